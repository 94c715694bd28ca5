"""The INIT/RUN/EVAL pipeline: executes what the core decided about trajectories, and
reports what came of it.

It decides nothing: slots, queues, retries and deadlines are the core's. Invariants:
every attempt that was started ends in exactly one `TrajectoryEnded` (or, in EVAL, one
reward event), posted after its environment is closed and its record is in the store; a
command of another attempt or try changes nothing; a cancelled attempt leaves no task,
environment or generation.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from rollweave.engine.clients.base import EngineBackend
from rollweave.envs.base import Score
from rollweave.envs.foreign import what_happened
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.chat.conversation import PLAN_TOKENS
from rollweave.rollout.driver import Driver, MakeEpisode
from rollweave.rollout.telling import Telling
from rollweave.rollout.turns import Spans, Turns
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import (
    AbortTurn,
    CancelTrajectory,
    Evict,
    Predict,
    RerankTurn,
    StartEval,
    StartInit,
    StartRun,
    StartTurn,
)
from rollweave.schema.errors import DiskError
from rollweave.schema.events import (
    EnvReady,
    Event,
    RewardFailed,
    RewardReady,
    TrajectoryEnded,
)
from rollweave.schema.prediction import LengthContext
from rollweave.schema.text import shortened
from rollweave.schema.work import BLAME_OF, TRAINABLE, Purpose, StopReason, Trajectory

CLOSE_S = 5.0
"""Seconds that an environment has to close before it is killed: less than the core
waits for a cancelled attempt.
"""

Key = tuple[TrajectoryId, int]


class Spawn(Protocol):
    """Run a coroutine as a task that somebody owns."""

    def __call__(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start it."""


@dataclasses.dataclass(slots=True)
class _Attempt:
    """An attempt between `StartInit` and `TrajectoryEnded`."""

    command: StartInit
    episode: Driver
    turns: Turns
    go: asyncio.Event
    task: asyncio.Task[None] | None = None
    begun: bool = False
    cancelled: StopReason | None = None

    @property
    def lane(self) -> str:
        return self.turns.lane


@dataclasses.dataclass(slots=True)
class _Evaluation:
    """An attempt between `StartEval` and its reward event."""

    attempt: _Attempt
    task: asyncio.Task[None] | None = None
    begun: bool = False
    cancelled: StopReason | None = None


