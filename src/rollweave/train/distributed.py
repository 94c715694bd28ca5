"""The trainer's ranks: sharding with FSDP2, and the few collectives around it.

Ranks form a grid: consecutive ranks are a tensor group, which computes the same rows
together and divides the layers (`train/tensor_parallel`); ranks with the same place in
their groups are a data group, over which FSDP2 shards the parameters of its ranks.
Without tensor parallelism each rank is a tensor group by itself.

Invariants: with one rank nothing here touches torch.distributed; every rank makes the
same calls in the same order; a rank saves or publishes consecutive rows of a full
parameter. FSDP2 and distributed tensors are imported only if there are several ranks,
because that takes seconds.
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

from rollweave.io.machine import bound_socket
from rollweave.schema.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

T = TypeVar("T")

COLLECTIVE_S = 1800.0
"""Maximum seconds of one collective operation. The trainer is ended much earlier if one
of its ranks is lost, or if a step takes too long.
"""

STORE_S = 300.0
"""Maximum seconds to connect to the store of rank 0."""

STORE_BACKLOG = 1024
"""Maximum number of ranks that connect to the store at the same moment."""

SIOCGIFADDR = 0x8915
"""Request for an interface's address (<linux/sockios.h>)."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroup:
    """One of `world_size` ranks, and its collectives with the others."""

    rank: int
    world_size: int
    address: str = "127.0.0.1"
    """The address of this host by which other hosts reach it."""
    host_group: "ProcessGroup | None" = None
    """A second process group of all ranks, over Gloo, for checkpoints, which are
    written while the ranks train.
    """
    tensor_size: int = 1
    """Number of ranks of a tensor group."""
    mesh: "DeviceMesh | None" = None
    """The grid of data groups and tensor groups, unless each rank is a tensor group."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """The number of tensor groups, which compute different rows."""
        return self.world_size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """The number of this rank's tensor group."""
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """The place of this rank in its tensor group."""
        return self.rank % self.tensor_size

    @property
    def tensor_group(self) -> "ProcessGroup":
        """The process group of this rank's tensor group."""
        assert self.mesh is not None, "tensor groups have several ranks"
        return self.mesh.get_group("tensor")

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over the tensor groups. The ranks of a tensor group have the
        same value.
        """
        if self.data_size > 1:
            dist.all_reduce(
                values, group=None if self.mesh is None else self.mesh.get_group("data")
            )
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
        """Raise `TrainerError` on every rank if any rank has an error: the error of the
        first such rank.
        """
        for text in self.all_gather(error):
            if text:
                raise TrainerError(text)


ALONE = RankGroup(rank=0, world_size=1)
"""The rank of a trainer with a single rank."""


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


def join_store(where: str, *, timeout_s: float = STORE_S) -> TCPStore:
    """Connect to the store of rank 0, which is tried again until `timeout_s` have
    passed. Raises RuntimeError.
    """
    host, _, port = where.rpartition(":")
    limit = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, int(port), is_master=False, timeout=limit)


def join_ranks(
    rank: int,
    world_size: int,
    *,
    store: Store,
    device: torch.device,
    address: str = "127.0.0.1",
    timeout_s: float = COLLECTIVE_S,
) -> RankGroup:
    """Join the other ranks at `store` in a process group; `address` is this host's
    address.

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
    return RankGroup(rank=rank, world_size=world_size, address=address, host_group=host_group)


def with_tensor_groups(ranks: RankGroup, size: int, device: torch.device) -> RankGroup:
    """Return the ranks with tensor groups of this size. All ranks call it. A single
    rank, as in a run within one process, divides nothing.
    """
    if size == 1 or ranks.world_size == 1:
        return ranks
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh(
        device.type,
        torch.arange(ranks.world_size).view(-1, size),
        mesh_dim_names=("data", "tensor"),
    )
    return dataclasses.replace(ranks, tensor_size=size, mesh=mesh)


