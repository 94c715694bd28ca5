"""Loads the model that the trainer trains: this package's own implementation of its
architecture, or transformers' implementation, of which each rank reads its own rows.

Invariant: before it is used, a model of transformers has its packed log-probs compared
with the log-probs of transformers' own attention on each sequence alone, so that a
model that packing would change is refused.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from rollweave.schema.errors import ConfigError, TrainerError, WeightsError
from rollweave.train.distributed import (
    ALONE,
    RankGroup,
    Split,
    local_tensor,
    own_rows,
    published_rows,
    saved_rows,
    shard_model,
)
from rollweave.train.lora import NewAdapters
from rollweave.train.model import Model, load_model
from rollweave.train.packing import Example, Packed, pack
from rollweave.train.tensor_parallel import check_gradients, divide, styles_of
from rollweave.train.transformers_checkpoint import UnloadedModel, persistent_buffers
from rollweave.train.transformers_model import TransformersModel, experts_of, routers_of
from rollweave.weights.checkpoint import has_native_shape, read_rows_of, read_sizes
from rollweave.weights.views import Part, StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Implementation = Literal["native", "transformers"]

TrainedModel = Model | TransformersModel


PROBE_LENGTHS = (9, 14, 5)
"""Lengths of the sequences with which packing is tested."""

PROBE_TOLERANCE = 2e-3
"""Maximum difference between packed log-probs and log-probs of single sequences, in
float32: noise is below 1e-4, also for large models.
"""

M = TypeVar("M", bound="TransformersModel")


def implementation_of(path: Path) -> Implementation:
    """Return the implementation of a checkpoint's model unless the user names one."""
    return "native" if has_native_shape(path) else "transformers"


