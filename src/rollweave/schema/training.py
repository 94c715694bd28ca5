"""The words between the controller and the trainer's processes, and what a training
step reports.
"""

from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, ScoredGroup


class TrainOn(TaggedStruct, frozen=True, kw_only=True):
    """Train on one (mini-)batch: the optimizer steps, the version does not.

    Answered by `Trained` or `TrainFailed`.
    """

    batch: Batch


class Measure(TaggedStruct, frozen=True, kw_only=True):
    """How far the current weights are from those that sampled these groups, before
    mini-batch `part` of step `step`.

    Nothing changes. Answered by `Measured` or `TrainFailed`.
    """

    step: int
    part: int
    groups: tuple[ScoredGroup, ...]


class Publish(TaggedStruct, frozen=True, kw_only=True):
    """Publish the current weights as `version`, and let go of all others but `keep`.

    Answered by `Published`.
    """

    version: int
    weights_id: int
    keep: tuple[int, ...] = ()


class Save(TaggedStruct, frozen=True, kw_only=True):
    """Write a complete checkpoint of model, optimizer, schedule and RNG to directory
    `path`, atomically.

    `export` additionally writes a Hugging Face checkpoint (config, safetensors,
    tokenizer) under `path/hf`. Answered by `Saved` or `SaveFailed`. With `beside`,
    answered by `Copied`; one of those follows later, among the answers to other
    commands.
    """

    path: str
    export: bool = False
    beside: bool = False


class Restore(TaggedStruct, frozen=True, kw_only=True):
    """Load a checkpoint written by `Save`. Answered by `Restored` or `TrainFailed`."""

    path: str


class StopTrainer(TaggedStruct, frozen=True, kw_only=True):
    pass


TrainerCommand = TrainOn | Measure | Publish | Save | Restore | StopTrainer


class TrainerReady(TaggedStruct, frozen=True, kw_only=True):
    parameters: int


class TrainMetrics(Struct, frozen=True, kw_only=True):
    """Figures of one (mini-)batch: `values` has stable, documented names (see
    `train/metrics.py`).
    """

    values: dict[str, float]
    tokens: int
    train_s: float


class Trained(TaggedStruct, frozen=True, kw_only=True):
    step: int
    part: int
    metrics: TrainMetrics


class Measured(TaggedStruct, frozen=True, kw_only=True):
    """The mean importance ratio of each group, in their order (`train/ratios.py`)."""

    ratios: tuple[float, ...]


class TrainFailed(TaggedStruct, frozen=True, kw_only=True):
    """`nonfinite` marks a NaN or infinite loss: weights and optimizer are as before the
    step. `groups` names the batch.
    """

    error: str
    nonfinite: bool = False
    groups: tuple[str, ...] = ()


class Published(TaggedStruct, frozen=True, kw_only=True):
    """`gathered`: some rank could not reach the memory of rank 0, so that all had to
    give it their weights.
    """

    manifest: WeightManifest
    publish_s: float
    gathered: bool = False


class Copied(TaggedStruct, frozen=True, kw_only=True):
    """A copy of the checkpoint is in memory, which took `copy_s` seconds, and is being
    written.
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


TrainerReply = (
    TrainerReady
    | Trained
    | Measured
    | TrainFailed
    | Published
    | Copied
    | Saved
    | SaveFailed
    | Restored
)
