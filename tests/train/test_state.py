"""The learning rate's schedule, clipping, and a snapshot that restores everything
bitwise.
"""

import math

import pytest
import torch
from torch import nn

from rollweave.schema.config.training import TrainerConfig
from rollweave.train.distributed import ALONE
from rollweave.train.state import (
    Snapshot,
    TrainedState,
    clip_gradients,
    learning_rate,
    load_optimizer_tensors,
    new_optimizer,
    optimizer_tensors,
)


def rates(steps: int, **schedule: float) -> list[float]:
    config = TrainerConfig(lr={"peak": 1.0, **schedule})  # type: ignore[typeddict-item]
    return [learning_rate(config, step=step, steps=steps) for step in range(steps)]


def test_learning_rate() -> None:
    assert rates(3, warmup=0) == [1, 1, 1]
    assert rates(5, warmup=0, final=0.0) == [1, 0.75, 0.5, 0.25, 0]
    assert rates(7, warmup=2, final=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(2, warmup=4) == [0.25, 0.5]
    assert rates(1, warmup=0, final=0.5) == [0.5]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, new_optimizer(
        model, TrainerConfig(weight_decay=0.0), lr=0.1, device=torch.device("cpu")
    )


def step(model: nn.Module, optimizer: torch.optim.AdamW, seed: int) -> None:
    optimizer.zero_grad()
    model(
        torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    ).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_snapshot_restores_everything(steps_before: int) -> None:
    model, optimizer = model_and_optimizer()
    for seed in range(steps_before):
        step(model, optimizer, seed)
    snapshot = Snapshot.take(model, optimizer)
    outcomes = []
    for _ in range(2):
        for seed in (7, 8):
            step(model, optimizer, seed)
        outcomes.append([parameter.detach().clone() for parameter in model.parameters()])
        snapshot.restore(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_named_state_loads_into_another_optimizer() -> None:
    model, optimizer = model_and_optimizer()
    other, fresh = model_and_optimizer()
    step(model, optimizer, 0)
    other.load_state_dict(model.state_dict())
    tensors = {name: t.clone() for name, t in optimizer_tensors(model, optimizer).items()}
    load_optimizer_tensors(other, fresh, tensors)
    for each in ((model, optimizer), (other, fresh)):
        step(*each, 1)
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]
    load_optimizer_tensors(other, fresh, {})
    assert not fresh.state


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping(limit: float) -> None:
    model, _ = model_and_optimizer()
    model(torch.ones(2, 4)).sum().backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    assert clip_gradients(model, limit) == pytest.approx(float(before.norm()))
    after = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    assert float(after.norm()) == pytest.approx(min(limit, float(before.norm())), rel=1e-3)


def test_reports_a_gradient_that_is_not_finite() -> None:
    model, _ = model_and_optimizer()
    (model(torch.ones(2, 4)).sum() * math.nan).backward()
    assert math.isnan(clip_gradients(model, 1.0))


def test_a_state_enters_its_device() -> None:
    model, _ = model_and_optimizer()
    state = TrainedState(model, TrainerConfig(), ALONE, torch.device("meta"), on_device=False)
    step(model, state.optimizer, 0)
    reference = [torch.zeros(2), torch.ones(2)]
    state.enter(reference)
    steps = [each["step"] for each in state.optimizer.state.values()]
    assert all(tensor.is_meta for tensor in [*reference, *model.parameters(), *steps])


def test_a_state_leaves_without_gradients() -> None:
    model, _ = model_and_optimizer()
    state = TrainedState(model, TrainerConfig(), ALONE, torch.device("cpu"), on_device=True)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state.leave(None)
    assert all(tensor.grad is None for tensor in model.parameters())
    state.enter(None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
