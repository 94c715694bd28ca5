"""Timings of a recorded run's rollouts, step by step, read from its journal; and the
tokens of its trajectories.

Only synchronous runs are supported: all trajectories of a step begin and end between
two training steps. The journal must be complete.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from rollweave.envs.rules import rules_of
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


class _Taken(msgspec.Struct):
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
            f"{journal} must replay to what was decided, {replay.differing} events do not"
        )
    return reader.rollouts


class _Reader:
    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self._begin()

    def _begin(self) -> None:
        self._taken: dict[TrajectoryId, _Taken] = {}
        self._began_at = math.inf
        self._ended_at = 0.0

    def on_event(self, now: float, event: e.Event) -> None:
        match event:
            case e.TurnRequested():
                self._of(event.trajectory_id).asked_at = now
            case e.TurnDone():
                taken = self._of(event.trajectory_id)
                taken.turns += 1
                taken.tokens += event.output_tokens
                taken.queue_s += event.queue_s
            case e.PredictionReady():
                taken = self._of(event.trajectory_id)
                if taken.turns:
                    taken.predicted.append((event.remaining_tokens, taken.tokens))
            case e.TrajectoryEnded():
                self._ended_at = now
            case _:
                pass

    def on_command(self, now: float, command: c.Command) -> None:
        match command:
            case c.StartTurn():
                # Before the first turn is given, engines take weights: nobody's policy
                # makes anyone wait.
                self._began_at = min(self._began_at, now)
                taken = self._of(command.trajectory_id)
                taken.queue_s += now - max(taken.asked_at, self._began_at)
            case c.TrainStep():
                self.rollouts.append(self._rollout())
                self._begin()
            case _:
                pass

    def _of(self, trajectory_id: TrajectoryId) -> _Taken:
        return self._taken.setdefault(trajectory_id, _Taken())

    def _rollout(self) -> Rollout:
        every = list(self._taken.values())
        tail = max(every, key=lambda taken: taken.tokens)
        return Rollout(
            makespan_s=self._ended_at - self._began_at,
            tail_queue_s=tail.queue_s,
            tail_tokens=tail.tokens,
            tail_turns=tail.turns,
            queue_s=sum(taken.queue_s for taken in every),
            tokens=sum(taken.tokens for taken in every),
            turns=sum(taken.turns for taken in every),
            predictions=tuple(
                (left, taken.tokens - before) for taken in every for left, before in taken.predicted
            ),
        )


class Spoken(Struct, frozen=True, kw_only=True):
    """Tokens and log-probs of a trajectory's sequences, concatenated."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def read_spoken(run: RunDir) -> dict[TrajectoryId, Spoken]:
    """Return the tokens of all ended trajectories, by their last attempt."""
    return dict(_spoken(TrajectoryReader(run.trajectories)))


def _spoken(reader: TrajectoryReader) -> Iterator[tuple[TrajectoryId, Spoken]]:
    for entry in reader.entries:
        sequences = reader.load(entry).sequences
        tokens = tuple(token for sequence in sequences for token in sequence.tokens)
        logprobs = tuple(value for sequence in sequences for value in sequence.logprobs)
        yield entry.trajectory_id, Spoken(tokens=tokens, logprobs=logprobs)


def mismatches(ours: Mapping[TrajectoryId, Spoken], theirs: Mapping[TrajectoryId, Spoken]) -> int:
    """Return the trajectories that are not in both, or whose tokens differ, or any
    log-prob by more than `LOGPROB_TOLERANCE`.
    """
    return sum(not _equal(ours.get(key), theirs.get(key)) for key in {**ours, **theirs})


def _equal(one: Spoken | None, other: Spoken | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.tokens == other.tokens
        and furthest(one, other) <= LOGPROB_TOLERANCE
    )


def furthest(one: Spoken, other: Spoken) -> float:
    """Return the maximum difference between log-probs of equal tokens."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max((abs(mine - its) for mine, its in pairs), default=0.0)
