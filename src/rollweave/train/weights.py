"""The trained weights as values: read them, replace them, or swap them temporarily.

They are the whole model, or its adapters; frozen weights never change.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from rollweave.schema.errors import TrainerError
from rollweave.train.distributed import (
    RankGroup,
    from_rows,
    host_copy,
    is_sharded,
    local_tensor,
    placed_like,
)
from rollweave.train.tensor_parallel import division_of


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def clone_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Copy every trained parameter (of this rank's shard), in the order of
    `trained_parameters`, on its device.
    """
    return [local_tensor(parameter).clone() for parameter in trained_parameters(model).values()]


@torch.no_grad()
def load_clones(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Restore copies from `clone_parameters`."""
    for parameter, value in zip(trained_parameters(model).values(), values, strict=True):
        local_tensor(parameter).copy_(value)


@contextlib.contextmanager
def swapped_weights(model: nn.Module, values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run with other weights.

    Costs a copy of the trained weights for the duration, instead of a second model
    permanently.
    """
    own = clone_parameters(model)
    load_clones(model, values)
    try:
        yield
    finally:
        load_clones(model, own)


def named_tensors(model: nn.Module, ranks: RankGroup) -> dict[str, torch.Tensor]:
    """Return copies of the trained parameters (of this rank's shards) by transformers'
    names, on the CPU; a tied head appears once, as the embedding.
    """
    splits = division_of(model).splits
    return {
        name: host_copy(parameter, ranks, like=parameter, split=splits.get(name))
        for name, parameter in trained_parameters(model).items()
    }


@torch.no_grad()
def load_named_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors from `named_tensors`.

    Raises `TrainerError` if names or shapes differ, before anything is changed.
    """
    parameters = trained_parameters(model)
    if tensors.keys() != parameters.keys():
        raise TrainerError(
            f"weights of another model: {sorted(tensors.keys() ^ parameters.keys())[:3]} differ"
        )
    division = division_of(model)
    for name, parameter in parameters.items():
        if tensors[name].shape != division.shape(name, parameter):
            raise TrainerError(
                f"weight {name} must have shape {tuple(division.shape(name, parameter))}, got "
                f"{tuple(tensors[name].shape)}"
            )
    for name, parameter in parameters.items():
        value = own_part(model, name, tensors[name])
        local_tensor(parameter).copy_(local_tensor(placed_like(value, parameter)))


def own_part(model: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's value (such as its weights), from the
    rows that this rank has saved.
    """
    division = division_of(model)
    split = division.splits.get(name)
    if split is None or not is_sharded(value):
        return value
    return from_rows(local_tensor(value), value.shape[0], split, division.ranks)
