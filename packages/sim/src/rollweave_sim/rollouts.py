"""The simulated pipeline: environments, episodes and rewards of every attempt, as its
workload's plan defines them.

Invariant: each command is answered as the live pipeline answers it
(`rollout/pipeline.py`): by the same kinds of events, with the same stop reasons, and
with no event of an attempt after its last.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from rollweave.record.trace import ENVIRONMENTS, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import TURN_REPORT_INTERVAL_S
from rollweave.schema.work import Limits, Purpose, StopReason
from rollweave_sim.clock import Clock
from rollweave_sim.engine import Done
from rollweave_sim.fleet import SimFleet
from rollweave_sim.kv import Request
from rollweave_sim.workers import Judges
from rollweave_sim.workload import Plan, Workload


@dataclass(slots=True)
class Attempt:
    """One attempt in progress.

    `tokens` is the length of its context, `turn` the open or next turn.
    """

    start: c.StartInit
    plan: Plan
    key: str
    began: float
    tokens: int = 0
    turn: int = 0
    ticket: int = 0  # of the current work of the environment or reward
    engine: EngineId | None = None  # the generating engine
    dispatch: int = 0
    done: e.TurnDone | None = None  # the latest answer
    awaits_engine: bool = False  # for an engine to receive the open turn
    prefilling: bool = False  # the engine computes only the KV of the open turn's context
    kept_tokens: int = 0  # tokens of the open turn from which its current or next engine continues
    # tokens of the open turn's dispatch reported to the core; -1 before the first
    # report
    reported: int = -1
    began_part: float = 0.0  # start of the open turn, or of the environment's work
    replays: int = 0  # first turns, whose answers are recorded
    recorded_tokens: int = 0  # of the turn after these
    version: int = -1  # the newest one that sampled a finished turn


@dataclass(frozen=True, slots=True)
class Recorded:
    """The turns of an attempt that was lost with the controller: its plan, the number
    of its finished turns, the tokens of the next one that its engine had reported, and
    the newest version that sampled any.
    """

    plan: Plan
    turns: int
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The facts about a scored trajectory that the trainer needs."""

    name: str
    initiated: int
    tokens: int
    turns: int
    reward: float
    success: bool


