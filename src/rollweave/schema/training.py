"""The messages between the controller and the trainer's processes, and the metrics of a
training step; and the messages about remaining lengths: the features of a running
trajectory, and the protocol of a predictor process (Heddle §4.1).
"""

from rollweave.schema.base import Struct, TaggedStruct, TrajectoryId
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, Measures, ScoredGroup

PROMPT_TOKENS = 256
"""Maximum number of tokens of a prompt from which lengths are predicted, the last ones:
a chat template and its system message come first.
"""


class TrainOn(TaggedStruct, frozen=True, kw_only=True):
    """Train on one (mini-)batch: the optimizer advances, the version does not.

    Answered by `Trained` or `TrainFailed`.
    """

    batch: Batch


class Measure(TaggedStruct, frozen=True, kw_only=True):
    """Measure these groups under the current weights, before mini-batch `part` of step
    `step`: what the configured `buffer.sample` chooses by, or all that can be measured
    for a user's function.

    The trainer's state does not change. Answered by `Measured` or `TrainFailed`.
    """

    step: int
    part: int
    groups: tuple[ScoredGroup, ...]


class Publish(TaggedStruct, frozen=True, kw_only=True):
    """Publish the current weights as `version`, and release all other versions that are
    not in `keep`. With `release`, give back the memory of the devices then, until the
    next `TrainOn` or `Measure`.

    Answered by `Published` or `TrainFailed`.
    """

    version: int
    publication_id: int
    keep: tuple[int, ...] = ()
    release: bool = False


class Save(TaggedStruct, frozen=True, kw_only=True):
    """Write a complete checkpoint of model, optimizer, schedule and RNG to directory
    `path`, atomically.

    `export` additionally writes a Hugging Face checkpoint (config, safetensors,
    tokenizer) under `path/hf`. Answered by `Saved` or `SaveFailed`. With `background`,
    answered by `Copied`; `Saved` or `SaveFailed` follows later, among the answers to
    other commands.
    """

    path: str
    export: bool = False
    background: bool = False


class Restore(TaggedStruct, frozen=True, kw_only=True):
    """Load a checkpoint written by `Save`. Answered by `Restored` or `TrainFailed`."""

    path: str


class StopTrainer(TaggedStruct, frozen=True, kw_only=True):
    pass


TrainerCommand = TrainOn | Measure | Publish | Save | Restore | StopTrainer


class TrainerReady(TaggedStruct, frozen=True, kw_only=True):
    parameters: int


class TrainMetrics(Struct, frozen=True, kw_only=True):
    """Metrics of one (mini-)batch: `values` has stable, documented names (see
    `train/update.py`).
    """

    values: dict[str, float]
    tokens: int
    train_s: float


class Trained(TaggedStruct, frozen=True, kw_only=True):
    step: int
    part: int
    metrics: TrainMetrics


class Measured(TaggedStruct, frozen=True, kw_only=True):
    """The measures of each group, in the order of the command."""

    groups: tuple[Measures, ...]


class TrainFailed(TaggedStruct, frozen=True, kw_only=True):
    """A command failed. `nonfinite` marks a NaN or infinite loss: weights and optimizer
    are as before the step. `groups` names the groups of the batch.
    """

    error: str
    nonfinite: bool = False
    groups: tuple[str, ...] = ()


class Published(TaggedStruct, frozen=True, kw_only=True):
    """The version is published, in parts if its ranks are on several hosts. `doubts`
    say what has failed of earlier broadcasts.
    """

    manifest: WeightManifest
    publish_s: float
    doubts: tuple[str, ...] = ()


class Copied(TaggedStruct, frozen=True, kw_only=True):
    """A copy of the checkpoint is in memory and is being written. Copying took `copy_s`
    seconds.
    """

    path: str
    copy_s: float


class Saved(TaggedStruct, frozen=True, kw_only=True):
    path: str
    save_s: float


class SaveFailed(TaggedStruct, frozen=True, kw_only=True):
    path: str
    error: str


class Restored(TaggedStruct, frozen=True, kw_only=True):
    step: int


TrainerReply = Trained | Measured | TrainFailed | Published | Copied | Saved | SaveFailed | Restored


class LengthContext(Struct, frozen=True, kw_only=True):
    """Describes a trajectory before turn `turn`: its task, its progress, and the
    lengths observed in its group. Lengths are in tokens. Unless it is `answered`, the
    environment has not answered the turn before.

    `siblings` members of its group have ended, after `sibling_mean` sampled tokens on
    average and `sibling_longest` at most. The world adds what it alone holds: `reward`
    (of the steps so far), `plan` (the first tokens of the first turn), `prompt` (the
    last tokens of the first turn's prompt), and `state`, which the engine of the turn
    before gave with it (`GenerateResult.state`), if it gave one.
    """

    domain: str
    prompt_tokens: int
    turn: int
    output_tokens: int
    last_output_tokens: int
    observation_tokens: int
    tool_s: float
    siblings: int
    sibling_mean: float
    sibling_longest: int
    answered: bool = True
    reward: float = 0.0
    plan: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    state: tuple[float, ...] = ()


class PredictorSpec(Struct, frozen=True, kw_only=True):
    """Describes how to build a predictor.

    `checkpoint` is the directory of the language model with which regressor `lm` reads
    prompts and plans.
    """

    regressor: str
    checkpoint: str | None = None


# Messages to a predictor, which processes them in the order in which they were sent.


class PredictionRequest(TaggedStruct, frozen=True, kw_only=True):
    """Ask for the remaining length. `number` increases from request to request."""

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    context: LengthContext


class RecordLength(TaggedStruct, frozen=True, kw_only=True):
    """Record that the attempt ended after `output_tokens` sampled tokens, or None if it
    is not usable for training.
    """

    trajectory_id: TrajectoryId
    attempt: int
    output_tokens: int | None


class Fit(TaggedStruct, frozen=True, kw_only=True):
    """Fit the regressor to the recorded lengths."""


class StopPredictor(TaggedStruct, frozen=True, kw_only=True):
    """End the process; no message follows."""


PredictorMessage = PredictionRequest | RecordLength | Fit | StopPredictor


# A predictor reports after every few messages that it processed together.


class PredictedLength(Struct, frozen=True, kw_only=True):
    number: int
    remaining_tokens: float


class PredictorReport(Struct, frozen=True, kw_only=True):
    """`processed` messages since the start, with the answers to all requests among
    them.

    `failed` counts fits and predictions that failed since the start, and `fits` the
    fits that succeeded, in `fit_s` seconds altogether. `pairs` is the number of pairs
    available for training.
    """

    processed: int
    answers: tuple[PredictedLength, ...] = ()
    failed: int = 0
    fits: int = 0
    fit_s: float = 0.0
    pairs: int = 0


class PredictorStats(Struct, frozen=True, kw_only=True):
    """The outcome of all requests of a run: the `requests` are `answered`,
    pending, or `lost` with a predictor that died.

    `dropped` requests were not sent, because too many were pending or no predictor was
    running. `failed` counts the fits and predictions that failed and were replaced.
    Latencies from request to answer are in milliseconds; `fit_s` is the total of all
    fits, in seconds.
    """

    requests: int = 0
    answered: int = 0
    lost: int = 0
    dropped: int = 0
    failed: int = 0
    restarts: int = 0
    fits: int = 0
    fit_s: float = 0.0
    pairs: int = 0
    mean_ms: float = 0.0
    p99_ms: float = 0.0
