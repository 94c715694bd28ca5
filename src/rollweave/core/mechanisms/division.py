"""The division of places between engines and ranks of the trainer: between steps, the
run gives places of engines to further ranks, or back, by what it has measured (RollArt
§8; docs/decisions/0028).

After each step, `core/policy/ratio` is given the times of the step and the load of the
engines (`mechanisms/load`), and compares all divisions. Once the best one has been the
same way off for some steps, and pays for the cost of the move, the run moves to it:

1. The trainer takes no further batch, and its state is saved; meanwhile, engines that
   give their places away finish their turns, and end.
2. The trainer starts again from this checkpoint, with a rank at each of its places, as
   after a loss, and publishes the same version.
3. On places that ranks have left, engines start.

If the trainer is lost meanwhile, it starts again with the ranks for which there are
places. A move that has become impossible, because the checkpoint failed or no other
engine is left, is given up, and its engines stay or start again. A world begins with as
many ranks as the run had, and with engines in all other places.

Invariants: engines and ranks together never have more places than the run began with,
apart from engines that joined, whose places no rank takes; the number of ranks stays
within its bounds; a move neither loses nor repeats a step, unless the trainer is lost
meanwhile.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rollweave.core import engines, evaluation, training
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.load import Counted, count, load_between
from rollweave.core.mechanisms.membership import members
from rollweave.core.policy.ratio import (
    Load,
    Patience,
    StepTimes,
    division,
    pays,
    speed,
    turns_per_s,
)
from rollweave.core.policy.scheduling import divides
from rollweave.core.policy.waiting import Wait
from rollweave.core.run import EngineMove, Mechanism, Run, TrainerMove
from rollweave.core.state import Engine, EngineStatus, TrainerStatus
from rollweave.schema.base import EngineId
from rollweave.schema.commands import Warn
from rollweave.schema.events import EngineJoined, EngineSlot
from rollweave.schema.hosts import RankSlot

IDLE_SHARE = 0.05
"""Share of a step from which the trainer's wait for trajectories says that the engines
are what limits the step.
"""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the run when the weights of a step were published."""

    step: int = -1
    at: float = 0.0
    counted: Counted = Counted()
    evaluated: int = 0  # episodes of evaluations
    engines: dict[str, float] = {}  # seconds of `core/idle`
    trainer: dict[str, float] = {}


class Dividing(msgspec.Struct):
    """The part of the state."""

    goal: int = 0  # ranks to which the run moves; 0 if it does not
    former: int = 0  # ranks from which it moves
    engines: dict[EngineId, float] = {}  # that give their places to ranks → since when
    places: list[RankSlot] = []  # of all engines that do, until the ranks have them
    since: float = 0.0  # when the move began, or the trainer's process
    stall_s: float = 0.0  # seconds from then until the trainer could train
    engine_s: float = 0.0  # seconds in which the engine started that has joined last
    patience: Patience = msgspec.field(default_factory=Patience)
    before: Past = Past()
    speeds: dict[int, float] = {}  # relative speeds of training, by the number of ranks
    trained: tuple[int, float] = (0, 0.0)  # ranks of the last step, and seconds of training
    warm: bool = False  # the trainer's process has trained a step, and prepares nothing more


def published(run: Run) -> None:
    """Compare the divisions after a step, or end a move once the trainer can train
    again. The first step of its process is not compared: it takes longer.
    """
    part, step = run.part(Dividing), run.state.trainer.step
    before, part.before = part.before, _past(run)
    if before.step < 0 or step != before.step + 1:  # the trainer has started
        part.stall_s, part.warm = run.now - part.since, False
        if part.goal == len(run.state.hosts.ranks):
            _arrive(run)
    elif not part.warm:
        part.warm = True
    elif not part.goal and run.training and not _is_disturbed(run, before, part.before):
        _plan(run, before, part.before)


def _past(run: Run) -> Past:
    state = run.state
    return Past(
        step=state.trainer.step,
        at=run.now,
        counted=count(run),
        evaluated=state.counters.eval_started,
        engines=dict(state.idle.engines),
        trainer=dict(state.idle.trainer),
    )


def _is_disturbed(run: Run, before: Past, after: Past) -> bool:
    """True if the step had more to do than others, or if the next one will."""
    state = run.state
    return (
        before.evaluated != after.evaluated
        or before.engines.get("starting") != after.engines.get("starting")
        or state.evaluations.current is not None
        or evaluation.is_due(run, after.step)
        or any(engine.departing or engine.version < 0 for engine in state.engines.values())
    )


