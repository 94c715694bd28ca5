"""Ranks of a test: processes that learn from the environment who they are, and meet at
a store whose address rank 0 writes to a file.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollweave.train.distributed import ALONE, RankGroup, join_ranks, join_store, open_store
from tests.support.forking import Forked
from tests.support.trainers import ROOT

WAIT_S = 200.0


def meet() -> RankGroup:
    """Join the other ranks of RANK, WORLD_SIZE and STORE, the file with the address."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return ALONE
    file = Path(os.environ["STORE"])
    if rank == 0:
        store, address = open_store("127.0.0.1")
        file.with_suffix(".new").write_text(address)
        file.with_suffix(".new").rename(file)
    else:
        deadline = time.monotonic() + WAIT_S
        while not file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store = join_store(file.read_text())
    return join_ranks(rank, world_size, store=store, device=torch.device("cpu"))


def start_ranks(
    count: int,
    worker: str,
    out: Path,
    *arguments: Path | str,
    prefix: Sequence[str] = (),
    **how: Any,
) -> list["subprocess.Popen[str]"]:
    """Start so many ranks of a program, the last one behind `prefix`; `how` are further
    arguments of `Popen`.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(count),
        "STORE": f"{out}.store",
    }
    command = [sys.executable, "-m", f"tests.train.{worker}", *map(str, arguments), str(out)]
    return [
        Forked(
            [*(prefix if rank == count - 1 else ()), *command],
            cwd=ROOT,
            env=environment | {"RANK": str(rank)},
            **how,
        )
        for rank in range(count)
    ]


def run_ranks(count: int, worker: str, out: Path, *arguments: Path | str) -> None:
    """Run so many ranks of a program until they exit."""
    ranks = start_ranks(count, worker, out, *arguments)
    try:
        assert [rank.wait(240) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
