"""torch.distributed's gloo as a peer: `python -m benchmarks.relay.gloo` runs one
process for each rank, each on its own host.

torch is imported once, and ranks are forked from there. Invariants: ranks end with this
process, which ends with its parent.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import free_port
from benchmarks.network import Network, enter
from rollweave.io.boot import die_with
from rollweave.io.child import spawn
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.base import Struct
from rollweave.schema.errors import WeightsError

PORT = 29400
"""Port of rank 0's store, on a host on which nothing else listens."""

PATIENCE_S = 300.0
"""Maximum seconds for one broadcast: the full version over the slowest link."""


class Ranks(Struct, frozen=True, kw_only=True):
    """Description of the ranks: the `paths` of their hosts, the `address` of the first
    and the `interface` of all. They form groups of `sizes`.
    """

    paths: tuple[str, ...]
    address: str
    port: int
    interface: str
    sizes: tuple[int, ...]


class Send(Struct, frozen=True, kw_only=True):
    """Request: broadcast so many bytes from rank 0 to the other ranks of the group of
    `size`.
    """

    size: int
    nbytes: int


class Sent(Struct, frozen=True, kw_only=True):
    """Reply: seconds from rank 0's start, after a barrier, until the last rank has
    received all bytes. The first reply is 0 and means ready.
    """

    seconds: float


class Gloo:
    """The peer as a bench uses it. `start` creates it; `close` ends it."""

    def __init__(self, network: Network, sizes: Sequence[int], logs: Path, *, hosts: int) -> None:
        self._replies: asyncio.Queue[float | str] = asyncio.Queue()
        self._decode = decoder_of(Sent)
        self._child = spawn(
            name="gloo",
            module="benchmarks.relay.gloo",
            log=logs / "gloo.log",
            env={"OMP_NUM_THREADS": "1"},
            on_frame=lambda payload: self._replies.put_nowait(self._decode(payload).seconds),
            on_gone=self._replies.put_nowait,
        )
        paths = tuple(network.path(host) for host in range(hosts))
        address, port = network.address(0), PORT if not network.why_not else 0
        ranks = Ranks(
            paths=paths, address=address, port=port, interface=network.interface, sizes=tuple(sizes)
        )
        self._child.send(encode(ranks))

    async def ready(self) -> None:
        """Wait until all ranks run. Raises WeightsError where a rank does not start."""
        await self._reply()

    async def broadcast(self, size: int, nbytes: int) -> float:
        """Broadcast and return the seconds. Raises WeightsError."""
        self._child.send(encode(Send(size=size, nbytes=nbytes)))
        return await self._reply()

    async def close(self) -> None:
        self._child.kill()
        await self._child.gone()

    async def _reply(self) -> float:
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await self._replies.get()
        except TimeoutError:
            raise WeightsError(f"gloo did not answer in {PATIENCE_S:g} s") from None
        if isinstance(reply, str):  # it is lost
            raise WeightsError(f"gloo: {reply}")
        return reply


def main() -> None:
    """Run the ranks, and report the seconds of each broadcast."""
    parent = Parent.from_arguments()
    ranks = decoder_of(Ranks)(parent.receive())
    decode = decoder_of(Send)
    import torch.distributed as dist  # before the ranks are forked

    assert dist.is_gloo_available(), "torch is built with gloo on every system that has namespaces"
    fork = multiprocessing.get_context("fork")
    port = ranks.port or free_port()
    pipes: list[Connection] = []
    for rank in range(len(ranks.paths)):
        ours, theirs = fork.Pipe()
        fork.Process(
            target=_rank, args=(rank, ranks, port, theirs, os.getpid()), daemon=True
        ).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    parent.send(encode(Sent(seconds=0.0)))
    while True:
        send = decode(parent.receive())
        for pipe in pipes[: send.size]:
            pipe.send((send.size, send.nbytes))
        times = [pipe.recv() for pipe in pipes[: send.size]]
        parent.send(encode(Sent(seconds=max(stop for _, stop in times) - times[0][0])))


def _rank(rank: int, ranks: Ranks, port: int, pipe: Connection, parent_pid: int) -> None:
    die_with(parent_pid)
    enter(ranks.paths[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = ranks.interface
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=PATIENCE_S)
    world = len(ranks.paths)
    where = f"tcp://{ranks.address}:{port}"
    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=world, timeout=patience
    )
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in ranks.sizes}
    pipe.send(None)
    tensors: dict[int, torch.Tensor] = {}
    while True:
        size, nbytes = pipe.recv()
        tensor = tensors.setdefault(nbytes, torch.full((nbytes,), rank, dtype=torch.uint8))
        dist.barrier(groups[size])
        start = time.monotonic()
        dist.broadcast(tensor, 0, group=groups[size])
        pipe.send((start, time.monotonic()))


if __name__ == "__main__":
    main()
