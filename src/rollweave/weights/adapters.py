"""Low-rank adapters (LoRA) of a base model: which layers have an adapter, and the
weights that the base and its adapters give together.

An adapter of a linear layer with weights W [out, in] is a pair of matrices, A [rank,
in] and B [out, rank]; the layer computes with W + scale · B A. Tensors have peft's
names: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Invariant: sums start from
the base's own weights each time, so that no error accumulates from version to version.

This module does not import torch where only names are needed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError, safe_open

from rollweave.schema.config.training import ALL_LINEAR, LoraConfig
from rollweave.schema.errors import FieldError, WeightsError
from rollweave.schema.text import did_you_mean
from rollweave.weights.checkpoint import ModelShape, read_rows_of, read_sizes

if TYPE_CHECKING:
    import torch

A, B = ".lora_A.weight", ".lora_B.weight"
"""The ends of the names of an adapter's tensors."""


PREFIX = "base_model.model."
"""Beginning of the names in peft's files."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""peft's files."""

BASE = "base"
"""Metadata of the weights that a run exports: the base model (`base_digest`)."""

UNSUPPORTED = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
)
"""Settings of peft that change what an adapter computes."""


def layer_of(name: str) -> str | None:
    """Return the layer of an adapter's tensor; None for any other tensor."""
    return next((name.removesuffix(end) for end in (A, B) if name.endswith(end)), None)


def targeted_layers(linear: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the `linear` layers that have an adapter. Raises FieldError for a target
    that names no linear layer.
    """
    if ALL_LINEAR in targets:
        return list(linear)
    for target in targets:
        if not any(_names(target, layer) for layer in linear):
            known = list(dict.fromkeys(layer.rpartition(".")[2] for layer in linear))
            raise FieldError(
                "lora.targets",
                f"name linear layers of the model ({', '.join(known)})",
                f"{target!r}{did_you_mean(target, known)}",
            )
    return [layer for layer in linear if any(_names(target, layer) for target in targets)]


def linear_layers(shape: ModelShape) -> list[str]:
    """Return the names of the linear layers below the output head. Routers and experts
    are not included.
    """
    return [
        name.removesuffix(".weight")
        for name, size in shape.tensors().items()
        if ".layers." in name
        and name.endswith(".weight")
        and len(size) == 2
        and ".experts." not in name
        and not name.endswith((".gate.weight", ".router.weight"))
    ]


def adapter_sizes(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes of the adapters' tensors by name. Raises FieldError for a
    target that the model lacks.
    """
    tensors, sizes = shape.tensors(), dict[str, tuple[int, int]]()
    for layer in targeted_layers(linear_layers(shape), lora.targets):
        out, columns = tensors[f"{layer}.weight"]
        sizes |= {layer + A: (lora.rank, columns), layer + B: (out, lora.rank)}
    return sizes


def merged(
    weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", *, scale: float
) -> "torch.Tensor":
    """Return W + scale · B A in float32."""
    return weight.float().addmm(b.float(), a.float(), alpha=scale)


def check_adapter(
    directory: Path, expected: Mapping[str, Sequence[int]], lora: LoraConfig, *, base: Path
) -> None:
    """Check that `directory` has an adapter, as peft writes it, with these tensors and
    settings, made for the model in `base`.

    Raises FieldError, which names what differs.
    """

    def wrong(what: str) -> FieldError:
        return FieldError("lora.path", f"be an adapter's directory: {directory}: {what}")

    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text())
        with safe_open(str(directory / ADAPTER_WEIGHTS), framework="pt") as file:
            sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (a handle is no mapping)
            made_for = (file.metadata() or {}).get(BASE)
    except (OSError, ValueError, SafetensorError) as error:
        raise wrong(str(error)) from error
    wanted = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    for key, value in wanted.items():
        if config.get(key) != value:
            raise wrong(f"{key} must be {value}, got {config.get(key)}")
    for key in UNSUPPORTED:
        if config.get(key):
            raise wrong(f"{key} is not supported, got {config[key]}")
    other = f"it is of another base model than {base}"
    named = {f"{PREFIX}{name}": tuple(size) for name, size in expected.items()}
    if sizes.keys() != named.keys():
        differing = sorted(sizes.keys() ^ named.keys())[:2]
        raise wrong(f"{other}, or of other lora.targets: {differing}")
    for name, size in named.items():
        if sizes[name] != size:
            raise wrong(f"{other}: {name} must have shape {size}, got {sizes[name]}")
    if made_for is not None and made_for != base_digest(base):
        raise wrong(other)


def base_digest(directory: Path) -> str:
    """Return the xxh3-128, in hex, of the first rows of a checkpoint's tensors. An
    adapter records this digest of its base model.
    """
    from rollweave.weights.publication import bytes_of

    content = xxhash.xxh3_128()
    rows = read_rows_of(directory, {name: slice(0, 1) for name in read_sizes(directory)})
    for name, row in sorted(rows, key=lambda row: row[0]):
        content.update(name.encode())
        content.update(bytes_of(row))
    return content.hexdigest()


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
        """Return each tensor's number format: the adapter's for tensors that an adapter
        changes, otherwise the model's.
        """
        return {
            name: adapters[a].dtype
            if (a := name.removesuffix(".weight") + A) in adapters
            else tensor.dtype
            for name, tensor in self._tensors.items()
        }

    def check(self, adapters: Mapping[str, "torch.Tensor"]) -> None:
        """Raise `WeightsError` unless `adapters` are complete and belong to layers of
        this model.
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

        The call itself allocates memory for the largest tensor.
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
