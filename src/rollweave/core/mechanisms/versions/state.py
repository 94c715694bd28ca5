"""The weights to which trajectories are bound."""

import msgspec

from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId


class Batch(msgspec.Struct):
    """The trajectories that an engine has launched under its weights."""

    launched: int = 0  # trajectories
    peak_kv: int | None = None  # most KV tokens of its trajectories at earlier checks


class Versions(msgspec.Struct):
    """The part of the state."""

    # the weights (publication id) to which each attempt that was launched is bound
    trajectories: dict[TrajectoryId, int] = {}
    engines: dict[EngineId, Batch] = {}
    unassigned: dict[TrajectoryId, None] = {}  # no engine has their weights
    consolidated_at: float = 0.0


def weights_of(run: Run, trajectory: Trajectory) -> int:
    """Return the weights to which the attempt is bound; -1 before its launch."""
    return run.part(Versions).trajectories.get(trajectory.id, -1)


def batch_of(run: Run, engine: Engine) -> Batch:
    """Return what the engine has launched under its weights."""
    engines: dict[EngineId, Batch] = run.parts[Versions].engines
    batch = engines.get(engine.id)
    if batch is None:
        batch = engines[engine.id] = Batch()
    return batch
