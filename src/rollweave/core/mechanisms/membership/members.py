"""The engines that a run begins with, and the engines that may join or leave it later.

Invariant: no engine number is used twice in a run, so that a late message about a
former engine is not attributed to another engine.
"""

import itertools
from collections.abc import Iterable, Sequence

from rollweave.core.mechanisms.membership.bindings import bind_all, bind_engine, one_machine
from rollweave.core.state import Engine, Phase, State
from rollweave.schema.base import EngineId
from rollweave.schema.config.engines import AllocationConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot


def first_engines(config: RunConfig) -> tuple[EngineSlot, ...]:
    """Return the configured engines, placed on one machine. With [allocation]: one
    engine of each degree as far as the budget allows, and engines of the smallest
    degree for the rest of the budget. So every degree that fits next to smaller degrees
    is measured before the first plan.
    """
    if config.allocation is not None:
        engines = [
            (degree, 0) for degree in _initial_degrees(config.allocation.budget, config.degrees)
        ]
    else:
        engines = [
            (group.degree, place)
            for place, group in enumerate(config.engines)
            for _ in range(group.count)
        ]
    return _on_one_machine(
        config,
        [
            EngineSlot(id=_name(number), degree=degree, group=group)
            for number, (degree, group) in enumerate(engines)
        ],
    )


def engines_to_start(config: RunConfig, state: State) -> tuple[EngineSlot, ...]:
    """Return the engines with which a new or restarted world begins, placed on one
    machine: the configured engines that were not withdrawn, and the engines that
    joined. With [allocation]: the engines that the run has or was about to start. If
    they no longer fit the configuration, the fleet begins as in a new run.
    """
    if config.allocation is not None:
        return _on_one_machine(config, _planned(config, config.allocation, state))
    gone = {
        *state.membership.withdrawn,
        *(engine.id for engine in state.engines.values() if engine.leaving and not engine.lender),
    }
    configured = first_engines(config)
    slots = [slot for slot in configured if slot.id not in gone]
    if further := ranks_to_start(config, state) - config.trainer.first_ranks:
        del slots[max(1, len(slots) - further) :]  # these have given their places to ranks
    taken, fresh = (
        {slot.id for slot in configured},
        itertools.count(max(state.membership.next_number, len(configured))),
    )
    for engine in state.engines.values():
        if engine.joined and not engine.leaving:
            # the configuration may have grown
            name = engine.id if engine.id not in taken else _name(next(fresh))
            group = engine.seat.group if engine.seat.group < len(config.engines) else 0  # or shrunk
            slots.append(EngineSlot(id=name, degree=config.engines[group].degree, group=group))
    return _on_one_machine(config, slots) if slots else configured


def ranks_to_start(config: RunConfig, state: State) -> int:
    """Return the number of the trainer's ranks with which a new or restarted world
    begins: as many as the run had, within the bounds of the configuration.
    """
    trainer = config.trainer
    return max(trainer.first_ranks, min(trainer.most_ranks, len(state.hosts.ranks)))


def _planned(
    config: RunConfig, allocation: AllocationConfig, state: State
) -> tuple[EngineSlot, ...]:
    kept = [
        EngineSlot(id=engine.id, degree=engine.seat.degree)
        for engine in state.engines.values()
        if not engine.draining
    ]
    new = enumerate(state.membership.pending_degrees, start=state.membership.next_number)
    slots = (*kept, *(EngineSlot(id=_name(number), degree=degree) for number, degree in new))
    degrees = [slot.degree for slot in slots]
    if not slots or sum(degrees) > allocation.budget or not set(degrees) <= set(config.degrees):
        return first_engines(config)
    return slots


def _on_one_machine(config: RunConfig, slots: Iterable[EngineSlot]) -> tuple[EngineSlot, ...]:
    return bind_all(config, slots, one_machine(config.weights.relays, config.pools))[0]


def _initial_degrees(budget: int, ascending: Sequence[int]) -> list[int]:
    left, degrees = budget, []
    for degree in ascending:
        if degree <= left:
            degrees.append(degree)
            left -= degree
    smallest = ascending[0]
    return sorted([*degrees, *[smallest] * (left // smallest)], reverse=True)


# Changes during a run.


def next_id(state: State) -> EngineId:
    """Return the id of the next engine, which no engine has had."""
    return _name(state.membership.next_number)


def why_not_join(config: RunConfig, state: State, slot: EngineSlot) -> str:
    """The reason why this engine cannot join a training run; "" if it can."""
    if state.phase is Phase.FINISHED:
        return "the run is over"
    if config.allocation is not None:
        return (
            "[allocation] decides which engines there are: resume the run with a larger "
            "allocation.budget"
        )
    if slot.group >= len(config.engines):
        return (
            f"there are {len(config.engines)} groups of engines, numbered from 0, and no group "
            f"{slot.group}"
        )
    addresses = config.engines[slot.group].address
    if addresses and sum(
        engine.seat.group == slot.group for engine in state.engines.values()
    ) >= len(addresses):
        return f"engines.{slot.group}.address has {len(addresses)} servers, each with an engine"
    if number_of(slot.id) < state.membership.next_number:
        return f"{slot.id} was the name of another engine"
    if not state.hosts.up:
        return "no host is up"
    if bind_engine(config, state, slot) is None:
        return "no host has room for it"
    return ""


def why_not_leave(config: RunConfig, state: State, engine: Engine) -> str:
    """The reason why this engine cannot leave a training run; "" if it can."""
    if config.allocation is not None:
        return (
            "[allocation] decides which engines there are: resume the run with a smaller "
            "allocation.budget"
        )
    others = remaining_engines(state, engine)
    if not others:
        return f"{engine.id} is the last engine"
    if engine.version >= 0 and all(other.version < 0 for other in others):
        return f"{engine.id} is the only engine that has weights: wait until another one serves"
    return ""


def remaining_engines(state: State, engine: Engine) -> list[Engine]:
    """The other engines that sample and are not departing."""
    return [
        other
        for other in state.engines.values()
        if other.samples and other is not engine and not (other.departing or other.lender)
    ]


def number_of(engine_id: EngineId) -> int:
    """The number of an engine: 3 for e3."""
    return int(engine_id.removeprefix("e"))


def _name(number: int) -> EngineId:
    return EngineId(f"e{number}")
