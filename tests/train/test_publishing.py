"""Ranks publish their own shards without gathering; together they make the version that
one rank would have made.
"""

import itertools
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rollweave.schema.weights import TensorMeta
from rollweave.train.distributed import rows_of
from rollweave.train.publishing import WeightPublisher, slice_of
from rollweave.weights.views import StoredTensors
from tests.support.trainers import make_model
from tests.train.ranks import start_ranks


def start(case: str, directory: Path, prefix: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Start two ranks, the last one behind `prefix`."""
    model = make_model(directory / "m")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    out = directory / "out"
    return start_ranks(2, "publish_worker", out, case, model, prefix=prefix, **pipes)


def wait_for_all(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return the exit status, output and errors of each rank."""
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
        return [
            (rank.returncode, out, err) for rank, (out, err) in zip(ranks, outputs, strict=True)
        ]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@given(rows=st.integers(0, 40), world_size=st.integers(1, 9))
def test_ranks_divide_a_tensor_like_torch_chunk(rows: int, world_size: int) -> None:
    meta = TensorMeta(name="any", dtype="float32", shape=(rows, 3), offset=64, nbytes=12 * rows)
    chunks = [len(chunk) for chunk in torch.empty(rows, 3).chunk(world_size)]
    view = StoredTensors.identical({"any": meta.shape}).views["any"]
    slices = [
        slice_of(meta, view.part(meta.shape, rows_of(rows, rank=rank, world_size=world_size)))
        for rank in range(world_size)
    ]
    expected = chunks + [0] * (world_size - len(chunks))
    assert [stop - start for start, stop in slices] == [12 * count for count in expected]
    assert [start for start, _ in slices][1:] == [stop for _, stop in slices][:-1]
    assert (slices[0][0], slices[-1][1]) == (64, 64 + 12 * rows)


def test_a_rank_alone_has_a_scalar() -> None:
    meta = TensorMeta(name="any", dtype="float32", shape=(), offset=64, nbytes=4)
    view = StoredTensors.identical({"any": ()}).views["any"]
    assert slice_of(meta, view.part((), slice(0, 1))) == (64, 68)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("reaches", [*itertools.product([True, False], repeat=3)], ids=str)
def test_a_rank_writes_into_the_first_memory_that_it_reaches(
    reaches: tuple[bool, ...], is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first of three ranks says so if they have more than one memory."""
    one, two, three = [True, True, True], [reaches[0], True, True], [*reaches[1:], True]
    opened: list[bool] = []

    def all_gather(value: Any) -> list[Any]:
        if isinstance(value, list):
            opened[:] = value
            return [one, two, three]
        return [value] * 3

    ranks: Any = SimpleNamespace(is_first=is_first, all_gather=all_gather)
    publisher: Any = SimpleNamespace(_ranks=ranks)
    owners = WeightPublisher._find_owners(publisher)
    assert opened == [True, True, True]
    second = 0 if reaches[0] else 1
    third = 0 if reaches[1] else 1 if second == 1 and reaches[2] else 2
    assert owners == [0, second, third]
    said = [line for line in caplog.messages if "do not share memory" in line]
    assert len(said) == (is_first and owners != [0, 0, 0])
    assert all(str(sorted(set(owners))) in line for line in said)


def can_hide() -> bool:
    """Return whether this user may run processes that see no others."""
    try:
        return (
            subprocess.run(
                ["unshare", "-Urpf", "--mount-proc", "true"], capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not can_hide(), reason="needs a user namespace")
@pytest.mark.slow
def test_a_rank_that_cannot_reach_the_memory_publishes_a_part(tmp_path: Path) -> None:
    ranks = wait_for_all(start("far", tmp_path, ("unshare", "-Urpf", "--mount-proc")))
    assert [status for status, _, _ in ranks] == [0, 0], ranks
    assert ranks[0][2].count("trainer ranks [0, 1] do not share memory") == 1, "it says so once"


@pytest.mark.extended
def test_a_rank_that_dies_fails_the_version_without_a_hang(tmp_path: Path) -> None:
    ranks = wait_for_all(start("dies", tmp_path))
    assert [status for status, _, _ in ranks] == [0, 9], ranks
    assert ranks[0][1] == "survived\n"
