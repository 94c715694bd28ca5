"""The placement of trajectories on engines, their moves with their KV, and the degrees
of the engines (Heddle §5, §6).
"""

from rollweave.core.mechanisms.placement import (
    allocation,
    assignment,
    dispatch,
    first_dispatch,
    migration,
    transfers,
)
from rollweave.core.mechanisms.placement.assignment import Placement
from rollweave.core.mechanisms.placement.dispatch import AssignedEngine
from rollweave.core.policy.scheduling import assigns, splits_turns
from rollweave.core.run import Chooser, EngineMove, Mechanism, Run, TrainerMove, TurnMove
from rollweave.core.state import Stage, Trajectory, Turn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import MigrationDone, WorldLost


def used(config: RunConfig) -> bool:
    """True if trajectories are assigned to engines, KV moves between engines, or the
    degrees of engines are planned.
    """
    return assigns(config) or splits_turns(config) or config.allocation is not None


def _choose_engine(config: RunConfig) -> Chooser | None:
    return AssignedEngine() if assigns(config) else None


def _requested(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    transfers.hold_turn(run, trajectory, turn)
    first_dispatch.hold(run, trajectory, turn)


def _world_lost(run: Run, event: WorldLost) -> None:
    transfers.on_world_lost(run, event)
    first_dispatch.forget_all(run)


def _check_late(run: Run) -> None:
    transfers.check_late(run)
    first_dispatch.give_up_late(run)


def _check(run: Run) -> None:
    transfers.check(run)
    assignment.check(run)


MECHANISM = Mechanism(
    name="placement",
    used=used,
    state=Placement,
    choose_engine=_choose_engine,
    handlers={MigrationDone: transfers.on_done, WorldLost: _world_lost},
    steps={"launch groups": allocation.advance, "moves of trajectories": _check_late},
    follows={
        Stage.EVAL_QUEUED: transfers.forget,
        Stage.OVER: transfers.forget,
        TurnMove.REQUESTED: _requested,
        TurnMove.GIVEN: dispatch.keep_resident,
        TurnMove.DONE: migration.turn_done,
        TurnMove.REVISED: migration.revised,
        EngineMove.FLEET_CHANGED: assignment.engines_changed,
        EngineMove.REPRICED: assignment.engines_changed,
        TrainerMove.TRAINED: allocation.plan,
    },
    check=_check,
)
