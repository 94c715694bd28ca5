"""Timings of a recorded run's rollouts, step by step, read from its journal; and the
tokens of its trajectories.

Only synchronous runs are supported: all trajectories of a step begin and end between
two training steps. The journal must be complete.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

LOGPROB_TOLERANCE = 1e-4
"""Maximum difference of log-probs of equal tokens, as engines' batches cause it (docs
of `engines.deterministic`).
"""


class Rollout(Struct, frozen=True, kw_only=True):
    """The rollout of one training step. `makespan_s` is from the first turn that an
    engine received to the last trajectory's end.

    `tail_tokens` and `tail_turns` are those of the trajectory with the most sampled
    tokens; `tail_queue_s` is how long its turns waited for a slot, in the core and on
    its engine. `tokens`, `turns` and `queue_s` are those of all trajectories.
    """

    makespan_s: float
    tail_queue_s: float
    tail_tokens: int
    tail_turns: int
    queue_s: float
    tokens: int
    turns: int
    predictions: tuple[tuple[float, int], ...]
    """Return (predicted, true) remaining tokens, for predictions before the second and
    later turns.
    """


class _Attempt(msgspec.Struct):
    """Measurements of one trajectory."""

    tokens: int = 0
    turns: int = 0
    queue_s: float = 0.0
    asked_at: float = 0.0
    predicted: list[tuple[float, int]] = []  # remaining tokens, sampled before


def read_rollouts(journal: Path, config: RunConfig) -> list[Rollout]:
    """Return one rollout for each training step.

    Raises ConfigError for a compacted journal and for one whose replay differs.
    """
    replay, reader = Replay(journal, config, rules=rules_of(config)), _Reader()
    replay.observe(reader)
    if replay.differing:
        raise ConfigError(
            f"{journal} must replay to the recorded decisions, {replay.differing} events do not"
        )
    return reader.rollouts


class _Reader:
    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self._begin()

    def _begin(self) -> None:
        self._attempts: dict[TrajectoryId, _Attempt] = {}
        self._began_at = math.inf
        self._ended_at = 0.0

    def on_event(self, now: float, event: e.Event) -> None:
        match event:
            case e.TurnRequested():
                self._of(event.trajectory_id).asked_at = now
            case e.TurnDone():
                attempt = self._of(event.trajectory_id)
                attempt.turns += 1
                attempt.tokens += event.output_tokens
                attempt.queue_s += event.queue_s
            case e.PredictionReady():
                attempt = self._of(event.trajectory_id)
                if attempt.turns:
                    attempt.predicted.append((event.remaining_tokens, attempt.tokens))
            case e.TrajectoryEnded():
                self._ended_at = now
            case _:
                pass

    def on_command(self, now: float, command: c.Command) -> None:
        match command:
            case c.StartTurn():
                # Before the first turn, engines fetch weights: that wait is not due to
                # a policy.
                self._began_at = min(self._began_at, now)
                attempt = self._of(command.trajectory_id)
                attempt.queue_s += now - max(attempt.asked_at, self._began_at)
            case c.TrainStep():
                self.rollouts.append(self._rollout())
                self._begin()
            case _:
                pass

    def _of(self, trajectory_id: TrajectoryId) -> _Attempt:
        return self._attempts.setdefault(trajectory_id, _Attempt())

    def _rollout(self) -> Rollout:
        every = list(self._attempts.values())
        tail = max(every, key=lambda attempt: attempt.tokens)
        return Rollout(
            makespan_s=self._ended_at - self._began_at,
            tail_queue_s=tail.queue_s,
            tail_tokens=tail.tokens,
            tail_turns=tail.turns,
            queue_s=sum(attempt.queue_s for attempt in every),
            tokens=sum(attempt.tokens for attempt in every),
            turns=sum(attempt.turns for attempt in every),
            predictions=tuple(
                (left, attempt.tokens - before)
                for attempt in every
                for left, before in attempt.predicted
            ),
        )


class Sample(Struct, frozen=True, kw_only=True):
    """Tokens and log-probs of a trajectory's sequences, concatenated."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def read_samples(run: RunDir) -> dict[TrajectoryId, Sample]:
    """Return the tokens of all ended trajectories, by their last attempt."""
    return dict(_sample(TrajectoryReader(run.trajectories)))


def _sample(reader: TrajectoryReader) -> Iterator[tuple[TrajectoryId, Sample]]:
    for entry in reader.entries:
        sequences = reader.load(entry).sequences
        tokens = tuple(token for sequence in sequences for token in sequence.tokens)
        logprobs = tuple(value for sequence in sequences for value in sequence.logprobs)
        yield entry.trajectory_id, Sample(tokens=tokens, logprobs=logprobs)


def mismatches(ours: Mapping[TrajectoryId, Sample], theirs: Mapping[TrajectoryId, Sample]) -> int:
    """Return the trajectories that are not in both, or whose tokens differ, or any
    log-prob by more than `LOGPROB_TOLERANCE`.
    """
    return sum(not _equal(ours.get(key), theirs.get(key)) for key in {**ours, **theirs})


def _equal(one: Sample | None, other: Sample | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.tokens == other.tokens
        and furthest(one, other) <= LOGPROB_TOLERANCE
    )


def furthest(one: Sample, other: Sample) -> float:
    """Return the maximum difference between log-probs of equal tokens."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)
