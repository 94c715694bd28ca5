"""The present state of a run as viewers show it, what works and what waits for what;
and the account of a run: where every training trajectory that was started went.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollweave.core import attempts
from rollweave.core.idle import cause_of_waiting
from rollweave.core.policy.places import is_backlogged
from rollweave.core.policy.waiting import Wait
from rollweave.core.run import Run
from rollweave.core.state import (
    EngineStatus,
    GroupStatus,
    OnEngine,
    Phase,
    Queued,
    Stage,
    State,
    Suspected,
    TrainerStatus,
    Trajectory,
)
from rollweave.core.watchdog import DRAW_S, GRACE_S
from rollweave.schema.base import Struct
from rollweave.schema.status import EngineState, RunStatus, TrainerState, WaitStatus
from rollweave.schema.work import Purpose


class Account(Struct, frozen=True, kw_only=True):
    """started = trained + dropped (by reason) + cancelled + buffered + in_flight.

    At the end of a run `in_flight` is 0.
    """

    started: int
    trained: int
    dropped: dict[str, int]
    cancelled: int
    buffered: int
    in_flight: int

    @property
    def balanced(self) -> bool:
        return (
            self.started
            == self.trained
            + sum(self.dropped.values())
            + self.cancelled
            + self.buffered
            + self.in_flight
        )


def account(state: State) -> Account:
    counters = state.counters
    buffered = in_flight = 0
    for trajectory in state.trajectories.values():
        group = state.groups[trajectory.group_id]
        if not trajectory.started or group.purpose is not Purpose.TRAIN:
            continue
        chosen = trajectory.id in group.chosen
        if chosen and group.status is GroupStatus.BUFFERED:
            buffered += 1
        elif not (chosen and group.status in (GroupStatus.TRAINED, GroupStatus.COVERED)):
            in_flight += 1
    return Account(
        started=counters.started,
        trained=counters.trained,
        dropped=dict(counters.dropped),
        cancelled=counters.cancelled,
        buffered=buffered,
        in_flight=in_flight,
    )


CAUSES = {
    "environment": ("environments", "their steps lead to the next turns"),
    "stragglers": ("other engines", "these have all of the turns"),
    "reward": ("rewards", "no attempt is left that samples"),
    "window": ("the trainer", "rollouts may not run further ahead of training"),
}
"""The target and the reason of the wait of an engine without turns, by the cause that
`core/idle` finds.
"""


def status(run: Run, now: float, waits: Iterable[Wait]) -> RunStatus:
    """Return the state of the run at time `now`; `waits` are those for components."""
    state = run.state
    pools, trainer = state.pools, state.trainer
    training = not state.serving
    return RunStatus(
        at=round(now, 3),
        error=state.error,
        phase=state.phase.value,
        step=trainer.step,
        steps=run.config.run.steps if training else 0,
        attempts={
            "queued": len(pools.queued),
            "starting": len(pools.init),
            "ready": len(pools.run_queued),
            "running": len(pools.run),
            "rolled out": len(pools.eval_queued),
            "in evaluation": len(pools.eval),
            "ending": len(pools.closing),
        },
        queued_turns=len(state.turns.queue) + len(state.turns.suspects),
        buffered=len(state.buffer),
        wanted=run.config.rollout.groups_per_step if training else 0,
        version=state.publication.version,
        engines=_engines(run, now),
        trainer=TrainerState(
            status=trainer.status.value,
            seconds=_seconds(now, trainer.since),
            step=trainer.step,
            hosts=tuple(dict.fromkeys(rank.host for rank in state.hosts.ranks)),
            ranks=len(state.hosts.ranks) or run.config.trainer.first_ranks,
        )
        if training
        else None,
        workers=dict(Counter(worker.status.value for worker in state.workers.values())),
        hosts={number: host.name for number, host in state.hosts.up.items()},
        waits=tuple(_waits(run, now, waits)),
    )


def _engines(run: Run, now: float) -> tuple[EngineState, ...]:
    return tuple(
        EngineState(
            id=engine.id,
            status="leaving" if engine.departing else engine.status.value,
            seconds=_seconds(now, engine.since),
            host=engine.seat.host,
            pool=engine.seat.pool,
            version=engine.version,
            busy=len(engine.active),
            slots=engine.abilities.max_slots,
            phase=engine.seat.phase,
            lent=engine.abilities.lent,
        )
        for engine in run.state.engines.values()
    )


def _waits(run: Run, now: float, components: Iterable[Wait]) -> Iterator[WaitStatus]:
    if run.state.phase is Phase.FINISHED:
        return
    for wait in components:
        yield WaitStatus(
            waiter="the run",
            target=wait.component,
            what=wait.what,
            seconds=_seconds(now, now if wait.since is None else wait.since),
            usual_s=round(wait.usual_s, 3),
            limit_s=wait.limit_s,
        )
    yield from _trainer(run, now)
    yield from _engines_without_turns(run)
    yield from _attempts(run, now)
    yield from _groups(run, now)


def _trainer(run: Run, now: float) -> Iterator[WaitStatus]:
    state, wanted = run.state, run.config.rollout.groups_per_step
    if state.serving or state.trainer.status is not TrainerStatus.IDLE or not run.training:
        return
    waited = max(0.0, now - state.trainer.since)
    earlier_s = max(0.0, state.idle.trainer.get("batch", 0.0) - waited)
    yield WaitStatus(
        waiter="the trainer",
        target=f"the batch of step {state.trainer.step}",
        what=f"{len(state.buffer)} of {wanted} groups are complete",
        seconds=round(waited, 3),
        usual_s=round(earlier_s / max(1, state.trainer.step), 3),
    )


def _engines_without_turns(run: Run) -> Iterator[WaitStatus]:
    idle = [
        engine.id
        for engine in run.state.engines.values()
        if engine.status is EngineStatus.SERVING and engine.samples and not engine.active
    ]
    if not idle or run.state.phase is not Phase.RUNNING:
        return
    target, what = CAUSES[cause_of_waiting(run)]
    yield WaitStatus(
        waiter="engines without turns", target=target, what=what, count=len(idle), oldest=idle[0]
    )


@dataclass(slots=True)
class _Waiting:
    """Attempts that wait for the same."""

    count: int
    since: float
    oldest: str
    limit_s: float


def _attempts(run: Run, now: float) -> Iterator[WaitStatus]:
    """Yield the waits of attempts, one for all that wait for the same."""
    state = run.state
    waiting: dict[tuple[str, str], _Waiting] = {}
    backlogged = is_backlogged(run.places, attempts.taken(run))
    pools = (
        state.pools.queued,
        state.pools.init,
        state.pools.run_queued,
        state.pools.run,
        state.pools.eval_queued,
        state.pools.eval,
        state.pools.closing,
    )
    for pool in pools:
        for name in pool:
            trajectory = state.trajectories[name]
            target, what, since, limit_s = _awaited(run, trajectory, backlogged)
            known = waiting.get((target, what))
            if known is None:
                waiting[target, what] = _Waiting(1, since, trajectory.id, limit_s)
                continue
            known.count += 1
            if since < known.since:
                known.since, known.oldest, known.limit_s = since, trajectory.id, limit_s
    for (target, what), one in waiting.items():
        yield WaitStatus(
            waiter="attempts",
            target=target,
            what=what,
            count=one.count,
            seconds=_seconds(now, one.since),
            limit_s=one.limit_s,
            oldest=one.oldest,
        )


def _awaited(run: Run, trajectory: Trajectory, backlogged: bool) -> tuple[str, str, float, float]:
    """Return what an attempt waits for, what that does, since when, and the limit.
    `backlogged`: no attempt is started until rewards are computed.
    """
    since, turn = trajectory.since, trajectory.turn
    group = run.state.groups[trajectory.group_id]
    limit_s = group.task.limits.step_s + GRACE_S if group.task is not None else 0.0
    match trajectory.stage:
        case Stage.QUEUED if backlogged:
            return "rewards", "as many attempts as may wait for them do", since, 0.0
        case Stage.QUEUED:
            return "a free place", "before their environments start", since, 0.0
        case Stage.RUN_QUEUED:
            return "a place in RUN", "their environments are ready", since, 0.0
        case Stage.INIT:
            return f"environments of {group.name}", "starting", since, limit_s
        case Stage.RUN if turn is None:
            return f"environments of {group.name}", "stepping", since, limit_s
        case Stage.RUN:
            assert turn is not None, "the case before"
            match turn.place:
                case Queued(engine=None):
                    return "any engine with a free slot", "all are taken", turn.since, 0.0
                case Queued(engine=engine):
                    return f"engine {engine}", "a free slot of it", turn.since, 0.0
                case Suspected():
                    what = "their last engine was lost, and each of them now runs alone"
                    return "an engine", what, turn.since, 0.0
                case OnEngine(engine=engine):
                    limit_s = run.config.watchdog.turn_s
                    return f"engine {engine}", "sampling their turns", turn.since, limit_s
                case _:
                    return "the transfer of their KV", "between engines", turn.since, 0.0
        case Stage.EVAL_QUEUED:
            return f"rewards of {group.name}", "all places are taken", since, 0.0
        case Stage.EVAL:
            return f"rewards of {group.name}", "being computed", since, limit_s
        case _:
            return "their end", "cancelled, and not stopped yet", since, GRACE_S


def _groups(run: Run, now: float) -> Iterator[WaitStatus]:
    """Yield the waits of groups for their task, and for a pairwise judge."""
    for wanted, target, what in (
        (GroupStatus.DRAWING, "the source of tasks", "drawing"),
        (GroupStatus.COMPARING, "a pairwise judge", "comparing their members"),
    ):
        found = [group for group in run.state.groups.values() if group.status is wanted]
        if not found or (run.state.serving and wanted is GroupStatus.DRAWING):
            continue
        oldest = min(found, key=lambda group: group.since)
        limit_s = DRAW_S if wanted is GroupStatus.DRAWING else oldest.limit_s
        yield WaitStatus(
            waiter="groups",
            target=target,
            what=what,
            count=len(found),
            seconds=_seconds(now, oldest.since),
            limit_s=limit_s,
            oldest=oldest.id,
        )


def _seconds(now: float, since: float) -> float:
    return round(max(0.0, now - since), 3)
