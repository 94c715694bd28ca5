"""What to do: every output of the core. A world executes each command and reports what
came of it as events.

The comment of each command names the events that may answer it. A command never fails
silently: what cannot be executed is answered by the failing event.
"""

from rollweave.schema.base import EngineId, GroupId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.prediction import LengthContext
from rollweave.schema.work import Decoding, Purpose, StopReason, Task


class DrawTask(TaggedStruct, frozen=True, kw_only=True):
    """Draw task number `index` of task domain `name` from the split of `purpose`. →
    GroupSubmitted | DrawFailed
    """

    group_id: GroupId
    name: str
    index: int
    purpose: Purpose


class StartInit(TaggedStruct, frozen=True, kw_only=True):
    """Start the environment of an attempt. → EnvReady | TrajectoryEnded (environment
    failed to start)
    """

    trajectory_id: TrajectoryId
    attempt: int
    group_id: GroupId
    member: int
    task: Task
    purpose: Purpose
    initiated_version: int
    decoding: Decoding = Decoding()


class StartRun(TaggedStruct, frozen=True, kw_only=True):
    """Let the episode go. → TurnRequested … TrajectoryEnded"""

    trajectory_id: TrajectoryId
    attempt: int


class StartTurn(TaggedStruct, frozen=True, kw_only=True):
    """Answer the episode's open turn with this engine; `dispatch` fences late
    answers. → TurnDone | TurnFailed

    With `resume` it goes on from what the tries before have sampled of it, as far as
    that is known: to be asked for only of an engine with the weights that sampled it.
    Without, it begins again, and what was sampled is forgotten.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    rank: float
    dispatch: int
    resume: bool = False


class AbortTurn(TaggedStruct, frozen=True, kw_only=True):
    """Stop the generation on this engine; the episode goes on waiting, and `StartTurn`
    may resume. No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    dispatch: int


class RerankTurn(TaggedStruct, frozen=True, kw_only=True):
    """Change the rank of a turn on this engine, which preempts by rank
    (engine/planner/batching). No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    engine_id: EngineId
    dispatch: int
    rank: float


class StartEval(TaggedStruct, frozen=True, kw_only=True):
    """Score the ended trajectory (its environment is already freed). → RewardReady |
    RewardFailed
    """

    trajectory_id: TrajectoryId
    attempt: int


class CancelTrajectory(TaggedStruct, frozen=True, kw_only=True):
    """Stop generation, environment and timers of the attempt, in whatever stage. →
    TrajectoryEnded with `reason`
    """

    trajectory_id: TrajectoryId
    attempt: int
    reason: StopReason


class Evict(TaggedStruct, frozen=True, kw_only=True):
    """These scored trajectories will not be trained on (again); the store may forget
    their tokens. No answer is owed.
    """

    trajectory_ids: tuple[TrajectoryId, ...]
    reason: str


class Deliver(TaggedStruct, frozen=True, kw_only=True):
    """A trajectory that was asked for is over, whatever came of it. `attempt` is in the
    store if it was `started`.

    → RolloutAcknowledged. It is said again after a restart, until that comes.
    """

    trajectory_id: TrajectoryId
    attempt: int
    stop_reason: StopReason
    started: bool


# Lengths.


class Predict(TaggedStruct, frozen=True, kw_only=True):
    """Predict how many tokens the attempt will yet sample, while turn `turn`, the next
    one, waits and runs.

    → PredictionReady. No answer is owed: where none comes, or too late, the last
      estimate holds.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context: LengthContext


class Harvest(TaggedStruct, frozen=True, kw_only=True):
    """The attempt is over after `output_tokens` sampled ones: the predictor may learn
    from what it was asked about it.

    None: it was cut off, and teaches nothing. No answer is owed.
    """

    trajectory_id: TrajectoryId
    attempt: int
    output_tokens: int | None


class FitPredictor(TaggedStruct, frozen=True, kw_only=True):
    """A step is trained: fit the predictor to what it has harvested.

    No answer is owed.
    """

    step: int


class Migrate(TaggedStruct, frozen=True, kw_only=True):
    """Copy the KV of the attempt's context from engine to engine, while its environment
    works (Heddle §5.3).

    Or while its open turn is with no engine: then what is known of that belongs to the
    context. `number` is unique in the run.
    → MigrationDone
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    source: EngineId
    target: EngineId


# Engines.


class StartEngine(TaggedStruct, frozen=True, kw_only=True):
    """Start an engine of parallel degree `degree`, like those of its group, epoch 0. →
    EngineJoined | EngineLost
    """

    engine_id: EngineId
    degree: int
    group: int = 0


class SuspendEngine(TaggedStruct, frozen=True, kw_only=True):
    """→ EngineSuspended | EngineLost"""

    engine_id: EngineId


class LoadWeights(TaggedStruct, frozen=True, kw_only=True):
    """Load published weights from memory of the engine's host, or from the checkpoint
    of step `from_checkpoint`.

    → WeightsLoaded | WeightsLoadFailed | EngineLost
    """

    engine_id: EngineId
    version: int
    weights_id: int
    from_checkpoint: int | None = None


class ResumeEngine(TaggedStruct, frozen=True, kw_only=True):
    """No answer is owed."""

    engine_id: EngineId


class RestartEngine(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the process and start it again as `epoch`. → EngineJoined |
    EngineLost
    """

    engine_id: EngineId
    degree: int
    group: int = 0
    epoch: int
    reason: str


