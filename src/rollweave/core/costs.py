"""What a token costs on an engine of a degree, from what the engines measured of themselves when they joined."""

from collections.abc import Sequence

from rollweave.core.run import Run
from rollweave.core.state import Engine
from rollweave.policy.interference import tabulate
from rollweave.policy.placement import ByTable, Groups
from rollweave.policy.work import ByWork, Rate, rate
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


def groups_of(run: Run, works: Sequence[tuple[int, int]], degrees: Sequence[int]) -> Groups:
    """What groups of these trajectories cost on engines of these degrees.

    `works`: tokens yet to come and the contexts that they occupy, the longest first.
    """
    kinds = list(dict.fromkeys(degrees))
    measured = {engine.degree: engine for engine in reversed(run.state.engines.values()) if engine.profile}
    if any(degree not in measured for degree in kinds):  # nothing can be compared
        measured = {}
    slots = {degree: _slots(run, degree) for degree in kinds}
    if run.scheduling.placement == "presorted":
        profile = {degree: _shortest(measured[degree].profile) if measured else UNMEASURED for degree in kinds}
        lengths = [tokens for tokens, _ in works]
        table = tabulate(profile, lengths=recent_lengths(run) or lengths, slots=slots, largest=len(works))
        return ByTable(lengths, table)
    everything = max(1, sum(held for _, held in works))
    unmeasured = {degree: rate(UNMEASURED, slots=slots[degree], kv_tokens=everything) for degree in kinds}
    return ByWork(works, {degree: rate_of(measured[degree]) for degree in kinds} if measured else unmeasured)


def _slots(run: Run, degree: int) -> int:
    of = {engine.degree: engine.max_slots for engine in run.state.engines.values() if engine.max_slots}
    return of.get(degree, max(of.values(), default=1))


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
