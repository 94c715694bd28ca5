"""The expected lengths of trajectories, and the engines that have the trajectories."""

import msgspec

from rollweave.core.run import Run
from rollweave.core.state import Trajectory
from rollweave.schema.base import EngineId, TrajectoryId


class Work(msgspec.Struct):
    """The work that an attempt has yet to do, and the engine that is to do it."""

    estimate: int = 0  # tokens that it will probably still sample
    kv_token_steps: int = 0  # the context sizes at each of these tokens, summed
    # level of its sampled and estimated length (core/policy/priority)
    length_bucket: int | None = None
    prediction_requested_for: int = -1  # turn before which a prediction was last requested
    predicted_at_turn: int = -1  # turn to which the last received prediction applies
    prompt_tokens: int = 0  # that were learned from
    last_output_tokens: int = 0
    tool_s: float = 0.0  # seconds in which its environment stepped
    # the engine for which its turns wait (core/policy/scheduling)
    assigned_engine: EngineId | None = None
    kv_resident: bool = False  # its assigned engine holds its KV, or should
    kv_demand: int = 0  # tokens of KV that it needs through its next turn


class DomainLengths(msgspec.Struct):
    """Lengths and times of a task domain's trajectories.

    Means are running means and None before the first value.
    """

    lengths: list[int] = []  # sampled tokens of the newest finished trajectories
    length_sum: int = 0  # sum of `lengths`
    predicted_length: float | None = None  # mean; used as long as none has finished
    context_growth: float | None = None  # tokens of context for each sampled one
    prompt_tokens: float | None = None
    turn_tokens: float | None = None  # sampled tokens of a turn
    turn_s: float | None = None  # seconds of a turn on its engine
    tool_s: float | None = None  # seconds of an environment's step


class Lengths(msgspec.Struct):
    """The part of the state."""

    trajectories: dict[TrajectoryId, Work] = {}
    domains: dict[str, DomainLengths] = {}  # by task domain


def work_of(run: Run, trajectory: Trajectory) -> Work:
    """Return what the trajectory has yet to sample."""
    works: dict[TrajectoryId, Work] = run.parts[Lengths].trajectories
    return works[trajectory.id]


def domain_of(run: Run, trajectory: Trajectory) -> DomainLengths:
    """Return the lengths and times of the trajectory's task domain."""
    name = run.state.groups[trajectory.group_id].name
    domains = run.part(Lengths).domains
    stats = domains.get(name)
    if stats is None:
        stats = domains[name] = DomainLengths()
    return stats
