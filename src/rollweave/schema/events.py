"""What happened: every input of the core. A journal is the list of `(now, event)`;
replaying it rebuilds the core.

Events about a trajectory carry its `attempt`, events about an engine or trainer its
`epoch` (the how-manieth process): what comes late from an earlier life is ignored. Text
in events is for people; decisions never read it.
"""

from typing import Literal

from rollweave.schema.base import EngineId, GroupId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.work import Decoding, StopReason, Task


class EngineSlot(Struct, frozen=True, kw_only=True):
    """An engine that the world starts, and its parallel degree: CPU threads, or GPUs
    that share every layer.

    `group`: which one of the configuration's groups of engines, from 0, it is of.
    """

    id: EngineId
    degree: int = 1
    group: int = 0


class RunStarted(TaggedStruct, frozen=True, kw_only=True):
    """The world is up for the first time. `engines` are the engines that the world is
    starting.

    `serving`: it has no trainer, and runs what it is asked for. `relays`: it starts so
    many of them too, r0, r1, …: one a machine; engine number k is on machine k modulo
    their number. `run_id` identifies the run, so that its journal cannot be mistaken
    for another run's.
    """

    engines: tuple[EngineSlot, ...]
    serving: bool = False
    relays: int = 0
    run_id: str = ""


class WorldLost(TaggedStruct, frozen=True, kw_only=True):
    """The controller was restarted: every process of the old world is gone
    (docs/decisions/0007).

    In-flight trajectories start again as new attempts; scored ones survive, except
    `missing`, which the store lacks.
    """

    engines: tuple[EngineSlot, ...]
    missing: tuple[TrajectoryId, ...] = ()
    relays: int = 0


class StopRequested(TaggedStruct, frozen=True, kw_only=True):
    """The user asks for an orderly end: cancel what is in flight, save a checkpoint,
    finish.

    `drain`: what a service was asked for is done first.
    """

    drain: bool = False


class TimerFired(TaggedStruct, frozen=True, kw_only=True):
    """The watchdog's timer that `SetTimer` asked for."""


# Work.


class GroupSubmitted(TaggedStruct, frozen=True, kw_only=True):
    """The task that `DrawTask` asked for."""

    group_id: GroupId
    task: Task


class DrawFailed(TaggedStruct, frozen=True, kw_only=True):
    """The task source raised: the environment's code is wrong, and the run ends with
    this error.
    """

    group_id: GroupId
    error: str


class RolloutsSubmitted(TaggedStruct, frozen=True, kw_only=True):
    """Somebody asks for `members` attempts at a task of domain `name`.

    A group that is known is not begun twice.
    """

    group_id: GroupId
    name: str
    task: Task
    members: int = 1
    decoding: Decoding = Decoding()


class RolloutCancelled(TaggedStruct, frozen=True, kw_only=True):
    """Nobody wants this trajectory any more."""

    trajectory_id: TrajectoryId


class RolloutAcknowledged(TaggedStruct, frozen=True, kw_only=True):
    """Whoever asked for it has what `Deliver` spoke of, safely."""

    trajectory_id: TrajectoryId


class EnvReady(TaggedStruct, frozen=True, kw_only=True):
    """The environment has begun its task; the first turn's prompt has `prompt_tokens`
    tokens.
    """

    trajectory_id: TrajectoryId
    attempt: int
    prompt_tokens: int = 0


class TurnRequested(TaggedStruct, frozen=True, kw_only=True):
    """The episode wants the agent's next message.

    `context_tokens` is the length of the prompt so far.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context_tokens: int


class TurnDone(TaggedStruct, frozen=True, kw_only=True):
    """The engine answered; the environment works now, until the next `TurnRequested` or
    `TrajectoryEnded`.

    `queue_s` of the time since `StartTurn` the turn waited on the engine, for its first
    slot or after it was preempted. `cut`: the turn ended at the task's
    `max_turn_tokens`, not because the agent was done.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    output_tokens: int
    cached_tokens: int
    version: int
    queue_s: float = 0.0
    cut: bool = False


class TurnFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine failed to answer (lost, aborted by us, or an error).

    The episode still waits for the turn.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    error: str


