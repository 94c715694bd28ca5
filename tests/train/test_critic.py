"""The critic learns returns beside the policy, and is saved and restored with it."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollweave.schema.training import (
    Restore,
    Restored,
    Save,
    Saved,
    TrainFailed,
    TrainOn,
)
from rollweave.schema.work import Batch
from rollweave.train.critic import Critic, load_value_model
from rollweave.train.distributed import ALONE
from rollweave.train.model import load_model
from rollweave.train.packing import pack
from rollweave.train.rows import batch_rows
from rollweave.train.state import load_named_tensors
from rollweave.train.trainer import Trainer
from tests.support.architectures import build, read
from tests.support.trainers import CPU, make_batch, make_config, make_examples, make_model
from tests.support.variants import mostly_extended, mostly_slow
from tests.train.asking import published, trained
from tests.train.compare import assert_all_close


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def critic_of(trainer: Trainer) -> Critic:
    assert trainer._critic is not None
    return trainer._critic


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return all weights, and the critic's optimizer."""
    policy = {f"policy/{name}": each for name, each in published(trainer, trainer.step).items()}
    critic = critic_of(trainer)
    return policy | critic.tensors() | critic.optimizer_tensors()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_value_is_a_product_of_the_hidden_state_before_the_token(model_dir: Path) -> None:
    config = make_config(advantage="gae")
    critic = Critic(config, model_dir, ranks=ALONE, device=CPU, on_device=True)
    trunk = load_model(model_dir, dtype="float32", device=CPU)
    row = batch_rows(make_batch(1), config.algorithm)[0]
    packed = pack([row.example])
    assert not critic.model(packed, 1.0).logprobs.any()
    with torch.no_grad():
        critic.model.value.copy_(torch.arange(32) / 32)
        values = critic.model(packed, 1.0).logprobs
        expected = trunk.hidden(packed) @ (torch.arange(32) / 32)
    torch.testing.assert_close(values, expected)
    assert "lm_head.weight" not in critic.tensors()


