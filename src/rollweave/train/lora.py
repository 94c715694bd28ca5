"""Low-rank adapters (LoRA) in the trainer's models: the model's own weights are frozen,
and the adapters of some linear layers are trained.

Invariants: a model computes the same with new adapters as without, bit for bit, because
B begins as 0; parameters of the model keep their names; an adapter's parameters have
peft's names.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from rollweave.schema.config.training import LoraConfig
from rollweave.schema.errors import ConfigError
from rollweave.train.distributed import RankGroup, Split, full_shape, local_tensor, own_rows
from rollweave.weights.adapters import ADAPTER_WEIGHTS, PREFIX, A, B, targeted_layers


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapter(x)

    def adapter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's part of the output."""
        down = functional.linear(x, self.lora_A.weight.to(x.dtype))
        return functional.linear(down, self.lora_B.weight.to(down.dtype)) * self.scale


@dataclass(frozen=True)
class NewAdapters:
    """The adapters that a run begins with. `seed` is the run's."""

    lora: LoraConfig
    seed: int

    def attach(self, model: nn.Module, *, head: nn.Module | None) -> None:
        """Give the linear layers of a model on the meta device their adapters, and
        freeze all else. The output `head` has no adapter.

        Raises ConfigError for a target that the model lacks.
        """
        linear = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module is not head
        }
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name in targeted_layers(list(linear), self.lora.targets):
            layer = linear[name]
            with torch.device("meta"):
                down = nn.Linear(layer.in_features, self.lora.rank, bias=False)
                up = nn.Linear(self.lora.rank, layer.out_features, bias=False)
            layer.__class__ = AdaptedLinear
            assert isinstance(layer, AdaptedLinear)
            layer.lora_A, layer.lora_B, layer.scale = down, up, self.lora.scale

    @torch.no_grad()
    def initialize(
        self, model: nn.Module, ranks: RankGroup, splits: Mapping[str, Split] | None = None
    ) -> None:
        """Set the adapters' first values: the values in `lora.path` or, like peft's, A
        uniform and B 0. They do not depend on the number of ranks, nor on how a tensor
        group divides them (`splits`).

        Raises ConfigError for an adapter that cannot be read.
        """
        splits = splits or {}
        given: dict[str, torch.Tensor] = {}
        if self.lora.path is not None:
            sizes = {
                name: full_shape(parameter.shape, splits.get(name), ranks)
                for name, parameter in model.named_parameters()
                if name.endswith((A, B))
            }
            given = self._given(Path(self.lora.path), sizes)
        for name, layer in model.named_modules():
            if not isinstance(layer, AdaptedLinear):
                continue
            ends = (A, layer.lora_A), (B, layer.lora_B)
            values = [given[name + end] for end, _ in ends] if given else self._new(name, layer)
            for (end, matrix), value in zip(ends, values, strict=True):
                split = splits.get(name + end)
                part = value if split is None else split.take(value, ranks)
                local_tensor(matrix.weight).copy_(part[own_rows(len(part), ranks)])

    def _new(self, name: str, layer: AdaptedLinear) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(self.lora.rank, layer.in_features)
        a.uniform_(-bound, bound, generator=generator)
        return [a, torch.zeros(layer.out_features, self.lora.rank)]

    def _given(self, directory: Path, sizes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return the adapters in `directory`. Raises ConfigError unless they are
        adapters of the model.
        """
        where = f"lora.path: {directory}"
        try:
            tensors = load_file(directory / ADAPTER_WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{where}: {error}") from error
        given = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        if {name: tensor.shape for name, tensor in given.items()} != sizes:
            raise ConfigError(f"{where} must have the adapters of this model, got others")
        return given
