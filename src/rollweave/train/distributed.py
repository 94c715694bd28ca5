"""The trainer's ranks: sharding with FSDP2, and the few collectives around it.

Invariants: with one rank nothing here touches torch.distributed; every rank makes the
same calls in the same order. FSDP2 and distributed tensors are imported only if there
are several ranks, because that takes seconds.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank, and the collectives with the other ranks of `world`."""

    rank: int
    world: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over the ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum over ranks."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        broadcast: T = box[0]
        return broadcast

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in order."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered


def init_ranks(rank: int, world: int, device: torch.device) -> RankGroup:
    """Join the other ranks at MASTER_ADDR:MASTER_PORT (torchrun's contract).

    Raises `ValueError` if these are not set.
    """
    if world > 1 and not dist.is_initialized():
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"{world} trainer ranks need the environment variables {' and '.join(missing)}"
            )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world
        )
    return RankGroup(rank=rank, world=world)


def shutdown_ranks(ranks: RankGroup) -> None:
    if ranks.world > 1 and dist.is_initialized():
        dist.destroy_process_group()


def shard_model(model: nn.Module, layers: Sequence[nn.Module], ranks: RankGroup) -> None:
    """Shard parameters over the ranks, layer by layer (FSDP2).

    Does nothing with one rank.
    """
    if ranks.world > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        # Without resharding, the root would keep its gathered weights from one forward
        # pass to the next, whatever was written to the shards.
        fully_shard(model, reshard_after_forward=True)


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


def sharded_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `value`, sharded and placed like `target`."""
    value = value.to(device=target.device, dtype=target.dtype)
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, target.device_mesh, target.placements)
    return value