class Rollouts:
    """Runs attempts. `work` is the workload of each task domain; `seed` the run's."""

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        fleet: SimFleet,
        work: Mapping[str, Workload],
        seed: int,
        trace: Trace | None,
        judges: Judges | None = None,
        keep_partial_turns: bool = False,
    ) -> None:
        """`keep_partial_turns` is that of `rollout/pipeline.py`."""
        self._judges, self._keeps_turns = judges, keep_partial_turns
        self._reporting = False
        self._clock, self._post, self._fleet, self._work, self._seed = (
            clock,
            post,
            fleet,
            work,
            seed,
        )
        self._trace = trace
        self._attempts: dict[TrajectoryId, Attempt] = {}
        self._by_key: dict[str, Attempt] = {}
        self.scored: dict[TrajectoryId, Scored] = {}
        self._recorded: dict[tuple[TrajectoryId, int], Recorded] = {}
        fleet.on_done, fleet.on_lost = self._on_turn_done, self._on_engine_lost
        fleet.on_returned = self._on_returned

    @property
    def alive(self) -> int:
        """Return the number of attempts that occupy an environment or a reward."""
        return len(self._attempts)

    # Commands.

    def start_init(self, command: c.StartInit) -> None:
        task = command.task
        plan = _within(
            self._work[task.tag].plan(
                index=task.seed, member=command.member, attempt=command.attempt, seed=self._seed
            ),
            task.limits,
        )
        recorded = self._continued(command)
        if recorded is not None:
            plan = recorded.plan
        attempt = Attempt(
            start=command,
            plan=plan,
            key=f"{command.trajectory_id}/{command.attempt}",
            began=self._clock.now,
            replays=recorded.turns if recorded is not None else 0,
            version=recorded.version if recorded is not None else -1,
            recorded_tokens=recorded.tokens if recorded is not None else 0,
        )
        self._attempts[command.trajectory_id] = attempt
        self._by_key[attempt.key] = attempt
        hangs = plan.fails_in == "init" and plan.stop is StopReason.ENV_HANG
        attempt.ticket = self._clock.after(
            task.limits.step_s if hangs else plan.init_s, lambda: self._init_over(attempt)
        )

    def start_run(self, command: c.StartRun) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is None:
            return
        attempt.tokens = attempt.plan.prompt_tokens
        if attempt.tokens < attempt.start.task.limits.max_tokens:
            self._ask(attempt)
        else:
            why = f"the first prompt ({attempt.tokens} tokens) leaves no room in max_tokens"
            self._end(attempt, StopReason.ENV_ERROR, why)

    def start_turn(self, command: c.StartTurn) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is None:
            return
        # its answer was given, and has not arrived
        if command.turn < attempt.turn and attempt.done is not None:
            self._post(msgspec.structs.replace(attempt.done, dispatch=command.dispatch))
            if attempt.awaits_engine:  # nor has what was began_part for since
                self._ask(attempt)
            return
        attempt.engine, attempt.dispatch, attempt.reported = command.engine_id, command.dispatch, -1
        attempt.awaits_engine = False
        attempt.prefilling = command.prefill and attempt.turn >= attempt.replays
        if attempt.turn < attempt.replays:
            attempt.engine = None
            tokens = attempt.plan.turns[attempt.turn].output_tokens
            self._answer(attempt, tokens, attempt.tokens, attempt.version, replayed=True)
            return
        if not command.resume:
            attempt.kept_tokens = 0
        if attempt.turn == attempt.replays:
            attempt.kept_tokens = max(attempt.kept_tokens, attempt.recorded_tokens)
        request = Request(
            key=attempt.key,
            shared_key=attempt.start.group_id,
            shared_tokens=attempt.plan.prompt_tokens,
            context_tokens=attempt.tokens + attempt.kept_tokens,
            output_tokens=1
            if command.prefill
            else attempt.plan.turns[attempt.turn].output_tokens - attempt.kept_tokens,
            rank=command.rank,
        )
        if not self._fleet.generate(command.engine_id, request):
            attempt.engine = None
            self._post(_failed(command, "the engine is on_lost"))
        elif self._keeps_turns and not self._reporting:
            self._reporting = True
            self._clock.after(TURN_REPORT_INTERVAL_S, self._report_progress)

    def abort_turn(self, command: c.AbortTurn) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is not None and (attempt.engine, attempt.dispatch) == (
            command.engine_id,
            command.dispatch,
        ):
            self._detach(attempt, self._fleet.abort(command.engine_id, attempt.key))

    def rerank(self, command: c.RerankTurn) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is not None and (attempt.engine, attempt.dispatch) == (
            command.engine_id,
            command.dispatch,
        ):
            self._fleet.rerank(command.engine_id, attempt.key, command.rank)

    def migrate(self, command: c.Migrate) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is not None:
            self._fleet.migrate(
                command,
                attempt.key,
                attempt.start.group_id,
                shared_tokens=attempt.plan.prompt_tokens,
            )
            return
        self._post(
            e.MigrationDone(
                number=command.number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                moved_tokens=0,
                error="the attempt is over",
            )
        )

    def start_eval(self, command: c.StartEval) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is None:
            self._post(
                e.RewardFailed(
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    stop_reason=StopReason.REWARD_ERROR,
                    error="the attempt is not waiting for its reward",
                )
            )
            return
        attempt.began_part = self._clock.now
        hangs = attempt.plan.fails_in == "eval" and attempt.plan.stop is StopReason.REWARD_HANG
        wait = attempt.start.task.limits.step_s if hangs else attempt.plan.reward_s
        if self._judges is not None:
            wait = self._judges.call(self._clock.now, wait)
        attempt.ticket = self._clock.after(wait, lambda: self._eval_over(attempt))

    def cancel(self, command: c.CancelTrajectory) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is None:
            self._post(
                e.TrajectoryEnded(
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    stop_reason=command.reason,
                )
            )
            return
        if attempt.engine is not None:
            self._fleet.abort(attempt.engine, attempt.key)
        self._end(attempt, command.reason)

    def evict(self, command: c.Evict) -> None:
        for trajectory_id in command.trajectory_ids:
            self.scored.pop(trajectory_id, None)
            for key in [key for key in self._recorded if key[0] == trajectory_id]:
                del self._recorded[key]

    def lose_worker(self, worker: str) -> tuple[TrajectoryId, ...]:
        """End the attempts of a worker that is gone. Return the trajectories whose
        attempts have recorded turns.
        """
        recorded = list[TrajectoryId]()
        reported = self._fleet.reported_tokens()
        for attempt in list(self._attempts.values()):
            if attempt.start.worker == worker:
                if self._record(attempt, reported):
                    recorded.append(attempt.start.trajectory_id)
                if attempt.engine is not None:
                    self._fleet.abort(attempt.engine, attempt.key)
                self._forget(attempt)
        return tuple(recorded)

    def forget_all(self) -> None:
        """Drop everything in flight, which is lost with the controller.

        Scored trajectories stay in the store, and the turns of attempts in the turn log
        (`record/turn_log.py`). Call before the engines are dropped.
        """
        reported = self._fleet.reported_tokens()
        for attempt in list(self._attempts.values()):
            self._record(attempt, reported)
            self._forget(attempt)

    def recorded(
        self, attempts: Collection[tuple[TrajectoryId, int, str]]
    ) -> tuple[TrajectoryId, ...]:
        """Return which of these attempts are recorded, and forget all others."""
        keys = [(trajectory_id, attempt) for trajectory_id, attempt, _ in attempts]
        self._recorded = {key: self._recorded[key] for key in keys if key in self._recorded}
        return tuple(trajectory_id for trajectory_id, _ in self._recorded)

    def _record(self, attempt: Attempt, reported: Mapping[EngineId, Mapping[str, int]]) -> bool:
        """Keep what is known of the attempt's turns; of a turn that is being replayed,
        all that was recorded before. Return False if that is nothing.
        """
        turns = max(attempt.turn, attempt.replays)
        tokens = attempt.kept_tokens if attempt.turn == turns else 0
        if attempt.engine is not None:
            tokens += reported.get(attempt.engine, {}).get(attempt.key, 0)
        if turns == attempt.replays:
            tokens = max(tokens, attempt.recorded_tokens)
        if turns < len(attempt.plan.turns):
            tokens = min(tokens, attempt.plan.turns[turns].output_tokens - 1)
        if not (turns or tokens):
            return False
        key = (attempt.start.trajectory_id, attempt.start.attempt)
        version = max(attempt.version, attempt.start.initiated_version)
        self._recorded[key] = Recorded(attempt.plan, turns, tokens, version)
        return True

    def _continued(self, command: c.StartInit) -> Recorded | None:
        """Return the record that the attempt continues. Tokens of versions are not
        distinguished here: one that is lost makes the whole record useless.
        """
        if command.continues is None:
            return None
        recorded = self._recorded.pop((command.trajectory_id, command.continues.attempt), None)
        newest = command.continues.version
        usable = recorded is not None and (newest is None or recorded.version <= newest)
        return recorded if usable else None

    # Unfinished turns.

    def _detach(self, attempt: Attempt, sampled: int | None) -> None:
        """Detach the open turn from its engine, which has sampled `sampled` of its
        tokens, if known.

        A live engine that was stopped after the last token would answer the turn; here
        that token is sampled again.
        """
        attempt.engine = None
        if self._keeps_turns and sampled is not None and not attempt.prefilling:
            attempt.kept_tokens = min(
                attempt.kept_tokens + sampled, attempt.plan.turns[attempt.turn].output_tokens - 1
            )

    def _on_engine_lost(self, engine_id: EngineId, reported: Mapping[str, int]) -> None:
        """Detach the turns of a lost engine: unreported tokens are lost."""
        for key, sampled in reported.items():
            attempt = self._by_key.get(key)
            if attempt is not None and attempt.engine == engine_id:
                self._detach(attempt, sampled)

    def _on_returned(self, engine_id: EngineId, turns: Mapping[str, int]) -> None:
        """Report turns that a lent engine gives back with the tokens that they have."""
        for key, sampled in turns.items():
            attempt = self._by_key.get(key)
            if attempt is not None and attempt.engine == engine_id:
                self._detach(attempt, sampled)
                self._post(
                    e.TurnReturned(
                        trajectory_id=attempt.start.trajectory_id,
                        attempt=attempt.start.attempt,
                        turn=attempt.turn,
                        dispatch=attempt.dispatch,
                    )
                )

    def _report_progress(self) -> None:
        """Report the progress of turns, as `rollout/turn_parts` does."""
        reported = self._fleet.reported_tokens()
        progress, self._reporting = [], False
        for attempt in self._by_key.values():
            sampled = (
                reported.get(attempt.engine, {}).get(attempt.key)
                if attempt.engine is not None and not attempt.prefilling
                else None
            )
            if sampled is None:
                continue
            self._reporting = True
            tokens = attempt.kept_tokens + sampled
            if attempt.reported >= 0 and tokens > max(attempt.reported, attempt.kept_tokens):
                attempt.reported = tokens
                progress.append(
                    e.TurnProgress(
                        trajectory_id=attempt.start.trajectory_id,
                        attempt=attempt.start.attempt,
                        turn=attempt.turn,
                        dispatch=attempt.dispatch,
                        output_tokens=tokens,
                    )
                )
            attempt.reported = max(attempt.reported, 0)
        if progress:
            self._post(e.TurnsProgressed(turns=tuple(progress)))
        if self._reporting:
            self._clock.after(TURN_REPORT_INTERVAL_S, self._report_progress)

    # Internal events.

    def _init_over(self, attempt: Attempt) -> None:
        self._span(attempt, "init", attempt.began)
        if attempt.plan.fails_in == "init":
            self._end(attempt, attempt.plan.stop, "as its workload says")
        else:
            self._post(
                e.EnvReady(
                    trajectory_id=attempt.start.trajectory_id,
                    attempt=attempt.start.attempt,
                    prompt_tokens=attempt.plan.prompt_tokens,
                )
            )

    def _ask(self, attempt: Attempt) -> None:
        attempt.began_part, attempt.awaits_engine = self._clock.now, True
        self._post(
            e.TurnRequested(
                trajectory_id=attempt.start.trajectory_id,
                attempt=attempt.start.attempt,
                turn=attempt.turn,
                context_tokens=attempt.tokens,
            )
        )

    def _on_turn_done(self, engine_id: EngineId, version: int, done: Done) -> None:
        """Let the environment act on a turn that an engine has finished."""
        attempt = self._by_key.get(done.key)
        if attempt is None or attempt.engine != engine_id:
            return
        attempt.engine = None
        if attempt.prefilling:
            self._post(
                e.PrefillDone(
                    trajectory_id=attempt.start.trajectory_id,
                    attempt=attempt.start.attempt,
                    turn=attempt.turn,
                    dispatch=attempt.dispatch,
                    cached_tokens=done.cached_tokens,
                )
            )
            return
        self._span(attempt, f"turn {attempt.turn} {engine_id}", attempt.began_part)
        tokens, cached = attempt.kept_tokens + done.output_tokens, done.cached_tokens
        self._answer(attempt, tokens, cached, version, queue_s=done.queue_s)

    def _answer(
        self,
        attempt: Attempt,
        output_tokens: int,
        cached_tokens: int,
        version: int,
        *,
        queue_s: float = 0.0,
        replayed: bool = False,
    ) -> None:
        """Answer the open turn, and let the environment act on it."""
        attempt.version = max(attempt.version, version)
        attempt.done = e.TurnDone(
            trajectory_id=attempt.start.trajectory_id,
            attempt=attempt.start.attempt,
            turn=attempt.turn,
            dispatch=attempt.dispatch,
            output_tokens=output_tokens,
            cached_tokens=min(cached_tokens, attempt.tokens),
            version=version,
            queue_s=queue_s,
            replayed=replayed,
        )
        self._post(attempt.done)
        attempt.kept_tokens = 0
        plan = attempt.plan.turns[attempt.turn]
        attempt.tokens += plan.output_tokens
        attempt.turn += 1
        attempt.began_part = self._clock.now
        last = attempt.turn == len(attempt.plan.turns)
        hangs = last and attempt.plan.stop is StopReason.ENV_HANG
        wait = attempt.start.task.limits.step_s if hangs else plan.env_s
        attempt.ticket = self._clock.after(
            wait, lambda: self._env_over(attempt, plan.observation_tokens)
        )

    def _env_over(self, attempt: Attempt, observation_tokens: int) -> None:
        self._span(attempt, "step", attempt.began_part)
        if attempt.turn < len(attempt.plan.turns):
            attempt.tokens += observation_tokens
            self._ask(attempt)
        elif attempt.plan.fails_in == "run":
            self._end(attempt, attempt.plan.stop, "as its workload says")
        else:
            self._post(
                self._ended(
                    attempt,
                    attempt.plan.stop if attempt.plan.fails_in == "" else StopReason.FINISHED,
                )
            )

    def _eval_over(self, attempt: Attempt) -> None:
        self._span(attempt, "eval", attempt.began_part)
        start, plan = attempt.start, attempt.plan
        self._forget(attempt)
        if plan.fails_in == "eval":
            self._post(
                e.RewardFailed(
                    trajectory_id=start.trajectory_id,
                    attempt=start.attempt,
                    stop_reason=plan.stop,
                    error="simulated",
                )
            )
            return
        if start.purpose is Purpose.TRAIN:  # the tokens of an evaluation are never read
            self.scored[start.trajectory_id] = Scored(
                name=start.task.tag,
                initiated=start.initiated_version,
                tokens=attempt.tokens,
                turns=attempt.turn,
                reward=plan.reward,
                success=plan.success,
            )
        self._post(
            e.RewardReady(
                trajectory_id=start.trajectory_id,
                attempt=start.attempt,
                reward=plan.reward,
                success=plan.success,
            )
        )

    def _end(self, attempt: Attempt, reason: StopReason, error: str = "") -> None:
        self._forget(attempt)
        self._post(self._ended(attempt, reason, error))

    def _ended(self, attempt: Attempt, reason: StopReason, error: str = "") -> e.TrajectoryEnded:
        return e.TrajectoryEnded(
            trajectory_id=attempt.start.trajectory_id,
            attempt=attempt.start.attempt,
            stop_reason=reason,
            turns=attempt.turn,
            tokens=attempt.tokens,
            error=error,
        )

    def _forget(self, attempt: Attempt) -> None:
        self._clock.cancel(attempt.ticket)
        self._attempts.pop(attempt.start.trajectory_id, None)
        self._by_key.pop(attempt.key, None)
        if self._trace is not None:
            self._trace.release(ENVIRONMENTS, attempt.key)

    def _find(self, trajectory_id: TrajectoryId, number: int) -> Attempt | None:
        attempt = self._attempts.get(trajectory_id)
        return attempt if attempt is not None and attempt.start.attempt == number else None

    def _span(self, attempt: Attempt, name: str, start: float) -> None:
        if self._trace is not None:
            self._trace.span(ENVIRONMENTS, attempt.key, name, start, self._clock.now)


