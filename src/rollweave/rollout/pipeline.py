"""The controller's part of the INIT/RUN/EVAL pipeline (ProRL Agent §3.3.1): it forwards
the core's decisions about trajectories to the workers that run them, runs their turns
on engines, and stores and reports their outcomes.

It decides nothing: slots, queues, retries, deadlines and the choice of a worker belong
to the core. Invariants: every attempt that was started ends with exactly one
`TrajectoryEnded` (or, in EVAL, one reward event) or with its worker, and is stored
before that; a command for another attempt or dispatch changes nothing; a cancelled
attempt leaves no generation behind.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import msgspec

from rollweave.engine.clients.base import Generates
from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.record.turn_log import TurnLog
from rollweave.rollout.driver import Spans, record_of
from rollweave.rollout.turn_parts import ProgressReporter, RecordedTurns
from rollweave.rollout.turns import Turns
from rollweave.rollout.worker import NOT_WAITING, Key, named
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
from rollweave.schema.events import (
    AttemptDelayed,
    EnvReady,
    Event,
    RewardFailed,
    RewardReady,
    TrajectoryEnded,
)
from rollweave.schema.rollouts import (
    AttemptEnded,
    AttemptReport,
    AttemptScored,
    PhaseEnded,
    RolloutCommand,
    TurnAsked,
)
from rollweave.schema.training import LengthContext
from rollweave.schema.work import BLAME_OF, TRAINABLE, Purpose, StopReason, Trajectory


class WorkerPort(Protocol):
    """Sends commands to one worker, in this process or in another."""

    def send(self, command: RolloutCommand) -> None:
        """Send a command, in order and without waiting.

        Commands to a worker that is gone are dropped; its loss is reported separately.
        """


@dataclasses.dataclass(slots=True)
class _Attempt:
    """An attempt between `StartInit` and its end, including its reward."""

    command: StartInit
    worker: WorkerPort
    turns: Turns
    cancelled: StopReason | None = None
    cancelled_error: str = ""

    @property
    def key(self) -> Key:
        return self.command.trajectory_id, self.command.attempt


class Pipeline:
    """`worker` and `engine` return the live worker and the live engine with an id, or
    None.
    """

    def __init__(
        self,
        *,
        worker: Callable[[str], WorkerPort | None],
        engine: Callable[[EngineId], Generates | None],
        store: TrajectoryStore,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        spans: Spans,
        waiting_limit: int,
        keep_partial_turns: bool = False,
        log: TurnLog | None = None,
    ) -> None:
        """Create a pipeline without attempts.

        `waiting_limit` is as in `rollout/worker.py`. With `keep_partial_turns`, the
        output of unfinished turns is kept for a `StartTurn` that resumes them, and the
        progress of long turns is reported to the core. Turns are recorded in `log`, for
        a `StartInit` that continues the attempt in another worker, or in another life.
        """
        self._worker, self._engine, self._store = worker, engine, store
        self._post, self._clock, self._spans = post, clock, spans
        self._attempts: dict[Key, _Attempt] = {}
        self._rolled_out: dict[Key, _Attempt] = {}
        self._evaluations: dict[Key, _Attempt] = {}
        self._waiting_limit = waiting_limit
        self._log = log
        self._progress = ProgressReporter(post) if keep_partial_turns else None

    def context_of(self, trajectory_id: TrajectoryId, attempt: int) -> tuple[int, ...] | None:
        """Return the tokens of the attempt's last turn and its context: what its engine
        has processed.

        They include the known part of an unfinished turn. None before the first turn
        begins.
        """
        active = self._attempts.get((trajectory_id, attempt))
        return active.turns.known_context if active is not None else None

    # Commands.

    def _active(self, command: StartRun | StartTurn | AbortTurn | RerankTurn) -> _Attempt | None:
        """Return the attempt that the command addresses, unless it has ended."""
        return self._attempts.get((command.trajectory_id, command.attempt))

    def start_init(self, command: StartInit) -> None:
        worker = self._worker(command.worker)
        if worker is None:
            self._lose(command, f"worker {command.worker} is lost")
            return
        turns = Turns(
            command=command,
            engine=self._engine,
            post=self._post,
            clock=self._clock,
            spans=self._spans,
            answer=worker.send,
            progress=self._progress,
            log=self._log,
            recorded=self._continue(command),
        )
        attempt = _Attempt(command=command, worker=worker, turns=turns)
        self._attempts[attempt.key] = attempt
        worker.send(command)

    def _continue(self, command: StartInit) -> RecordedTurns:
        """Return the recorded turns of the attempt that this one continues, and record
        them as turns of this one. Other records of the trajectory are forgotten.
        """
        continues, log, recorded = command.continues, self._log, RecordedTurns()
        if log is None:
            return recorded
        if continues is not None:
            records = log.take(command.trajectory_id, continues.attempt)
            recorded = RecordedTurns(records, version=continues.version)
            for record in recorded.records(command.trajectory_id, command.attempt):
                log.append(record)
        log.release(command.trajectory_id)
        return recorded

    def _is_over(self, key: Key) -> None:
        """The attempt needs no recorded turns any longer."""
        if self._log is not None:
            self._log.forget(*key)

    def _lost(self, trajectory_id: TrajectoryId, attempt: int) -> bool:
        """The attempt is lost with its worker. Return True if another one may continue
        it, since turns of it are recorded.
        """
        return self._log is not None and self._log.lose(trajectory_id, attempt)

    def start_run(self, command: StartRun) -> None:
        if (attempt := self._active(command)) is not None:
            attempt.worker.send(command)

    def start_turn(self, command: StartTurn) -> None:
        if (attempt := self._active(command)) is not None:
            attempt.turns.start(command)

    def abort_turn(self, command: AbortTurn) -> None:
        if (attempt := self._active(command)) is not None:
            attempt.turns.abort(command)

    def rerank(self, command: RerankTurn) -> None:
        if (attempt := self._active(command)) is not None:
            attempt.turns.rerank(command)

    def start_eval(self, command: StartEval) -> None:
        key = (command.trajectory_id, command.attempt)
        attempt = self._rolled_out.pop(key, None)
        if attempt is None:
            self._post(
                RewardFailed(**named(key), stop_reason=StopReason.REWARD_ERROR, error=NOT_WAITING)
            )
            return
        self._evaluations[key] = attempt
        attempt.worker.send(command)

    def cancel(self, command: CancelTrajectory) -> None:
        key = (command.trajectory_id, command.attempt)
        active = self._attempts.get(key) or self._evaluations.get(key)
        if active is None:
            self._rolled_out.pop(key, None)
            self._is_over(key)
            self._post(TrajectoryEnded(**named(key), stop_reason=command.reason))
            return
        active.cancelled, active.cancelled_error = command.reason, command.error
        active.turns.close()
        active.worker.send(command)

    def length_context(self, command: Predict) -> LengthContext:
        """Return the command's context with what only the pipeline knows: the rewards
        so far, the first prompt, the beginning of the first turn, and the state of the
        last one.
        """
        attempt = self._attempts.get((command.trajectory_id, command.attempt))
        if attempt is None:
            return command.context
        turns = attempt.turns
        return msgspec.structs.replace(
            command.context,
            reward=turns.reward,
            plan=turns.plan,
            prompt=turns.prompt,
            state=turns.state,
        )

    def evict(self, command: Evict) -> None:
        self._store.forget(command.trajectory_ids)
        if self._log is not None:
            for trajectory_id in command.trajectory_ids:
                self._log.release(trajectory_id)

    # Reports of workers.

    def on_report(self, report: AttemptReport) -> None:
        """Handle what a worker reports about an attempt. A report about an attempt that
        is over changes nothing.

        Raises DiskError.
        """
        match report:
            case AttemptEnded(trajectory=trajectory):
                key = (trajectory.id, trajectory.attempt)
            case _:
                key = (report.trajectory_id, report.attempt)
        attempt = self._attempts.get(key)
        if isinstance(report, AttemptScored):
            if key in self._evaluations:
                self._scored(self._evaluations[key], report)
        elif isinstance(report, AttemptDelayed):
            if attempt is not None or key in self._evaluations:
                self._post(report)
        elif isinstance(report, PhaseEnded):
            if attempt is not None or key in self._evaluations:
                self._spans.episode_span(_lane(key), report.name, report.start, report.end)
        elif attempt is None:
            return
        elif isinstance(report, AttemptEnded):
            self._ended(attempt, report)
        elif isinstance(report, EnvReady):
            self._post(report)
        elif isinstance(report, TurnAsked):
            attempt.turns.request(report)
        else:
            attempt.turns.withdraw(report.turn)

    def lose_worker(self, worker: WorkerPort, error: str) -> tuple[TrajectoryId, ...]:
        """Store the ends of all attempts of a worker that is gone. No events are posted
        for them: the core ends them when it receives the loss of the worker. Return the
        trajectories whose attempts may be continued.

        Raises DiskError.
        """
        recorded = list[TrajectoryId]()
        for table in (self._attempts, self._rolled_out, self._evaluations):
            for attempt in [one for one in table.values() if one.worker is worker]:
                del table[attempt.key]
                attempt.turns.close()
                if attempt.cancelled is not None:
                    self._is_over(attempt.key)
                elif self._lost(*attempt.key):
                    recorded.append(attempt.command.trajectory_id)
                self._spans.episode_over(_lane(attempt.key))
                if table is self._attempts:
                    self._append_loss(attempt.command, error)
                else:
                    self._score(attempt, _loss(attempt.command, error))
        return tuple(recorded)

    def _ended(self, attempt: _Attempt, report: AttemptEnded) -> None:
        """Store the record, then post the event."""
        command, trajectory = attempt.command, report.trajectory
        stored = trajectory
        reason = attempt.cancelled_error or (
            attempt.turns.last_failure
            if trajectory.stop_reason is StopReason.ENGINE_FAILURE
            else ""
        )
        if reason and not trajectory.error:
            stored = msgspec.structs.replace(trajectory, error=reason)
        self._append_end(command, stored)
        attempt.turns.close()
        del self._attempts[attempt.key]
        self._spans.episode_over(_lane(attempt.key))
        if trajectory.stop_reason in TRAINABLE and attempt.cancelled is None:
            self._rolled_out[attempt.key] = attempt
            while len(self._rolled_out) > self._waiting_limit:
                forgotten = next(iter(self._rolled_out))
                del self._rolled_out[forgotten]
                self._is_over(forgotten)
        else:
            self._is_over(attempt.key)
            if command.purpose is not Purpose.SERVE:  # a service delivers failures too
                self._store.forget((command.trajectory_id,))
        self._post(
            TrajectoryEnded(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                stop_reason=trajectory.stop_reason,
                turns=report.turns,
                tokens=sum(len(sequence.tokens) for sequence in trajectory.sequences),
                error=trajectory.error,
            )
        )

    def _lose(self, command: StartInit, error: str) -> None:
        """End an attempt whose worker was lost before it could begin. What it was to
        continue is recorded as its own.
        """
        self._continue(command)
        self._lost(command.trajectory_id, command.attempt)
        self._append_loss(command, error)
        self._post(
            TrajectoryEnded(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                stop_reason=StopReason.WORKER_LOST,
                error=error,
            )
        )

    def _append_end(self, command: StartInit, trajectory: Trajectory) -> None:
        self._store.append(
            Ended(
                at=self._clock(),
                purpose=command.purpose,
                member=command.member,
                trajectory=trajectory,
            )
        )

    def _append_loss(self, command: StartInit, error: str) -> None:
        self._append_end(command, record_of(command, StopReason.WORKER_LOST, error))
        if command.purpose is not Purpose.SERVE:
            self._store.forget((command.trajectory_id,))

    def _scored(self, attempt: _Attempt, report: AttemptScored) -> None:
        """Store the score, or why there is none; then post the event."""
        self._spans.episode_over(_lane(attempt.key))
        if attempt.cancelled is not None:
            report = msgspec.structs.replace(
                report, reward=None, success=None, stop_reason=attempt.cancelled
            )
        self._score(attempt, report)
        del self._evaluations[attempt.key]
        self._is_over(attempt.key)
        names = named(attempt.key)
        if attempt.cancelled is not None:
            self._post(TrajectoryEnded(**names, stop_reason=attempt.cancelled))
        elif report.reward is None:
            self._post(RewardFailed(**names, stop_reason=report.stop_reason, error=report.error))
        else:
            self._post(RewardReady(**names, reward=report.reward, success=report.success))

    def _score(self, attempt: _Attempt, report: AttemptScored) -> None:
        blame = BLAME_OF[report.stop_reason]
        self._store.score(Scored(at=self._clock(), blame=blame, **msgspec.structs.asdict(report)))
        purpose = attempt.command.purpose
        if purpose is Purpose.EVAL or (purpose is Purpose.TRAIN and report.reward is None):
            self._store.forget((report.trajectory_id,))


def _loss(command: StartInit, error: str) -> AttemptScored:
    return AttemptScored(
        trajectory_id=command.trajectory_id,
        attempt=command.attempt,
        stop_reason=StopReason.WORKER_LOST,
        error=error,
    )


def _lane(key: Key) -> str:
    """Return the attempt's name in the trace."""
    return f"{key[0]}/{key[1]}"
