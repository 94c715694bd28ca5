"""Engines of phase `either`: between steps, the run moves an engine from prefill to
decoding, or back, by what it has measured (RollArt §6.3, §9).

After each trained step, `core/policy/ratio` is given the load of the step: the tokens
of prompts and of outputs per turn, which the counters have; their prices, which
`mechanisms/costs` and `mechanisms/phases` have learned; and the attempts under way and
the time between two turns, which are observed here. An engine that is to move gets no
more turns and prompts, and changes its phase when it has finished those that it has.
Its process, its weights and its KV stay: trajectories whose KV it has need a transfer
or another computation of their contexts, which is the cost of the move, with the time
for which the engine empties.

A world begins with as many prefill engines as the run had. An engine that is the only
one left, since others were lost, samples.

Invariants: at most one engine moves at a time, and at most one in a step; a side with
one engine keeps it, unless no other engine samples.
"""

import math

import msgspec

from rollweave.core import dispatching, engines
from rollweave.core.mechanisms.costs import price, sampling_price
from rollweave.core.mechanisms.costs.rates import Costs, kind_of, turn_costs_of
from rollweave.core.mechanisms.phases import Phases
from rollweave.core.policy.ratio import Change, Load, Patience, change, pays
from rollweave.core.policy.scheduling import moves_phases
from rollweave.core.policy.turn_times import FIRST_TURNS, estimate
from rollweave.core.run import EngineMove, Mechanism, Run, TrainerMove, TurnMove
from rollweave.core.state import Engine, Trajectory, Turn
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import Warn
from rollweave.schema.events import TurnDone

MOVES = "moves"
"""Reason for which an engine that is about to change its phase gets no turns."""

