"""The engines of trajectories, and the moves of trajectories between engines."""

import msgspec

from rollweave.core.run import Run
from rollweave.core.state import Trajectory
from rollweave.schema.base import EngineId, TrajectoryId


class Migration(msgspec.Struct):
    """A migration of a trajectory's KV.

    `since` is None while it waits for its transfer epoch.
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    source: EngineId
    target: EngineId
    since: float | None = None
    # the trajectory leaves for good, with its open turn, so that the source can load
    # new weights
    vacates: bool = False
    prompt: bool = False  # a prefill engine has computed the prompt of its open turn


class Migrations(msgspec.Struct):
    """The migrations of trajectories."""

    open: dict[int, Migration] = {}  # planned or under way
    next_number: int = 0
    token_s: float = 0.0  # mean seconds for the transfer of a token's KV


class Share(msgspec.Struct):
    """A share of the partition: the engine has the next `size` trajectories by
    predicted length.
    """

    engine_id: EngineId
    size: int


class Partition(msgspec.Struct):
    """The assignment of ranks to engines, longest first, as planned for `planned`
    trajectories.
    """

    shares: list[Share] = []
    planned: int = 0
    predictions: int = 0  # received since the plan was made


class Placement(msgspec.Struct):
    """The part of the state."""

    trajectories: dict[TrajectoryId, int] = {}  # the migration that the trajectory has
    migrations: Migrations = msgspec.field(default_factory=Migrations)
    partitions: dict[str, Partition] = {}  # by the pool that trajectories prefer, "" for none
    planned_at: int = 0  # step of the last plan of degrees
    # degree of running engines whose costs are unknown → step since when
    awaited: dict[int, int] = {}


def migration_of(run: Run, trajectory: Trajectory) -> int | None:
    """Return the number of the trajectory's migration, from its planning to its end."""
    return run.part(Placement).trajectories.get(trajectory.id)