def interface_of(address: str) -> str | None:
    """Return the network interface with this IPv4 address, or None.

    Gloo and NCCL would otherwise choose an interface by the name of the host, which may
    not be the interface through which the other hosts reach this host.
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
    """Shard parameters over the ranks of a data group and their devices, layer by layer
    (FSDP2).

    Does nothing with one rank.
    """
    if ranks.world_size > 1:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert dist.group.WORLD is not None, "the ranks have met"
        mesh = (
            DeviceMesh.from_group(dist.group.WORLD, device.type)
            if ranks.mesh is None
            else ranks.mesh["data"]
        )
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
    """Return which of a tensor's `count` rows this rank has, unless its tensor group
    divides the rows.
    """
    return rows_of(count, rank=ranks.data_rank, world_size=ranks.data_size)


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


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def on_cpu(
    value: torch.Tensor, ranks: RankGroup, *, like: torch.Tensor, split: "Split | None" = None
) -> torch.Tensor:
    """Return a value that belongs to the parameter `like` on the CPU: itself if it is
    there, or a copy. It is a shard if `like` is sharded, or a scalar. If the parameter
    is divided by `split`, it has rows of the full parameter.
    """
    if not (is_sharded(like) and value.dim()):
        return local_tensor(value).cpu()
    rows = to_rows(local_tensor(value), split, ranks).cpu()
    return _shard_of_rows(rows, full_shape(like.shape, split, ranks), ranks, split)


def empty_shard(
    shape: Sequence[int], dtype: torch.dtype, ranks: RankGroup, *, split: "Split | None" = None
) -> torch.Tensor:
    """Return space for this rank's rows of a tensor on the CPU. A scalar has none."""
    if not shape:
        return torch.empty((), dtype=dtype)
    rows = saved_rows(shape[0], ranks, split=split)
    local = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=dtype)
    return _shard_of_rows(local, torch.Size(shape), ranks, split)


