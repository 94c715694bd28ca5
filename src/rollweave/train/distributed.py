"""The trainer's ranks: sharding with FSDP2, and the few collectives around it.

Invariants: with one rank nothing here touches torch.distributed; every rank makes the
same calls in the same order. FSDP2 and distributed tensors are imported only if there
are several ranks, because that takes seconds.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import TypeIs

from rollweave.io.sockets import bound_socket
from rollweave.schema.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

COLLECTIVE_S = 1800.0
"""Maximum seconds of one collective operation. The trainer is ended much earlier if one
of its ranks is lost, or if a step takes too long.
"""

STORE_BACKLOG = 1024
"""Maximum number of ranks that connect to the store at the same moment."""

SIOCGIFADDR = 0x8915
"""Request for an interface's address (<linux/sockios.h>)."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroup:
    """One of `world_size` ranks, and its collectives with the others."""

    rank: int
    world_size: int
    host_group: "ProcessGroup | None" = None
    """A second process group of all ranks, over Gloo, for checkpoints, which are
    written while the ranks train.
    """

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum over ranks."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        broadcast: T = box[0]
        return broadcast

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in order."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def raise_together(self, error: str) -> None:
        """Raise `TrainerError` on every rank if any of them has an error: that of the
        first such rank.
        """
        for text in self.all_gather(error):
            if text:
                raise TrainerError(text)


ALONE = RankGroup(rank=0, world_size=1)
"""The rank of a trainer that has no others."""


def open_store(address: str) -> tuple[TCPStore, str]:
    """Open the store at which ranks meet, on one address of this host.

    Return it, for rank 0, and the address at which the other ranks reach it
    ("10.0.0.1:29500"). Raises OSError.
    """
    # the store would otherwise listen on every address of this host
    with bound_socket(address, 0) as listening:
        listening.listen(STORE_BACKLOG)
        port: int = listening.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, f"{address}:{port}"


def join_store(where: str) -> TCPStore:
    """Connect to the store of rank 0."""
    host, _, port = where.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def join_ranks(
    rank: int,
    world_size: int,
    *,
    store: Store,
    device: torch.device,
    address: str = "127.0.0.1",
    timeout_s: float = COLLECTIVE_S,
) -> RankGroup:
    """Join the other ranks at `store` in a process group; `address` is that of this
    host.

    Tensors on a GPU go through NCCL, all others through Gloo.
    """
    if interface := interface_of(address):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    host_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return RankGroup(rank=rank, world_size=world_size, host_group=host_group)


def interface_of(address: str) -> str | None:
    """Return the network interface with this IPv4 address, or None.

    Gloo and NCCL would otherwise choose one by the name of the host, which may not be
    the one by which the other hosts reach it.
    """
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None


def shutdown_ranks(ranks: RankGroup) -> None:
    if ranks.world_size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def shard_model(
    model: nn.Module, layers: Sequence[nn.Module], ranks: RankGroup, *, device: torch.device
) -> None:
    """Shard parameters over the ranks and their devices, layer by layer (FSDP2).

    Does nothing with one rank.
    """
    if ranks.world_size > 1:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert dist.group.WORLD is not None, "the ranks have met"
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        # Without resharding, the root would keep its gathered weights from one forward
        # pass to the next, whatever was written to the shards.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)


def rows_of(count: int, *, rank: int, world_size: int) -> slice:
    """Return which of a tensor's `count` rows a rank has: FSDP2 divides them like
    `torch.chunk`.
    """
    each = -(-count // world_size)
    return slice(min(each * rank, count), min(each * (rank + 1), count))


def own_rows(count: int, ranks: RankGroup) -> slice:
    """Return which of a tensor's `count` rows this rank has."""
    return rows_of(count, rank=ranks.rank, world_size=ranks.world_size)


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass reduces gradients over ranks; it is disabled
    for all micro-batches but the last.
    """
    # FSDP2's method, if the model is sharded
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is not None:
        set_sync(enabled)


def is_sharded(tensor: torch.Tensor) -> "TypeIs[DTensor]":
    """Return whether this is a distributed tensor.

    None can exist before their module is imported.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, gathered from all ranks if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def host_copy(value: torch.Tensor, ranks: RankGroup, *, like: torch.Tensor) -> torch.Tensor:
    """Copy a value that belongs to the parameter `like` to the CPU. It is a shard if
    `like` is sharded, or a scalar.
    """
    copy = local_tensor(value).to("cpu", copy=True)
    return _shard(copy, like.shape, _host_mesh(ranks)) if is_sharded(like) and copy.dim() else copy


def empty_shard(shape: Sequence[int], dtype: torch.dtype, ranks: RankGroup) -> torch.Tensor:
    """Return space for this rank's shard of a tensor on the CPU. A scalar has none."""
    if not shape:
        return torch.empty((), dtype=dtype)
    rows = own_rows(shape[0], ranks)
    local = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=dtype)
    return _shard(local, torch.Size(shape), _host_mesh(ranks))


def placed_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `value`, which is sharded if `target` is, on its device."""
    if not is_sharded(target):
        return value.to(device=target.device, dtype=target.dtype)
    local = local_tensor(value).to(device=target.device, dtype=target.dtype)
    return _shard(local, target.shape, target.device_mesh)


@functools.cache
def _host_mesh(ranks: RankGroup) -> "DeviceMesh":
    from torch.distributed.device_mesh import DeviceMesh

    assert ranks.host_group is not None, "there are several ranks"
    return DeviceMesh.from_group(ranks.host_group, "cpu")


def _shard(local: torch.Tensor, shape: torch.Size, mesh: "DeviceMesh") -> "DTensor":
    """Return the tensor of `shape` whose rows on this rank are `local`."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
