"""Low-rank adapters (LoRA) of a base model: the layers that have one, and the weights
that base and adapters give together.

An adapter of a linear layer with weights W [out, in] is a pair of matrices, A [rank, in]
and B [out, rank]; the layer computes with W + scale · B A. Tensors have peft's names:
`<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Invariant: sums start from the base's
own weights each time, so that no error accumulates from version to version.

This module does not import torch where only names are needed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rollweave.schema.config.sections import ALL_LINEAR
from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.schema.text import did_you_mean
from rollweave.weights.checkpoint import ModelShape

if TYPE_CHECKING:
    import torch

A, B = ".lora_A.weight", ".lora_B.weight"
"""The ends of the names of an adapter's tensors."""


def layer_of(name: str) -> str | None:
    """Return the layer of an adapter's tensor; None for any other tensor."""
    return next((name.removesuffix(end) for end in (A, B) if name.endswith(end)), None)


def targeted_layers(linear: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return which of the `linear` layers have an adapter.

    Raises ConfigError for a target that names none of them.
    """
    if ALL_LINEAR in targets:
        return list(linear)
    for target in targets:
        if not any(_names(target, layer) for layer in linear):
            known = list(dict.fromkeys(layer.rpartition(".")[2] for layer in linear))
            raise ConfigError(
                f"lora.targets must name linear layers of the model ({', '.join(known)}), got "
                f"{target!r}{did_you_mean(target, known)}"
            )
    return [layer for layer in linear if any(_names(target, layer) for target in targets)]


def linear_layers(shape: ModelShape) -> list[str]:
    """Return the names of the linear layers below the output head. Routers and experts
    are none.
    """
    return [
        name.removesuffix(".weight")
        for name, size in shape.tensors().items()
        if ".layers." in name
        and name.endswith(".weight")
        and len(size) == 2
        and ".experts." not in name
        and not name.endswith(".gate.weight")
    ]


def adapter_sizes(shape: ModelShape, layers: Iterable[str], *, rank: int) -> list[tuple[int, int]]:
    """Return the shapes of the tensors of adapters of these layers."""
    tensors = shape.tensors()
    sizes = (tensors[f"{layer}.weight"] for layer in layers)
    return [size for out, columns in sizes for size in ((rank, columns), (out, rank))]


def merged(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", *, scale: float
) -> "torch.Tensor":
    """Return W + scale · B A in float32."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale)


class AdapterBase:
    """The weights of a model of this shape, to which an engine adds adapters.

    Tensors that are read from files stay there, mapped.
    """

    def __init__(
        self, tensors: Mapping[str, "torch.Tensor"], shape: ModelShape, *, scale: float
    ) -> None:
        self._scale = scale
        self._tensors = {name: tensors[name] for name in shape.tensors()}

    def formats(self, adapters: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.dtype"]:
        """Return the number formats of the model's tensors: those that the adapters
        change have theirs.
        """
        return {
            name: adapters[a].dtype
            if (a := name.removesuffix(".weight") + A) in adapters
            else tensor.dtype
            for name, tensor in self._tensors.items()
        }

    def check(self, adapters: Mapping[str, "torch.Tensor"]) -> None:
        """Raise `WeightsError` unless these are complete adapters of layers of this
        model.
        """
        layers = {layer_of(name) for name in adapters}
        if not layers or None in layers:
            others = sorted(name for name in adapters if layer_of(name) is None)
            raise WeightsError(f"tensors must be those of adapters, got {others[:3]}")
        for layer in sorted(name for name in layers if name is not None):
            base = self._tensors.get(f"{layer}.weight")
            a, b = (adapters.get(layer + end) for end in (A, B))
            if base is None or base.dim() != 2 or a is None or b is None:
                what = f"without {A} or {B}" if base is not None else "which the model lacks"
                raise WeightsError(f"adapters must be complete, got one of {layer}, {what}")
            given = (tuple(a.shape), tuple(b.shape))
            expected = ((len(a), base.shape[1]), (base.shape[0], len(a)))
            if given != expected:
                raise WeightsError(
                    f"the adapter of {layer} must have shapes {expected}, got {given}"
                )
            if not (a.is_floating_point() and b.is_floating_point()):
                raise WeightsError(f"the adapter of {layer} must be of floats, got {a.dtype}")

    def with_adapters(
        self, adapters: Mapping[str, "torch.Tensor"], device: "torch.device"
    ) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Return the model's tensors with these adapters, which `check` has passed, on
        the device: one after the other, each valid until the next.

        The call itself allocates memory for the largest one.
        """
        from rollweave.weights.staging import on_device

        return self._merge(adapters, on_device(self._tensors, device), device)

    def _merge(
        self,
        adapters: Mapping[str, "torch.Tensor"],
        base: Iterable[tuple[str, "torch.Tensor"]],
        device: "torch.device",
    ) -> Iterator[tuple[str, "torch.Tensor"]]:
        for name, tensor in base:
            layer = name.removesuffix(".weight")
            if layer + A in adapters:
                a, b = (adapters[layer + end].to(device) for end in (A, B))
                tensor = merged(tensor, a, b, scale=self._scale)
            yield name, tensor


def _names(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
