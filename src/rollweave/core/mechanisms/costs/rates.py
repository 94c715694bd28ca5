"""The cost of a token on an engine of a kind: from what the engines measured of
themselves when they joined or, for engines that do not measure themselves, from the
turns that they have finished (`core/policy/turn_times`).

A kind is a class of engines and a parallel degree. The class names the pool through
which an engine found its place or, if it may be on any host, the pools of its host;
then the inference server, if the engine has one. An engine that a client of a service
registered is a class by itself.

Invariant: all engines of an unmeasured kind have the same rate, apart from their slots
and KV. Until enough of their turns are done, it is the rate of another kind.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rollweave.core.mechanisms.costs.interference import tabulate
from rollweave.core.mechanisms.costs.placement import ByTable, Groups
from rollweave.core.mechanisms.lengths.estimates import recent_lengths
from rollweave.core.mechanisms.lengths.index import LengthIndex, index_of
from rollweave.core.mechanisms.lengths.work import ByWork, Rate, rate
from rollweave.core.policy.scheduling import has_learned_pools, prices_turns
from rollweave.core.policy.turn_times import KEPT, KEPT_OF_DOMAINS, TurnTime, TurnTimes, step_times
from rollweave.core.run import EngineMove, Run
from rollweave.core.state import Engine, Trajectory, Turn
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import StepTime, TurnDone


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The use of an engine so far: the number of its turns and the tokens of their
    contexts, both summed over the seconds until `at`, and the prompt tokens that it
    computed for turns that are done.
    """

    at: float = 0.0
    turn_s: float = 0.0
    context_s: float = 0.0
    prompt_tokens: int = 0


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a context that an engine should have cached, unless its process
    or its weights have changed since.
    """

    tokens: int
    epoch: int
    publication_id: int


class Spent(msgspec.Struct):
    """Seconds spent on tokens; earlier ones count less."""

    seconds: float = 0.0
    tokens: float = 0.0


class Measured(msgspec.Struct):
    """The costs of the engines of one kind: measured by the engines, or estimated from
    finished turns. The costs are kept when the last engine of the kind is gone.
    """

    profile: tuple[StepTime, ...]
    slots: int
    rate: Rate
    prompt_s: float | None = None  # seconds of a prompt's token; None if they were not estimated


class EngineCosts(msgspec.Struct):
    """The costs of one engine."""

    # follows from the steps of its kind, its slots and KV; None before it has joined
    rate: Rate | None = None
    measured: bool = False  # it has measured its steps itself
    use: Use = Use()


class TurnCosts(msgspec.Struct):
    """The costs of an attempt's open turn, and the caches that have its context."""

    use_before: Use = Use()  # of its engine, when it began there
    split: bool = False  # its prompt was given to a prefill engine
    prefixes: dict[EngineId, Prefix] = {}  # of its context


class Costs(msgspec.Struct):
    """The part of the state. Tables without ids are by class of engines, and degree."""

    engines: dict[EngineId, EngineCosts] = {}
    trajectories: dict[TrajectoryId, TurnCosts] = {}
    measured: dict[str, dict[int, Measured]] = {}
    # of engines that do not measure themselves
    turn_times: dict[str, dict[int, TurnTimes]] = {}
    sampling: dict[str, dict[int, Spent]] = {}  # on prompts, at engines that sample
    # the time of the turn that is done, if it is comparable with other turns' times
    newest: TurnTime | None = None


def costs_of(run: Run, engine: Engine) -> EngineCosts:
    """Return the costs of the engine."""
    engines: dict[EngineId, EngineCosts] = run.parts[Costs].engines
    costs = engines.get(engine.id)
    if costs is None:
        costs = engines[engine.id] = EngineCosts()
    return costs


def turn_costs_of(run: Run, trajectory: Trajectory) -> TurnCosts:
    """Return the costs of the trajectory's turn."""
    costs: dict[TrajectoryId, TurnCosts] = run.parts[Costs].trajectories
    return costs[trajectory.id]


UNMEASURED = (StepTime(batch=1, seconds=1.0), StepTime(batch=32, seconds=2.0))
"""Step times of an unknown engine: only comparisons between equal engines are
meaningful.
"""

NEW_RATE = 0.1
"""Minimum relative change of a step's estimated time after which trajectories are
placed again.
"""


Kind = tuple[str, int]
"""A class of engines, and a parallel degree."""


def kind_of(run: Run, engine: Engine) -> Kind:
    """Return the kind of an engine."""
    if run.state.serving and engine.joined:
        return engine.id, engine.seat.degree
    host = run.state.hosts.up.get(engine.seat.host)
    hardware = engine.seat.pool or "+".join(host.pools if host is not None else ())
    server = run.config.engines[engine.seat.group].server
    return hardware if server is None else f"{hardware}/{server}", engine.seat.degree


