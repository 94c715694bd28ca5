"""The costs of work on the engines, and the contents of their caches."""

import msgspec

from rollweave.core.mechanisms.lengths.work import Rate
from rollweave.core.policy.turn_times import TurnTime, TurnTimes
from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import StepTime


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The use of an engine so far: the number of its turns and the tokens of their
    contexts, both summed over the seconds until `at`, and the prompt tokens that it
    computed for turns that are done.
    """

    at: float = 0.0
    turn_s: float = 0.0
    context_s: float = 0.0
    prompt_tokens: int = 0


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a context that an engine should have cached, unless its process
    or its weights have changed since.
    """

    tokens: int
    epoch: int
    publication_id: int


class Spent(msgspec.Struct):
    """Seconds spent on tokens; earlier ones count less."""

    seconds: float = 0.0
    tokens: float = 0.0


class Measured(msgspec.Struct):
    """The costs of the engines of one kind: measured by the engines, or estimated from
    finished turns. The costs are kept when the last engine of the kind is gone.
    """

    profile: tuple[StepTime, ...]
    slots: int
    rate: Rate
    prompt_s: float | None = None  # seconds of a prompt's token; None if they were not estimated


class EngineCosts(msgspec.Struct):
    """The costs of one engine."""

    # follows from the steps of its kind, its slots and KV; None before it has joined
    rate: Rate | None = None
    measured: bool = False  # it has measured its steps itself
    use: Use = Use()


class TurnCosts(msgspec.Struct):
    """The costs of an attempt's open turn, and the caches that have its context."""

    use_before: Use = Use()  # of its engine, when it began there
    split: bool = False  # its prompt was given to a prefill engine
    prefixes: dict[EngineId, Prefix] = {}  # of its context


class Costs(msgspec.Struct):
    """The part of the state. Tables without ids are by class of engines, and degree."""

    engines: dict[EngineId, EngineCosts] = {}
    trajectories: dict[TrajectoryId, TurnCosts] = {}
    measured: dict[str, dict[int, Measured]] = {}
    # of engines that do not measure themselves
    turn_times: dict[str, dict[int, TurnTimes]] = {}
    sampling: dict[str, dict[int, Spent]] = {}  # on prompts, at engines that sample
    # the time of the turn that is done, if it is comparable with other turns' times
    newest: TurnTime | None = None


def costs_of(run: Run, engine: Engine) -> EngineCosts:
    """Return the costs of the engine."""
    engines: dict[EngineId, EngineCosts] = run.parts[Costs].engines
    costs = engines.get(engine.id)
    if costs is None:
        costs = engines[engine.id] = EngineCosts()
    return costs


def turn_costs_of(run: Run, trajectory: Trajectory) -> TurnCosts:
    """Return the costs of the trajectory's turn."""
    costs: dict[TrajectoryId, TurnCosts] = run.parts[Costs].trajectories
    return costs[trajectory.id]
