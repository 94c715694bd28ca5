"""A rollout worker: it runs INIT, RUN and EVAL of attempts, in the controller or in a
separate process (RollArt §6.1).

It decides nothing and stores nothing. Invariants: every attempt that was started is
reported by exactly one `AttemptEnded`, after its environment is closed, and every
`StartEval` by one `AttemptScored`; a command for another attempt changes nothing; a
cancelled attempt leaves no task or environment behind.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.threads import describe_error
from rollweave.rollout.driver import (
    Driver,
    EpisodeStopError,
    MakeEpisode,
    SpawnTask,
    TurnResult,
    record_of,
    report_delays,
)
from rollweave.rollout.reward_sources import finished_attempt
from rollweave.rollout.rewards import DomainRewards, Outcome
from rollweave.rollout.teacher import Teach, TeacherError
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import CancelTrajectory, DrawTask, StartEval, StartInit, StartRun
from rollweave.schema.errors import DiskError
from rollweave.schema.events import AttemptDelayed, EnvReady
from rollweave.schema.rollouts import (
    AnswerTurn,
    AttemptEnded,
    AttemptReport,
    AttemptScored,
    PhaseEnded,
    RolloutCommand,
    StreamTurn,
    TurnAsked,
    TurnGivenUp,
)
from rollweave.schema.serving import FinishReason, Sampling
from rollweave.schema.text import shortened
from rollweave.schema.work import TRAINABLE, Purpose, StopReason, TokenSequence, Unscored

CLOSE_S = 5.0
"""Maximum seconds for an environment to close before it is killed. The core waits
longer for a cancelled attempt.
"""

Key = tuple[TrajectoryId, int]

Report = Callable[[AttemptReport], None]


def named(key: Key) -> dict[str, Any]:
    """Return the fields by which messages name an attempt."""
    return {"trajectory_id": key[0], "attempt": key[1]}


class RemoteTurns:
    """Requests each turn of an attempt from the controller, and waits for the answer
    (a `TurnPort`).
    """

    def __init__(self, key: Key, report: Report, *, episode: Callable[[], Driver]) -> None:
        self._key, self._report, self._episode = key, report, episode
        self.ending = False
        """True once the attempt is being cancelled; its open turn need not be given up
        then.
        """
        self._open: tuple[int, asyncio.Future[TurnResult]] | None = None
        self._on_tokens: OnTokens | None = None
        self._base = -1
        self._known: tuple[int, ...] = ()
        """The context of turn `_base`, and its answer."""

    async def turn(
        self,
        number: int,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
    ) -> TurnResult:
        answer: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self._open, self._on_tokens = (number, answer), on_tokens
        kept = len(self._known)
        if tokens[:kept] != self._known:
            kept = 0
        episode = self._episode()
        self._report(
            TurnAsked(
                **named(self._key),
                turn=number,
                base=self._base,
                kept=kept,
                tokens=tokens[kept:],
                sampling=sampling,
                budget_s=episode.budget_s,
                reward=episode.reward,
                streamed=on_tokens is not None,
            )
        )
        try:
            result = await answer
        except asyncio.CancelledError:
            # an agent program has abandoned this call but continues to run
            if not self.ending and answer.cancelled():
                self._report(TurnGivenUp(**named(self._key), turn=number))
            raise
        finally:
            self._open = self._on_tokens = None
        if result.result.finish is FinishReason.REFUSED:
            return result  # the controller has forgotten this turn
        self._base, self._known = number, tokens + result.result.tokens
        return result

    def record_span(self, name: str, start: float, end: float) -> None:
        self._report(PhaseEnded(**named(self._key), name=name, start=start, end=end))

    def stream(self, command: StreamTurn) -> None:
        """Pass sampled tokens of the open turn to the episode."""
        if self._on_tokens is not None and self._open is not None:
            number, answer = self._open
            if number == command.turn and not answer.done():
                self._on_tokens(command.delta)

    def answer(self, command: AnswerTurn) -> None:
        """Pass the answer to the episode, unless it has given the turn up."""
        if self._open is None or self._open[0] != command.turn or self._open[1].done():
            return
        if command.stop is not None:
            self._open[1].set_exception(EpisodeStopError(command.stop, command.error))
            return
        assert command.result is not None, "an answer has a result or a reason to stop"
        self._open[1].set_result(TurnResult(result=command.result, engine_id=command.engine_id))


@dataclasses.dataclass(slots=True)
class _Attempt:
    """An attempt between `StartInit` and `AttemptEnded`."""

    command: StartInit
    episode: Driver
    turns: RemoteTurns
    run_allowed: asyncio.Event
    task: asyncio.Task[None] | None = None
    started: bool = False
    closed: bool = False
    cancelled: StopReason | None = None
    taught: tuple[TokenSequence, ...] | None = None
    """Its sequences with the teacher's log-probs, if it has a teacher."""

    @property
    def key(self) -> Key:
        return self.command.trajectory_id, self.command.attempt

    @property
    def lane(self) -> str:
        return f"{self.command.trajectory_id}/{self.command.attempt}"

    def receive(self, command: StartRun | AnswerTurn | StreamTurn) -> None:
        """Pass on a command that the attempt waits for."""
        match command:
            case StartRun():
                self.run_allowed.set()
            case AnswerTurn():
                self.turns.answer(command)
            case StreamTurn():
                self.turns.stream(command)


