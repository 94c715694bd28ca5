"""Prefill and decoding on different engines (RollArt §6.3): which prompts prefill
engines compute, and what prompts cost there and elsewhere.

A turn belongs to the engine that samples it, which it occupies from its dispatch. If a
prefill engine computes its prompt, the turn is dispatched twice: to that engine, and,
once the KV has moved (`core/migration`), to its own. Whatever goes wrong before ends in
the second dispatch, for which the engine computes what it lacks. So a turn is sampled
whole by one engine, and its tokens are those of a run without prefill engines.

`core/policy/disaggregation` decides. It gets what engines should have cached: of an
engine, the context that it computed last of a trajectory, and of a group, the prompt.
What a prompt costs at prefill engines shows in the seconds for which they are busy; at
others, in the times of finished turns (`core/costs`). A cost that is unknown is assumed
to be the other one.

Invariants: a prefill engine has no turns, only prompts; a turn whose prompt is computed
or moves is on an engine that samples, and on no other.
"""

from rollweave.core.costs import kind_of
from rollweave.core.policy.disaggregation import LEAST_TOKENS, TRIAL, PrefillSite, prefill_site
from rollweave.core.policy.turn_times import estimate
from rollweave.core.run import Run
from rollweave.core.state import Engine, Prefix, Prompt, Spent, Trajectory, Turn
from rollweave.schema.base import EngineId
from rollweave.schema.events import PrefillDone

REMEMBERED = 0.95
"""Weight of what is known of a cost as it is observed again: about twenty observations
count.
"""

UNKNOWN_S = 1.0
"""Seconds of a prompt's token as long as none was observed anywhere: far more than any
transfer, which is thus tried.
"""


