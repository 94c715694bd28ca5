"""What a token costs on an engine of a degree, from what the engines measured of themselves when they joined."""

from collections.abc import Sequence

from rollweave.core.run import Run
from rollweave.core.state import Engine
from rollweave.policy.interference import CostTable, tabulate
from rollweave.policy.work import Rate, rate
from rollweave.schema.events import StepTime

UNMEASURED = (StepTime(batch=1, seconds=1.0), StepTime(batch=32, seconds=2.0))
"""Of an engine that did not measure itself: only comparisons between equal engines mean anything."""


def profiles(run: Run) -> dict[int, tuple[StepTime, ...]]:
    """The measured step times by degree; of several engines those of the first."""
    found: dict[int, tuple[StepTime, ...]] = {}
    for engine in run.state.engines.values():
        if engine.profile:
            found.setdefault(engine.degree, engine.profile)
    return found


def cost_table(run: Run, degrees: Sequence[int], *, largest: int) -> CostTable:
    """Cost by degree and group size up to `largest`, for groups whose lengths are spread like those of late."""
    measured = profiles(run)
    # Where only some degrees are measured, nothing can be compared.
    whole = all(degree in measured for degree in degrees)
    slots = {engine.degree: engine.max_slots for engine in run.state.engines.values() if engine.max_slots}
    most = max(slots.values(), default=1)
    return tabulate(
        {degree: _shortest(measured[degree]) if whole else UNMEASURED for degree in dict.fromkeys(degrees)},
        lengths=recent_lengths(run) or [-key[0] for key in run.order.keys],
        slots={degree: slots.get(degree, most) for degree in dict.fromkeys(degrees)},
        largest=largest,
    )


def _shortest(profile: Sequence[StepTime]) -> list[StepTime]:
    """Of a profile's contexts the shortest: eq. 2 knows none, and only that one is measured at every batch."""
    context = min(point.context for point in profile)
    return [point for point in profile if point.context == context]


def recent_lengths(run: Run) -> list[int]:
    """Sampled tokens of the newest finished trajectories, of all task domains."""
    return [length for known in run.state.lengths.values() for length in known]


def rate_of(engine: Engine) -> Rate:
    """What the engine, which has joined, needs for a group, by the work in it."""
    if engine.rate is None:  # once: the fit is no matter of microseconds
        profile = engine.profile or UNMEASURED
        engine.rate = rate(profile, slots=max(1, engine.max_slots), kv_tokens=max(1, engine.kv_tokens))
    return engine.rate