def measured_of(run: Run, engine: Engine) -> Measured | None:
    """Return the costs of engines of this kind, if they are known."""
    hardware, degree = kind_of(run, engine)
    return run.part(Costs).measured.get(hardware, {}).get(degree)


def prevailing_hardware(run: Run) -> str:
    """Return the class that most engines have."""
    counts = Counter(kind_of(run, engine)[0] for engine in run.state.engines.values())
    return max(counts, key=lambda hardware: counts[hardware], default="")


def numbers_of(run: Run, engines: Iterable[Engine]) -> dict[Kind, int]:
    """Return a number for each kind of these engines, which have joined: the degree if
    all engines are of one class, otherwise a number that is greater for faster kinds.
    """
    kinds = {kind_of(run, engine): rate_of(run, engine) for engine in engines}
    if len({hardware for hardware, _ in kinds}) <= 1:
        return {kind: kind[1] for kind in kinds}
    slowest_first = sorted(
        kinds, key=lambda kind: (-kinds[kind].seconds(longest=1, tokens=1, occupied=0), kind)
    )
    return {kind: number for number, kind in enumerate(slowest_first, start=1)}


def joined(run: Run, engine: Engine, profile: tuple[StepTime, ...]) -> None:
    """Record the rate of an engine that is ready, and its own measured profile, if it
    has one.
    """
    costs_of(run, engine).measured = bool(profile)
    if profile:
        _set_rate(run, engine, profile)
        _set_costs(run, engine, profile)
    else:
        _set_rate(run, engine, _known_profile(run, engine))


def left(run: Run, engine: Engine) -> None:
    """Forget the costs of an engine that is a kind by itself."""
    if run.state.serving and engine.joined:
        run.part(Costs).measured.pop(engine.id, None)
        run.part(Costs).turn_times.pop(engine.id, None)


def _set_rate(run: Run, engine: Engine, profile: Sequence[StepTime]) -> None:
    slots, kv_tokens = max(1, engine.abilities.max_slots), max(1, engine.abilities.kv_tokens)
    costs_of(run, engine).rate = rate(profile, slots=slots, kv_tokens=kv_tokens)
    if LengthIndex in run.derived and (load := index_of(run).loads.get(engine.id)) is not None:
        load.work_s = None  # it was computed at another rate


def _set_costs(
    run: Run, engine: Engine, profile: tuple[StepTime, ...], prompt_s: float | None = None
) -> None:
    """Record the costs of the engine's kind, and reprice all engines that have not
    measured themselves.
    """
    hardware, degree = kind_of(run, engine)
    slots = max(1, engine.abilities.max_slots)
    run.part(Costs).measured.setdefault(hardware, {})[degree] = Measured(
        profile=profile,
        slots=slots,
        rate=rate(profile, slots=slots, kv_tokens=max(1, engine.abilities.kv_tokens)),
        prompt_s=prompt_s,
    )
    for other in run.state.engines.values():
        known = costs_of(run, other)
        if known.rate is not None and not known.measured:
            _set_rate(run, other, _known_profile(run, other))


def _known_profile(run: Run, engine: Engine) -> Sequence[StepTime]:
    """Return the profile of the engine's kind. While the profile is not known, the
    engine is assumed to cost as much as other engines, of its degree if possible.
    """
    known = measured_of(run, engine)
    if known is None:
        classes = run.part(Costs).measured.values()
        same = [
            by_degree[engine.seat.degree]
            for by_degree in classes
            if engine.seat.degree in by_degree
        ]
        others = same or [measured for by_degree in classes for measured in by_degree.values()]
        known = others[0] if others else None
    return UNMEASURED if known is None else known.profile


# Costs learned from finished turns.


def charge(run: Run, engine: Engine) -> Use:
    """Return the engine's use until now. Call before its turns change."""
    costs, load = costs_of(run, engine), run.fleet.loads.get(engine.id)
    use = costs.use
    if load is not None:
        tokens = load.tokens
    else:  # it takes no turns now
        trajectories = run.state.trajectories
        tokens = sum(trajectories[name].open_turn.context_tokens for name in engine.active)
    seconds = run.now - use.at
    costs.use = Use(
        at=run.now,
        turn_s=use.turn_s + seconds * len(engine.active),
        context_s=use.context_s + seconds * tokens,
        prompt_tokens=use.prompt_tokens,
    )
    return costs.use


def begin_attempt(run: Run, trajectory: Trajectory) -> None:
    """Begin with a new attempt."""
    run.part(Costs).trajectories[trajectory.id] = TurnCosts()


