"""Events: every input of the core. A journal is the list of `(now, event)`; replaying
it rebuilds the core.

Events about a trajectory carry its `attempt`, and events about an engine, a relay or
the trainer carry the `epoch` of the process, its generation counted from 0. The core
ignores events of an earlier attempt or epoch. Text in events is for people; no decision
reads it.
"""

from typing import Literal

from rollweave.schema.base import EngineId, GroupId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.hosts import HostSlot, RankSlot
from rollweave.schema.work import Decoding, Measures, StopReason, Task


class EngineSlot(Struct, frozen=True, kw_only=True):
    """An engine that the world starts. `degree` is its parallel degree: CPU threads, or
    GPUs that share every layer.

    `group` is the index of its group of engines in the configuration, from 0. It runs
    on `devices` of host number `host`, or on the CPU there. `pool` is the pool through
    which it got this place: its group's pool or a fallback of this pool; empty without
    a pool.
    """

    id: EngineId
    degree: int = 1
    group: int = 0
    host: int = 0
    devices: tuple[int, ...] = ()
    pool: str = ""
    lender: str = ""  # the serving engine that lends itself; "" for an engine of the run


class WorkerSlot(Struct, frozen=True, kw_only=True):
    """A rollout worker that the world starts on host number `host`."""

    id: str
    host: int = 0


class RunStarted(TaggedStruct, frozen=True, kw_only=True):
    """The world is up for the first time, and starts the engines `engines`.

    A world with `serving` has no trainer and runs the rollouts that clients submit.
    `hosts` are numbered from 0; without hosts, everything is on one host. The world
    starts a relay on each of the first `relays` hosts: r0, r1, …. `ranks` are the
    trainer's. Attempts run in `workers`; without workers, in the controller. `run_id`
    identifies the run, so that its journal cannot be mistaken for another run's, and
    `life` the life of its controller.
    """

    engines: tuple[EngineSlot, ...]
    hosts: tuple[HostSlot, ...] = ()
    ranks: tuple[RankSlot, ...] = ()
    workers: tuple[WorkerSlot, ...] = ()
    serving: bool = False
    relays: int = 0
    run_id: str = ""
    life: str = ""


class WorldLost(TaggedStruct, frozen=True, kw_only=True):
    """The controller was restarted, and every process of the former world is gone
    (docs/decisions/0007).

    Trajectories in flight start again as new attempts; `recorded` names the
    trajectories whose turns are on disk (record/turn_log.py). Scored trajectories
    survive, except `missing`, which the store lacks. `life` identifies the new life of
    the controller.
    """

    engines: tuple[EngineSlot, ...]
    hosts: tuple[HostSlot, ...] = ()
    ranks: tuple[RankSlot, ...] = ()
    workers: tuple[WorkerSlot, ...] = ()
    missing: tuple[TrajectoryId, ...] = ()
    recorded: tuple[TrajectoryId, ...] = ()
    relays: int = 0
    life: str = ""


class StopRequested(TaggedStruct, frozen=True, kw_only=True):
    """The user asks for an orderly end: cancel everything in flight, save a checkpoint,
    finish.

    With `drain`, a service first completes the rollouts that were submitted.
    """

    drain: bool = False


class TimerFired(TaggedStruct, frozen=True, kw_only=True):
    """The timer that `SetTimer` requested has fired."""


# Work.


class GroupSubmitted(TaggedStruct, frozen=True, kw_only=True):
    """The task that `DrawTask` requested has been drawn."""

    group_id: GroupId
    task: Task


class DrawFailed(TaggedStruct, frozen=True, kw_only=True):
    """The task source raised. The environment's code is wrong, and the run ends with
    this error.
    """

    group_id: GroupId
    error: str


class RolloutsSubmitted(TaggedStruct, frozen=True, kw_only=True):
    """A client submits `members` attempts at a task of domain `name`.

    A group that is already known is not started twice.
    """

    group_id: GroupId
    name: str
    task: Task
    members: int = 1
    decoding: Decoding = Decoding()


class RolloutCancelled(TaggedStruct, frozen=True, kw_only=True):
    """The client cancelled this trajectory."""

    trajectory_id: TrajectoryId


class RolloutAcknowledged(TaggedStruct, frozen=True, kw_only=True):
    """The requester has durably stored the result announced by `Deliver`."""

    trajectory_id: TrajectoryId


class EnvReady(TaggedStruct, frozen=True, kw_only=True):
    """The environment has started its task; the first prompt has `prompt_tokens`
    tokens.
    """

    trajectory_id: TrajectoryId
    attempt: int
    prompt_tokens: int = 0