def placed_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `value`, which is sharded if `target` is, on its device."""
    if not is_sharded(target):
        return value.to(device=target.device, dtype=target.dtype)
    local = local_tensor(value).to(device=target.device, dtype=target.dtype)
    return _shard(local, target.shape, target.device_mesh)


def _shard_of_rows(
    local: torch.Tensor, shape: torch.Size, ranks: RankGroup, split: "Split | None"
) -> "DTensor":
    """Return the tensor of `shape` whose `saved_rows` on this rank are `local`."""
    if ranks.tensor_size == 1:
        return _shard(local, shape, _host_mesh(ranks))
    from torch.distributed.tensor import Replicate, Shard

    by_column = split is not None and split.dim > 0
    outer = Replicate() if split is None else Shard(0)
    return _shard(local, shape, _host_grid(ranks, by_column), [outer, Shard(0)])


@functools.cache
def _host_mesh(ranks: RankGroup) -> "DeviceMesh":
    from torch.distributed.device_mesh import DeviceMesh

    assert ranks.host_group is not None, "there are several ranks"
    return DeviceMesh.from_group(ranks.host_group, "cpu")


@functools.cache
def _host_grid(ranks: RankGroup, by_data: bool) -> "DeviceMesh":
    """Return the grid of ranks on the CPU, whose first dimension is the number of the
    tensor group if `by_data`, else the place in it.
    """
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.arange(ranks.world_size).view(-1, ranks.tensor_size)
    names = ("data", "tensor")
    if by_data:
        return DeviceMesh("cpu", grid, mesh_dim_names=names)
    return DeviceMesh("cpu", grid.T.contiguous(), mesh_dim_names=names[::-1])


def _shard(
    local: torch.Tensor,
    shape: torch.Size,
    mesh: "DeviceMesh",
    placements: "Sequence[Placement] | None" = None,
) -> "DTensor":
    """Return the tensor of `shape` whose part on this rank is `local`: its rows, or the
    part that `placements` assign to it.
    """
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        local,
        mesh,
        placements or [Shard(0)],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


# Parameters that tensor groups divide


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Divides a parameter among a tensor group: each rank has an equal part of
    dimension `dim`, or of each of `blocks` equal parts of it.
    """

    dim: int
    blocks: int = 1

    def take(self, full: torch.Tensor, ranks: RankGroup) -> torch.Tensor:
        """Return this rank's part of a parameter."""
        blocks = full.chunk(self.blocks, self.dim)
        each = blocks[0].shape[self.dim] // ranks.tensor_size
        own = [block.narrow(self.dim, each * ranks.tensor_rank, each) for block in blocks]
        return torch.cat(own, self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter from the parts of all ranks."""
        by_rank = [part.chunk(self.blocks, self.dim) for part in parts]
        return torch.cat([part for block in zip(*by_rank, strict=True) for part in block], self.dim)


def full_shape(local: Sequence[int], split: Split | None, ranks: RankGroup) -> torch.Size:
    """Return a full parameter's shape, given the shape `local` of a rank's part."""
    if split is None:
        return torch.Size(local)
    size = list(local)
    size[split.dim] *= ranks.tensor_size
    return torch.Size(size)


def saved_rows(
    count: int, ranks: RankGroup, *, split: Split | None = None, rank: int | None = None
) -> slice:
    """Return which of a parameter's `count` rows a rank saves, by default this rank.
    The ranks of a tensor group have the same rows of an undivided parameter, and
    different rows of a divided parameter.
    """
    rank = ranks.rank if rank is None else rank
    data, place = divmod(rank, ranks.tensor_size)
    if split is None:
        return rows_of(count, rank=data, world_size=ranks.data_size)
    if split.dim == 0:
        each = count // ranks.tensor_size
        start, rows = each * place, rows_of(each, rank=data, world_size=ranks.data_size)
    else:
        outer = rows_of(count, rank=data, world_size=ranks.data_size)
        start = outer.start
        rows = rows_of(outer.stop - outer.start, rank=place, world_size=ranks.tensor_size)
    return slice(start + rows.start, start + rows.stop)


def published_rows(
    count: int, ranks: RankGroup, *, split: Split | None = None, rank: int | None = None
) -> slice:
    """Return which of a parameter's `count` rows a rank publishes, by default this
    rank: each row is published by one rank.
    """
    rank = ranks.rank if rank is None else rank
    rows = saved_rows(count, ranks, split=split, rank=rank)
    return slice(rows.stop, rows.stop) if split is None and rank % ranks.tensor_size else rows


def to_rows(local: torch.Tensor, split: Split | None, ranks: RankGroup) -> torch.Tensor:
    """Return this rank's `saved_rows` of a parameter, from its own part of it. If
    columns are divided, all ranks of the tensor group call it together.
    """
    if split is None or split.dim == 0:
        return local
    parts = [torch.empty_like(local) for _ in range(ranks.tensor_size)]
    if local.numel():
        dist.all_gather(parts, local.contiguous(), group=ranks.tensor_group)
    own = rows_of(len(local), rank=ranks.tensor_rank, world_size=ranks.tensor_size)
    # concatenated rows only: the full matrix would be as large as all parts
    return split.join([part[own] for part in parts])


def from_rows(
    rows: torch.Tensor, count: int, split: Split | None, ranks: RankGroup
) -> torch.Tensor:
    """Return this rank's part of a parameter with `count` rows, from its `saved_rows`.

    The inverse of `to_rows`, and called in the same way.
    """
    if split is None or split.dim == 0:
        return rows
    outer = own_rows(count, ranks)
    size = outer.stop - outer.start
    padded = rows.new_zeros(-(-size // ranks.tensor_size), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks.tensor_size)]
    if padded.numel():
        dist.all_gather(parts, padded, group=ranks.tensor_group)
    return split.take(torch.cat(parts)[:size], ranks)
