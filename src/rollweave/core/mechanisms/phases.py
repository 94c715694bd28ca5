"""Prefill and decoding on different engines (RollArt §6.3): which prompts prefill
engines compute, and what prompts cost there.

A turn belongs to the engine that samples it, and occupies this engine from its
dispatch. If a prefill engine computes its prompt, the turn is dispatched twice: to the
prefill engine and, once the KV has moved (`placement/transfers`), to its own engine. If
anything goes wrong before, the second dispatch follows, and the engine computes the KV
that it lacks. So a turn is sampled whole by one engine, and its tokens are the same as
in a run without prefill engines.

`core/policy/routing` decides. It is given the tokens that engines should have
cached (`mechanisms/costs`). The cost of a prompt is learned at prefill engines from the
seconds for which they are busy, and at other engines from the times of finished turns.
If only one of the two costs is known, the other is assumed to be equal.

Invariants: a prefill engine has no turns, only prompts; a turn whose prompt is computed
or moves is on an engine that samples, and on no other engine.
"""

import msgspec

from rollweave.core import attempts, dispatching, turns
from rollweave.core.mechanisms.costs import (
    cached_tokens,
    price,
    record_prefix,
    sampling_price,
    spend,
)
from rollweave.core.mechanisms.costs.rates import Spent, kind_of, turn_costs_of
from rollweave.core.mechanisms.placement import transfers
from rollweave.core.policy.routing import LEAST_TOKENS, TRIAL, PrefillSite, prefill_site
from rollweave.core.policy.scheduling import splits_turns
from rollweave.core.run import Mechanism, Run, TurnMove
from rollweave.core.state import MOVING, Engine, OnEngine, Trajectory, Turn
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.config.engines import BLOCK_TOKENS
from rollweave.schema.events import PrefillDone, WorldLost

UNKNOWN_S = 1.0
"""Seconds of a prompt's token until its cost is observed anywhere: far more than any
transfer takes, so that a transfer is tried.
"""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's prompt that a prefill engine computes for the engine that has the turn,
    or whose KV is on its way between the two.
    """

    engine: EngineId
    tokens: int  # that the prefill engine has to compute, as far as known
    since: float  # when it was given to that engine, or computed


class Phases(msgspec.Struct):
    """The part of the state. Tables without ids are by class of engines, and degree."""

    trajectories: dict[TrajectoryId, Prompt] = {}
    engines: dict[EngineId, float] = {}  # when each began the prompt that it computes
    prefill: dict[str, dict[int, Spent]] = {}  # on prompts, at prefill engines
    moved: Spent = msgspec.field(default_factory=Spent)
    decisions: int = 0  # turns whose prompts could have been computed elsewhere


def give(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> None:
    """Give the prompt of a turn that `engine` is about to get to a prefill engine, if
    that pays.
    """
    prompt = None if turn.suspicion is not None else _prompt_for(run, trajectory, turn, engine)
    if prompt is None:
        return
    source, part = run.state.engines[prompt.engine], run.part(Phases)
    if not source.active:
        part.engines[source.id] = run.now
    source.active[trajectory.id] = turn.number
    part.trajectories[trajectory.id], turn.prefill = prompt, source.id
    turn_costs_of(run, trajectory).split = True
    # members of its group that follow wait for it
    record_prefix(run, trajectory, source, turn.context_tokens + turn.output_tokens)
    run.state.counters.scheduling.split_turns += 1


def on_prefilled(run: Run, event: PrefillDone) -> None:
    """Move the KV of the prompt to the engine that has the turn, if it can take it."""
    answered = turns.find(run, event)
    if answered is None or not answered[1].prefill:
        return
    trajectory, turn, engine = answered
    prompt = run.part(Phases).trajectories[trajectory.id]
    source = run.state.engines[prompt.engine]
    _learn_prompt(run, source, turn, event)
    source.failures.consecutive_timeouts = 0
    _leave(run, trajectory, source)
    moving = msgspec.structs.replace(prompt, since=run.now)
    run.part(Phases).trajectories[trajectory.id], turn.prefill = moving, MOVING
    transfers.carry_prompt(run, trajectory, source.id, engine.id)
    dispatching.release(run, transfers.begin(run))


def on_world_lost(run: Run, _event: WorldLost) -> None:
    """Forget all prompts: their turns are gone."""
    run.part(Phases).trajectories.clear()


def give_up(run: Run, trajectory: Trajectory, turn: Turn, error: str) -> None:
    """Let the engine of the turn compute the prompt that a prefill engine failed to
    compute.
    """
    prompt = run.part(Phases).trajectories[trajectory.id]
    turn_costs_of(run, trajectory).prefixes.pop(prompt.engine, None)
    run.warn(
        prompt.engine, f"prompt of {trajectory.id} not computed: {error}", count="prompt_failed"
    )
    run.state.counters.scheduling.split_failed += 1
    dispatching.begin_sampling(run, trajectory, turn)


def withdraw(run: Run, trajectory: Trajectory, turn: Turn, _engine: Engine) -> None:
    """Take the prompt of a turn that leaves its engine from the prefill engine that
    computes it.
    """
    if turn.prefill is None:
        return
    if turn.prefill == MOVING:
        transfers.forget(run, trajectory)
    else:
        attempts.abort(run, trajectory, turn)
    _release(run, trajectory, turn)


def begin_sampling(run: Run, trajectory: Trajectory, turn: Turn, _engine: Engine) -> None:
    """Record that the turn no longer waits for a prompt: the prompt was given up, or
    its KV has arrived.
    """
    _release(run, trajectory, turn)
    run.state.counters.scheduling.split_s += run.now - turn.since


def carried(
    run: Run, trajectory: Trajectory, _turn: Turn, target: Engine, moved_tokens: int
) -> None:
    """Learn from the transfer of the part of a prompt's KV that the target lacked."""
    lacked = moved_tokens - cached_tokens(run, trajectory, target)
    since = run.part(Phases).trajectories[trajectory.id].since
    learn_move(run, run.now - since, max(BLOCK_TOKENS, lacked))