class AttemptDelayed(TaggedStruct, frozen=True, kw_only=True):
    """The attempt still waits for something shared, such as an image: the time limit of
    its stage begins again.
    """

    trajectory_id: TrajectoryId
    attempt: int


class TurnRequested(TaggedStruct, frozen=True, kw_only=True):
    """The episode needs the agent's next message.

    `context_tokens` is the length of the prompt so far. If `streamed`, an agent program
    reads the tokens while they are sampled, so that they should not change.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context_tokens: int
    streamed: bool = False


class TurnDone(TaggedStruct, frozen=True, kw_only=True):
    """The engine has completed the turn. The environment works until the next
    `TurnRequested` or `TrajectoryEnded`.

    `queue_s` is the part of the time since `StartTurn` that the turn waited on the
    engine, before its first slot and while preempted. `cut` is true if the turn ended
    at the task's `max_turn_tokens`, and not because the agent was done. With
    `replayed`, the answer was recorded before the controller was lost, and no engine
    has worked.
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
    replayed: bool = False


class PrefillDone(TaggedStruct, frozen=True, kw_only=True):
    """The engine has cached the KV of the turn's context; the KV of `cached_tokens`
    tokens was cached before. The turn is sampled by another dispatch.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    cached_tokens: int


class TurnFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine did not complete the turn: it was lost, the turn was aborted, or the
    engine reported an error.

    The episode still waits for the turn.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    error: str


class TurnWithdrawn(TaggedStruct, frozen=True, kw_only=True):
    """The agent program gave up this call. The turn is no longer needed, and the
    attempt continues.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int


class TurnProgress(Struct, frozen=True, kw_only=True):
    """`output_tokens` of the open turn have been sampled, including the tokens that
    this dispatch resumed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int
    output_tokens: int


TURN_REPORT_INTERVAL_S = 2.0
"""Seconds between two `TurnsProgressed`: several for each migration plan, which Laminar
makes every 5 s.
"""


class TurnsProgressed(TaggedStruct, frozen=True, kw_only=True):
    """A periodic report on long turns, sent only where unfinished turns are kept."""

    turns: tuple[TurnProgress, ...]


class TrajectoryEnded(TaggedStruct, frozen=True, kw_only=True):
    """INIT or RUN is over and the environment is closed.

    This event also answers `CancelTrajectory`.
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
    """EVAL failed: the reward function raised, returned garbage, or hung."""

    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    error: str


class GroupCompared(TaggedStruct, frozen=True, kw_only=True):
    """The members of a group have been compared, and their new rewards are in the
    store. Members that are not in `rewards` have no reward, because of `error`.
    """

    group_id: GroupId
    rewards: dict[TrajectoryId, float]
    error: str = ""


# Lengths.


class PredictionReady(TaggedStruct, frozen=True, kw_only=True):
    """The predictor expects the attempt to sample about `remaining_tokens` more tokens,
    as seen before turn `turn`.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    remaining_tokens: float


class MigrationDone(TaggedStruct, frozen=True, kw_only=True):
    """The target holds the KV of the first `moved_tokens` tokens of the context.

    If the migration failed, `moved_tokens` is 0 and `error` says why.
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    moved_tokens: int
    error: str = ""


# Engines.


class StepTime(Struct, frozen=True, kw_only=True):
    """A measurement: one decode step of `batch` sequences with `context` tokens each
    takes `seconds`.
    """

    batch: int
    seconds: float
    context: int = 0


class EngineJoined(TaggedStruct, frozen=True, kw_only=True):
    """The process is ready, and stale until it has loaded weights. `profile` holds the
    step times that it measured, if requested; `stages`, `moves_kv`, `preempts` and
    `lent` are as in `Ready`.

    `version` is the version of the weights that it serves already; only engines of a
    service have a version.
    """

    engine_id: EngineId
    epoch: int
    max_slots: int
    kv_total_tokens: int
    version: int = -1
    profile: tuple[StepTime, ...] = ()
    stages: bool = False
    moves_kv: bool = True
    preempts: bool = True
    lent: bool = False


class Lender(Struct, frozen=True, kw_only=True):
    """A serving engine that lends its slack (ROSE §4).

    `kv_use` is the mean share of its KV memory that serving has used over the last hour
    or so, and `lent_to` the name of the run to which it is lent. It `takes` turns
    unless serving needs all of it now; if it is `recalled`, it must be given back
    immediately. `host` is the number of the host that lends it; -1 in simulations,
    where lenders are no hosts.
    """

    name: str
    kv_use: float
    host: int = -1
    lent_to: str = ""
    takes: bool = True
    recalled: bool = False


