"""Commands: every output of the core. A world executes each command and reports the
outcome as events.

The docstring of each command names the events that may answer it. No command fails
silently: a command that cannot be executed is answered by the failing event.
"""

from msgspec import field

from rollweave.schema.base import EngineId, GroupId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.hosts import RankSlot
from rollweave.schema.training import LengthContext
from rollweave.schema.work import Decoding, Purpose, StopReason, Task


class DrawTask(TaggedStruct, frozen=True, kw_only=True):
    """Draw task number `index` of task domain `name` from the split of `purpose`. →
    GroupSubmitted | DrawFailed
    """

    group_id: GroupId
    name: str
    index: int
    purpose: Purpose


class Continuation(Struct, frozen=True, kw_only=True):
    """An earlier attempt, lost with its worker or its controller, whose recorded turns
    a new attempt uses: the turns that weights up to `version` sampled, or all turns if
    `version` is None.
    """

    attempt: int
    version: int | None


class StartInit(TaggedStruct, frozen=True, kw_only=True):
    """Start the environment of an attempt in a worker, or in the controller ("").

    → EnvReady | TrajectoryEnded (if the environment failed to start). Until its end,
    the attempt may also be lost with its worker (WorkerLost), and AttemptDelayed may
    come at any time, in RUN and EVAL, too.

    With `continues`, a turn with the same context as the earlier attempt's turn is
    answered by the recorded tokens, or continues after them; `initiated_version` is
    then the earlier attempt's.
    """

    trajectory_id: TrajectoryId
    attempt: int
    group_id: GroupId
    member: int
    task: Task
    purpose: Purpose
    initiated_version: int
    decoding: Decoding = Decoding()
    worker: str = ""
    continues: Continuation | None = None


class StartRun(TaggedStruct, frozen=True, kw_only=True):
    """Start the episode. → TurnRequested … TrajectoryEnded"""

    trajectory_id: TrajectoryId
    attempt: int


class StartTurn(TaggedStruct, frozen=True, kw_only=True):
    """Run the episode's open turn on this engine. `dispatch` fences late answers. →
    TurnDone | TurnFailed | TurnReturned

    With `resume`, the turn continues after the tokens that earlier dispatches sampled,
    as far as the tokens are known. The core sets `resume` on an engine with the weights
    that sampled them, and for a turn whose tokens a program has read already. Without
    `resume`, the turn starts over and earlier tokens are discarded. With `prefill`, the
    engine only computes the KV of the context and of the earlier tokens, and keeps it
    in its cache for `Migrate`. → PrefillDone | TurnFailed
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    rank: float
    dispatch: int
    resume: bool = False
    prefill: bool = False


class AbortTurn(TaggedStruct, frozen=True, kw_only=True):
    """Stop the generation on this engine. The episode keeps waiting, and `StartTurn`
    may resume the turn. No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    dispatch: int


class RerankTurn(TaggedStruct, frozen=True, kw_only=True):
    """Change the rank of a turn on this engine, which preempts by rank
    (engine/batching). No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    dispatch: int
    rank: float


class StartEval(TaggedStruct, frozen=True, kw_only=True):
    """Score the ended trajectory, whose environment is already closed. → RewardReady |
    RewardFailed
    """

    trajectory_id: TrajectoryId
    attempt: int


class CompareGroup(TaggedStruct, frozen=True, kw_only=True):
    """Compare members of a group by the pairwise judges of its task domain. →
    GroupCompared

    `rewards` has the members with their other rewards. The simulated world takes these
    for the final rewards; the live world reads its store. `pairs` has the positions of
    the members to compare.
    """

    group_id: GroupId
    task: Task
    rewards: dict[TrajectoryId, float]
    pairs: tuple[tuple[int, int], ...]


class CancelComparison(TaggedStruct, frozen=True, kw_only=True):
    """The group is dropped: ask the judge no more about it. No answer is owed."""

    group_id: GroupId


class CancelTrajectory(TaggedStruct, frozen=True, kw_only=True):
    """Stop generation, environment and timers of the attempt, whatever its stage. The
    record gets the text `error` if it has none. → TrajectoryEnded with `reason`
    """

    trajectory_id: TrajectoryId
    attempt: int
    reason: StopReason
    error: str = ""


class Evict(TaggedStruct, frozen=True, kw_only=True):
    """The scored trajectories among these will not be trained on again, and the
    unscored trajectories will not be tried again: the store may discard their tokens,
    and the turn log their records. No answer is owed.
    """

    trajectory_ids: tuple[TrajectoryId, ...]
    reason: str


class Deliver(TaggedStruct, frozen=True, kw_only=True):
    """Announce to the requester that its trajectory is over, whatever the outcome. If
    `started`, the store has its `attempt`.

    → RolloutAcknowledged. The command is repeated after a restart until that event
    comes.
    """

    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    started: bool


# Lengths.


class Predict(TaggedStruct, frozen=True, kw_only=True):
    """Predict how many more tokens the attempt will sample, from its next turn `turn`
    on.

    → PredictionReady. No answer is owed: without a timely one, the last estimate stays.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context: LengthContext


