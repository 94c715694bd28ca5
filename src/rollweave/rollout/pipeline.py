"""The INIT/RUN/EVAL pipeline: executes the core's decisions about trajectories, and
reports their outcomes.

It decides nothing: slots, queues, retries and deadlines belong to the core. Invariants:
every attempt that was started ends in exactly one `TrajectoryEnded` (or, in EVAL, one
reward event), posted after its environment is closed and its record is stored; a
command for another attempt or dispatch changes nothing; a cancelled attempt leaves no
task, environment or generation behind.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from rollweave.engine.clients.base import EngineBackend
from rollweave.envs.base import Score
from rollweave.envs.foreign import describe_error
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.chat.conversation import PLAN_TOKENS
from rollweave.rollout.driver import Driver, MakeEpisode
from rollweave.rollout.progress import ProgressReporter
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
    """Runs a coroutine as a task of an owner that awaits it."""

    def __call__(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start the task."""


@dataclasses.dataclass(slots=True)
class _Attempt:
    """An attempt between `StartInit` and `TrajectoryEnded`."""

    command: StartInit
    episode: Driver
    turns: Turns
    run_allowed: asyncio.Event
    task: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: StopReason | None = None

    @property
    def lane(self) -> str:
        return self.turns.lane


@dataclasses.dataclass(slots=True)
class _Evaluation:
    """An attempt between `StartEval` and its reward event."""

    attempt: _Attempt
    task: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: StopReason | None = None


