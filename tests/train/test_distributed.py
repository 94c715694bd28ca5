"""Two ranks train like one, and how they meet."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.train.distributed import interface_of, join_store, open_store
from tests.support.training import ROOT
from tests.train.builders import make_model
from tests.train.rank_worker import run

WORKER = "tests.train.rank_worker"


def run_two(model_dir: Path, out: Path) -> None:
    """Run two ranks until they exit."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "STORE": str(out.with_name("store")),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, str(model_dir), str(out)],
            cwd=ROOT,
            env=environment | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_two_ranks_match_one(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "m")
    one_rank = run(model_dir, tmp_path / "alone")
    run_two(model_dir, tmp_path / "two")
    both = [load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in range(2)]
    for of_rank in both:
        assert of_rank.keys() == one_rank.keys()
        for name, tensor in one_rank.items():
            torch.testing.assert_close(
                of_rank[name],
                tensor,
                atol=1e-4,
                rtol=1e-3,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert torch.equal(both[0]["ratios"], both[1]["ratios"])
    exported = load_file(tmp_path / "two" / "c" / "hf" / "model.safetensors")
    expected = load_file(tmp_path / "alone" / "c" / "hf" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-4, rtol=1e-3)


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
