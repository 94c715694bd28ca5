"""The simulated pipeline: environments, episodes and rewards of every attempt, as its
workload's plan says.

Invariant: each command is answered as the live pipeline answers it
(`rollout/pipeline.py`): by the same kinds of events, with the same stop reasons, and
with no event of an attempt after its last.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from rollweave.record.trace import ENVIRONMENTS, Trace
from rollweave.rollout.progress import REPORT_INTERVAL_S
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.work import Limits, Purpose, StopReason
from rollweave.sim.clock import Clock
from rollweave.sim.engine import Done
from rollweave.sim.fleet import SimFleet
from rollweave.sim.kv import Request
from rollweave.sim.serverless import Serverless
from rollweave.sim.workload import Plan, Workload

Key = tuple[TrajectoryId, int]


@dataclass(slots=True)
class Attempt:
    """One attempt under way.

    `tokens` is the length of its context, `turn` the turn that is open or comes next.
    """

    start: c.StartInit
    plan: Plan
    key: str
    began: float
    tokens: int = 0
    turn: int = 0
    ticket: int = 0  # of the environment or reward that works now
    engine: EngineId | None = None  # that generates now
    dispatch: int = 0
    done: e.TurnDone | None = None  # the last answer
    waits: bool = False  # for the open turn to be given to an engine
    kept: int = 0  # tokens of the open turn that its engine goes on from, or its next one can
    # tokens of the open turn's try that the core was told of; -1 before it was looked
    # at
    told: int = -1
    asked: float = 0.0  # when the open turn was asked for, or the environment's part began


@dataclass(frozen=True, slots=True)
class Scored:
    """What the trainer needs to know of a scored trajectory."""

    name: str
    initiated: int
    tokens: int
    turns: int
    reward: float
    success: bool


class Rollouts:
    """`work` is the workload of each task domain; `seed` the run's."""

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        fleet: SimFleet,
        work: Mapping[str, Workload],
        seed: int,
        trace: Trace | None,
        serverless: Serverless | None = None,
        keep_partial_turns: bool = False,
    ) -> None:
        """`keep_partial_turns` as in `rollout/pipeline.py`."""
        self._serverless, self._keeps_turns = serverless, keep_partial_turns
        self._looking = False
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
        fleet.answered, fleet.gone = self._answered, self._gone

    @property
    def alive(self) -> int:
        """Attempts for which an environment or a reward is held."""
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
        attempt = Attempt(
            start=command,
            plan=plan,
            key=f"{command.trajectory_id}/{command.attempt}",
            began=self._clock.now,
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
            if attempt.waits:  # nor has what was asked for since
                self._ask(attempt)
            return
        attempt.engine, attempt.dispatch, attempt.told = command.engine_id, command.dispatch, -1
        attempt.waits = False
        if not command.resume:
            attempt.kept = 0
        request = Request(
            key=attempt.key,
            shared_key=attempt.start.group_id,
            shared_tokens=attempt.plan.prompt_tokens,
            context_tokens=attempt.tokens + attempt.kept,
            output_tokens=attempt.plan.turns[attempt.turn].output_tokens - attempt.kept,
            rank=command.rank,
        )
        if not self._fleet.generate(command.engine_id, request):
            attempt.engine = None
            self._post(_failed(command, "the engine is gone"))
        elif self._keeps_turns and not self._looking:
            self._looking = True
            self._clock.after(REPORT_INTERVAL_S, self._look)

    def abort_turn(self, command: c.AbortTurn) -> None:
        attempt = self._find(command.trajectory_id, command.attempt)
        if attempt is not None and (attempt.engine, attempt.dispatch) == (
            command.engine_id,
            command.dispatch,
        ):
            self._left(attempt, self._fleet.abort(command.engine_id, attempt.key))

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
            self._fleet.migrate(command, attempt.key, attempt.start.group_id)
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
        attempt.asked = self._clock.now
        hangs = attempt.plan.fails_in == "eval" and attempt.plan.stop is StopReason.REWARD_HANG
        wait = attempt.start.task.limits.step_s if hangs else attempt.plan.reward_s
        if self._serverless is not None:
            wait = self._serverless.call(self._clock.now, wait)
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

    def forget_all(self) -> None:
        """The controller is lost, and with it everything in flight.

        What was scored is in the store.
        """
        for attempt in list(self._attempts.values()):
            self._forget(attempt)

    # Unfinished turns.

    def _left(self, attempt: Attempt, sampled: int | None) -> None:
        """The open turn is with no engine any more, the last of which has sampled so
        many tokens of it, where that is known.

        An engine that was stopped as it had sampled the last one would answer it; here
        that one is sampled again.
        """
        attempt.engine = None
        if self._keeps_turns and sampled is not None:
            attempt.kept = min(
                attempt.kept + sampled, attempt.plan.turns[attempt.turn].output_tokens - 1
            )

    def _gone(self, engine_id: EngineId, told: Mapping[str, int]) -> None:
        """The engine is lost, and with it what it had not told of its turns."""
        for key, sampled in told.items():
            attempt = self._by_key.get(key)
            if attempt is not None and attempt.engine == engine_id:
                self._left(attempt, sampled)

    def _look(self) -> None:
        """Tell the core how far turns have come, as `rollout/progress.py` does."""
        told = self._fleet.told()
        news, self._looking = [], False
        for attempt in self._by_key.values():
            sampled = (
                told.get(attempt.engine, {}).get(attempt.key)
                if attempt.engine is not None
                else None
            )
            if sampled is None:
                continue
            self._looking = True
            tokens = attempt.kept + sampled
            if attempt.told >= 0 and tokens > max(attempt.told, attempt.kept):
                attempt.told = tokens
                news.append(
                    e.TurnProgress(
                        trajectory_id=attempt.start.trajectory_id,
                        attempt=attempt.start.attempt,
                        turn=attempt.turn,
                        dispatch=attempt.dispatch,
                        output_tokens=tokens,
                    )
                )
            attempt.told = max(attempt.told, 0)
        if news:
            self._post(e.TurnsProgressed(turns=tuple(news)))
        if self._looking:
            self._clock.after(REPORT_INTERVAL_S, self._look)

    # What happens.

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
        attempt.asked, attempt.waits = self._clock.now, True
        self._post(
            e.TurnRequested(
                trajectory_id=attempt.start.trajectory_id,
                attempt=attempt.start.attempt,
                turn=attempt.turn,
                context_tokens=attempt.tokens,
            )
        )

    def _answered(self, engine_id: EngineId, version: int, done: Done) -> None:
        """An engine has finished a turn: the environment works now."""
        attempt = self._by_key.get(done.key)
        if attempt is None or attempt.engine != engine_id:
            return
        attempt.engine = None
        self._span(attempt, f"turn {attempt.turn} {engine_id}", attempt.asked)
        attempt.done = e.TurnDone(
            trajectory_id=attempt.start.trajectory_id,
            attempt=attempt.start.attempt,
            turn=attempt.turn,
            dispatch=attempt.dispatch,
            output_tokens=attempt.kept + done.output_tokens,
            cached_tokens=min(done.cached_tokens, attempt.tokens),
            version=version,
            queue_s=done.queue_s,
        )
        self._post(attempt.done)
        attempt.kept = 0
        plan = attempt.plan.turns[attempt.turn]
        attempt.tokens += plan.output_tokens
        attempt.turn += 1
        attempt.asked = self._clock.now
        last = attempt.turn == len(attempt.plan.turns)
        hangs = last and attempt.plan.fails_in == "run" and attempt.plan.stop is StopReason.ENV_HANG
        wait = attempt.start.task.limits.step_s if hangs else plan.env_s
        attempt.ticket = self._clock.after(
            wait, lambda: self._env_over(attempt, plan.observation_tokens)
        )

    def _env_over(self, attempt: Attempt, observation_tokens: int) -> None:
        self._span(attempt, "step", attempt.asked)
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
        self._span(attempt, "eval", attempt.asked)
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
        if start.purpose is Purpose.TRAIN:  # nobody reads the tokens of an evaluation
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
    """The plan as far as the task's limits on turns and tokens let it come."""
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
