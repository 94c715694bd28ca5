"""Ranks of a test: forks of its process, or programs that learn from the environment
who they are. They meet at a store in a file.
"""

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from rollweave.train.distributed import RankGroup, join_ranks, shutdown_ranks
from tests.support.forking import Forked
from tests.support.trainers import ROOT

LIMIT_S = 30.0


def meet() -> RankGroup:
    """Join the other ranks of RANK, WORLD_SIZE and STORE, a file."""
    return _join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["STORE"])


def _join(rank: int, count: int, file: str) -> RankGroup:
    store = FileStore(file, count)
    return join_ranks(rank, count, store=store, device=torch.device("cpu"), timeout_s=LIMIT_S)


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


def on_ranks(path: Path, count: int, work: Callable[[RankGroup], None]) -> None:
    """Do the work on `count` ranks: this process is the first, the others are forks."""
    rank, others = 0, list[int]()
    for number in range(1, count):
        if pid := os.fork():
            others.append(pid)
        else:
            # the groups of earlier tests would wait for threads that a fork lacks
            gc.freeze()
            rank, others = number, []
            break
    try:
        work(_join(rank, count, f"{path}/store{count}"))
    except BaseException:
        if rank:
            traceback.print_exc()
            os._exit(1)
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        if rank:
            os._exit(0)
        statuses = [os.waitpid(pid, 0)[1] for pid in others]
        shutdown_ranks(RankGroup(0, count))
    assert not any(statuses)
