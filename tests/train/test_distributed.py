"""Two ranks train like one, and how they meet."""

import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.train.checkpoint import Checkpoint, load, verify
from rollweave.train.distributed import interface_of, join_store, open_store
from rollweave.train.trainer import Trainer
from rollweave.weights.adapters import A
from rollweave.weights.trainer_checkpoint import file_of, read_trainer_checkpoint
from tests.support.trainers import LR, make_batch, make_config, make_model
from tests.train.asking import save_to, trained
from tests.train.compare import assert_all_close
from tests.train.rank_worker import CASE, CASES, run
from tests.train.ranks import run_ranks
from tests.train.reshard_worker import restep


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_match_one(tmp_path: Path, case: str) -> None:
    model_dir = make_model(tmp_path / "m")
    one_rank = run(model_dir, tmp_path / "alone", case=case)
    run_ranks(2, "rank_worker", tmp_path / "two", model_dir, case)
    both = [load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in range(2)]
    for of_rank in both:
        adapters = {
            name: without_amplified_rounding(tensor, one_rank[name])
            for name, tensor in of_rank.items()
            if name.endswith(A)
        }
        assert_all_close(of_rank | adapters, one_rank)
    assert torch.equal(both[0]["ratios"], both[1]["ratios"])
    exported = load_file(tmp_path / "two" / "c" / "hf" / "model.safetensors")
    expected = load_file(tmp_path / "alone" / "c" / "hf" / "model.safetensors")
    assert_all_close(exported, expected)


def without_amplified_rounding(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return `actual` with the expected value for its most different element, if these
    two differ by less than a tenth of a step of the optimizer.

    The gradients of an adapter's A are as small as its B, which begins as 0, and Adam
    divides by their size: on one rank, a change of 1e-7 of all values of A moves one
    element by 9e-4.
    """
    worst = (actual - expected).abs().argmax()
    result = actual.clone().flatten()
    if (result[worst] - expected.flatten()[worst]).abs() < LR / 10:
        result[worst] = expected.flatten()[worst]
    return result.view_as(actual)


@pytest.mark.slow
def test_any_number_of_ranks_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """One rank, then two, then four, then one again train a step each. What they
    restore is bitwise what was saved, and each step is that of one rank alone.
    """
    model_dir = make_model(tmp_path / "m")
    alone = Trainer(make_config(**CASE), model_dir)  # type: ignore[arg-type]
    saved = None
    for number, count in enumerate((1, 2, 4, 1)):
        out = tmp_path / str(number)
        if count == 1:
            restep(model_dir, saved, out)
        else:
            assert saved is not None
            run_ranks(count, "reshard_worker", out, model_dir, saved)
        if saved is not None:
            assert_equal(load(out / "same"), load(saved), exact=True)
        assert verify(out / "same") == number
        files = sorted(file.name for file in out.joinpath("same").glob("model*"))
        assert files == [file_of("model", rank=rank, world_size=count) for rank in range(count)]
        trained(alone, make_batch(number, step=number, size=2))
        save_to(alone, tmp_path / f"alone{number}")
        saved = out / "trained"
        assert_equal(load(saved), load(tmp_path / f"alone{number}"), exact=False)
        exported = load_file(saved / "hf" / "model.safetensors")
        read = read_trainer_checkpoint(saved, step=number + 1, dtype=torch.float32)
        assert exported.keys() == read.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in read.items())


def assert_equal(one: Checkpoint, other: Checkpoint, *, exact: bool) -> None:
    assert one.step == other.step
    for part, tensors in one.sharded().items():
        bounds = {"atol": 0.0, "rtol": 0.0} if exact else {}
        assert_all_close(tensors, other.sharded()[part], **bounds)


def test_the_store_listens_on_one_address_only() -> None:
    store, address = open_store("127.0.0.1")
    store.set("key", "value")
    assert join_store(address).get("key") == b"value"
    port = int(address.rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free, as it would not be on every address


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") is None