def _plan(run: Run, before: Past, after: Past) -> None:
    """Begin a move if the last steps ask for it, and it pays."""
    part, present = run.part(Dividing), [*run.state.engines.values()]
    measured = _times(run, before, after, present)
    if measured is None:
        return
    times, load = measured
    ranks, trainer = len(run.state.hosts.ranks), run.config.trainer
    own = sum(not engine.joined for engine in present)
    former, former_s = part.trained
    part.trained = ranks, max(1e-9, times.training_s)
    if former != ranks:
        known = speed(part.speeds, former) * former_s / part.trained[1] if former else ranks
        part.speeds[ranks] = known
    asked = division(
        times,
        load,
        ranks=ranks,
        engines=len(present),
        bounds=(trainer.first_ranks, min(trainer.most_ranks, ranks + own)),
        speeds=part.speeds,
    )
    way = (asked.ranks > ranks) - (asked.ranks < ranks)
    if not part.patience.ask(way):
        return
    now_s, steps = times.after(1, 1), run.config.run.steps - after.step
    # before the first move, a start says little of what it costs
    cost_s = part.stall_s if part.patience.last else max(part.stall_s, now_s)
    cost_s += part.engine_s * max(0, ranks - asked.ranks) / max(1, len(present))
    if pays(asked.gain, waited_s=now_s, engines=1, steps=steps, cost_s=cost_s):
        _begin(
            run,
            asked.ranks,
            f"steps of {asked.step_s:.3g} s instead of {now_s:.3g} s expected ({asked.gain:.0%} "
            f"more per second), for {cost_s:.3g} s (rollouts of a step take {times.rollouts_s:.3g} "
            f"s, training {times.training_s:.3g} s)",
        )


def _times(
    run: Run, before: Past, after: Past, present: list[Engine]
) -> tuple[StepTimes, Load] | None:
    """Return the times and the load of the step between two publications; None if the
    load is not known.

    If the trainer waited for trajectories, the rollouts took as long as the step, but
    for the engines' waits for the trainer. Otherwise the trainer held them back, also
    where they never stood still, and they could have been faster with as many attempts
    as the mode allows.
    """
    load = load_between(run, before.counted, after.counted, present)
    if load is None:
        return None

    def passed(cause: str, *, engines: bool = False) -> float:
        old, new = (before.engines, after.engines) if engines else (before.trainer, after.trainer)
        return new.get(cause, 0.0) - old.get(cause, 0.0)

    step_s = after.at - before.at
    rollouts_s = step_s - passed("window", engines=True) / len(present)
    if passed("batch") < IDLE_SHARE * step_s:
        wanted = run.config.rollout.groups_per_step * max(run.group_sizes.values())
        most = run.places.run if run.mode.window is None else wanted * (1 + run.mode.window)
        attempts = max(load.attempts, float(min(run.places.run, most)))
        load = msgspec.structs.replace(load, attempts=attempts)
        turns = after.counted.turns - before.counted.turns
        rate = turns_per_s(load, 0, len(present))
        rollouts_s = min(rollouts_s, turns / rate if rate else rollouts_s)
    training_s = passed("busy") + passed("measuring")
    other_s = passed("publishing") + passed("saving")
    return StepTimes(
        step_s=step_s, rollouts_s=rollouts_s, training_s=training_s, other_s=other_s
    ), load


def _begin(run: Run, goal: int, why: str) -> None:
    """Let the engines drain whose places further ranks are to have: those with the
    fewest turns and, among equals, the newest. Ranks share no device, and take no place
    of an engine that joined.
    """
    part, state = run.part(Dividing), run.state
    ranks = state.hosts.ranks
    taken = {(rank.host, device) for rank in ranks for device in rank.devices}
    present = sorted(
        state.engines.values(), key=lambda one: (len(one.active), -members.number_of(one.id))
    )
    free = [
        one
        for one in present
        if not (one.joined or taken & {(one.seat.host, gpu) for gpu in one.seat.devices})
    ]
    leaving = free[: min(goal - len(ranks), len(present) - 1)] if goal > len(ranks) else []
    goal = min(goal, len(ranks) + len(leaving))
    if goal == len(ranks):
        return
    part.goal, part.former, part.since = goal, len(ranks), run.now
    part.patience.moved(1 if goal > len(ranks) else -1)
    part.engines = {engine.id: run.now for engine in leaving}
    part.places = [RankSlot(host=one.seat.host, devices=one.seat.devices) for one in leaving]
    places = len(ranks) + len(present)
    former, after = _shown(len(ranks), places), _shown(goal, places)
    run.emit(Warn(component="trainer", message=f"moves from {former} to {after}: {why}"))
    for engine in leaving:
        membership.drain(run, engine)


def _shown(ranks: int, places: int) -> str:
    numbers = {"rank": ranks, "engine": places - ranks}
    return " and ".join(f"{number} {what}{'s' * (number > 1)}" for what, number in numbers.items())


