"""Ranks of a test: processes that learn from the environment who they are, and meet at
a store whose address rank 0 writes to a file.
"""

import os
import time
from pathlib import Path

import torch

from rollweave.train.distributed import ALONE, RankGroup, join_ranks, join_store, open_store

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
