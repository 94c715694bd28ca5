"""The costs of work on engines of each kind, and the contents of their caches: learned
for the mechanisms that compare engines.
"""

from rollweave.core.mechanisms.costs import caches, rates
from rollweave.core.mechanisms.costs.state import Costs
from rollweave.core.policy.scheduling import assigns, has_learned_pools, splits_turns
from rollweave.core.run import EngineMove, Mechanism, Run, TurnMove
from rollweave.core.state import Engine, Stage, Trajectory, Turn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineJoined, TurnDone


def used(config: RunConfig) -> bool:
    """True if a mechanism compares engines."""
    return (
        assigns(config)
        or config.allocation is not None
        or has_learned_pools(config)
        or splits_turns(config)
    )


def _learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, engine: Engine, event: TurnDone
) -> None:
    rates.learn_turn(run, trajectory, turn, engine, event)
    caches.learn_turn(run, trajectory, turn, engine, event)


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