class Harvest(TaggedStruct, frozen=True, kw_only=True):
    """The attempt is over after `output_tokens` sampled tokens: label the samples that
    the predictor collected from the attempt.

    `output_tokens` is None for an attempt that was cut off, whose samples are
    discarded. No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    output_tokens: int | None


class FitPredictor(TaggedStruct, frozen=True, kw_only=True):
    """Step `step` is trained, or a service has delivered another batch of rollouts: fit
    the predictor to the samples collected so far. No answer is owed.
    """

    step: int


class Migrate(TaggedStruct, frozen=True, kw_only=True):
    """Copy the KV of the attempt's context from engine to engine while its environment
    works (Heddle §5.3).

    The copy may also happen while its open turn is on no engine; the known tokens of
    that turn then belong to the context. `number` is unique in the run. → MigrationDone
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    source: EngineId
    target: EngineId


# Engines.


class StartEngine(TaggedStruct, frozen=True, kw_only=True):
    """Start an engine of parallel degree `degree` with the settings of its group, as
    epoch 0, on `devices` of a host or on the CPU there. With `lender`, borrow it from
    that serving engine, which may refuse; `RemoveEngine` gives it back.
    → EngineJoined | EngineLost
    """

    engine_id: EngineId
    degree: int
    group: int = 0
    host: int = 0
    devices: tuple[int, ...] = ()
    lender: str = ""


class SuspendEngine(TaggedStruct, frozen=True, kw_only=True):
    """Let the engine take no further steps. With `release`, it also gives back the
    memory of its weights and KV, until it loads weights. → EngineSuspended | EngineLost
    """

    engine_id: EngineId
    release: bool = False


class StageWeights(TaggedStruct, frozen=True, kw_only=True):
    """Let the engine receive and verify published weights from memory of its host while
    it serves, for a later `LoadWeights`. → WeightsStaged | StagingFailed | EngineLost
    """

    engine_id: EngineId
    version: int
    publication_id: int


class LoadWeights(TaggedStruct, frozen=True, kw_only=True):
    """Load published weights from memory of the engine's host, or from the checkpoint
    of step `from_checkpoint`. Staged weights are swapped in; for weights that are still
    being staged, the answer to `StageWeights` comes first.

    → WeightsLoaded | WeightsLoadFailed | EngineLost
    """

    engine_id: EngineId
    version: int
    publication_id: int
    from_checkpoint: int | None = None


class ResumeEngine(TaggedStruct, frozen=True, kw_only=True):
    """Let the engine take steps again. No answer is owed."""

    engine_id: EngineId


