"""Ask a trainer in this process to train, to publish, to save and to restore."""

from pathlib import Path
from typing import Any

import torch

from rollweave.schema import training
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Batch
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors

CASE: dict[str, Any] = {
    "trainer": {"minibatches": 2, "micro_tokens": 60},
    "correction": "decoupled",
    "kl": 0.1,
    "entropy": 0.01,
}
"""Settings that use most parts of a step."""


def trained(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Train on the batch, and return the metrics."""
    reply = trainer.handle(training.TrainOn(batch=batch))
    assert isinstance(reply, training.Trained), reply
    assert (reply.step, reply.part) == (batch.step, batch.part)
    return reply.metrics.values


def published(trainer: Trainer, version: int = 0) -> dict[str, torch.Tensor]:
    """Publish the weights as `version`, and return copies of their tensors."""
    reply = trainer.handle(training.Publish(version=version, publication_id=version))
    assert isinstance(reply, training.Published), reply
    return {name: tensor.clone() for name, tensor in read_tensors(reply.manifest).items()}


def save_to(trainer: Trainer, path: Path, *, export: bool = False) -> None:
    """Save a checkpoint."""
    reply = trainer.handle(training.Save(path=str(path), export=export))
    assert isinstance(reply, training.Saved), reply


def restore_from(trainer: Trainer, path: Path, *, step: int) -> None:
    """Restore a checkpoint of this step."""
    assert trainer.handle(training.Restore(path=str(path))) == training.Restored(step=step)


def refused(trainer: Trainer, command: training.TrainerCommand) -> training.TrainFailed:
    """Return the failure with which a command is answered."""
    reply = trainer.handle(command)
    assert isinstance(reply, training.TrainFailed), reply
    return reply


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether the tensors have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """Return the configuration with other values in one section."""
    part = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: part})