def _within(plan: Plan, limits: Limits) -> Plan:
    """Cut the plan to the task's limits on turns and tokens."""
    tokens, turns = plan.prompt_tokens, []
    for turn in plan.turns[: limits.max_turns]:
        room = min(limits.max_turn_tokens, limits.max_tokens - tokens)
        if room < 1:
            break
        turns.append(
            turn
            if turn.output_tokens <= room
            else msgspec.structs.replace(turn, output_tokens=room)
        )
        tokens += turns[-1].output_tokens + turn.observation_tokens
    if len(turns) == len(plan.turns):
        return (
            plan
            if all(map(operator.is_, turns, plan.turns))
            else msgspec.structs.replace(plan, turns=tuple(turns))
        )
    stop = StopReason.MAX_TURNS if len(turns) == limits.max_turns else StopReason.MAX_TOKENS
    kept = tuple(turns or plan.turns[:1])  # an attempt has at least one turn
    return msgspec.structs.replace(plan, turns=kept, stop=stop, fails_in="")


def _failed(command: c.StartTurn, error: str) -> e.TurnFailed:
    return e.TurnFailed(
        trajectory_id=command.trajectory_id,
        attempt=command.attempt,
        turn=command.turn,
        dispatch=command.dispatch,
        error=error,
    )
