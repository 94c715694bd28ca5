"""The trainer's ranks: sharding with FSDP2, and the few collectives around it.

Invariants: with one rank nothing here touches torch.distributed; every rank makes the
same calls in the same order. FSDP2 and distributed tensors are imported only where
there are several ranks: they take seconds, which a laptop's run would wait for.
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
    """This rank among `world`."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def greatest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over ranks."""
        if self.world > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def from_first(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        found: T = box[0]
        return found

    def each(self, value: T) -> list[T]:
        """Every rank's value, in their order."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found


def init_ranks(rank: int, world: int, device: torch.device) -> RankGroup:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT (torchrun's contract).

    Raises `ValueError` where these are not set.
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

    Nothing happens with one rank.
    """
    if ranks.world > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        # Without resharding the root would keep its gathered weights from one forward
        # to the next, whatever was written.
        fully_shard(model, reshard_after_forward=True)


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients over ranks; off for all micro-batches
    but the last.
    """
    # FSDP2's, where the model is sharded
    set_sync = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is not None:
        set_sync(enabled)


def is_sharded(tensor: torch.Tensor) -> "TypeIs[DTensor]":
    """Whether this is a distributed tensor.

    None can exist before their module is imported.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks where it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`value`, sharded and placed as `target` is."""
    value = value.to(device=target.device, dtype=target.dtype)
    if is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, target.device_mesh, target.placements)
    return value
