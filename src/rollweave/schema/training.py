"""The messages between the controller and the trainer's processes, and the metrics of a
training step.
"""

from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, ScoredGroup


class TrainOn(TaggedStruct, frozen=True, kw_only=True):
    """Train on one (mini-)batch: the optimizer advances, the version does not.

    Answered by `Trained` or `TrainFailed`.
    """

    batch: Batch


class Measure(TaggedStruct, frozen=True, kw_only=True):
    """Measure how far the current weights are from the weights that sampled these
    groups, before mini-batch `part` of step `step`.

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
    """The mean importance ratio of each group, in the order of the command
    (`train/passes.py`).
    """

    ratios: tuple[float, ...]


class TrainFailed(TaggedStruct, frozen=True, kw_only=True):
    """A command failed. `nonfinite` marks a NaN or infinite loss: weights and optimizer
    are as before the step. `groups` names the groups of the batch.
    """

    error: str
    nonfinite: bool = False
    groups: tuple[str, ...] = ()


class Published(TaggedStruct, frozen=True, kw_only=True):
    """The version is published, in parts if its ranks are on several hosts."""

    manifest: WeightManifest
    publish_s: float


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