class Pipeline:
    """`make_episode` builds the driver of one attempt; `engine` returns an engine's
    live process.
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
        keep_partial_turns: bool = False,
    ) -> None:
        """Create a pipeline without attempts.

        `waiting_limit` bounds the number of rolled-out attempts that are kept for a
        `StartEval` that may never come.

        With `keep_partial_turns`, the output of unfinished turns is kept for a
        `StartTurn` that resumes them, and the progress of long turns is reported to the
        core.
        """
        self._make_episode, self._engine, self._store = make_episode, engine, store
        self._post, self._spawn, self._clock, self._spans = post, spawn, clock, spans
        self._attempts: dict[Key, _Attempt] = {}
        self._rolled_out: dict[Key, _Attempt] = {}
        self._evaluations: dict[Key, _Evaluation] = {}
        self._waiting_limit = waiting_limit
        self._progress = ProgressReporter(post) if keep_partial_turns else None

    @property
    def active_attempts(self) -> int:
        """Return the number of attempts that hold resources."""
        return len(self._attempts) + len(self._evaluations)

    def context_of(self, trajectory_id: TrajectoryId, attempt: int) -> tuple[int, ...] | None:
        """Return the tokens of the attempt's last turn and its context: what its engine
        has processed.

        They include the known part of an unfinished turn. None before the first turn
        begins.
        """
        active = self._attempts.get((trajectory_id, attempt))
        return active.turns.known_context if active is not None else None

    # Commands.

    def _with_attempt(
        self,
        command: StartRun | StartTurn | AbortTurn | RerankTurn,
        act: Callable[[_Attempt], None],
    ) -> None:
        """Apply `act` to the attempt that the command addresses, unless it has ended."""
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is not None:
            act(attempt)

    def start_init(self, command: StartInit) -> None:
        key = (command.trajectory_id, command.attempt)
        try:
            episode = self._make_episode(command)
        except Exception as bug:  # a bug of Rollweave fails only this attempt
            self._fail_to_start(command, _bug_text(bug))
            return
        turns = Turns(
            command=command,
            engine=self._engine,
            post=self._post,
            clock=self._clock,
            spans=self._spans,
            budget_s=lambda: episode.budget_s,
            progress=self._progress,
        )
        attempt = self._attempts[key] = _Attempt(
            command=command, episode=episode, turns=turns, run_allowed=asyncio.Event()
        )
        attempt.task = self._spawn(self._run_attempt(attempt), f"episode {attempt.lane}")

    def start_run(self, command: StartRun) -> None:
        self._with_attempt(command, lambda attempt: attempt.run_allowed.set())

    def start_turn(self, command: StartTurn) -> None:
        self._with_attempt(command, lambda attempt: attempt.turns.start(command))

    def abort_turn(self, command: AbortTurn) -> None:
        self._with_attempt(command, lambda attempt: attempt.turns.abort(command))

    def rerank(self, command: RerankTurn) -> None:
        self._with_attempt(command, lambda attempt: attempt.turns.rerank(command))

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
        active = self._attempts.get(key) or self._evaluations.get(key)
        if active is None:
            self._rolled_out.pop(key, None)
            self._post(
                TrajectoryEnded(trajectory_id=key[0], attempt=key[1], stop_reason=command.reason)
            )
            return
        active.cancelled = command.reason
        if isinstance(active, _Attempt):
            active.turns.ending = True
        # A task that has not started checks `cancelled` itself.
        if active.started and active.task is not None:
            active.task.cancel()

    def length_context(self, command: Predict) -> LengthContext:
        """Return the command's context with what only the pipeline knows: the rewards
        so far, and the beginning of the first turn.
        """
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is None:
            return command.context
        plan = attempt.episode.plan
        last_turn = attempt.turns.last_turn
        if not plan and last_turn is not None:  # the driver has not yet received the first answer
            plan = last_turn[1][:PLAN_TOKENS]
        return msgspec.structs.replace(command.context, reward=attempt.episode.reward, plan=plan)

    def evict(self, command: Evict) -> None:
        self._store.forget(command.trajectory_ids)

    # INIT and RUN.

    async def _run_attempt(self, attempt: _Attempt) -> None:
        """Run INIT and RUN, close the environment, and report the end."""
        attempt.started = True
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
            except Exception as bug:  # a bug of Rollweave fails only this attempt
                reason, error = StopReason.ENV_ERROR, _bug_text(bug)
        except asyncio.CancelledError:
            episode.kill()  # the run is shutting down and does not wait for an orderly close
            self._end(attempt, StopReason.CANCELLED, "the run ended")
            raise
        await _close_or_kill(episode)
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
        await attempt.run_allowed.wait()
        return await attempt.episode.run(attempt.turns)

    def _end(self, attempt: _Attempt, reason: StopReason, error: str) -> None:
        """Store the record, then post the event."""
        command = attempt.command
        key = (command.trajectory_id, command.attempt)
        try:
            trajectory = attempt.episode.trajectory(reason, error)
            self._append(command, trajectory)
        except DiskError:
            raise
        except Exception as bug:  # the result cannot be stored, but the failure can
            reason, error = StopReason.ENV_ERROR, _bug_text(bug)
            trajectory = _empty_trajectory(command, error)
            self._append(command, trajectory)
        del self._attempts[key]
        self._spans.episode_over(attempt.lane)
        if reason in TRAINABLE and attempt.cancelled is None:
            self._rolled_out[key] = attempt
            while len(self._rolled_out) > self._waiting_limit:
                del self._rolled_out[next(iter(self._rolled_out))]
        elif command.purpose is not Purpose.SERVE:  # a service delivers failures too
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

    def _fail_to_start(self, command: StartInit, error: str) -> None:
        trajectory = _empty_trajectory(command, error)
        self._append(command, trajectory)
        if command.purpose is not Purpose.SERVE:
            self._store.forget((command.trajectory_id,))
        key, reason = (command.trajectory_id, command.attempt), trajectory.stop_reason
        self._post(
            TrajectoryEnded(trajectory_id=key[0], attempt=key[1], stop_reason=reason, error=error)
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
        evaluation.started = True
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
        except Exception as bug:  # a bug of Rollweave fails only this attempt
            reason, error = StopReason.REWARD_ERROR, _bug_text(bug)
        self._spans.episode_span(attempt.lane, "eval", started, self._clock())
        self._spans.episode_over(attempt.lane)
        self._scored(key, evaluation, score, evaluation.cancelled or reason, error)

    def _scored(
        self, key: Key, evaluation: _Evaluation, score: Score | None, reason: StopReason, error: str
    ) -> None:
        """Store the score, or why there is none; then post the event."""
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


def _bug_text(bug: Exception) -> str:
    """Describe a failure that no other part has attributed."""
    return shortened(
        f"a failure that Rollweave did not foresee: {describe_error('the attempt', bug)}"
    )


def _empty_trajectory(command: StartInit, error: str) -> Trajectory:
    """Return the minimal record of an attempt that has no other record."""
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


async def _close_or_kill(episode: Driver) -> None:
    """Close the environment; kill it if that fails or takes too long."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await episode.close()
    except (Exception, asyncio.CancelledError):
        # The author's `close` may raise anything; a cancellation has been handled before.
        episode.kill()