def learn_move(run: Run, seconds: float, tokens: int) -> None:
    """Learn from a transfer of `tokens` tokens that the target lacked."""
    spend(run.part(Phases).moved, seconds, tokens)


def _release(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    prompt = run.part(Phases).trajectories.pop(trajectory.id)
    if turn.prefill != MOVING:
        _leave(run, trajectory, run.state.engines[prompt.engine])


def _leave(run: Run, trajectory: Trajectory, engine: Engine) -> None:
    """Take the trajectory's prompt from the prefill engine."""
    del engine.active[trajectory.id]
    run.part(Phases).engines[engine.id] = run.now


def _prompt_for(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> Prompt | None:
    """Return the prompt of the turn that `engine` is given, for the prefill engine that
    is to compute it; None if `engine` computes the prompt.
    """
    if engine.seat.phase != "decode" or not engine.abilities.moves_kv:
        return None
    context = turn.context_tokens + turn.output_tokens
    missing = context - cached_tokens(run, trajectory, engine)
    if missing < LEAST_TOKENS:
        return None
    sites, token_s = _sites(run, trajectory, engine, context)
    if not sites:
        return None
    phases = run.part(Phases)
    phases.decisions += 1
    chosen = prefill_site(
        sites,
        missing=missing,
        price=token_s,
        beside=len(engine.active),
        move=price(phases.moved) or 0.0,
        trial=phases.decisions % TRIAL == 0,
    )
    return next(
        (
            Prompt(engine=site.id, tokens=site.missing, since=run.now)
            for site in sites
            if site.id == chosen
        ),
        None,
    )


def _sites(
    run: Run, trajectory: Trajectory, target: Engine, context: int
) -> tuple[list[PrefillSite], float]:
    """Return the prefill engines that can take a prompt whose KV moves to `target`, and
    the seconds of a token there.
    """
    state = run.state
    engines = [
        engine
        for engine in (state.engines[name] for name in run.fleet.prefill)
        if engine.publication_id == target.publication_id
        and engine.abilities.moves_kv
        and engine.open
        and len(engine.active) < engine.abilities.max_slots
    ]
    prices = {engine.id: _prefill_price(run, engine) for engine in engines}
    known = [price for price in prices.values() if price is not None]
    here = sampling_price(run, target)
    if here is None:
        here = min(known, default=UNKNOWN_S)
    sites = []
    for engine in engines:
        known_price = prices[engine.id]
        sites.append(
            PrefillSite(
                id=engine.id,
                ahead=_ahead(run, engine),
                missing=max(0, context - cached_tokens(run, trajectory, engine)),
                price=here if known_price is None else known_price,
            )
        )
    return sites, here


def _ahead(run: Run, engine: Engine) -> int:
    """Return the tokens that the engine has yet to compute of its prompts."""
    prompts = run.part(Phases).trajectories
    return sum(prompts[trajectory_id].tokens for trajectory_id in engine.active)


# What prompts cost.


def _learn_prompt(run: Run, engine: Engine, turn: Turn, event: PrefillDone) -> None:
    """Learn from a prompt that a prefill engine has computed. Call before the engine
    begins another prompt.
    """
    computed = max(0, turn.context_tokens + turn.output_tokens - event.cached_tokens)
    run.state.counters.scheduling.split_tokens += computed
    began = run.part(Phases).engines[engine.id]
    if engine.since > began:
        return  # it has loaded weights meanwhile
    hardware, degree = kind_of(run, engine)
    by_degree = run.part(Phases).prefill.setdefault(hardware, {})
    spend(by_degree.setdefault(degree, Spent()), run.now - began, computed)


def _prefill_price(run: Run, engine: Engine) -> float | None:
    """Return the seconds of a prompt's token at a prefill engine; None if unknown."""
    hardware, degree = kind_of(run, engine)
    return price(run.part(Phases).prefill.get(hardware, {}).get(degree))


def check(run: Run) -> None:
    """Assert that an engine waits for each prompt that a prefill engine computes, or
    whose KV moves.
    """
    prompts, part = dict(run.part(Phases).trajectories), run.part(Phases)
    for trajectory in run.state.trajectories.values():
        turn = trajectory.turn
        if turn is None or turn.prefill is None:
            continue
        prompt = prompts.pop(trajectory.id)
        assert isinstance(turn.place, OnEngine), trajectory
        if turn.prefill != MOVING:
            assert turn.prefill == prompt.engine, trajectory
            assert trajectory.id in run.state.engines[prompt.engine].active, trajectory
            continue
        transfers.check_prompt(run, trajectory, prompt.engine, turn.place.engine)
    assert not prompts, f"no turn waits for {prompts}"
    for engine_id in part.engines:
        assert not run.state.engines[engine_id].samples, f"{engine_id} computes prompts"


MECHANISM = Mechanism(
    name="phases",
    used=splits_turns,
    state=Phases,
    handlers={PrefillDone: on_prefilled, WorldLost: on_world_lost},
    follows={
        TurnMove.GIVEN: give,
        TurnMove.BEGUN: begin_sampling,
        TurnMove.REFUSED: give_up,
        TurnMove.LEFT: withdraw,
        TurnMove.CARRIED: carried,
    },
    check=check,
)
