"""Several ranks divide, compute, publish and continue like one rank."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from rollweave.schema.errors import TrainerError
from rollweave.schema.training import Measure, Measured, Save, SaveFailed, TrainOn
from rollweave.train.checkpoint import ADAPTER, EXPORT
from rollweave.train.distributed import (
    ALONE,
    RankGroup,
    Split,
    empty_shard,
    from_rows,
    saved_rows,
    to_rows,
    with_tensor_groups,
)
from rollweave.train.sharded_checkpoint import _failure
from rollweave.train.state import clip_gradients
from rollweave.train.tensor_parallel import (
    COLUMNS,
    ROWS,
    Division,
    _exchange,
    check_gradients,
    sync_tensor_group,
)
from rollweave.train.trainer import Trainer
from rollweave.weights.adapters import ADAPTER_WEIGHTS
from rollweave.weights.publication import DraftHandle, PayloadWriter
from rollweave.weights.trainer_checkpoint import MODEL
from tests.support.architectures import build
from tests.support.trainers import CPU, make_batch, make_config, make_model
from tests.support.variants import mostly_slow
from tests.train.asking import CASE, published, refused, restore_from, save_to, trained
from tests.train.compare import assert_all_close, randn
from tests.train.publish_worker import Rank, far, shares
from tests.train.ranks import on_ranks

SMALL = {"minibatches": 2, "micro_tokens": 60}
OFFLOADED = SMALL | {"save_memory": ["optimizer"]}
LORA = CASE | {"lora": {"rank": 3, "alpha": 6.0}}
OWN = {"other": {"advantage": "rloo"}}
DOMAINS = {"trainer": SMALL, "loss": "gspo", "clip": (0.2, 0.3), "own": OWN}
FAST = [
    ("native", 2, 1, {"trainer": OFFLOADED, "advantage": "gae", "kl": 0.1}),
    ("qwen3_moe", 2, 2, LORA),
]
SLOW = [
    ("native", 2, 1, CASE),
    ("native", 2, 1, DOMAINS),
    ("native", 2, 1, LORA),
    ("native", 2, 1, {"trainer": SMALL, "advantage": "gae", "implementation": "transformers"}),
    *((name, 3, 1, CASE) for name in ("qwen3_moe", "gemma3")),  # four experts on three ranks
    *((name, 2, 2, CASE) for name in ("qwen3", "qwen3_moe", "phi3")),
    *((name, 4, 2, CASE) for name in ("qwen3_moe", "gemma3")),
    ("qwen3", 2, 2, LORA),
    ("glm4", 4, 2, LORA),
]


def steps(
    settings: dict[str, Any], path: Path, out: Path, ranks: RankGroup, other: Path | None
) -> dict[str, torch.Tensor]:
    """Train two steps, and repeat the second step from the checkpoint before it: from
    this trainer's own in `out`, and from `other`. Return what is published, exported
    and reported.
    """
    trainer = Trainer(make_config(**settings), path, ranks=ranks)
    envs = ("none", *settings.get("own", ()))
    last = make_batch(2, step=1, groups=2, size=2, envs=envs)
    refused(trainer, TrainOn(batch=last))
    assert isinstance(trainer.handle(Save(path="/proc/nowhere/c")), SaveFailed)
    # one group of two: with two minibatches some ranks have no work
    trained(trainer, make_batch(1, size=2, groups=1, envs=envs))
    save_to(trainer, out, export=True)

    def second(version: int) -> dict[str, torch.Tensor]:
        values = trained(trainer, last)
        del values["tokens_per_s"]
        return published(trainer, version) | {n: torch.tensor(v) for n, v in values.items()}

    found = second(1)
    restore_from(trainer, out, step=1)
    assert_all_close(second(2), found, atol=1e-6)
    if other is not None:
        restore_from(trainer, other, step=1)
        assert_all_close(second(3), found, atol=1e-4)
    measured = trainer.handle(Measure(step=2, part=0, groups=make_batch(9, size=1).groups))
    assert isinstance(measured, Measured), measured
    for name in ("ratio", "entropy"):
        values = [getattr(group, name) for group in measured.groups]
        found[f"measured/{name}"] = torch.tensor(values)
    for file in (out / EXPORT / MODEL, out / ADAPTER / ADAPTER_WEIGHTS):
        if file.exists():
            found |= {f"{file.name}/{name}": each for name, each in load_file(file).items()}
    if ranks.world_size > 1:
        torch.distributed.barrier()  # the first rank's publications end with it
    trainer.close()
    return found


@pytest.mark.parametrize("case", mostly_slow(FAST + SLOW, FAST))
def test_ranks_train_like_one(tmp_path: Path, case: tuple[str, int, int, dict[str, Any]]) -> None:
    """Ranks continue from the checkpoint of one rank, and one rank from theirs."""
    name, count, group, settings = case  # `group` ranks divide the layers
    path = make_model(tmp_path / "m") if name == "native" else build(name, tmp_path / "m")
    alone, several = tmp_path / "alone", tmp_path / "several"
    expected = steps(settings, path, alone, ALONE, None)
    divided = {"trainer": settings["trainer"] | {"ranks": count, "tensor_parallel": group}}
    own = {"implementation": "transformers"} if group > 1 else {}
    # AdamW divides the smallest gradients of A by their own size
    atol = 1e-3 if "lora" in settings else 1e-4
    on_ranks(
        tmp_path,
        count,
        lambda ranks: assert_all_close(
            steps(settings | divided | own, path, several, ranks, alone), expected, atol=atol
        ),
    )
    steps(settings, path, tmp_path / "again", ALONE, several)


@pytest.mark.parametrize(("case", "count"), [(shares, 3), (far, 2)])
def test_ranks_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Callable[[Rank], None], count: int
) -> None:
    """Heads are so small that chunks are uneven, and the last of three ranks holds
    nothing of some tensors.
    """
    reach = PayloadWriter.open

    def reach_own(handle: DraftHandle) -> PayloadWriter | None:
        return reach(handle) if f"/{os.getpid()}/" in handle.location else None

    if case is far:
        monkeypatch.setattr(PayloadWriter, "open", reach_own)
    path = make_model(tmp_path / "m", kv_heads=1, head_dim=4)

    def work(ranks: RankGroup) -> None:
        rank = Rank(path, ranks)
        case(rank)
        rank.close()

    on_ranks(tmp_path, count, work)


def test_the_first_rank_that_fails_is_named() -> None:
    failures: Any = {2: (OSError("late"), None), 1: (ValueError("early"), None)}
    text = str(_failure(CheckpointException("both", failures)))
    assert text == "trainer rank 1: ValueError: early"


def test_values_of_two_ranks(tmp_path: Path) -> None:
    def work(ranks: RankGroup) -> None:
        own = torch.tensor([ranks.rank + 1.0, -ranks.rank])
        assert ranks.all_reduce_sum(own.clone()).tolist() == [3, -1]
        assert ranks.all_reduce_max(own.clone()).tolist() == [2, 0]
        assert ranks.broadcast(f"of {ranks.rank}") == "of 0"
        assert ranks.all_gather(ranks.rank) == [0, 1]
        ranks.raise_together("")
        with pytest.raises(TrainerError, match=r"^of the second$"):
            ranks.raise_together("of the second" if ranks.rank else "")
        assert with_tensor_groups(ranks, 1, CPU) is ranks
        group = with_tensor_groups(ranks, 2, CPU)
        assert (group.data_size, group.data_rank, group.tensor_rank) == (1, 0, ranks.rank)
        assert torch.equal(group.all_reduce_sum(own.clone()), own), "the group has one value"
        assert group.all_reduce_max(own.clone()).tolist() == [2, 0]

    on_ranks(tmp_path, 2, work)


@pytest.mark.parametrize(
    ("split", "count"),
    [(Split(0), 6), *((Split(1, blocks), count) for blocks in (1, 2) for count in (0, 1, 5))],
)
def test_two_ranks_save_rows(tmp_path: Path, split: Split, count: int) -> None:
    """A rank saves rows of the full parameter, and gets its own part from them."""
    full = randn(count, count, 4, 3)

    def work(ranks: RankGroup) -> None:
        ranks = with_tensor_groups(ranks, 2, CPU)
        rows = full[saved_rows(count, ranks, split=split)]
        own = split.take(full, ranks)
        assert torch.equal(to_rows(own, split, ranks), rows)
        assert torch.equal(from_rows(rows, count, split, ranks), own)
        assert empty_shard(full.shape, torch.float64, ranks, split=split).shape == full.shape

    on_ranks(tmp_path, 2, work)


def test_two_ranks_divide_a_linear_layer(tmp_path: Path) -> None:
    """Outputs and gradients are the undivided layer's, or a rank's own part of them."""
    full, x, along = nn.Linear(4, 6), randn(1, 3, 4).requires_grad_(), randn(2, 3, 6)
    out = full(x)
    out.backward(along)

    def work(ranks: RankGroup) -> None:
        ranks = with_tensor_groups(ranks, 2, CPU)
        last = Split(-1)
        for style in sorted(ROWS | COLUMNS):
            split = Split(0 if style in ROWS else 1)
            layer, given, expected = nn.Linear(4, 6), x.detach().clone(), [out, along, x.grad]
            layer.weight = nn.Parameter(split.take(full.weight.detach(), ranks))
            layer.bias = nn.Parameter(full.bias.detach().clone())
            if style in ROWS:
                layer.bias = nn.Parameter(split.take(full.bias.detach(), ranks))
            if style == "rowwise":
                given, expected[2] = last.take(given, ranks), last.take(x.grad, ranks)
            if style == "colwise":
                expected[:2] = [last.take(each, ranks) for each in (out, along)]
            _exchange(layer, style, ranks.tensor_group)
            got = layer(given.requires_grad_())
            got.backward(expected[1])
            torch.testing.assert_close([got, given.grad], [expected[0], expected[2]], msg=style)
            torch.testing.assert_close(layer.weight.grad, split.take(full.weight.grad, ranks))
            own = split.take(full.bias.grad, ranks) if style in ROWS else full.bias.grad
            torch.testing.assert_close(layer.bias.grad, own)

    on_ranks(tmp_path, 2, work)


def test_gradients_of_two_ranks(tmp_path: Path) -> None:
    """A divided gradient is a rank's own, a partial one is summed, others are averaged.
    The norm counts each element once.
    """

    def work(ranks: RankGroup) -> None:
        model = nn.ParameterDict({name: torch.zeros(2) for name in ("divided", "part", "same")})
        model["without"] = nn.Parameter(torch.zeros(2))
        group = with_tensor_groups(ranks, 2, CPU)
        model.division = Division(group, {"divided": Split(0)}, frozenset({"part"}))
        own = 1.0 + ranks.rank
        for name, value in {
            "divided": [own, 0],
            "part": [own, 4],
            "same": [2, 0.019 * own],
        }.items():
            model[name].grad = torch.tensor(value, dtype=torch.float32)
        check_gradients(model)  # differs from the mean by less than a hundredth of the largest
        model["same"].grad[1] += 0.03 * own
        with pytest.raises(TrainerError) as refused:
            check_gradients(model)
        assert str(refused.value) == (
            "trainer.tensor_parallel must be 1 for this model, whose tp_plan leaves the gradient "
            "of same incomplete, got 2"
        )
        model["same"].grad[1] = 3 * own
        sync_tensor_group(model)
        grads = [model[name].grad.tolist() for name in ("divided", "part", "same")]
        assert grads == [[own, 0], [3, 8], [2, 4.5]]
        norm = math.sqrt(1 + 4 + 9 + 64 + 4 + 4.5**2)
        for limit, scale in ((norm + 1, 1.0), (norm / 4, 0.25)):
            assert clip_gradients(model, limit) == pytest.approx(norm)
            assert model["part"].grad.tolist() == pytest.approx([3 * scale, 8 * scale])
        assert model["divided"].grad.tolist() == pytest.approx([own / 4, 0])
        model["same"].grad[0] = math.inf
        assert clip_gradients(model, 1.0) == math.inf
        assert model["part"].grad.tolist() == pytest.approx([0.75, 2])

    on_ranks(tmp_path, 2, work)