def advance(run: Run) -> None:
    """Let the trainer wait for its checkpoint and the engines, and start it again."""
    part, state = run.part(Dividing), run.state
    trainer, newest = state.trainer, state.checkpoints.newest
    if not part.goal or trainer.status not in (TrainerStatus.IDLE, TrainerStatus.SAVING):
        return
    if not run.training:
        _stop(run)
    elif trainer.saving is None and newest == trainer.step and not part.engines:
        training.start_process(run, f"it continues with {part.goal} ranks")
    elif trainer.saving is None and state.checkpoints.failed_at == trainer.step:
        _give_up(run, "the checkpoint failed")
    elif trainer.status is TrainerStatus.IDLE:
        if newest != trainer.step:
            training.save(run)
        training.enter(run, TrainerStatus.SAVING)


def starting(run: Run, _reason: str) -> None:
    """Change the ranks of a trainer that is about to start, if they have places."""
    part, ranks = run.part(Dividing), run.state.hosts.ranks
    if not part.goal:
        part.since = run.now
    elif not part.engines:
        former = len(ranks)
        ranks += part.places
        del ranks[part.goal :]
        part.places = []
        run.state.counters.scheduling.moved_ranks += abs(len(ranks) - former)


def _arrive(run: Run) -> None:
    """End a move: start engines on the places that ranks have left."""
    part = run.part(Dividing)
    _start_engines(run, part.former - part.goal)
    part.goal = 0
    took_s = run.now - part.since
    ranks = len(run.state.hosts.ranks)
    shown = _shown(ranks, ranks + len(run.state.engines))
    text = f"continues with {shown} after {took_s:.3g} s"
    run.emit(Warn(component="trainer", message=text))


def _start_engines(run: Run, number: int) -> None:
    for _ in range(number):
        membership.add(run, EngineSlot(id=members.next_id(run.state), degree=1, group=0))


def _give_up(run: Run, why: str) -> None:
    """End a move whose ranks have not changed yet: its engines stay, or start again."""
    part, state = run.part(Dividing), run.state
    staying = [state.engines[name] for name in part.engines if name in state.engines]
    for engine in staying:
        engine.draining = False
    engines.fleet_changed(run)
    run.emit(Warn(component="trainer", message=f"stays with the former division: {why}"))
    _start_engines(run, len(part.places) - len(staying))
    _stop(run)


def _stop(run: Run) -> None:
    """Forget a move, and let the trainer continue."""
    part, trainer = run.part(Dividing), run.state.trainer
    part.goal, part.engines, part.places = 0, {}, []
    if trainer.status is TrainerStatus.SAVING and trainer.saving is None:
        training.enter(run, TrainerStatus.IDLE)


def joined(run: Run, engine: Engine, _event: EngineJoined) -> None:
    """Observe how long an engine takes to start."""
    if engine.status is EngineStatus.STARTING:
        run.part(Dividing).engine_s = run.now - engine.since


def removed(run: Run, engine: Engine) -> None:
    """Keep an engine that was to give its place to a rank if no other is left."""
    if run.part(Dividing).places and not members.remaining_engines(run.state, engine):
        _give_up(run, "no other engine is left")


def replaced(run: Run, _former: object) -> None:
    """Begin with the division of a new world."""
    part = run.part(Dividing)
    part.goal, part.engines, part.places = 0, {}, []
    part.before, part.since = Past(), run.now


def waits(run: Run, _received: Mapping[str, tuple[int, int]], _start_s: float) -> Iterator[Wait]:
    """Yield the waits for engines that give their places to ranks."""
    for name, since in run.part(Dividing).engines.items():
        what = "finishing its turns before a rank of the trainer takes its place"
        yield Wait(component=f"engine {name}", what=what, since=since)


def check(run: Run) -> None:
    """Assert that no place is used twice, and that the number of ranks is allowed."""
    part, state, trainer = run.part(Dividing), run.state, run.config.trainer
    if state.serving or not state.hosts.ranks:
        return
    ranks, own = len(state.hosts.ranks), sum(not one.joined for one in state.engines.values())
    assert trainer.first_ranks <= ranks <= trainer.most_ranks, state.hosts.ranks
    assert ranks + own <= trainer.first_ranks + run.config.engines[0].count, (ranks, own)
    assert {*part.engines} <= {*state.engines}, part.engines
    assert part.goal or not (part.engines or part.places), part


MECHANISM = Mechanism(
    name="division",
    used=divides,
    state=Dividing,
    steps={"train": advance},
    follows={
        TrainerMove.PUBLISHED: published,
        TrainerMove.STARTING: starting,
        EngineMove.JOINED: joined,
        EngineMove.REMOVED: removed,
        EngineMove.REPLACED: replaced,
    },
    waits=waits,
    check=check,
)