@pytest.mark.parametrize(
    "name",
    mostly_extended(
        ["qwen3", "qwen3_moe", "gemma3", "deepseek_v3", "qwen2_5_vl"], {"qwen3_moe", "gemma3"}
    ),
)
def test_a_value_of_a_model_of_transformers_is_one_of_its_own_hidden_states(
    tmp_path: Path, name: str
) -> None:
    path = build(name, tmp_path / "m")
    model = load_value_model(path, "transformers", dtype="float32", device=CPU)
    examples = make_examples(4)
    assert not model(pack(examples), 1.0).logprobs.any()
    head = torch.arange(len(model.value)) / len(model.value)
    with torch.no_grad():
        model.value.copy_(head)
        values = model(pack(examples), 1.0).logprobs
        base = read(path).base_model
        expected = [
            base(input_ids=each.tokens[None]).last_hidden_state[0, each.targets - 1] @ head
            for each in examples
        ]
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-4, rtol=1e-4)
    model(pack(examples), 1.0).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert model.value.grad is not None
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.extended
@pytest.mark.parametrize("tied", mostly_slow([True, False], {True}))
def test_both_implementations_learn_the_same(tmp_path: Path, tied: bool) -> None:
    path = make_model(tmp_path / "m") if tied else build("qwen3", tmp_path / "m")
    batch, steps, gradients = make_batch(3), [], []
    weights: dict[str, torch.Tensor] = {}
    for implementation in ("native", "transformers"):
        config = make_config(
            advantage="gae",
            implementation=implementation,
            trainer={"minibatches": 2, "epochs": 2, "save_memory": ["activations"]},
        )
        trainer = Trainer(config, path, tmp_path / implementation)
        steps.append([trained(trainer, make_batch(step, step=step)) for step in range(3)])
        critic = critic_of(trainer)
        weights = weights or critic.tensors()
        load_named_tensors(critic.model, weights)  # rounding has grown in three steps
        rows = critic.estimated(batch, batch_rows(batch, config.algorithm))
        critic.backward(rows, range(len(rows)), step=3)
        gradients.append(
            {f"advantage/{at}": row.advantages for at, row in enumerate(rows)}
            | {name: each.grad for name, each in critic.model.named_parameters()}
        )
    ours, theirs = gradients
    assert_all_close(theirs, ours, atol=1e-6)
    for one, other in zip(*steps, strict=True):
        for name in ("critic_loss", "critic_grad_norm", "critic_explained", "loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-2, abs=1e-4)


@pytest.mark.extended
@pytest.mark.parametrize("advantage", mostly_slow(["gae", "gae_turn"], {"gae_turn"}))
def test_the_critic_learns_the_returns(model_dir: Path, tmp_path: Path, advantage: str) -> None:
    """Trained on one batch again and again, it explains the returns ever better."""
    config = make_config(advantage=advantage, steps=60, trainer={"lr": 3e-3, "epochs": 2})
    trainer = Trainer(config, model_dir, tmp_path)
    explained, losses = [], []
    for step in range(25):
        batch = msgspec.structs.replace(make_batch(7), step=step, version=step)
        values = trained(trainer, batch)
        explained.append(values["critic_explained"])
        losses.append(values["critic_loss"])
    assert explained[0] == 0.0  # it starts with 0
    assert explained[-1] > 0.5
    assert losses[-1] < losses[0] / 2
    assert values["critic_grad_norm"] > 0
    assert values["updates"] == 2


def test_a_minibatch_is_half_the_mean_squared_error(model_dir: Path, tmp_path: Path) -> None:
    """Before its first step every value is 0, so that a return is a reward-to-go."""
    config = make_config(advantage="gae", trainer={"micro_tokens": 30})
    trainer = Trainer(config, model_dir, tmp_path)
    batch = make_batch(2)
    values = trained(trainer, batch)
    squares = []
    for group in batch.groups:
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            # λ = 0.95 of the reward for each token until the last one
            count = sum(sequence.output_mask())
            assert trajectory.reward is not None
            squares += [(trajectory.reward * 0.95**left) ** 2 for left in range(count)]
    assert values["critic_loss"] == pytest.approx(sum(squares) / len(squares) / 2, rel=1e-5)


def test_a_domain_without_critic_beside_one_with(model_dir: Path, tmp_path: Path) -> None:
    config = make_config(advantage="grpo", own={"other": {"advantage": "gae_turn"}})
    trainer = Trainer(config, model_dir, tmp_path)
    assert "critic_loss" not in trained(trainer, make_batch(0))
    before = critic_of(trainer).tensors()
    assert "critic_loss" in trained(trainer, make_batch(1, step=1, envs=("none", "other")))
    after = critic_of(trainer).tensors()
    assert not torch.equal(before["value"], after["value"])


@pytest.mark.variants
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_restored_trainer_continues_bitwise(
    model_dir: Path, tmp_path: Path, implementation: str
) -> None:
    config = make_config(
        advantage="gae",
        trainer={"minibatches": 2, "epochs": 2},
        implementation=implementation,
    )
    first = Trainer(config, model_dir, tmp_path / "a")
    for step in range(4):
        trained(first, make_batch(step, step=step))
        if step == 1:
            assert isinstance(first.handle(Save(path=str(tmp_path / "c"), export=True)), Saved)
    second = Trainer(config, model_dir, tmp_path / "b")
    trained(second, make_batch(9))  # a step that the restore discards
    assert second.handle(Restore(path=str(tmp_path / "c"))) == Restored(step=2)
    for step in (2, 3):
        trained(second, make_batch(step, step=step))
    assert same(state_of(first), state_of(second))


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_run_may_get_a_critic_and_lose_it_again(
    model_dir: Path, tmp_path: Path, implementation: str
) -> None:
    plain = make_config(implementation=implementation)
    with_critic = make_config(advantage="gae", implementation=implementation)
    first = Trainer(plain, model_dir, tmp_path / "a")
    trained(first, make_batch(0))
    assert isinstance(first.handle(Save(path=str(tmp_path / "s1"))), Saved)
    second = Trainer(with_critic, model_dir, tmp_path / "b")
    assert second.handle(Restore(path=str(tmp_path / "s1"))) == Restored(step=1)
    policy = {name[7:]: t for name, t in state_of(second).items() if name.startswith("policy/")}
    trunk = critic_of(second).tensors()
    assert all(torch.equal(trunk[name], policy[name]) for name in trunk.keys() - {"value"})
    trained(second, make_batch(1, step=1))
    assert isinstance(second.handle(Save(path=str(tmp_path / "s2"))), Saved)
    third = Trainer(plain, model_dir, tmp_path / "c")
    assert third.handle(Restore(path=str(tmp_path / "s2"))) == Restored(step=2)
    trained(third, make_batch(2, step=2))


def poisoned(batch: Batch) -> Batch:
    """Return the batch with a log-prob that is no number in its last trajectory."""
    group = batch.groups[-1]
    last = group.trajectories[-1]
    (sequence,) = last.sequences
    mask = sequence.output_mask()
    logprobs = tuple(math.nan if sampled else 0.0 for sampled in mask)
    broken = msgspec.structs.replace(
        last, sequences=(msgspec.structs.replace(sequence, logprobs=logprobs),)
    )
    group = msgspec.structs.replace(group, trajectories=(*group.trajectories[:-1], broken))
    return msgspec.structs.replace(batch, groups=(*batch.groups[:-1], group))


@pytest.mark.parametrize("passes", [{}, {"epochs": 2, "minibatches": 3}])
def test_a_policy_that_fails_does_not_change_the_critic(
    model_dir: Path, tmp_path: Path, passes: dict[str, Any]
) -> None:
    trainer = Trainer(make_config(advantage="gae", trainer=passes), model_dir, tmp_path)
    trained(trainer, make_batch(0))
    before = state_of(trainer)
    reply = trainer.handle(TrainOn(batch=poisoned(make_batch(1, step=1))))
    assert isinstance(reply, TrainFailed)
    assert reply.nonfinite
    assert same(state_of(trainer), before)


def test_its_learning_rate_is_its_own(model_dir: Path, tmp_path: Path) -> None:
    config = make_config(advantage="gae", trainer={"lr": 1e-3})
    config = config.model_copy(update={"critic": config.critic.model_copy(update={"lr": 5e-3})})
    trainer = Trainer(config, model_dir, tmp_path)
    assert trained(trainer, make_batch(0))["lr"] == 1e-3
    assert critic_of(trainer).optimizer.param_groups[0]["lr"] == 5e-3