@dataclasses.dataclass(slots=True)
class _Evaluation:
    """An attempt between `StartEval` and `AttemptScored`."""

    attempt: _Attempt
    task: asyncio.Task[None] | None = None
    started: bool = False
    cancelled: StopReason | None = None
    success: bool | None = None
    unscored: Unscored | None = None
    waited_s: float = 0.0
    """Seconds that the rewards beside the environment's took."""


class RolloutWorker:
    """Runs attempts. `make_episode` builds the driver of each attempt, and `report`
    receives every report. `draw` draws a task; None if this worker is sent no
    `DrawTask`. `teacher` returns what asks the teacher of an attempt, or None if it has
    none, and `rewards_of` the rewards of a task domain beside the environment's.
    """

    def __init__(
        self,
        *,
        make_episode: MakeEpisode,
        report: Report,
        spawn: SpawnTask,
        clock: Callable[[], float],
        waiting_limit: int,
        draw: Callable[[DrawTask], None] | None = None,
        teacher: Callable[[StartInit], Teach | None] = lambda _: None,
        rewards_of: Callable[[str], DomainRewards | None] = lambda _: None,
    ) -> None:
        """Create a worker without attempts.

        `waiting_limit` bounds the number of rolled-out attempts that are kept for a
        `StartEval` that may never come.
        """
        self._make_episode, self._report, self._spawn = make_episode, report, spawn
        self._clock, self._waiting_limit, self._draw = clock, waiting_limit, draw
        self._teacher, self._rewards_of = teacher, rewards_of
        self._attempts: dict[Key, _Attempt] = {}
        self._rolled_out: dict[Key, _Attempt] = {}
        self._evaluations: dict[Key, _Evaluation] = {}

    def send(self, command: RolloutCommand) -> None:
        """Execute a command."""
        match command:
            case StartInit():
                self._start_init(command)
            case StartRun() | AnswerTurn() | StreamTurn():
                attempt = self._attempts.get((command.trajectory_id, command.attempt))
                if attempt is not None:
                    attempt.receive(command)
            case StartEval():
                self._start_eval(command)
            case CancelTrajectory():
                self._cancel(command)
            case DrawTask():
                assert self._draw is not None, "this worker draws tasks"
                self._draw(command)

    def _start_init(self, command: StartInit) -> None:
        key = (command.trajectory_id, command.attempt)
        try:
            episode = self._make_episode(command)
        except Exception as bug:  # a bug of Rollweave fails only this attempt
            trajectory = record_of(command, StopReason.ENV_ERROR, _bug_text(bug))
            self._report(AttemptEnded(trajectory=trajectory, turns=0))
            return
        episode.on_delay = lambda: self._report(AttemptDelayed(**named(key)))
        turns = RemoteTurns(key, self._report, episode=lambda: episode)
        attempt = self._attempts[key] = _Attempt(
            command=command, episode=episode, turns=turns, run_allowed=asyncio.Event()
        )
        attempt.task = self._spawn(self._run_attempt(attempt), f"episode {attempt.lane}")

    def _start_eval(self, command: StartEval) -> None:
        key = (command.trajectory_id, command.attempt)
        attempt = self._rolled_out.pop(key, None)
        if attempt is None:
            self._report(
                AttemptScored(**named(key), stop_reason=StopReason.REWARD_ERROR, error=NOT_WAITING)
            )
            return
        evaluation = self._evaluations[key] = _Evaluation(attempt=attempt)
        evaluation.task = self._spawn(self._evaluate(key, evaluation), f"eval {attempt.lane}")

    def _cancel(self, command: CancelTrajectory) -> None:
        """Cancel an attempt; an unknown one has ended, and its end has been
        reported.
        """
        key = (command.trajectory_id, command.attempt)
        active = self._attempts.get(key) or self._evaluations.get(key)
        if active is None:
            self._rolled_out.pop(key, None)
            return
        active.cancelled = command.reason
        if isinstance(active, _Attempt):
            active.turns.ending = True
        # A task that has not started checks `cancelled` itself.
        if active.started and active.task is not None:
            active.task.cancel()

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
            if not attempt.closed:
                episode.kill()  # the run is shutting down and does not wait for an orderly close
            self._end(attempt, StopReason.CANCELLED, "the run ended")
            raise
        if not attempt.closed:
            await _close_or_kill(episode)
        self._end(attempt, reason, error)

    async def _init_and_run(self, attempt: _Attempt) -> StopReason:
        command, started = attempt.command, self._clock()
        await attempt.episode.init()
        attempt.turns.record_span("init", started, self._clock())
        self._report(EnvReady(**named(attempt.key), prompt_tokens=attempt.episode.prompt_tokens))
        await attempt.run_allowed.wait()
        reason = await attempt.episode.run(attempt.turns)
        if (teach := self._teacher(command)) is not None:
            await self._ask_teacher(attempt, reason, teach)
        return reason

    async def _ask_teacher(self, attempt: _Attempt, reason: StopReason, teach: Teach) -> None:
        """Get the teacher's log-probs of the attempt's tokens, after its environment is
        closed. The time that this takes is not the environment's.

        Raises `EpisodeStopError`.
        """
        attempt.closed = True
        await _close_or_kill(attempt.episode)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # which `_close_or_kill` has absorbed
            raise asyncio.CancelledError
        started = self._clock()
        delays = asyncio.create_task(report_delays(attempt.episode), name="report delays")
        try:
            attempt.taught = await teach(attempt.episode.trajectory(reason, "").sequences)
        except TeacherError as error:
            raise EpisodeStopError(StopReason.TEACHER_ERROR, str(error)) from error
        finally:
            delays.cancel()
            attempt.turns.record_span("teacher", started, self._clock())

    def _end(self, attempt: _Attempt, reason: StopReason, error: str) -> None:
        """Report the end with the record."""
        command, key, turns = attempt.command, attempt.key, attempt.episode.turns
        del self._attempts[key]
        if reason in TRAINABLE and attempt.cancelled is None:
            self._rolled_out[key] = attempt
            while len(self._rolled_out) > self._waiting_limit:
                del self._rolled_out[next(iter(self._rolled_out))]
        try:
            trajectory = attempt.episode.trajectory(reason, error)
            if attempt.taught is not None:
                trajectory = msgspec.structs.replace(trajectory, sequences=attempt.taught)
            self._report(AttemptEnded(trajectory=trajectory, turns=turns))
        except DiskError:
            raise
        except Exception as bug:  # the result cannot be stored, but the failure can
            self._rolled_out.pop(key, None)
            trajectory = record_of(command, StopReason.ENV_ERROR, _bug_text(bug))
            self._report(AttemptEnded(trajectory=trajectory, turns=turns))

    # EVAL.

    async def _evaluate(self, key: Key, evaluation: _Evaluation) -> None:
        evaluation.started = True
        attempt, started = evaluation.attempt, self._clock()
        outcome = Outcome(components={})
        try:
            if evaluation.cancelled is None:
                outcome = await self._score(evaluation)
        except EpisodeStopError as stop:
            outcome = Outcome(components={}, reason=stop.reason, error=str(stop))
        except asyncio.CancelledError:
            if evaluation.cancelled is None:
                evaluation.cancelled = StopReason.CANCELLED
                self._scored(key, evaluation, Outcome(components={}, error="the run ended"))
                raise
        except Exception as bug:  # a bug of Rollweave fails only this attempt
            reason, error = StopReason.REWARD_ERROR, _bug_text(bug)
            outcome = Outcome(components={}, reason=reason, error=error)
        attempt.turns.record_span("eval", started, self._clock())
        self._scored(key, evaluation, outcome)

    async def _score(self, evaluation: _Evaluation) -> Outcome:
        """Return the environment's reward with the attempt's other rewards. The time
        that these take is not the environment's.

        Raises `EpisodeStopError`.
        """
        attempt = evaluation.attempt
        command, episode = attempt.command, attempt.episode
        score = await episode.score()
        rewards, started = self._rewards_of(command.task.tag), self._clock()
        evaluation.success = score.success
        if rewards is None:
            return Outcome(components={}, reward=score.reward)
        unscored = Unscored(
            missing=(),
            conversation=tuple(episode.conversation),
            reward=score.reward,
            success=score.success,
            stop_reason=episode.stop_reason,
        )
        finished = finished_attempt(command.trajectory_id, command.attempt, command.task, unscored)
        judges = tuple(rewards.judges) if command.purpose is Purpose.TRAIN else ()
        episode.on_delay()
        delays = asyncio.create_task(report_delays(episode), name="report delays")
        try:
            outcome = await rewards.compute(finished, record=attempt.turns.record_span)
        finally:
            delays.cancel()
            evaluation.waited_s = self._clock() - started
        if outcome.reward is None or judges:
            missing = (*outcome.missing, *judges)
            evaluation.unscored = msgspec.structs.replace(unscored, missing=missing)
        return outcome

    def _scored(self, key: Key, evaluation: _Evaluation, outcome: Outcome) -> None:
        """Report the score, or why there is none."""
        episode, cancelled = evaluation.attempt.episode, evaluation.cancelled
        is_scored = outcome.reward is not None and cancelled is None
        del self._evaluations[key]
        self._report(
            AttemptScored(
                **named(key),
                reward=outcome.reward if is_scored else None,
                success=evaluation.success if is_scored else None,
                stop_reason=episode.stop_reason if is_scored else cancelled or outcome.reason,
                eval_s=episode.eval_s + evaluation.waited_s,
                error=outcome.error,
                result=episode.result,
                rewards=outcome.components,
                unscored=evaluation.unscored if cancelled is None else None,
            )
        )


NOT_WAITING = "the attempt is not waiting for its reward"
"""Error of a `StartEval` for an attempt that has ended already, or is no longer
kept.
"""


def _bug_text(bug: Exception) -> str:
    """Describe a failure that no other part has attributed."""
    return shortened(
        f"a failure that Rollweave did not foresee: {describe_error('the attempt', bug)}"
    )


async def _close_or_kill(episode: Driver) -> None:
    """Close the environment; kill it if that fails or takes too long."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await episode.close()
    except (Exception, asyncio.CancelledError):
        # The author's `close` may raise anything; a cancellation has been handled
        # before.
        episode.kill()