class RemoveEngine(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process for good. No answer is owed."""

    engine_id: EngineId
    reason: str


# Relays.


class FetchWeights(TaggedStruct, frozen=True, kw_only=True):
    """Have the relay get these weights from the relay `source`, or (None) from the
    trainer, whole or as a change of `base_id`.

    A source may still be taking them itself. Said again of the same weights, it goes on
    where it stood, and only the last `try_number` is answered. Weights that are neither
    in `keep` nor the base may go. → WeightsFetched | FetchFailed | RelayLost
    """

    relay_id: str
    weights_id: int
    try_number: int
    base_id: int | None = None
    source: str | None = None
    keep: tuple[int, ...] = ()


class RestartRelay(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the process and start it again as `epoch`, without weights.
    → RelayJoined | RelayLost
    """

    relay_id: str
    epoch: int
    reason: str


class RemoveRelay(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process for good: its machine is given up. No answer is owed."""

    relay_id: str
    reason: str


# Trainer.


class GroupRef(Struct, frozen=True, kw_only=True):
    id: GroupId
    name: str
    trajectory_ids: tuple[TrajectoryId, ...]


class TrainStep(TaggedStruct, frozen=True, kw_only=True):
    """Train mini-batch `part` of `parts` of step `step`: the weights are at version
    `step`.

    → StepTrained | TrainFailed | TrainerLost
    """

    step: int
    part: int
    parts: int
    groups: tuple[GroupRef, ...]


class MeasureRatios(TaggedStruct, frozen=True, kw_only=True):
    """How far the trainer's weights, before mini-batch `part` of step `step`, are from
    those that sampled these groups.

    → RatiosMeasured | TrainFailed | TrainerLost
    """

    step: int
    part: int
    groups: tuple[GroupRef, ...]


class PublishWeights(TaggedStruct, frozen=True, kw_only=True):
    """Publish the trainer's weights, after restoring checkpoint `from_checkpoint` where
    given. Others than `keep` may go.

    → WeightsPublished | TrainerLost
    """

    version: int
    weights_id: int
    from_checkpoint: int | None = None
    keep: tuple[int, ...] = ()


class SaveCheckpoint(TaggedStruct, frozen=True, kw_only=True):
    """Save model and optimizer, atomically; keep the steps `keep` too and prune all
    others.

    The trainer copies them and may then train on while the copy is written.
    → CheckpointCopied?, then CheckpointSaved | CheckpointFailed | TrainerLost
    """

    step: int
    keep: tuple[int, ...]
    export: bool


class RestartTrainer(TaggedStruct, frozen=True, kw_only=True):
    """Kill what is left of the trainer, start it as `epoch` and restore checkpoint
    `step` (None: start afresh).

    Where that one is damaged, `fallback` is restored, if there is one. → TrainerReady |
    TrainerLost
    """

    epoch: int
    step: int | None
    reason: str
    fallback: int | None = None


# The run.


class RecordEvaluation(TaggedStruct, frozen=True, kw_only=True):
    """An evaluation of weight version `version` is complete. Rates are by task domain,
    over `episodes` scored episodes each.

    `success` has the domains whose environment defines success. `target_reached`: it
    reached `eval.stop_at`; training ends.
    """

    version: int
    final: bool
    success: dict[str, float]
    reward: dict[str, float]
    episodes: dict[str, int]
    failed: dict[str, int]
    target_reached: bool = False


class MarkBest(TaggedStruct, frozen=True, kw_only=True):
    """Checkpoint `step` has the best evaluation so far. No answer is owed."""

    step: int


class SetTimer(TaggedStruct, frozen=True, kw_only=True):
    """Send `TimerFired` at time `at`; replaces the timer set before."""

    at: float


class Warn(TaggedStruct, frozen=True, kw_only=True):
    """Tell the user: which component, and what was done about it."""

    component: str
    message: str


class Finish(TaggedStruct, frozen=True, kw_only=True):
    """The run is over; `error` is empty when all went well. Nothing follows."""

    error: str


Command = (
    DrawTask
    | StartInit
    | StartRun
    | StartTurn
    | AbortTurn
    | RerankTurn
    | StartEval
    | CancelTrajectory
    | Evict
    | Deliver
    | Predict
    | Harvest
    | FitPredictor
    | Migrate
    | StartEngine
    | SuspendEngine
    | LoadWeights
    | ResumeEngine
    | RestartEngine
    | RemoveEngine
    | FetchWeights
    | RestartRelay
    | RemoveRelay
    | TrainStep
    | MeasureRatios
    | PublishWeights
    | SaveCheckpoint
    | RestartTrainer
    | RecordEvaluation
    | MarkBest
    | SetTimer
    | Warn
    | Finish
)