def load_trained_model(
    path: Path,
    implementation: Implementation | None,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> TrainedModel:
    """Read a Hugging Face checkpoint directory, sharded over `ranks`. Weights are kept
    in float32; `dtype` is the number format of the computation. With `adapters`, only
    the adapters are trained. A rank reads its own rows only.

    Raises `TrainerError`, which names what is not supported, missing, or of the wrong
    shape.
    """
    if (implementation or implementation_of(path)) == "transformers":
        return load_transformers_model(
            path, dtype=dtype, device=device, ranks=ranks, adapters=adapters
        )
    return load_model(path, dtype=dtype, device=device, ranks=ranks, adapters=adapters)


def load_transformers_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> TransformersModel:
    """Load a model of transformers as `load_trained_model` does, and verify it."""
    model = load_transformers_as(
        TransformersModel, path, dtype=dtype, device=device, ranks=ranks, adapters=adapters
    )
    _probe(model)
    return model


def load_transformers_as(
    kind: type[M],
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> M:
    """Load a model of class `kind` as `load_trained_model` does, without verifying it;
    parameters that only `kind` has are left empty, and parameters that it lacks are not
    read.
    """
    try:
        unloaded = UnloadedModel(path)
        causal = unloaded.causal
        model = kind(causal, unloaded.stored, getattr(torch, dtype))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        stored = unloaded.stored.of(shapes)
        if adapters is not None:
            adapters.attach(model, head=causal.get_output_embeddings())
        model.division = divide(causal, ranks)
        splits = model.division.splits
        parts = _parts(stored, shapes, splits, ranks)
        tied = _shared_parameters(model)
        shard_model(model, _layers(causal), ranks, device=device)
        model.to_empty(device=device)
        for first, others in tied:
            for module, name in others:
                setattr(module, name, getattr(*first))
        _compute_buffers(causal)
        _read_weights(model, path, stored, parts, shapes)
        if adapters is not None:
            adapters.initialize(model, ranks, splits)
    except (ConfigError, WeightsError) as error:
        raise TrainerError(f"{path}: {error}") from error
    return model


def examine(path: Path, *, tensor_parallel: int = 1) -> tuple[StoredTensors, list[str], int | None]:
    """Return how a checkpoint stores the model that the trainer would train, its
    tensors that text does not use, and the number of experts whose choice can be
    replayed, without reading its weights.

    Raises `TrainerError`, which names the unsupported part, and ConfigError for a model
    whose layers `tensor_parallel` ranks cannot divide.
    """
    try:
        unloaded = UnloadedModel(path)
        unused = unloaded.unused() if unloaded.sees else []
    except (ConfigError, WeightsError) as error:
        raise TrainerError(f"{path}: {error}") from error
    styles_of(unloaded.causal, tensor_parallel)
    routers = routers_of(unloaded.causal).values()
    return unloaded.stored, unused, next(map(experts_of, routers), None)


# Loading


def _parts(
    stored: StoredTensors,
    shapes: Mapping[str, Sequence[int]],
    splits: Mapping[str, Split],
    ranks: RankGroup,
) -> dict[str, Part]:
    """Return the part of each stored tensor that this rank reads: all columns, if its
    tensor group divides them. Raises `WeightsError` if a tensor cannot be divided among
    the ranks.
    """
    parts = {}
    for name, view in stored.views.items():
        shape, split = shapes[view.parameter], splits.get(view.parameter)
        count = shape[0] if shape else 1
        if split is None or split.dim > 0:
            parts[name] = view.part(shape, own_rows(count, ranks))
        else:
            parts[name] = view.part(shape, saved_rows(count, ranks, split=split))
        view.part(shape, published_rows(count, ranks, split=split))
    return parts


def _shared_parameters(
    model: nn.Module,
) -> list[tuple[tuple[nn.Module, str], list[tuple[nn.Module, str]]]]:
    """Return the places of each parameter that several modules have."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [(same[0], same[1:]) for same in places.values() if len(same) > 1]


def _layers(causal: "PreTrainedModel") -> list[nn.Module]:
    """Return the layers, each of which is sharded as a unit."""
    names = set(causal._no_split_modules or ())
    return [module for module in causal.modules() if type(module).__name__ in names]


def _compute_buffers(causal: "PreTrainedModel") -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies."""
    for tensor in (*causal.parameters(), *persistent_buffers(causal).values()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for name, buffer in causal.named_buffers():
        owner, _, attribute = name.rpartition(".")
        if attribute not in causal.get_submodule(owner)._non_persistent_buffers_set:
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        causal.initialize_weights()


@torch.no_grad()
def _read_weights(
    model: TransformersModel,
    path: Path,
    stored: StoredTensors,
    parts: Mapping[str, Part],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Read this rank's rows of the checkpoint, of parameters with these full shapes."""
    parameters = {name: local_tensor(value) for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    rows = {name: part.rows for name, part in parts.items() if part.rows.start < part.rows.stop}
    whole = _WholeRows(model, shapes, (stored.views[name].parameter for name in rows))
    for name, shape in read_sizes(path).items():
        if name in stored.constants:
            rows[name] = slice(0, shape[0] if shape else 1)
    for name, tensor in read_rows_of(path, rows):
        if name in stored.constants:
            buffers[stored.constants[name]].copy_(tensor)
        else:
            view = stored.views[name]
            shard = whole.of(view.parameter)
            if shard is None:
                shard = parameters[view.parameter]
            parts[name].of(view, shard).copy_(tensor)
            whole.read(view.parameter, parameters[view.parameter])


class _WholeRows:
    """This rank's rows of parameters whose columns its tensor group divides, from the
    first to the last stored tensor of each parameter. `stored` names the parameter of
    every stored tensor.
    """

    def __init__(
        self,
        model: TransformersModel,
        shapes: Mapping[str, Sequence[int]],
        stored: Iterable[str],
    ) -> None:
        self._division = model.division
        self._shapes = shapes
        self._missing = collections.Counter(stored)
        self._rows: dict[str, torch.Tensor] = {}

    def of(self, name: str) -> torch.Tensor | None:
        """Return space for the rows of a parameter; None if its columns are not
        divided.
        """
        split = self._division.splits.get(name)
        if split is None or split.dim == 0:
            return None
        if name not in self._rows:
            count, *others = self._shapes[name]
            rows = own_rows(count, self._division.ranks)
            self._rows[name] = torch.empty(rows.stop - rows.start, *others)
        return self._rows[name]

    def read(self, name: str, own: torch.Tensor) -> None:
        """Note that a stored tensor was read. After the last stored tensor of a
        parameter, copy this rank's columns to `own`.
        """
        self._missing[name] -= 1
        if not self._missing[name] and name in self._rows:
            own.copy_(self._division.splits[name].take(self._rows.pop(name), self._division.ranks))


# Verification


@torch.no_grad()
def _probe(model: TransformersModel) -> None:
    """Compare packed log-probs with the log-probs of transformers' own attention on
    each sequence alone. Raises `TrainerError` if they differ.
    """
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    examples = [
        Example(
            tokens=torch.randint(0, model.vocab, (length,), generator=generator),
            targets=torch.arange(1, length),
        )
        for length in PROBE_LENGTHS
    ]
    name = model.architecture
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        packed = model(pack(examples).to(device), 1.0).logprobs
        with model.own_attention():
            alone = torch.cat([model(pack([e]).to(device), 1.0).logprobs for e in examples])
    except (TrainerError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        text = str(error).splitlines()[0]
        raise TrainerError(f"{name} is not supported: {text}") from error
    finally:
        model.compute_dtype = dtype
    gap = float((packed - alone).abs().max())
    if not gap <= PROBE_TOLERANCE:
        raise TrainerError(
            f"{name} is not supported: packing several sequences changes its log-probs "
            f"(by {gap:.2g}), so some of its layers see more than attention shows them"
        )
    if model.division.splits:
        _probe_gradients(model, pack(examples).to(device))


def _probe_gradients(model: TransformersModel, packed: Packed) -> None:
    """Compare gradients in a tensor group. Raises `TrainerError` if they differ."""
    try:
        with torch.enable_grad():
            model(packed, 1.0).logprobs.sum().backward()
        check_gradients(model)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
