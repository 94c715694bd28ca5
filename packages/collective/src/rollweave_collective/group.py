"""A process group of `torch.distributed` beside the default one: every wait in it has
an end.
"""

import contextlib
import datetime
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

WAIT_S = 10.0
"""Maximum seconds to form a group, and for one operation in it, after which a peer that
is silent counts as gone, as on a channel.
"""

POLL_S = 0.001
"""Seconds between two polls of an operation of NCCL, which has no wait with an end."""

BUCKET_BYTES = 16 << 20
"""Bytes of one operation: enough to amortize it; the next is under way while a member
computes the digest of the last.
"""

ERRORS = (RuntimeError, ValueError)
"""The errors of torch.distributed."""


class Group:
    """A rank of a group, which needs no default group of torch.distributed. `host` is
    the address of this host by which the others reach it. Without a GPU as `device`,
    Gloo. All methods raise RuntimeError.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        number: int,
        host: str,
        device: torch.device | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.number, self.size = number, size
        self._store, self._device, self._wait_s = store, device, wait_s
        assert store is not None, "the ranks of a new group meet at a store"
        prefix = PrefixStore(str(number), store)
        self._ranks: Any
        if device is None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = datetime.timedelta(seconds=wait_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._ranks = dist.ProcessGroupGloo(prefix, rank, size, options)
            return
        # by default, a thread of NCCL ends the process when a peer is lost
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            torch.cuda.set_device(device)
            self._ranks = dist.ProcessGroupNCCL(prefix, rank, size, dist.ProcessGroupNCCL.Options())

    def broadcast(
        self, payload: torch.Tensor, done: Callable[[torch.Tensor], None] = lambda bucket: None
    ) -> None:
        """Broadcast the bytes of rank 0 into the payload of all others, in buckets, and
        call `done` with each. A group that fails is closed.
        """
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        try:
            for bucket in payload.split(BUCKET_BYTES):  # type: ignore[no-untyped-call]
                under_way.append(self._begin(bucket))
                if len(under_way) > 1:
                    done(self._finish(*under_way.popleft()))
            for last in under_way:
                done(self._finish(*last))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, so that the others notice it at once."""
        with contextlib.suppress(RuntimeError):
            self._ranks.abort()

    def _begin(self, bucket: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        if self._device is not None:
            bucket = bucket.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._ranks.broadcast([bucket], options), bucket

    def _finish(self, work: dist.Work, bucket: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            work.wait(datetime.timedelta(seconds=self._wait_s))
            return bucket
        until = time.monotonic() + self._wait_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"a peer was silent for {self._wait_s:g} s")
            time.sleep(POLL_S)
        work.wait()  # raises if it has failed
        return bucket


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if former is not None:
            os.environ[name] = former