LEAST_TURNS = 2 * FIRST_TURNS
"""Minimum number of turns of a step whose load is compared."""


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the run when a step was trained."""

    turns: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    mixed_tokens: int = 0  # of prompts, at engines that sample
    split_tokens: int = 0  # of prompts, at prefill engines
    waited_s: float = 0.0  # for which the trainer waited for trajectories
    answered: int = 0
    attempts: int = 0  # under way, summed over the answered turns
    followed: int = 0  # turns that followed another turn
    between_s: float = 0.0


class Ratio(msgspec.Struct):
    """The part of the state."""

    prefill: int = 1  # prefill engines that there should be
    engines: dict[EngineId, float] = {}  # that move → since when they empty
    trajectories: dict[TrajectoryId, float] = {}  # → when its last turn was answered
    patience: Patience = msgspec.field(default_factory=Patience)
    observed: Counted = Counted()  # the last four of its counts, until now
    before: Counted = Counted()
    emptied_s: float = 0.0  # seconds for which the engine that moved last emptied


def requested(run: Run, trajectory: Trajectory, _turn: Turn) -> None:
    """Observe the time since the last turn."""
    part = run.part(Ratio)
    answered = part.trajectories.pop(trajectory.id, None)
    if answered is not None:
        part.observed = msgspec.structs.replace(
            part.observed,
            followed=part.observed.followed + 1,
            between_s=part.observed.between_s + run.now - answered,
        )


def done(run: Run, trajectory: Trajectory, _turn: Turn, _engine: Engine, _: TurnDone) -> None:
    """Observe the attempts under way."""
    part = run.part(Ratio)
    part.trajectories[trajectory.id] = run.now
    part.observed = msgspec.structs.replace(
        part.observed,
        answered=part.observed.answered + 1,
        attempts=part.observed.attempts + len(run.state.pools.run),
    )


def plan(run: Run) -> None:
    """Move an engine, after a trained step, if the last steps ask for it."""
    part, state = run.part(Ratio), run.state
    counted, before = _counted(run, part), part.before
    part.before = counted
    sides = _sides(run)
    prefill, decode = len(sides[1]), len(sides[-1])
    if part.engines or not run.training or prefill + decode < 2:
        return
    if any(engine.departing for engine in state.engines.values()) or state.hosts.unplaced:
        return
    if prefill < min(part.prefill, prefill + decode - 1):  # a prefill engine was lost
        _begin(run, 1, f"{prefill} of {part.prefill} prefill engines are left")
        return
    load = _load(run, before, counted)
    if load is None:
        return
    asked = change(load, prefill, decode)
    if not part.patience.ask(asked.way):
        return
    cost_s = _cost_s(run, asked.way)
    if not pays(
        asked.gain,
        waited_s=counted.waited_s - before.waited_s,
        engines=prefill + decode,
        steps=run.config.run.steps - state.trainer.step,
        cost_s=cost_s,
    ):
        return
    part.patience.moved(asked.way)
    part.prefill = prefill + asked.way
    _begin(run, asked.way, _why(asked, load, cost_s))


def _why(asked: Change, load: Load, cost_s: float) -> str:
    return (
        f"{asked.gain:.0%} more turns per second expected with {asked.prefill} prefill engines, "
        f"for {cost_s:.1f} s of an engine (a turn's prompt takes {load.prompt_s:.3g} s, its "
        f"sampling {load.steps_s:.3g} s and more)"
    )


def _sides(run: Run) -> dict[int, list[Engine]]:
    """Return the engines that may move, by the way in which they came: prefill engines
    under 1, decode engines under −1.
    """
    sides: dict[int, list[Engine]] = {1: [], -1: []}
    for engine in run.state.engines.values():
        if not engine.lender and run.config.engines[engine.seat.group].phase == "either":
            sides[-1 if engine.samples else 1].append(engine)
    return sides


def _counted(run: Run, part: Ratio) -> Counted:
    counters = run.state.counters
    return msgspec.structs.replace(
        part.observed,
        turns=counters.turns,
        output_tokens=counters.output_tokens,
        context_tokens=counters.context_tokens,
        mixed_tokens=counters.context_tokens - counters.cached_tokens,
        split_tokens=counters.scheduling.split_tokens,
        waited_s=run.state.idle.trainer.get("batch", 0.0),
    )


def _load(run: Run, before: Counted, counted: Counted) -> Load | None:
    """Return the load of the turns between two counts; None if it is not known.

    Finished turns tell prompts and outputs apart only if these vary. So the time of a
    prompt beside outputs is at least its time at a prefill engine, without the part
    that steps hide which read the weights anyway.
    """
    turns, answered = counted.turns - before.turns, counted.answered - before.answered
    engine = next(iter(_sides(run)[-1]), None)
    if engine is None or min(turns, answered) < LEAST_TURNS:
        return None
    hardware, degree = kind_of(run, engine)
    times = run.part(Costs).turn_times.get(hardware, {}).get(degree)
    if times is None or times.count < FIRST_TURNS:
        return None
    prices = estimate(times.turns)
    mixed_price = sampling_price(run, engine)
    mixed_price = prices.prompt_s if mixed_price is None else mixed_price
    prefill_price = price(run.part(Phases).prefill.get(hardware, {}).get(degree))
    tokens = (counted.output_tokens - before.output_tokens) / turns
    prompts = (
        counted.mixed_tokens + counted.split_tokens - before.mixed_tokens - before.split_tokens
    ) / turns
    context = (counted.context_tokens - before.context_tokens) / turns + tokens / 2
    followed = counted.followed - before.followed
    attempts = (counted.attempts - before.attempts) / answered
    prompt_s = prompts * (mixed_price if prefill_price is None else prefill_price)
    steps_s = tokens * prices.fixed_s
    # the steps of a batch hide at most as much as they take themselves
    hidden_s = steps_s / max(1.0, attempts / len(_sides(run)[-1]))
    return Load(
        attempts=attempts,
        prompt_s=prompt_s,
        mixed_s=max(prompts * mixed_price, prompt_s - hidden_s),
        move_s=prompts * (price(run.part(Phases).moved) or 0.0),
        steps_s=steps_s,
        sequence_s=tokens * (prices.sequence_s + context * prices.context_s),
        between_s=(counted.between_s - before.between_s) / max(1, followed),
        slots=max(1, engine.abilities.max_slots),
    )


def _cost_s(run: Run, way: int) -> float:
    """Return the engine-seconds that a move costs: the time for which an engine
    empties, as for the last that moved, and for a decode engine another computation of
    the contexts of its trajectories, or their transfer.
    """
    emptied_s = run.part(Ratio).emptied_s
    engine = _leaving(run, way)
    if way != 1 or engine is None:
        return emptied_s
    cached = sum(
        prefix.tokens
        for name in run.state.pools.run
        if (prefix := turn_costs_of(run, run.state.trajectories[name]).prefixes.get(engine.id))
        and prefix.publication_id == engine.publication_id
    )
    prices = [sampling_price(run, engine), price(run.part(Phases).moved)]
    known = [one for one in prices if one is not None]
    return emptied_s + cached * min(known, default=0.0)


def _leaving(run: Run, way: int) -> Engine | None:
    """Return the engine that would move: the one with the fewest turns, and among
    equals the newest.
    """
    side = _sides(run)[-way] if way else []
    return min(reversed(side), key=lambda engine: len(engine.active), default=None)


def _begin(run: Run, way: int, why: str) -> None:
    """Let an engine empty, which then changes its phase."""
    engine = _leaving(run, way)
    if engine is None:
        return
    run.part(Ratio).engines[engine.id] = run.now
    engine.barred[MOVES] = math.inf
    former, phase = ("decode", "prefill") if way == 1 else ("prefill", "decode")
    _say(run, engine, f"moves from {former} to {phase}: {why}")
    run.fleet_changed()
    dispatching.requeue_from(run, engine)


def _say(run: Run, engine: Engine, message: str) -> None:
    """Tell the user of a move, and count it."""
    run.state.counters.scheduling.moved_engines += 1
    run.emit(Warn(component=engine.id, message=message))


def advance(run: Run) -> None:
    """Change the phase of an engine that has emptied."""
    part = run.part(Ratio)
    for engine_id, since in list(part.engines.items()):
        engine = run.state.engines[engine_id]
        if not engine.active or engine.departing:
            part.emptied_s = run.now - since
            _move(run, engine)


def _move(run: Run, engine: Engine) -> None:
    """Change the phase of an engine without turns."""
    run.part(Ratio).engines.pop(engine.id, None)
    run.part(Phases).engines.pop(engine.id, None)
    engine.barred.pop(MOVES, None)
    if not engine.departing:
        engine.seat.phase = "prefill" if engine.samples else "decode"
    engines.fleet_changed(run)
    dispatching.requeue_from(run, engine)
    run.dirty_queues += [None, engine.id]


def replaced(run: Run, _former: object) -> None:
    """Begin a world with as many prefill engines as there should be."""
    part = run.part(Ratio)
    part.engines.clear()
    part.trajectories.clear()
    movable = _sides(run)[-1]
    for engine in movable[: max(0, min(part.prefill, len(movable) - 1))]:
        engine.seat.phase = "prefill"


def removed(run: Run, _engine: Engine) -> None:
    """Let a prefill engine sample if no engine is left that does."""
    sides = _sides(run)
    if not sides[-1] and (engine := next((one for one in sides[1] if not one.active), None)):
        _say(run, engine, "moves from prefill to decode: no other samples")
        _move(run, engine)


def check(run: Run) -> None:
    """Assert that at most one engine moves, and that none else is barred for it."""
    moving = run.part(Ratio).engines
    assert len(moving) <= 1, moving
    for engine in run.state.engines.values():
        assert (MOVES in engine.barred) == (engine.id in moving), engine
        movable = run.config.engines[engine.seat.group].phase == "either"
        assert engine.id not in moving or (movable and not engine.lender), engine


MECHANISM = Mechanism(
    name="ratio",
    used=moves_phases,
    state=Ratio,
    steps={"end": advance},
    follows={
        TurnMove.REQUESTED: requested,
        TurnMove.DONE: done,
        EngineMove.REPLACED: replaced,
        EngineMove.REMOVED: removed,
        TrainerMove.TRAINED: plan,
    },
    check=check,
)