class Pipeline:
    """`make_episode` builds the driver of one attempt; `engine` finds an engine's
    living process.
    """

    def __init__(
        self,
        *,
        make_episode: MakeEpisode,
        engine: Callable[[EngineId], EngineBackend | None],
        store: TrajectoryStore,
        post: Callable[[Event], None],
        spawn: Spawn,
        clock: Callable[[], float],
        spans: Spans,
        waiting_limit: int,
        keeps_turns: bool = False,
    ) -> None:
        """`waiting_limit` bounds the rolled-out attempts that are remembered for a
        `StartEval` that may never come.

        With `keeps_turns` what engines have sampled of unfinished turns is kept, for a
        `StartTurn` that resumes, and the core is told how far long ones have come.
        """
        self._make_episode, self._engine, self._store = make_episode, engine, store
        self._post, self._spawn, self._clock, self._spans = post, spawn, clock, spans
        self._attempts: dict[Key, _Attempt] = {}
        self._rolled_out: dict[Key, _Attempt] = {}
        self._evaluations: dict[Key, _Evaluation] = {}
        self._waiting_limit = waiting_limit
        self._telling = Telling(post) if keeps_turns else None

    @property
    def alive(self) -> int:
        """Attempts for which something is held."""
        return len(self._attempts) + len(self._evaluations)

    def context_of(self, trajectory_id: TrajectoryId, attempt: int) -> tuple[int, ...] | None:
        """The tokens of the attempt's last turn and all before: what its engine has
        seen. None before the first turn's end.

        What is kept of an unfinished turn is part of it.
        """
        held = self._attempts.get((trajectory_id, attempt))
        return held.turns.seen if held is not None else None

    # Commands.

    def start_init(self, command: StartInit) -> None:
        key = (command.trajectory_id, command.attempt)
        try:
            episode = self._make_episode(command)
        except Exception as bug:  # of ours, which fails this attempt, not all others
            self._stillborn(command, _unforeseen(bug))
            return
        turns = Turns(
            command=command,
            engine=self._engine,
            post=self._post,
            clock=self._clock,
            spans=self._spans,
            budget_s=lambda: episode.budget_s,
            telling=self._telling,
        )
        attempt = self._attempts[key] = _Attempt(
            command=command, episode=episode, turns=turns, go=asyncio.Event()
        )
        attempt.task = self._spawn(self._live(attempt), f"episode {attempt.lane}")

    def start_run(self, command: StartRun) -> None:
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is not None:
            attempt.go.set()

    def start_turn(self, command: StartTurn) -> None:
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is not None:
            attempt.turns.start(command)

    def abort_turn(self, command: AbortTurn) -> None:
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is not None:
            attempt.turns.abort(command)

    def rerank(self, command: RerankTurn) -> None:
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is not None:
            attempt.turns.rerank(command)

    def start_eval(self, command: StartEval) -> None:
        key = (command.trajectory_id, command.attempt)
        attempt = self._rolled_out.pop(key, None)
        if attempt is None:
            error = "the attempt is not waiting for its reward"
            self._post(
                RewardFailed(
                    trajectory_id=key[0],
                    attempt=key[1],
                    stop_reason=StopReason.REWARD_ERROR,
                    error=error,
                )
            )
            return
        evaluation = self._evaluations[key] = _Evaluation(attempt=attempt)
        evaluation.task = self._spawn(self._evaluate(key, evaluation), f"eval {attempt.lane}")

    def cancel(self, command: CancelTrajectory) -> None:
        key = (command.trajectory_id, command.attempt)
        held = self._attempts.get(key) or self._evaluations.get(key)
        if held is None:
            self._rolled_out.pop(key, None)
            self._post(
                TrajectoryEnded(trajectory_id=key[0], attempt=key[1], stop_reason=command.reason)
            )
            return
        held.cancelled = command.reason
        if isinstance(held, _Attempt):
            held.turns.ending = True
        if held.begun and held.task is not None:  # a task that has not begun looks for itself
            held.task.cancel()

    def seen(self, command: Predict) -> LengthContext:
        """What the command says of an attempt, with what only we hold: its rewards so
        far, and how its first turn began.
        """
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is None:
            return command.context
        plan = attempt.episode.plan
        spoken = attempt.turns.spoken
        if not plan and spoken is not None:  # the episode has not taken its first turn's answer yet
            plan = spoken[1][:PLAN_TOKENS]
        return msgspec.structs.replace(command.context, reward=attempt.episode.reward, plan=plan)

    def evict(self, command: Evict) -> None:
        self._store.forget(command.trajectory_ids)

    # INIT and RUN.

    async def _live(self, attempt: _Attempt) -> None:
        """The attempt's life until its environment is closed."""
        attempt.begun = True
        episode, error = attempt.episode, ""
        try:
            try:
                if attempt.cancelled is None:
                    reason = await self._init_and_run(attempt)
                else:
                    reason = attempt.cancelled
            except EpisodeStopError as stop:
                reason, error = stop.reason, str(stop)
            except asyncio.CancelledError:
                if attempt.cancelled is None:
                    raise
                reason = attempt.cancelled
            except Exception as bug:  # of ours, which fails this attempt, not all others
                reason, error = StopReason.ENV_ERROR, _unforeseen(bug)
        except asyncio.CancelledError:
            episode.kill()  # the world ends: nobody waits for an orderly close
            self._end(attempt, StopReason.CANCELLED, "the run ended")
            raise
        await _closed(episode)
        self._end(attempt, reason, error)

    async def _init_and_run(self, attempt: _Attempt) -> StopReason:
        command, started = attempt.command, self._clock()
        await attempt.episode.init()
        self._spans.episode_span(attempt.lane, "init", started, self._clock())
        self._post(
            EnvReady(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                prompt_tokens=attempt.episode.prompt_tokens,
            )
        )
        await attempt.go.wait()
        return await attempt.episode.run(attempt.turns)

    def _end(self, attempt: _Attempt, reason: StopReason, error: str) -> None:
        """Write the record, then say it."""
        command = attempt.command
        key = (command.trajectory_id, command.attempt)
        try:
            trajectory = attempt.episode.trajectory(reason, error)
            self._append(command, trajectory)
        except DiskError:
            raise
        except (
            Exception
        ) as bug:  # the attempt's result cannot be kept, but the fact that it failed can
            reason, error = StopReason.ENV_ERROR, _unforeseen(bug)
            trajectory = _nothing(command, error)
            self._append(command, trajectory)
        del self._attempts[key]
        self._spans.episode_over(attempt.lane)
        if reason in TRAINABLE and attempt.cancelled is None:
            self._rolled_out[key] = attempt
            while len(self._rolled_out) > self._waiting_limit:
                del self._rolled_out[next(iter(self._rolled_out))]
        elif command.purpose is not Purpose.SERVE:  # which is told of failures too
            self._store.forget((command.trajectory_id,))
        self._post(
            TrajectoryEnded(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                stop_reason=reason,
                turns=attempt.episode.turns,
                tokens=sum(len(sequence.tokens) for sequence in trajectory.sequences),
                error=error,
            )
        )

    def _stillborn(self, command: StartInit, error: str) -> None:
        trajectory = _nothing(command, error)
        self._append(command, trajectory)
        if command.purpose is not Purpose.SERVE:
            self._store.forget((command.trajectory_id,))
        ended, reason = (command.trajectory_id, command.attempt), trajectory.stop_reason
        self._post(
            TrajectoryEnded(
                trajectory_id=ended[0], attempt=ended[1], stop_reason=reason, error=error
            )
        )

    def _append(self, command: StartInit, trajectory: Trajectory) -> None:
        self._store.append(
            Ended(
                at=self._clock(),
                purpose=command.purpose,
                member=command.member,
                trajectory=trajectory,
            )
        )

    # EVAL.

    async def _evaluate(self, key: Key, evaluation: _Evaluation) -> None:
        evaluation.begun = True
        attempt, started = evaluation.attempt, self._clock()
        score: Score | None = None
        reason, error = StopReason.FINISHED, ""
        try:
            if evaluation.cancelled is None:
                score = await attempt.episode.score()
        except EpisodeStopError as stop:
            reason, error = stop.reason, str(stop)
        except asyncio.CancelledError:
            if evaluation.cancelled is None:
                evaluation.cancelled = StopReason.CANCELLED
                self._scored(key, evaluation, None, StopReason.CANCELLED, "the run ended")
                raise
        except Exception as bug:  # of ours, which fails this attempt, not all others
            reason, error = StopReason.REWARD_ERROR, _unforeseen(bug)
        self._spans.episode_span(attempt.lane, "eval", started, self._clock())
        self._spans.episode_over(attempt.lane)
        self._scored(key, evaluation, score, evaluation.cancelled or reason, error)

    def _scored(
        self, key: Key, evaluation: _Evaluation, score: Score | None, reason: StopReason, error: str
    ) -> None:
        """Write the score, or why there is none; then say it."""
        trajectory_id, number = key
        episode = evaluation.attempt.episode
        if evaluation.cancelled is not None:
            score = None
        if score is not None:
            reason = episode.stop_reason
        self._store.score(
            Scored(
                at=self._clock(),
                trajectory_id=trajectory_id,
                attempt=number,
                reward=score.reward if score is not None else None,
                success=score.success if score is not None else None,
                stop_reason=reason,
                blame=BLAME_OF[reason],
                eval_s=episode.eval_s,
                error=error,
                result=episode.result,
            )
        )
        del self._evaluations[key]
        purpose = evaluation.attempt.command.purpose
        if purpose is Purpose.EVAL or (purpose is Purpose.TRAIN and score is None):
            self._store.forget((trajectory_id,))
        if evaluation.cancelled is not None:
            self._post(
                TrajectoryEnded(
                    trajectory_id=trajectory_id, attempt=number, stop_reason=evaluation.cancelled
                )
            )
        elif score is None:
            self._post(
                RewardFailed(
                    trajectory_id=trajectory_id, attempt=number, stop_reason=reason, error=error
                )
            )
        else:
            self._post(
                RewardReady(
                    trajectory_id=trajectory_id,
                    attempt=number,
                    reward=score.reward,
                    success=score.success,
                )
            )


def _unforeseen(bug: Exception) -> str:
    """Describe a failure that nothing else has attributed."""
    return shortened(
        f"a failure that Rollweave did not foresee: {what_happened('the attempt', bug)}"
    )


def _nothing(command: StartInit, error: str) -> Trajectory:
    """Return the minimal record of an attempt of which nothing else can be kept."""
    reason = StopReason.ENV_ERROR
    return Trajectory(
        id=command.trajectory_id,
        group_id=command.group_id,
        task=command.task,
        attempt=command.attempt,
        initiated_version=command.initiated_version,
        sequences=(),
        reward=None,
        stop_reason=reason,
        blame=BLAME_OF[reason],
        error=error,
    )


async def _closed(episode: Driver) -> None:
    """Close the environment, or kill it."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await episode.close()
    except (
        Exception,
        asyncio.CancelledError,
    ):  # whatever its author's `close` does; a cancellation has been answered
        episode.kill()
