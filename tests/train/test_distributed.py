"""Two ranks train like one: under torchrun, and as plain child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.train.distributed import init_ranks
from tests.support.training import ROOT, free_port
from tests.train.builders import make_model
from tests.train.rank_worker import run

WORKER = "tests.train.rank_worker"


def start_all(kind: str, model_dir: Path, out: Path) -> None:
    """Run two ranks until they exit."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    arguments = ["-m", WORKER, str(model_dir), str(out)]
    if kind == "torchrun":
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-addr=127.0.0.1",
            f"--master-port={free_port()}",
        ]
        subprocess.run(
            [sys.executable, *launcher, *arguments], cwd=ROOT, env=environment, check=True
        )
        return
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment | {"RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "processes"])
def test_two_ranks_match_one(tmp_path: Path, kind: str) -> None:
    model_dir = make_model(tmp_path / "m")
    one_rank = run(model_dir, tmp_path / "alone", rank=0, world=1)
    start_all(kind, model_dir, tmp_path / "two")
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


def test_several_ranks_need_an_address() -> None:
    assert "MASTER_ADDR" not in os.environ
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        init_ranks(0, 2, torch.device("cpu"))
