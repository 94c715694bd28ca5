"""The cost of a token on an engine of a degree, from what the engines measured of
themselves when they joined.
"""

from collections.abc import Sequence

from rollweave.core.policy.interference import tabulate
from rollweave.core.policy.placement import ByTable, Groups
from rollweave.core.policy.work import ByWork, Rate, rate
from rollweave.core.run import Run
from rollweave.core.state import Engine, MeasuredDegree
from rollweave.schema.events import StepTime

UNMEASURED = (StepTime(batch=1, seconds=1.0), StepTime(batch=32, seconds=2.0))
"""Step times of an engine that did not measure itself: only comparisons between equal
engines are meaningful.
"""


def joined(run: Run, engine: Engine, profile: tuple[StepTime, ...]) -> None:
    """Record the rate of an engine that is ready, and the profile that it measured of
    itself, if it did.
    """
    slots = max(1, engine.max_slots)
    if (load := run.length_index.loads.get(engine.id)) is not None:
        load.work_s = None  # it was computed at another rate
    engine.rate = rate(profile or UNMEASURED, slots=slots, kv_tokens=max(1, engine.kv_tokens))
    if profile:
        run.state.measured[engine.degree] = MeasuredDegree(
            profile=profile, slots=slots, rate=engine.rate
        )


def groups_of(run: Run, works: Sequence[tuple[int, int]], degrees: Sequence[int]) -> Groups:
    """The cost of groups of these trajectories on engines of these degrees.

    `works` are the tokens to sample and the KV token steps, the longest first.
    """
    kinds, state = list(dict.fromkeys(degrees)), run.state
    measured = {degree: state.measured[degree] for degree in kinds if degree in state.measured}
    if len(measured) < len(kinds):  # degrees cannot be compared
        slots = max((engine.max_slots for engine in state.engines.values()), default=1) or 1
        everything = max(1, sum(held for _, held in works))
        same = MeasuredDegree(
            profile=UNMEASURED,
            slots=slots,
            rate=rate(UNMEASURED, slots=slots, kv_tokens=everything),
        )
        measured = dict.fromkeys(kinds, same)
    if run.scheduling.placement != "presorted":
        return ByWork(works, {degree: measured[degree].rate for degree in kinds})
    lengths = [tokens for tokens, _ in works]
    table = tabulate(
        {degree: _shortest(measured[degree].profile) for degree in kinds},
        lengths=recent_lengths(run) or lengths,
        slots={degree: measured[degree].slots for degree in kinds},
        largest=len(works),
    )
    return ByTable(lengths, table)


def _shortest(profile: Sequence[StepTime]) -> list[StepTime]:
    """The points of the profile with the shortest context: eq. 2 ignores contexts, and
    only this one is measured at every batch size.
    """
    context = min(point.context for point in profile)
    return [point for point in profile if point.context == context]


def recent_lengths(run: Run) -> list[int]:
    """Sampled tokens of the newest finished trajectories of all task domains."""
    return [length for stats in run.state.domains.values() for length in stats.lengths]


def rate_of(engine: Engine) -> Rate:
    """The rate of an engine that has joined: what it needs for a group by the work in
    it.
    """
    assert engine.rate is not None, "an engine that takes turns has joined"
    return engine.rate
