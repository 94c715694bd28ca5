"""A trainer on a device computes the steps of one on the CPU, and resumes from its
checkpoints.
"""

from pathlib import Path

import pytest
import torch

from rollweave.schema import training
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import CUDA_BYTES
from rollweave.schema.work import Batch
from rollweave.train.needs import rank_needs
from rollweave.train.trainer import Trainer
from rollweave.weights.checkpoint import read_shape
from rollweave.weights.publication import read_tensors
from tests.support.trainers import make_batch, make_config, make_model

STEPS = 3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def config(device: str, dtype: str = "float32", **trainer: int) -> RunConfig:
    made = make_config(trainer={"lr": 1e-3, **trainer}, kl=0.1, entropy=0.01)
    model = made.model.model_copy(update={"device": device, "dtype": dtype})
    return made.model_copy(update={"model": model})


def trained(trainer: Trainer, batch: Batch) -> dict[str, float]:
    reply = trainer.handle(training.TrainOn(batch=batch))
    assert isinstance(reply, training.Trained), reply
    return reply.metrics.values


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    reply = trainer.handle(training.Publish(version=trainer.step, publication_id=trainer.step))
    assert isinstance(reply, training.Published), reply
    return {name: tensor.clone().float() for name, tensor in read_tensors(reply.manifest).items()}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the mean difference of two models' weights."""
    return float(torch.cat([(left[name] - right[name]).abs().flatten() for name in left]).mean())


@pytest.mark.variants
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_the_cpu(
    model_dir: Path, tmp_path: Path, device: str, dtype: str
) -> None:
    own = Trainer(config(device, dtype), model_dir)
    reference = Trainer(config("cpu"), model_dir)
    tolerance = 1e-3 if dtype == "float32" else 0.1
    before = weights_of(reference)
    for step in range(STEPS):
        batch = make_batch(step, step=step)
        values, expected = trained(own, batch), trained(reference, batch)
        for name in ("loss", "grad_norm", "entropy"):
            assert values[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance)
    after, weights = weights_of(reference), weights_of(own)
    moved = distance(before, after)
    # Adam makes a step of full length even where a gradient is next to nothing
    assert distance(weights, after) < (0.02 if dtype == "float32" else 0.3) * moved + (
        2**-8 if dtype == "bfloat16" else 0
    )
    own.close()
    reference.close()


def test_a_restored_trainer_continues_as_the_first(
    model_dir: Path, tmp_path: Path, device: str
) -> None:
    first = Trainer(config(device, epochs=2), model_dir)
    trained(first, make_batch(0))
    reply = first.handle(training.Save(path=str(tmp_path / "checkpoint")))
    assert isinstance(reply, training.Saved), reply
    second = Trainer(config(device, epochs=2), model_dir)
    assert isinstance(
        second.handle(training.Restore(path=str(tmp_path / "checkpoint"))), training.Restored
    )
    batch = make_batch(1, step=1)
    values, expected = trained(second, batch), trained(first, batch)
    assert values["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    assert distance(weights_of(first), weights_of(second)) < 1e-6
    first.close()
    second.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_takes_no_more_memory_than_estimated(tmp_path: Path, dtype: str) -> None:
    path = make_model(tmp_path / "m", hidden=256, layers=6)
    run = config("cuda", dtype)
    estimate = sum(
        need.nbytes for need in rank_needs(run, read_shape(path), rank=0) if need.on_device
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = Trainer(run, path)
    for step in range(2):
        trained(trainer, make_batch(step, step=step))
    trainer.close()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= estimate - CUDA_BYTES