class RestartEngine(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the process and start it again as `epoch`. → EngineJoined |
    EngineLost
    """

    engine_id: EngineId
    degree: int
    group: int = 0
    host: int = 0
    devices: tuple[int, ...] = ()
    epoch: int
    reason: str


class RemoveEngine(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process for good. No answer is owed."""

    engine_id: EngineId
    reason: str


# Workers.


class RestartWorker(TaggedStruct, frozen=True, kw_only=True):
    """Kill the rest of the rollout worker's process and start it again as `epoch` on
    this host.

    → WorkerJoined | WorkerLost
    """

    worker_id: str
    host: int
    epoch: int
    reason: str


class RemoveWorker(TaggedStruct, frozen=True, kw_only=True):
    """End the process, or kill its rest; it is not started again for now. No answer is
    owed.
    """

    worker_id: str
    reason: str


# Relays.


class FetchWeights(TaggedStruct, frozen=True, kw_only=True):
    """Let the relay fetch these weights from the relay `source`, or from the trainer
    (None), in full or as a delta on `base_id`.

    The source may itself still be fetching them. A repeated command for the same
    weights continues where the fetch stood, and only the last `fetch_number` is
    answered. Weights that are neither in `keep` nor the base may be dropped.
    → WeightsFetched | FetchFailed | RelayLost
    """

    relay_id: str
    publication_id: int
    fetch_number: int
    base_id: int | None = None
    source: str | None = None
    keep: tuple[int, ...] = ()


class RestartRelay(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the process and start it again as `epoch`, without weights,
    or for the first time on a host that has joined. → RelayJoined | RelayLost
    """

    relay_id: str
    host: int
    epoch: int
    reason: str


class RemoveRelay(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process for good, because its machine is given up. No answer is owed."""

    relay_id: str
    reason: str


# Trainer.


class GroupRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A buffered group, and its trajectories that are trained on. `restored_to` has the
    trajectories that may have tokens of discarded weights, with the step to which the
    trainer was restored since: later versions of their tokens are of those weights.
    """

    id: GroupId
    name: str
    trajectory_ids: tuple[TrajectoryId, ...]
    restored_to: dict[TrajectoryId, int] = field(default_factory=dict)


class TrainStep(TaggedStruct, frozen=True, kw_only=True):
    """Train mini-batch `part` of `parts` of step `step`, which starts from the weights
    of version `step`.

    → StepTrained | TrainFailed | TrainerLost
    """

    step: int
    part: int
    parts: int
    groups: tuple[GroupRef, ...]


class MeasureGroups(TaggedStruct, frozen=True, kw_only=True):
    """Measure these groups under the trainer's weights, before mini-batch `part` of
    step `step`. → GroupsMeasured | TrainFailed | TrainerLost
    """

    step: int
    part: int
    groups: tuple[GroupRef, ...]


class PublishWeights(TaggedStruct, frozen=True, kw_only=True):
    """Publish the trainer's weights, after restoring checkpoint `from_checkpoint` if
    given. Versions other than `keep` may be dropped. With `release`, the trainer then
    gives back the memory of its devices, until it trains.

    → WeightsPublished | TrainerLost
    """

    version: int
    publication_id: int
    from_checkpoint: int | None = None
    keep: tuple[int, ...] = ()
    release: bool = False


class SaveCheckpoint(TaggedStruct, frozen=True, kw_only=True):
    """Save model and optimizer atomically, keep the checkpoints of the steps `keep`,
    and prune all others.

    The trainer copies its state and may then train on while the copy is written. →
    CheckpointCopied (optional), then CheckpointSaved | CheckpointFailed | TrainerLost
    """

    step: int
    keep: tuple[int, ...]
    export: bool


class RestartTrainer(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the trainer, start it as `epoch` and restore the checkpoint
    of step `step`, or start fresh (None).

    If that checkpoint is damaged, the checkpoint of step `fallback` is restored, if
    there is one. `ranks` are the places of its ranks. → TrainerReady | TrainerLost
    """

    epoch: int
    step: int | None
    reason: str
    fallback: int | None = None
    ranks: tuple[RankSlot, ...] = ()


# The run.


class RecordEvaluation(TaggedStruct, frozen=True, kw_only=True):
    """Record the complete evaluation of weight version `version`. Rates are per task
    domain, over `episodes` scored episodes each, of `distinct` tasks.

    `success` has the domains whose environment defines success. With `target_reached`,
    the evaluation reached `eval.stop_at` and training ends. `last_failure` has the stop
    reason of the last of the `failed` episodes. No answer is owed.
    """

    version: int
    final: bool
    success: dict[str, float]
    reward: dict[str, float]
    episodes: dict[str, int]
    failed: dict[str, int]
    distinct: dict[str, int]
    last_failure: str = ""
    target_reached: bool = False


class MarkBest(TaggedStruct, frozen=True, kw_only=True):
    """Record that the checkpoint of step `step` has the best evaluation so far. No
    answer is owed.
    """

    step: int


class SetTimer(TaggedStruct, frozen=True, kw_only=True):
    """Send `TimerFired` at time `at`. This replaces the timer set before. →
    TimerFired
    """

    at: float


class Warn(TaggedStruct, frozen=True, kw_only=True):
    """Show the user a warning: the component, and what was done about it. No answer is
    owed.
    """

    component: str
    message: str


class Finish(TaggedStruct, frozen=True, kw_only=True):
    """The run is over. `error` is empty if all went well. Nothing follows."""

    error: str


Command = (
    DrawTask
    | StartInit
    | StartRun
    | StartTurn
    | AbortTurn
    | RerankTurn
    | StartEval
    | CompareGroup
    | CancelComparison
    | CancelTrajectory
    | Evict
    | Deliver
    | Predict
    | Harvest
    | FitPredictor
    | Migrate
    | StartEngine
    | SuspendEngine
    | StageWeights
    | LoadWeights
    | ResumeEngine
    | RestartEngine
    | RemoveEngine
    | RestartWorker
    | RemoveWorker
    | FetchWeights
    | RestartRelay
    | RemoveRelay
    | TrainStep
    | MeasureGroups
    | PublishWeights
    | SaveCheckpoint
    | RestartTrainer
    | RecordEvaluation
    | MarkBest
    | SetTimer
    | Warn
    | Finish
)