class LendersReported(TaggedStruct, frozen=True, kw_only=True):
    """All serving engines that lend, or could. This heartbeat renews the leases of
    borrowed engines.
    """

    lenders: tuple[Lender, ...]


class KvReported(TaggedStruct, frozen=True, kw_only=True):
    """The engine's turns hold the KV of `used` tokens, as the engine itself counts
    them. Posted in mode decoupled with each heartbeat, unless it is 0 again.
    """

    engine_id: EngineId
    epoch: int
    used: int


class TurnReturned(TaggedStruct, frozen=True, kw_only=True):
    """A borrowed engine gave the turn back, because serving needs its memory or its
    time. This is not a failure: the turn continues elsewhere with the tokens that it
    has.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    dispatch: int


class EngineRegistered(TaggedStruct, frozen=True, kw_only=True):
    """A new engine is offered to a service, or a training run is asked to start one."""

    engine: EngineSlot


class EngineWithdrawn(TaggedStruct, frozen=True, kw_only=True):
    """The engine is to leave: once its turns are done (`drain`), or now, and its turns
    are requeued.
    """

    engine_id: EngineId
    drain: bool


class EngineSuspended(TaggedStruct, frozen=True, kw_only=True):
    """The engine takes no steps until it is resumed."""

    engine_id: EngineId
    epoch: int


class WeightsStaged(TaggedStruct, frozen=True, kw_only=True):
    """The engine has received and verified these weights, and still serves the former
    weights.
    """

    engine_id: EngineId
    epoch: int
    publication_id: int


class StagingFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine cannot receive these weights while it serves. It still serves the
    former weights.
    """

    engine_id: EngineId
    epoch: int
    publication_id: int
    error: str


class WeightsLoaded(TaggedStruct, frozen=True, kw_only=True):
    """The engine serves these weights."""

    engine_id: EngineId
    epoch: int
    version: int
    publication_id: int


class WeightsLoadFailed(TaggedStruct, frozen=True, kw_only=True):
    """The engine rejected the weights and still serves the former weights."""

    engine_id: EngineId
    epoch: int
    publication_id: int
    error: str


class EngineLost(TaggedStruct, frozen=True, kw_only=True):
    """The process or its connection is gone. This one event fails all turns that it
    served.
    """

    engine_id: EngineId
    epoch: int
    error: str


# Hosts.


class HostJoined(TaggedStruct, frozen=True, kw_only=True):
    """A host has joined during the run. No number is used twice in a world, not even
    for a host that was lost and joins again.
    """

    host: HostSlot


class HostLost(TaggedStruct, frozen=True, kw_only=True):
    """A host can no longer be reached; its agent ends all processes there. The losses
    of these processes follow.
    """

    host: int
    error: str


# Workers.


class WorkerJoined(TaggedStruct, frozen=True, kw_only=True):
    """The process takes attempts."""

    worker_id: str
    epoch: int


class WorkerLost(TaggedStruct, frozen=True, kw_only=True):
    """The process is gone or hangs. This one event ends all attempts that it had; their
    ends are stored already. `recorded` names the trajectories whose attempts there have
    turns on disk (record/turn_log.py), so that the next attempts may continue them.
    """

    worker_id: str
    epoch: int
    error: str
    recorded: tuple[TrajectoryId, ...] = ()


# Relays.


RefusalReason = Literal["source", "base", "broken", "room"]
"""Why a fetch failed; see `FetchFailed`."""


class RelayJoined(TaggedStruct, frozen=True, kw_only=True):
    """The process listens. It holds no weights."""

    relay_id: str
    epoch: int


class RelayLost(TaggedStruct, frozen=True, kw_only=True):
    """The process is gone or unresponsive, and the weights that it held are gone with
    it.
    """

    relay_id: str
    epoch: int
    error: str


class RelaySuspected(TaggedStruct, frozen=True, kw_only=True):
    """The relay has missed heartbeats: it may hang, or its machine may be busy. →
    RelayRecovered | RelayLost
    """

    relay_id: str
    epoch: int


class RelayRecovered(TaggedStruct, frozen=True, kw_only=True):
    """A suspected relay sends heartbeats again."""

    relay_id: str
    epoch: int


