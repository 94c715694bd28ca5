"""The allocation of engines to the lengths observed: planned after every step, changed
engine by engine (Heddle §6).

An engine that the plan lacks takes no more turns and is removed when its last turn is
done; engines that the plan has and the fleet lacks are started as the budget allows.
Only degrees are compared at which an engine has measured itself or, with an inference
server, has finished enough turns (`costs/rates`). A plan waits for the costs of engines
that run, but for a few steps only: then these engines stay as they are, and the rest of
the budget is planned without them until their costs are known.
"""

from collections import Counter

from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.costs.placement import allocate_groups, is_sum, place_groups
from rollweave.core.mechanisms.costs.rates import Costs, groups_of, kind_of, prevailing_hardware
from rollweave.core.mechanisms.lengths.index import Lengths
from rollweave.core.mechanisms.lengths.work import occupied
from rollweave.core.mechanisms.membership import members
from rollweave.core.mechanisms.placement.assignment import Placement
from rollweave.core.policy.turn_times import FIRST_TURNS
from rollweave.core.run import Run
from rollweave.core.state import Engine, State
from rollweave.schema.events import EngineSlot

MIN_GAIN = 0.05
"""Minimum share of the predicted makespan that another fleet must save: changing the
fleet costs starts of engines.
"""

WAIT_STEPS = 4
"""Number of steps for which the plan waits for the costs of engines of a degree: with
usual batches, engines finish the turns that are needed in one or two.
"""


def plan(run: Run) -> None:
    """Look for a better fleet after every trained step."""
    config, state, allocation = run.config.allocation, run.state, run.part(Placement)
    if config is None or state.trainer.step == allocation.planned_at or not run.training:
        return
    draining = any(engine.draining for engine in state.engines.values())
    if draining or state.membership.pending_degrees or state.hosts.unplaced:
        return  # the last plan is not carried out yet
    allocation.planned_at = state.trainer.step
    hardware = prevailing_hardware(run)
    known = run.part(Costs).measured.get(hardware, {})
    measured = [degree for degree in run.config.degrees if degree in known]
    if _waits_for_costs(run, hardware):
        return
    absent = [
        degree for degree in run.config.degrees if degree not in (*known, *allocation.awaited)
    ]
    if absent and not state.counters.watchdog.get("degree_unmeasured"):
        missing = ", ".join(map(str, absent))
        why = (
            f"no engine of degree {missing} fits the budget of {config.budget} beside the others; "
            "it is not planned with"
        )
        run.warn("allocation", why, count="degree_unmeasured")
    works = _batch(run)
    planned = [
        engine for engine in state.engines.values() if engine.seat.degree not in allocation.awaited
    ]
    budget = config.budget - _used(state) + sum(engine.seat.degree for engine in planned)
    degrees = [degree for degree in measured if degree <= budget]
    if len(degrees) > 1 and is_sum(budget, degrees) and len(works) >= budget // min(degrees):
        _change(run, budget, works, degrees, planned)


def _waits_for_costs(run: Run, hardware: str) -> bool:
    """True while the plan waits for the costs of an engine that runs. A degree that has
    been waited for long enough is named once.
    """
    state, allocation = run.state, run.part(Placement)
    known, step = run.part(Costs).measured.get(hardware, {}), state.trainer.step
    kinds = {kind_of(run, engine) for engine in state.engines.values()}
    unknown = sorted(degree for kind, degree in kinds if kind == hardware and degree not in known)
    allocation.awaited = {degree: allocation.awaited.get(degree, step) for degree in unknown}
    for degree, since in allocation.awaited.items():
        late, name = step - since >= WAIT_STEPS, f"degree_{degree}_unlearned"
        if late and not state.counters.watchdog.get(name):
            times = run.part(Costs).turn_times.get(hardware, {}).get(degree)
            text = (
                f"after {step - since} steps the engines of degree {degree} have finished "
                f"{times.count if times is not None else 0} of the {FIRST_TURNS} turns that show "
                "their costs (turns do not count during which weights were loaded, or that began "
                "on another engine): they stay as they are, and the rest of the budget is planned "
                "without them"
            )
            run.warn("allocation", text, count=name)
    return any(step - since < WAIT_STEPS for since in allocation.awaited.values())


def _change(
    run: Run,
    budget: int,
    works: list[tuple[int, int]],
    degrees: list[int],
    engines_now: list[Engine],
) -> None:
    """Compare the fleet `engines_now` with the best fleet of these degrees for the same
    work and `budget`, and begin to replace it if the gain is large enough.
    """
    state = run.state
    hardware = prevailing_hardware(run)
    groups = groups_of(run, works, {degree: (hardware, degree) for degree in degrees})
    allocation = allocate_groups(groups, budget, degrees)
    now = [engine.seat.degree for engine in engines_now]
    if now and set(now) <= set(degrees) and len(now) <= len(works):
        before_s = place_groups(groups, sorted(now, reverse=True)).makespan_s
        if allocation.makespan_s > (1 - MIN_GAIN) * before_s:
            return
    wanted = Counter(allocation.degrees)
    if wanted == Counter(now):
        return
    state.counters.scheduling.reallocations += 1
    for engine in engines_now:
        if wanted[engine.seat.degree] > 0:
            wanted[engine.seat.degree] -= 1
        else:
            membership.drain(run, engine)
    state.membership.pending_degrees = sorted(wanted.elements(), reverse=True)


def _batch(run: Run) -> list[tuple[int, int]]:
    """Work like one batch's: from the newest finished trajectories, evenly spaced by
    length, the longest first.
    """
    rollout = run.config.rollout
    works = []
    for stats in run.part(Lengths).domains.values():
        context = stats.prompt_tokens or 0.0
        growth = 1.0 if stats.context_growth is None else stats.context_growth
        works += [
            (length, round(occupied(length, context=context, growth=growth)))
            for length in stats.lengths
        ]
    works.sort(reverse=True)
    count = min(len(works), rollout.groups_per_step * rollout.group_size)
    return [works[(2 * index + 1) * len(works) // (2 * count)] for index in range(count)]


def advance(run: Run) -> None:
    """Start the engines for which the budget has room."""
    config, state = run.config.allocation, run.state
    if config is None:
        return
    pending = state.membership.pending_degrees
    while state.hosts.up and pending and pending[0] <= config.budget - _used(state):
        name = members.next_id(state)
        membership.add(run, EngineSlot(id=name, degree=pending.pop(0)))


def _used(state: State) -> int:
    """Return the number of devices of all engines, including engines that wait for a
    place.
    """
    waiting = sum(engine.degree for engine in state.hosts.unplaced)
    return waiting + sum(engine.seat.degree for engine in state.engines.values())