def prompt_for(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> Prompt | None:
    """Return the prompt of the turn, which this engine is given, for the prefill engine
    that is to compute it; None if this engine computes it.
    """
    if engine.phase != "decode" or not engine.moves_kv:
        return None
    context = turn.context_tokens + turn.output_tokens
    missing = context - cached_tokens(run, trajectory, engine)
    if missing < LEAST_TOKENS:
        return None
    sites, price = _sites(run, trajectory, engine, context)
    if not sites:
        return None
    phases, moved = run.state.phases, run.state.phases.moved
    phases.decisions += 1
    chosen = prefill_site(
        sites,
        missing=missing,
        price=price,
        beside=len(engine.active),
        move=_price(moved) or 0.0,
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
        and engine.moves_kv
        and len(engine.prompts) < engine.max_slots
    ]
    prices = {engine.id: _prefill_price(run, engine) for engine in engines}
    known = [price for price in prices.values() if price is not None]
    here = sampling_price(run, target)
    if here is None:
        here = min(known, default=UNKNOWN_S)
    sites = []
    for engine in engines:
        price = prices[engine.id]
        sites.append(
            PrefillSite(
                id=engine.id,
                ahead=_ahead(run, engine),
                missing=max(0, context - cached_tokens(run, trajectory, engine)),
                price=here if price is None else price,
            )
        )
    return sites, here


def _ahead(run: Run, engine: Engine) -> int:
    """Return the tokens of the prompts that the engine has, as far as they are to be
    computed.
    """
    prompts = (run.state.trajectories[name].open_turn.prompt for name in engine.prompts)
    return sum(prompt.tokens for prompt in prompts if prompt is not None)


def cached_tokens(run: Run, trajectory: Trajectory, engine: Engine) -> int:
    """Return how many of the first tokens of the trajectory's context the engine should
    have cached: those of its last turn there, or of the prompt of its group.
    """
    own = _valid(trajectory.prefixes.get(engine.id), engine)
    if own >= trajectory.prompt_tokens:
        return own
    trajectories = run.state.trajectories
    members = (trajectories[name] for name in run.state.groups[trajectory.group_id].members)
    shared = max(_valid(member.prefixes.get(engine.id), engine) for member in members)
    return max(own, min(shared, trajectory.prompt_tokens))


def cached_by_engine(run: Run, trajectory: Trajectory) -> dict[EngineId, int]:
    """Return `cached_tokens` for every engine that should have any."""
    cached: dict[EngineId, int] = {}
    for name in run.state.groups[trajectory.group_id].members:
        member = run.state.trajectories[name]
        limit = None if member is trajectory else trajectory.prompt_tokens
        for engine_id, prefix in member.prefixes.items():
            engine = run.state.engines.get(engine_id)
            if engine is not None:
                tokens = _valid(prefix, engine)
                tokens = tokens if limit is None else min(tokens, limit)
                cached[engine_id] = max(tokens, cached.get(engine_id, 0))
    return cached


def _valid(prefix: Prefix | None, engine: Engine) -> int:
    same = prefix is not None and (prefix.epoch, prefix.publication_id) == (
        engine.epoch,
        engine.publication_id,
    )
    return prefix.tokens if prefix is not None and same else 0


def record_prefix(trajectory: Trajectory, engine: Engine, tokens: int) -> None:
    """Record that the engine has so many of the first tokens of the context."""
    trajectory.prefixes[engine.id] = Prefix(
        tokens=tokens, epoch=engine.epoch, publication_id=engine.publication_id
    )


def give(run: Run, trajectory: Trajectory, turn: Turn, prompt: Prompt) -> None:
    """Give the prompt of the turn to its prefill engine."""
    engine = run.state.engines[prompt.engine]
    if not engine.prompts:
        engine.prompts_since = run.now
    engine.prompts[trajectory.id] = None
    turn.prompt, turn.split = prompt, True
    # members of its group that follow wait for it
    record_prefix(trajectory, engine, turn.context_tokens + turn.output_tokens)
    run.state.counters.scheduling.split_turns += 1


# What prompts cost.


def learn_prompt(run: Run, engine: Engine, turn: Turn, event: PrefillDone) -> None:
    """Learn from a prompt that a prefill engine has computed. Call before the engine
    begins another one.
    """
    computed = max(0, turn.context_tokens + turn.output_tokens - event.cached_tokens)
    run.state.counters.scheduling.split_tokens += computed
    if engine.since > engine.prompts_since:
        return  # it has loaded weights meanwhile
    hardware, degree = kind_of(run, engine)
    by_degree = run.state.phases.prefill.setdefault(hardware, {})
    _spend(by_degree.setdefault(degree, Spent()), run.now - engine.prompts_since, computed)


def learn_move(run: Run, seconds: float, tokens: int) -> None:
    """Learn from a transfer of so many tokens that the target lacked."""
    _spend(run.state.phases.moved, seconds, tokens)


def learn_turn(run: Run, trajectory: Trajectory, engine: Engine, turn: Turn, output: int) -> None:
    """Learn from a finished turn, which `core/costs` has just learned from."""
    if not (run.splits_turns or run.scheduling.by_finish):
        return
    record_prefix(trajectory, engine, turn.context_tokens + output)
    hardware, degree = kind_of(run, engine)
    times = run.state.turn_times.get(hardware, {}).get(degree)
    if times is not None and times.count and times.estimated_at == times.count:
        # of turns without prompts, the estimate is a guess, and weighs nothing
        turns = times.turns
        prompts = sum(turn.prompt_tokens for turn in turns)
        by_degree = run.state.phases.sampling.setdefault(hardware, {})
        spent = by_degree.setdefault(degree, Spent())
        _spend(spent, estimate(turns).prompt_s * prompts, prompts)


def _spend(spent: Spent, seconds: float, tokens: int) -> None:
    spent.seconds = REMEMBERED * spent.seconds + seconds
    spent.tokens = REMEMBERED * spent.tokens + tokens


def _price(spent: Spent | None) -> float | None:
    return spent.seconds / spent.tokens if spent is not None and spent.tokens else None


def _prefill_price(run: Run, engine: Engine) -> float | None:
    """Return the seconds of a prompt's token at a prefill engine; None if unknown."""
    hardware, degree = kind_of(run, engine)
    return _price(run.state.phases.prefill.get(hardware, {}).get(degree))


def sampling_price(run: Run, engine: Engine) -> float | None:
    """Return the seconds of a prompt's token at an engine that samples; None if
    unknown.
    """
    hardware, degree = kind_of(run, engine)
    return _price(run.state.phases.sampling.get(hardware, {}).get(degree))