class WeightsFetched(TaggedStruct, frozen=True, kw_only=True):
    """The relay has these weights, complete and verified. Engines on its machine may
    load them. It received `nbytes` of them from relays of other hosts.
    """

    relay_id: str
    epoch: int
    publication_id: int
    nbytes: int = 0


class FetchStalled(TaggedStruct, frozen=True, kw_only=True):
    """No bytes have arrived from the relay `source` for a while.

    The fetch continues.
    """

    relay_id: str
    epoch: int
    publication_id: int
    source: str


class FetchFailed(TaggedStruct, frozen=True, kw_only=True):
    """The relay could not fetch these weights. It keeps the versions that it had.

    Reasons: "source": the source is gone, silent, or lacks them; "base": the base of
    the delta is missing or differs; "broken": the data is corrupt; "room": there is not
    enough memory.
    """

    relay_id: str
    epoch: int
    publication_id: int
    fetch_number: int
    reason: RefusalReason
    error: str


# Trainer.


class TrainerReady(TaggedStruct, frozen=True, kw_only=True):
    """A trainer process is up at training step `step`: 0 for a fresh trainer, else the
    step of the restored checkpoint. `note` says why another checkpoint than requested
    was restored.
    """

    epoch: int
    step: int
    note: str = ""


class StepTrained(TaggedStruct, frozen=True, kw_only=True):
    """Mini-batch `part` of step `step` is trained."""

    epoch: int
    step: int
    part: int


class GroupMeasures(Struct, frozen=True, kw_only=True):
    """The measures of one group."""

    id: GroupId
    measures: Measures


class GroupsMeasured(TaggedStruct, frozen=True, kw_only=True):
    """The measures of all groups that `MeasureGroups` named, in its order."""

    epoch: int
    step: int
    part: int
    groups: tuple[GroupMeasures, ...]


class TrainFailed(TaggedStruct, frozen=True, kw_only=True):
    """The step, or the measurement before it, failed. Weights and optimizer are
    unchanged.

    `nonfinite` is true if the loss, the gradient or a log-prob was NaN or infinite.
    """

    epoch: int
    step: int
    error: str
    nonfinite: bool


class WeightsPublished(TaggedStruct, frozen=True, kw_only=True):
    """The weights of this version can be fetched and loaded."""

    epoch: int
    version: int
    publication_id: int


class CheckpointCopied(TaggedStruct, frozen=True, kw_only=True):
    """A copy of the checkpoint is in memory. Training may continue while the copy is
    written. `CheckpointSaved` or `CheckpointFailed` follows.
    """

    epoch: int
    step: int


class CheckpointSaved(TaggedStruct, frozen=True, kw_only=True):
    """The checkpoint of step `step` is complete on disk."""

    epoch: int
    step: int


class CheckpointFailed(TaggedStruct, frozen=True, kw_only=True):
    """The checkpoint could not be written, for example because the disk is full.
    Earlier checkpoints are intact.
    """

    epoch: int
    step: int
    error: str


class TrainerLost(TaggedStruct, frozen=True, kw_only=True):
    """The trainer process is gone.

    `hopeless` is true if another trainer would fail in the same way, because no
    checkpoint can be read or the trainer cannot start.
    """

    epoch: int
    error: str
    hopeless: bool = False


Event = (
    RunStarted
    | WorldLost
    | StopRequested
    | TimerFired
    | HostJoined
    | HostLost
    | GroupSubmitted
    | DrawFailed
    | RolloutsSubmitted
    | RolloutCancelled
    | RolloutAcknowledged
    | EnvReady
    | AttemptDelayed
    | TurnRequested
    | TurnDone
    | TurnFailed
    | PrefillDone
    | TurnWithdrawn
    | TurnsProgressed
    | TrajectoryEnded
    | RewardReady
    | RewardFailed
    | GroupCompared
    | PredictionReady
    | MigrationDone
    | EngineJoined
    | EngineRegistered
    | LendersReported
    | KvReported
    | TurnReturned
    | EngineWithdrawn
    | EngineSuspended
    | WeightsStaged
    | StagingFailed
    | WeightsLoaded
    | WeightsLoadFailed
    | EngineLost
    | WorkerJoined
    | WorkerLost
    | RelayJoined
    | RelayLost
    | RelaySuspected
    | RelayRecovered
    | WeightsFetched
    | FetchStalled
    | FetchFailed
    | TrainerReady
    | StepTrained
    | GroupsMeasured
    | TrainFailed
    | WeightsPublished
    | CheckpointCopied
    | CheckpointSaved
    | CheckpointFailed
    | TrainerLost
)
