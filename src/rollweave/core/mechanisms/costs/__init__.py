"""The costs of work on engines of each kind, and the contents of their caches: learned
for the mechanisms that compare engines.

An engine's cache should have the context that it computed last of a trajectory, and the
prompt of its group. What a prompt costs at engines that sample shows in the times of
finished turns (`costs/rates`).
"""

from rollweave.core.mechanisms.costs import rates
from rollweave.core.mechanisms.costs.rates import Costs, Prefix, Spent, kind_of, turn_costs_of
from rollweave.core.policy.scheduling import assigns, has_learned_pools, prices_turns
from rollweave.core.policy.turn_times import estimate
from rollweave.core.run import EngineMove, Mechanism, Run, TurnMove
from rollweave.core.state import Engine, Stage, Trajectory, Turn
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineJoined, TurnDone

REMEMBERED = 0.95
"""Weight of the known cost when a new observation is added: about twenty observations
count.
"""


def cached_tokens(run: Run, trajectory: Trajectory, engine: Engine) -> int:
    """Return how many of the first tokens of the trajectory's context the engine should
    have cached: the tokens of its last turn there, or of the prompt of its group.
    """
    own = _valid(turn_costs_of(run, trajectory).prefixes.get(engine.id), engine)
    if own >= trajectory.prompt_tokens:
        return own
    trajectories = run.state.trajectories
    members = (trajectories[name] for name in run.state.groups[trajectory.group_id].members)
    shared = max(
        _valid(turn_costs_of(run, member).prefixes.get(engine.id), engine) for member in members
    )
    return max(own, min(shared, trajectory.prompt_tokens))


def cached_by_engine(run: Run, trajectory: Trajectory) -> dict[EngineId, int]:
    """Return `cached_tokens` for every engine that should have any."""
    cached: dict[EngineId, int] = {}
    for name in run.state.groups[trajectory.group_id].members:
        member = run.state.trajectories[name]
        limit = None if member is trajectory else trajectory.prompt_tokens
        for engine_id, prefix in turn_costs_of(run, member).prefixes.items():
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


def record_prefix(run: Run, trajectory: Trajectory, engine: Engine, tokens: int) -> None:
    """Record that the engine has the first `tokens` tokens of the context."""
    turn_costs_of(run, trajectory).prefixes[engine.id] = Prefix(
        tokens=tokens, epoch=engine.epoch, publication_id=engine.publication_id
    )


def learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, engine: Engine, event: TurnDone
) -> None:
    """Learn from a finished turn, after `rates.learn_turn`."""
    if event.replayed or not (prices_turns(run.config) or run.scheduling.by_finish):
        return
    record_prefix(run, trajectory, engine, turn.context_tokens + event.output_tokens)
    hardware, degree = kind_of(run, engine)
    times = run.part(Costs).turn_times.get(hardware, {}).get(degree)
    if times is not None and times.count and times.estimated_at == times.count:
        # the estimate for turns without prompts is a guess, and weighs nothing
        turns = times.turns
        prompts = sum(turn.prompt_tokens for turn in turns)
        by_degree = run.part(Costs).sampling.setdefault(hardware, {})
        spent = by_degree.setdefault(degree, Spent())
        spend(spent, estimate(turns).prompt_s * prompts, prompts)


def spend(spent: Spent, seconds: float, tokens: int) -> None:
    spent.seconds = REMEMBERED * spent.seconds + seconds
    spent.tokens = REMEMBERED * spent.tokens + tokens


def price(spent: Spent | None) -> float | None:
    return spent.seconds / spent.tokens if spent is not None and spent.tokens else None


def sampling_price(run: Run, engine: Engine) -> float | None:
    """Return the seconds of a prompt's token at an engine that samples; None if
    unknown.
    """
    hardware, degree = kind_of(run, engine)
    return price(run.part(Costs).sampling.get(hardware, {}).get(degree))


def used(config: RunConfig) -> bool:
    """True if a mechanism compares engines."""
    return (
        assigns(config)
        or config.allocation is not None
        or has_learned_pools(config)
        or prices_turns(config)
    )


def _learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, engine: Engine, event: TurnDone
) -> None:
    rates.learn_turn(run, trajectory, turn, engine, event)
    learn_turn(run, trajectory, turn, engine, event)


def _joined(run: Run, engine: Engine, event: EngineJoined) -> None:
    rates.joined(run, engine, event.profile)


MECHANISM = Mechanism(
    name="costs",
    used=used,
    state=Costs,
    follows={
        Stage.QUEUED: rates.begin_attempt,
        TurnMove.GIVEN: rates.given,
        TurnMove.BEGUN: rates.begun,
        TurnMove.LEFT: rates.left_by_turn,
        TurnMove.DONE: _learn_turn,
        EngineMove.JOINED: _joined,
        EngineMove.REMOVED: rates.left,
    },
)
