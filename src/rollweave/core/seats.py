"""The engines that a run begins with."""

from rollweave.core.state import State
from rollweave.schema.base import EngineId
from rollweave.schema.config import RunConfig
from rollweave.schema.events import EngineSeat
from rollweave.schema.sections import AllocationConfig


def first_seats(config: RunConfig) -> tuple[EngineSeat, ...]:
    """As configured; under [allocation] one engine of each degree as far as the budget goes, and the rest of it in small ones.

    So every degree that fits beside smaller ones is measured before the first plan.
    """
    if config.allocation is not None:
        degrees = _first_degrees(config.allocation)
    else:
        degrees = [group.degree for group in config.engines for _ in range(group.count)]
    return tuple(EngineSeat(id=EngineId(f"e{number}"), degree=degree) for number, degree in enumerate(degrees))


def begun_with(config: RunConfig, state: State) -> tuple[EngineSeat, ...]:
    """The engines that a world begins with, again perhaps: under [allocation] those that the run has or was about to have.

    Where these do not fit [allocation] any more, it begins afresh.
    """
    allocation = config.allocation
    kept = [EngineSeat(id=engine.id, degree=engine.degree) for engine in state.engines.values() if not engine.draining]
    new = enumerate(state.seats, start=state.next_engine)
    seats = (*kept, *(EngineSeat(id=EngineId(f"e{number}"), degree=degree) for number, degree in new))
    degrees = [seat.degree for seat in seats]
    if allocation is None or not seats or sum(degrees) > allocation.budget or not set(degrees) <= set(allocation.degrees):
        return first_seats(config)
    return seats


def _first_degrees(allocation: AllocationConfig) -> list[int]:
    left, found = allocation.budget, []
    for degree in sorted(allocation.degrees):
        if degree <= left:
            found.append(degree)
            left -= degree
    smallest = min(allocation.degrees)
    return sorted([*found, *[smallest] * (left // smallest)], reverse=True)
