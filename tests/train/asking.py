"""Ask a trainer in this process to train and to publish."""

import torch

from rollweave.schema.training import Publish, Published, Trained, TrainOn
from rollweave.schema.work import Batch
from rollweave.train.trainer import Trainer
from rollweave.weights.publication import read_tensors


def trained(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Train on the batch, and return the metrics."""
    reply = trainer.handle(TrainOn(batch=batch))
    assert isinstance(reply, Trained), reply
    assert (reply.step, reply.part) == (batch.step, batch.part)
    return reply.metrics.values


def published(trainer: Trainer, version: int = 0) -> dict[str, torch.Tensor]:
    """Publish the weights as `version`, and return copies of their tensors."""
    reply = trainer.handle(Publish(version=version, publication_id=version))
    assert isinstance(reply, Published), reply
    return {name: tensor.clone() for name, tensor in read_tensors(reply.manifest).items()}