class TurnWithdrawn(TaggedStruct, frozen=True, kw_only=True):
    """Nobody waits for this turn any more, and the attempt goes on: an agent program
    has given up a call.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int


class TurnProgress(Struct, frozen=True, kw_only=True):
    """`output_tokens` of the open turn are sampled, what this try resumed among them."""

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    output_tokens: int


class TurnsProgressed(TaggedStruct, frozen=True, kw_only=True):
    """How far turns have come that engines are long at: now and then, and only where
    unfinished turns are kept.
    """

    turns: tuple[TurnProgress, ...]


class TrajectoryEnded(TaggedStruct, frozen=True, kw_only=True):
    """INIT or RUN is over and the environment is closed.

    Also the answer to `CancelTrajectory`.
    """

    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    turns: int = 0
    tokens: int = 0
    error: str = ""


class RewardReady(TaggedStruct, frozen=True, kw_only=True):
    """EVAL is over and the trajectory is in the store."""

    trajectory_id: TrajectoryId
    attempt: int
    reward: float
    success: bool | None = None


class RewardFailed(TaggedStruct, frozen=True, kw_only=True):
    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    error: str


# Lengths.


class PredictionReady(TaggedStruct, frozen=True, kw_only=True):
    """The attempt will probably sample `remaining_tokens` more, as seen before turn
    `turn`.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    remaining_tokens: float


class MigrationDone(TaggedStruct, frozen=True, kw_only=True):
    """The target holds the KV of the first `moved_tokens` tokens of the context; of
    none where `error` says why.
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    moved_tokens: int
    error: str = ""


# Engines.


class StepTime(Struct, frozen=True, kw_only=True):
    """Measured: a step in which `batch` sequences, each with `context` tokens, decode a
    token each takes `seconds`.
    """

    batch: int
    seconds: float
    context: int = 0


class EngineJoined(TaggedStruct, frozen=True, kw_only=True):
    """The process is ready. It is stale until it has loaded weights. `profile` is what
    it measured of itself, if it did.

    `version`: of the weights that it serves already, in a service, which has no others.
    """

    engine_id: EngineId
    epoch: int
    max_slots: int
    kv_total_tokens: int
    version: int = -1
    profile: tuple[StepTime, ...] = ()


class EngineRegistered(TaggedStruct, frozen=True, kw_only=True):
    """There is to be one more engine: somebody offers it to a service, or asks a
    training run to start it.
    """

    engine: EngineSlot


class EngineWithdrawn(TaggedStruct, frozen=True, kw_only=True):
    """The engine is not to be used any more: when its turns are done (`drain`), or now,
    and they go elsewhere.
    """

    engine_id: EngineId
    drain: bool


class EngineSuspended(TaggedStruct, frozen=True, kw_only=True):
    engine_id: EngineId
    epoch: int


class WeightsLoaded(TaggedStruct, frozen=True, kw_only=True):
    engine_id: EngineId
    epoch: int
    version: int
    weights_id: int


class WeightsLoadFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine refused the weights and stays on those that it had."""

    engine_id: EngineId
    epoch: int
    weights_id: int
    error: str


class EngineLost(TaggedStruct, frozen=True, kw_only=True):
    """The process or its connection is gone; this one event fails all turns that it
    served.
    """

    engine_id: EngineId
    epoch: int
    error: str


# Relays.


RefusalReason = Literal["source", "base", "broken", "room"]


class RelayJoined(TaggedStruct, frozen=True, kw_only=True):
    """The process listens. It holds no weights."""

    relay_id: str
    epoch: int


class RelayLost(TaggedStruct, frozen=True, kw_only=True):
    """The process is gone, or says nothing any more, and the weights that it held with
    it.
    """

    relay_id: str
    epoch: int
    error: str


class RelaySuspected(TaggedStruct, frozen=True, kw_only=True):
    """Nothing has been heard of it for a moment: perhaps it hangs, perhaps its machine
    is busy. → RelayRecovered | RelayLost
    """

    relay_id: str
    epoch: int


