"""The cost of a token on an engine of a kind, from what the engines measured of
themselves when they joined.

A kind is a class of hardware and a parallel degree. The class is the pool through which
an engine found its place or, if it may be on any host, the pools of that host.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollweave.core.policy.interference import tabulate
from rollweave.core.policy.placement import ByTable, Groups
from rollweave.core.policy.work import ByWork, Rate, rate
from rollweave.core.run import Run
from rollweave.core.state import Engine, Measured
from rollweave.schema.events import StepTime

UNMEASURED = (StepTime(batch=1, seconds=1.0), StepTime(batch=32, seconds=2.0))
"""Step times of an engine that did not measure itself: only comparisons between equal
engines are meaningful.
"""


Kind = tuple[str, int]
"""A class of hardware, and a parallel degree."""


def kind_of(run: Run, engine: Engine) -> Kind:
    """Return the kind of an engine."""
    host = run.state.hosts.up.get(engine.host)
    return engine.pool or "+".join(host.pools if host is not None else ()), engine.degree


def measured_of(run: Run, engine: Engine) -> Measured | None:
    """Return the measurements of engines of this kind, if one has measured itself."""
    hardware, degree = kind_of(run, engine)
    return run.state.measured.get(hardware, {}).get(degree)


def prevailing_hardware(run: Run) -> str:
    """Return the class of hardware that most engines have."""
    counts = Counter(kind_of(run, engine)[0] for engine in run.state.engines.values())
    return max(counts, key=lambda hardware: counts[hardware], default="")


def numbers_of(run: Run, engines: Iterable[Engine]) -> dict[Kind, int]:
    """Return a number for each kind of these engines, which have joined: its degree if
    all have the same hardware, otherwise a number that is greater for faster kinds.
    """
    kinds = {kind_of(run, engine): rate_of(engine) for engine in engines}
    if len({hardware for hardware, _ in kinds}) <= 1:
        return {kind: kind[1] for kind in kinds}
    slowest_first = sorted(
        kinds, key=lambda kind: (-kinds[kind].seconds(longest=1, tokens=1, occupied=0), kind)
    )
    return {kind: number for number, kind in enumerate(slowest_first, start=1)}


def joined(run: Run, engine: Engine, profile: tuple[StepTime, ...]) -> None:
    """Record the rate of an engine that is ready, and the profile that it measured of
    itself, if it did.
    """
    slots = max(1, engine.max_slots)
    if (load := run.length_index.loads.get(engine.id)) is not None:
        load.work_s = None  # it was computed at another rate
    engine.rate = rate(profile or UNMEASURED, slots=slots, kv_tokens=max(1, engine.kv_tokens))
    if profile:
        hardware, degree = kind_of(run, engine)
        run.state.measured.setdefault(hardware, {})[degree] = Measured(
            profile=profile, slots=slots, rate=engine.rate
        )


def groups_of(run: Run, works: Sequence[tuple[int, int]], kinds: Mapping[int, Kind]) -> Groups:
    """Return the cost of groups of these trajectories on engines of these kinds, by
    number.

    `works` are the tokens to sample and the KV token steps, the longest first.
    """
    state = run.state
    measured = {
        number: state.measured[hardware][degree]
        for number, (hardware, degree) in kinds.items()
        if degree in state.measured.get(hardware, {})
    }
    if len(measured) < len(kinds):  # they cannot be compared
        slots = max((engine.max_slots for engine in state.engines.values()), default=1) or 1
        everything = max(1, sum(held for _, held in works))
        same = Measured(
            profile=UNMEASURED,
            slots=slots,
            rate=rate(UNMEASURED, slots=slots, kv_tokens=everything),
        )
        measured = dict.fromkeys(kinds, same)
    if run.scheduling.placement != "presorted":
        return ByWork(works, {number: measured[number].rate for number in kinds})
    lengths = [tokens for tokens, _ in works]
    table = tabulate(
        {number: _shortest(measured[number].profile) for number in kinds},
        lengths=recent_lengths(run) or lengths,
        slots={number: measured[number].slots for number in kinds},
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
