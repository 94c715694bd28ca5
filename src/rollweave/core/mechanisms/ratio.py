"""Engines of phase `either`: between steps, the run moves an engine from prefill to
decoding, or back, by what it has measured (RollArt §6.3, §9).

After each trained step, `core/policy/ratio` is given the load of the step
(`mechanisms/load`). An engine that is to move gets no
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
from rollweave.core.mechanisms.costs.rates import turn_costs_of
from rollweave.core.mechanisms.load import Counted, count, load_between
from rollweave.core.mechanisms.phases import Phases
from rollweave.core.policy.ratio import Change, Load, Patience, change, pays
from rollweave.core.policy.scheduling import moves_phases
from rollweave.core.run import EngineMove, Mechanism, Run, TrainerMove
from rollweave.core.state import Engine
from rollweave.schema.base import EngineId
from rollweave.schema.commands import Warn

MOVES = "moves"
"""Reason for which an engine that is about to change its phase gets no turns."""


class Ratio(msgspec.Struct):
    """The part of the state."""

    prefill: int = 1  # prefill engines that there should be
    engines: dict[EngineId, float] = {}  # that move → since when they empty
    patience: Patience = msgspec.field(default_factory=Patience)
    before: Counted = Counted()
    emptied_s: float = 0.0  # seconds for which the engine that moved last emptied


def plan(run: Run) -> None:
    """Move an engine, after a trained step, if the last steps ask for it."""
    part, state = run.part(Ratio), run.state
    counted, before = count(run), part.before
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
    load = load_between(run, before, counted, sides[-1])
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
        EngineMove.REPLACED: replaced,
        EngineMove.REMOVED: removed,
        TrainerMove.TRAINED: plan,
    },
    check=check,
)