class RelayRecovered(TaggedStruct, frozen=True, kw_only=True):
    """A suspected relay speaks again."""

    relay_id: str
    epoch: int


class WeightsFetched(TaggedStruct, frozen=True, kw_only=True):
    """The relay has these weights, whole and verified: engines on its machine may load
    them.
    """

    relay_id: str
    epoch: int
    weights_id: int


class FetchStalled(TaggedStruct, frozen=True, kw_only=True):
    """Nothing has come of them from the relay `source` for a moment.

    The take goes on.
    """

    relay_id: str
    epoch: int
    weights_id: int
    source: str


class FetchFailed(TaggedStruct, frozen=True, kw_only=True):
    """They have not come; what the relay held it still holds.

    Reasons: the `source` is gone, silent or lacks them; the `base` is not here, or not
    what the change was made from; what came is `broken`; there is no `room` in memory.
    """

    relay_id: str
    epoch: int
    weights_id: int
    try_number: int
    reason: RefusalReason
    error: str


# Trainer.


class TrainerReady(TaggedStruct, frozen=True, kw_only=True):
    """A trainer process is up at training step `step`: 0 when fresh, a checkpoint's
    step when restored.

    `note` says why it is not the checkpoint that was asked for first.
    """

    epoch: int
    step: int
    note: str = ""


class StepTrained(TaggedStruct, frozen=True, kw_only=True):
    epoch: int
    step: int
    part: int


class GroupRatio(Struct, frozen=True, kw_only=True):
    """The mean importance ratio of a group: above 0 and finite (`train/ratios.py`)."""

    id: GroupId
    ratio: float


class RatiosMeasured(TaggedStruct, frozen=True, kw_only=True):
    """Of every group that `MeasureRatios` named, in its order."""

    epoch: int
    step: int
    part: int
    ratios: tuple[GroupRatio, ...]


class TrainFailed(TaggedStruct, frozen=True, kw_only=True):
    """The step, or the measurement before it, left weights and optimizer as they were.

    `nonfinite`: the loss, the gradient or a log-prob was NaN or infinite.
    """

    epoch: int
    step: int
    error: str
    nonfinite: bool


class WeightsPublished(TaggedStruct, frozen=True, kw_only=True):
    epoch: int
    version: int
    weights_id: int


class CheckpointCopied(TaggedStruct, frozen=True, kw_only=True):
    """A copy of the checkpoint is in memory: training may continue while it is written.
    `CheckpointSaved` or `CheckpointFailed` follows.
    """

    epoch: int
    step: int


class CheckpointSaved(TaggedStruct, frozen=True, kw_only=True):
    epoch: int
    step: int


class CheckpointFailed(TaggedStruct, frozen=True, kw_only=True):
    """The disk is full, say. The checkpoints before it are untouched."""

    epoch: int
    step: int
    error: str


class TrainerLost(TaggedStruct, frozen=True, kw_only=True):
    """`hopeless`: another trainer would fail in the same way, since no checkpoint can
    be read, or it cannot start.
    """

    epoch: int
    error: str
    hopeless: bool = False


Event = (
    RunStarted
    | WorldLost
    | StopRequested
    | TimerFired
    | GroupSubmitted
    | DrawFailed
    | RolloutsSubmitted
    | RolloutCancelled
    | RolloutAcknowledged
    | EnvReady
    | TurnRequested
    | TurnDone
    | TurnFailed
    | TurnWithdrawn
    | TurnsProgressed
    | TrajectoryEnded
    | RewardReady
    | RewardFailed
    | PredictionReady
    | MigrationDone
    | EngineJoined
    | EngineRegistered
    | EngineWithdrawn
    | EngineSuspended
    | WeightsLoaded
    | WeightsLoadFailed
    | EngineLost
    | RelayJoined
    | RelayLost
    | RelaySuspected
    | RelayRecovered
    | WeightsFetched
    | FetchStalled
    | FetchFailed
    | TrainerReady
    | StepTrained
    | RatiosMeasured
    | TrainFailed
    | WeightsPublished
    | CheckpointCopied
    | CheckpointSaved
    | CheckpointFailed
    | TrainerLost
)