def given(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> None:
    """Charge the engine, which is about to get the turn."""
    costs = turn_costs_of(run, trajectory)
    costs.use_before = charge(run, engine)
    costs.split &= turn.dispatch > 0


def begun(run: Run, trajectory: Trajectory, _turn: Turn, engine: Engine) -> None:
    """Charge the engine, which is about to begin the turn after its prompt."""
    turn_costs_of(run, trajectory).use_before = charge(run, engine)


def left_by_turn(run: Run, _trajectory: Trajectory, _turn: Turn, engine: Engine) -> None:
    """Charge the engine, which is about to lose the turn."""
    charge(run, engine)


def compares_engines(run: Run) -> bool:
    """True if a policy compares what work costs on engines."""
    return run.scheduling.assigns or run.config.allocation is not None


def learns_pools(run: Run) -> bool:
    """True if task domains move to the pools that serve them best, in training."""
    return has_learned_pools(run.config) and not run.state.serving


def learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, engine: Engine, event: TurnDone
) -> None:
    """Learn from a finished turn what the steps of an unmeasured engine cost, or what
    its domain costs in its pool. The engine has just been charged for it. The turn's
    time becomes the newest time if it is comparable with the times of other turns. It
    is not if the turn began elsewhere, because its tokens may be another engine's
    (apart from its prompt), nor if the engine stopped serving during the turn to load
    weights.
    """
    part, costs = run.part(Costs), costs_of(run, engine)
    part.newest = None
    unmeasured = compares_engines(run) and not costs.measured
    learns = unmeasured or learns_pools(run) or run.scheduling.by_finish
    if event.replayed or not (learns or prices_turns(run.config)):
        return
    computed = max(0, turn.context_tokens - event.cached_tokens)
    use = costs.use = msgspec.structs.replace(
        costs.use, prompt_tokens=costs.use.prompt_tokens + computed
    )
    own, elapsed = turn_costs_of(run, trajectory), run.now - turn.since
    before = own.use_before
    seconds, turn_s = elapsed - event.queue_s, use.turn_s - before.turn_s
    if turn.dispatch != own.split or turn.since < engine.since or min(seconds, turn_s) <= 0:
        return
    hardware, degree = kind_of(run, engine)
    times = part.turn_times.setdefault(hardware, {}).setdefault(degree, TurnTimes())
    part.newest = time = TurnTime(
        seconds=seconds,
        output_tokens=max(1, event.output_tokens),
        prompt_tokens=use.prompt_tokens - before.prompt_tokens,
        batch=min(max(1.0, turn_s / elapsed), float(max(1, engine.abilities.max_slots))),
        # contexts grow during turns, which are half done on average
        context=(use.context_s - before.context_s) / turn_s + event.output_tokens / 2,
    )
    most = KEPT_OF_DOMAINS if learns_pools(run) else KEPT
    if times.add(time, most=most):
        times.estimated_at = times.count
        if unmeasured:
            _estimate(run, engine, times)


def _estimate(run: Run, engine: Engine, times: TurnTimes) -> None:
    former = measured_of(run, engine)
    profile, prompt_s = step_times(times, slots=max(1, engine.abilities.max_slots))
    _set_costs(run, engine, profile, prompt_s)
    if former is None or _differ(former.profile, profile):
        run.follow(EngineMove.REPRICED)


def _differ(former: Sequence[StepTime], profile: Sequence[StepTime]) -> bool:
    return len(former) != len(profile) or any(
        abs(after.seconds - before.seconds) > NEW_RATE * before.seconds
        for before, after in zip(former, profile, strict=True)
    )


def groups_of(run: Run, works: Sequence[tuple[int, int]], kinds: Mapping[int, Kind]) -> Groups:
    """Return the cost of groups of these trajectories on engines of `kinds`, which maps
    numbers to kinds. `works` are the tokens to sample and the KV token steps, the
    longest first.
    """
    known = run.part(Costs).measured
    measured = {
        number: known[hardware][degree]
        for number, (hardware, degree) in kinds.items()
        if degree in known.get(hardware, {})
    }
    if len(measured) < len(kinds):  # they cannot be compared
        slots = (
            max((engine.abilities.max_slots for engine in run.state.engines.values()), default=1)
            or 1
        )
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
    only the shortest context is measured at every batch size.
    """
    context = min(point.context for point in profile)
    return [point for point in profile if point.context == context]


def rate_of(run: Run, engine: Engine) -> Rate:
    """The rate of an engine that has joined: the seconds that it needs for a group, by
    the group's work.
    """
    known = costs_of(run, engine).rate
    assert known is not None, "an engine that takes turns has joined"
    return known
