"""Settings that save memory give the same update, and save memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollweave.schema.training import Restore, Restored
from rollweave.train.checkpoint import load
from rollweave.train.trainer import Trainer
from tests.support.trainers import make_batch, make_config, make_model, peak_bytes
from tests.train.asking import save_to, trained


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m", layers=6, hidden=64)


def train(model_dir: Path, run_dir: Path, **settings: Any) -> tuple[int, list[torch.Tensor]]:
    """Return the peak of one step, and the weights after a second step that follows a
    restored checkpoint.
    """
    trainer = Trainer(make_config(trainer=settings), model_dir)

    def step(number: int) -> None:
        batch = make_batch(number, step=number, groups=8, size=4)
        trained(trainer, batch)

    peak, _ = peak_bytes(lambda: step(0))
    save_to(trainer, run_dir / "c")
    step(1)
    assert isinstance(trainer.handle(Restore(path=str(run_dir / "c"))), Restored)
    step(1)
    return peak, [parameter.detach().clone() for parameter in trainer._model.parameters()]


@pytest.mark.slow
def test_savings_of_memory(model_dir: Path, tmp_path: Path) -> None:
    """Recomputed activations and offloaded moments change no bit; smaller micro-batches
    only the order of sums.
    """
    plain, expected = train(model_dir, tmp_path / "plain")
    recomputed, weights = train(model_dir, tmp_path / "recomputed", save_memory=("activations",))
    assert recomputed < 0.4 * plain
    assert all(map(torch.equal, weights, expected))
    _, weights = train(model_dir, tmp_path / "offloaded", save_memory=("optimizer",))
    assert all(map(torch.equal, weights, expected))
    saved, same = (load(tmp_path / name / "c").optimizer for name in ("offloaded", "plain"))
    assert saved.keys() == same.keys()
    assert all(torch.equal(tensor, same[name]) for name, tensor in saved.items())
    accumulated, weights = train(model_dir, tmp_path / "accumulated", micro_tokens=60)
    assert accumulated < 0.4 * plain
    for weight, tensor in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offloaded_moments_leave_the_gpu(model_dir: Path, tmp_path: Path) -> None:
    used, weights = [], []
    for saved in ((), ("optimizer",)):
        config = make_config(trainer={"save_memory": saved})
        trainer = Trainer(config, model_dir)
        before = torch.cuda.memory_allocated()
        trained(trainer, make_batch())
        used.append(torch.cuda.memory_allocated() - before)
        weights.append([parameter.cpu() for parameter in trainer._model.parameters()])
        trainer.close()
    assert used[1] < 0.1 * used[0]
    assert all(map(torch.equal, *weights))
