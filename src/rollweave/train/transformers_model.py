"""Any causal language model of transformers for training, with the interface of
`train/model.Model`: packed inputs in, scores of the labels out.

The model's own code computes everything but attention (`train/packed_attention`).
Invariants: parameters have the names of transformers' module, and are published and
exported under the names and shapes of the checkpoint (`weights/views`); before it is
used, a model's packed log-probs are compared with those of transformers' own attention
on each sequence alone, so that a model that packing would change is refused.

transformers is imported only by the functions that need it, because that takes seconds.
"""

import collections
import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollweave.io.extras import from_extra
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
from rollweave.train.model import MAX_LOGITS, Reference, Scores, scores_in_parts, scores_of
from rollweave.train.packed_attention import IMPLEMENTATION, packed_rows, register
from rollweave.train.packing import Example, Packed, pack
from rollweave.train.routing import Replay, experts_of, routers_of
from rollweave.train.tensor_parallel import Division, check_gradients, divide, styles_of
from rollweave.weights.checkpoint import read_rows_of, read_sizes
from rollweave.weights.views import Part, StoredTensors, View

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose tokens see each other through attention alone."""

REFERENCE_IMPLEMENTATION = "eager"
"""transformers' plain attention, with which packed log-probs are compared."""

PROBE_LENGTHS = (9, 14, 5)
"""Lengths of the sequences with which packing is tested."""

PROBE_TOLERANCE = 2e-3
"""Maximum difference between packed log-probs and those alone, in float32: noise is
below 1e-4, also for large models.
"""


M = TypeVar("M", bound="TransformersModel")


class TransformersModel(nn.Module):
    """A model of transformers, `causal`, whose forward pass returns log-probs of the
    labels.

    Its modules are also those of this object, so that parameters have the same names.
    """

    _causal: "PreTrainedModel"

    def __init__(
        self, causal: "PreTrainedModel", stored: StoredTensors, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        for name, child in self.parts_of(causal):
            self.add_module(name, child)
        # not a submodule, which would add a prefix to each name
        object.__setattr__(self, "_causal", causal)
        self.compute_dtype = compute_dtype
        self.max_logits = MAX_LOGITS
        self.stored = stored
        self.vocab = int(causal.get_output_embeddings().weight.shape[0])
        self._replay = Replay(causal)
        self.division = Division()

    def parts_of(self, causal: "PreTrainedModel") -> Iterable[tuple[str, nn.Module]]:
        """Yield the modules that this model has, by name."""
        return causal.named_children()

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return log-probs of `packed.labels` at `temperature`, and the policy's
        entropy and distance from `reference` there.
        """
        with self._computing():
            return scores_in_parts(
                self._head,
                self._hidden(packed),
                packed.labels,
                temperature,
                reference,
                rows=max(1, self.max_logits // self.vocab),
            )

    def hidden(self, packed: Packed) -> torch.Tensor:
        """Return the last hidden states at the labels, [M, H]."""
        with self._computing():
            return self._hidden(packed)

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint that training does not change."""
        buffers = dict(self.named_buffers())
        return {name: buffers[buffer] for name, buffer in self.stored.constants.items()}

    def output_weights(self) -> torch.Tensor:
        """Return the head's weights, [V, H]. Raises `TrainerError` for a head that also
        has a bias.
        """
        head = self._causal.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise TrainerError(
                f"algorithm.kl_direction must be reverse for {type(self._causal).__name__}, "
                "whose head has a bias, got forward"
            )
        return cast(torch.Tensor, head.weight)

    def recompute_activations(self, enabled: bool) -> None:
        """Set whether the backward pass computes the layers' activations again.

        Raises `TrainerError` for a model that cannot.
        """
        if not enabled:
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        try:
            self._causal.activation_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        except ValueError as error:
            raise TrainerError(
                f"trainer.save_memory must be without activations for "
                f"{type(self._causal).__name__}: {error}"
            ) from error
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # transformers recomputes layers in training only; no layer has a
                # dropout
                module.training = True

    @contextlib.contextmanager
    def own_attention(self) -> Iterator[None]:
        """Compute with transformers' own attention in this context, one sequence at a
        time.
        """
        self._causal.set_attn_implementation(REFERENCE_IMPLEMENTATION)
        try:
            yield
        finally:
            self._causal.set_attn_implementation(IMPLEMENTATION)

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a pass. Weights are float32; products are computed in
        `compute_dtype`.
        """
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        device = next(self.parameters()).device.type
        return torch.autocast(device, dtype=self.compute_dtype)

    def _hidden(self, packed: Packed) -> torch.Tensor:
        grid = packed.keys
        positions = grid.positions.flatten()[grid.flat]
        base = getattr(self._causal, self._causal.base_model_prefix)
        self._replay.set(packed.routes)
        with packed_rows(packed):
            states = base(
                input_ids=packed.tokens[None],
                position_ids=positions[None],
                # all tokens: without it, transformers searches for sequences in the row
                attention_mask=torch.ones_like(packed.tokens)[None],
                use_cache=False,
            ).last_hidden_state
        return cast(torch.Tensor, states[0].index_select(0, packed.predicting))

    def _head(
        self, x: torch.Tensor, labels: torch.Tensor, temperature: float, reference: Reference | None
    ) -> Scores:
        other = None
        if reference is not None:
            other = self._logits(reference.hidden, weights=reference.head)
        return scores_of(self._logits(x), labels, temperature, other)

    def _logits(self, x: torch.Tensor, *, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [M, V] of hidden states, as the model's own forward pass
        computes them, which may scale or bound them; with other `weights` of the head.
        """
        head = copy.copy(self._causal)
        # the modules of the copy are its own
        head.__dict__["_modules"] = dict(self._causal._modules)
        head._modules[self._causal.base_model_prefix] = _Given(x)
        if weights is None:
            logits = head(inputs_embeds=x[None], use_cache=False).logits
        else:
            own = self._causal.get_output_embeddings()
            name = next(name for name, module in head.named_modules() if module is own)
            logits = torch.func.functional_call(
                head,
                {f"{name}.weight": weights},
                kwargs={"inputs_embeds": x[None], "use_cache": False},
            ).logits
        return cast(torch.Tensor, logits[0])


class _Given(nn.Module):
    """Stands for a model's layers, with known hidden states as their output."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self._states = states

    @property
    def decoder(self) -> "_Given":
        """The layers, where a model calls them as a part of its base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_GivenOutput":
        return _GivenOutput(self._states[None])


@dataclasses.dataclass(frozen=True)
class _GivenOutput:
    """The output of `_Given`. Whatever else a model's output may have is None."""

    last_hidden_state: torch.Tensor

    def __getitem__(self, index: int) -> torch.Tensor:
        assert index == 0, "hidden states are the first output"
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Unloaded:
    """A model of transformers on the meta device, and how its checkpoint stores it.

    Raises `TrainerError`, which names the unsupported part, for a checkpoint that this
    trainer cannot train.
    """

    def __init__(self, path: Path) -> None:
        with from_extra("transformers"):
            import transformers
            from transformers.utils import logging

            logging.set_verbosity_error()
        register()
        config = _read_config(path)
        self.sees = config.get_text_config() is not config
        self.causal = _build(transformers, config)
        self.causal.eval()
        self.stored = _stored(self.causal, read_sizes(path))

    def unused(self) -> list[str]:
        """Return the tensors of the checkpoint that text alone does not use, such as
        those of a vision tower. They get no gradient, and stay as they are.
        """
        used = [self.causal.get_decoder(), self.causal.get_output_embeddings()]
        of_text = {id(parameter) for module in used for parameter in module.parameters()}
        parameters = dict(self.causal.named_parameters())
        return [
            name
            for name, view in self.stored.views.items()
            if id(parameters[view.parameter]) not in of_text
        ]


def load_transformers_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> TransformersModel:
    """Read a Hugging Face checkpoint directory, sharded over `ranks`. Weights are kept
    in float32; `dtype` is that of the computation. With `adapters`, these are trained
    alone.

    A rank reads its own rows only. Raises `TrainerError` for what is not supported, and
    for tensors that are missing or have the wrong shape.
    """
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
    """Load a model of class `kind` as `load_transformers_model` does, without verifying
    it; parameters that only `kind` has are left empty, and those that it lacks are not
    read.
    """
    try:
        unloaded = _Unloaded(path)
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
        unloaded = _Unloaded(path)
        unused = unloaded.unused() if unloaded.sees else []
    except (ConfigError, WeightsError) as error:
        raise TrainerError(f"{path}: {error}") from error
    styles_of(unloaded.causal, tensor_parallel)
    routers = routers_of(unloaded.causal).values()
    return unloaded.stored, unused, next(map(experts_of, routers), None)


# Building


def _read_config(path: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    if not (path / "config.json").exists():
        raise ConfigError("config.json is missing")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"transformers cannot read config.json: {text}") from error
    return config


def _build(transformers: Any, config: "PreTrainedConfig") -> "PreTrainedModel":
    """Build the model on the meta device. Raises ConfigError for an unsupported one."""
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    known = {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    }
    names = config.architectures or []
    name = next((name for name in names if name in known), None)
    kind = getattr(transformers, name or "", None)
    if kind is None:
        raise ConfigError(
            f"architectures must name a causal language model of transformers, got {names}"
        )
    if problem := _unsupported(config, kind):
        raise ConfigError(f"{name} is not supported: {problem}")
    text = config.get_text_config()
    for part in (config, text):
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(part, key, 0.0)
        part.output_router_logits = False  # no auxiliary loss
        part.use_cache = False
    config.dtype = torch.float32
    config._attn_implementation = IMPLEMENTATION
    with torch.device("meta"), no_init_weights():
        causal: PreTrainedModel = kind(config)
    causal.tie_weights()
    base = getattr(causal, causal.base_model_prefix, None)
    if not isinstance(base, nn.Module) or "position_ids" not in _arguments(base):
        raise ConfigError(
            f"{name} is not supported: its positions cannot be given (no position_ids)"
        )
    direct = [*causal._parameters, *causal._buffers]
    if direct or causal.get_output_embeddings() is None:
        what = f"{direct[0]} is outside of its layers" if direct else "it has no output head"
        raise ConfigError(f"{name} is not supported: {what}")
    return causal


def _unsupported(config: "PreTrainedConfig", kind: Any) -> str:
    """Return which part of a model the trainer does not support, or ""."""
    text = config.get_text_config()
    other = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if other:
        return f"layers of type {other[0]} (layer_types) carry state between packed sequences"
    if getattr(kind, "_is_stateful", False):
        return "its layers carry state between packed sequences"
    if config.is_encoder_decoder:
        return "it has an encoder (is_encoder_decoder)"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized (quantization_config)"
    if not kind._can_set_attn_implementation():
        return "its attention does not use transformers' attention interface"
    return ""


def _arguments(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(type(module).forward).parameters


# Storage


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes copies of tensors aliases, so that results show which memory they have."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def _stored(causal: "PreTrainedModel", sizes: Mapping[str, Sequence[int]]) -> StoredTensors:
    """Return how the checkpoint with tensors of these `sizes` stores a model on the
    meta device.

    transformers' own conversion from a model's tensors to a checkpoint's is followed
    without data. Raises `WeightsError` for a checkpoint that has other tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    constants = _persistent_buffers(causal)
    # as transformers writes it; as it was written in former times; as the modules are
    # named
    conversions = [None, get_model_conversion_mapping(causal), []]
    attempts = [_converted(causal, conversion, constants) for conversion in conversions]
    complete = (
        stored
        for stored in attempts
        if all(name in sizes for name in (*stored.views, *stored.constants))
    )
    stored = next(complete, attempts[0])
    _check(causal, stored, sizes)
    return stored


def _converted(
    causal: "PreTrainedModel", conversions: Any, constants: Mapping[str, torch.Tensor]
) -> StoredTensors:
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: parameter.detach() for name, parameter in causal.named_parameters()}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    fixed = {tensor.untyped_storage()._cdata: name for name, tensor in constants.items()}
    assert len(names) == len(state), "parameters on the meta device share memory"
    written = {**state, **constants}
    model: Any = causal
    model._weight_conversions = conversions
    try:
        if conversions != []:
            with torch.no_grad(), _WithoutCopies():  # type: ignore[no-untyped-call]
                written = revert_weight_conversion(causal, written)
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"its tensors are converted in an unsupported way: {error}") from error
    finally:
        model._weight_conversions = None
    views, kept = dict[str, View](), dict[str, str]()
    for name, tensor in written.items():
        memory = tensor.untyped_storage()._cdata
        if memory in fixed:
            kept[name] = fixed[memory]
        elif memory not in names:
            raise WeightsError(f"tensor {name} is not a part of one parameter")
        else:
            views[name] = View(
                parameter=names[memory],
                offset=int(tensor.storage_offset()),
                size=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
            )
    return StoredTensors(views=views, constants=kept)


def _check(
    causal: "PreTrainedModel",
    stored: StoredTensors,
    sizes: Mapping[str, Sequence[int]],
) -> None:
    """Raise `WeightsError` unless the checkpoint has the model's tensors, and no
    other.
    """
    expected = {*stored.views, *stored.constants}
    tied = set(causal.all_tied_weights_keys) | {
        target for target in causal.all_tied_weights_keys.values() if isinstance(target, str)
    }
    ignored = [r"rotary_emb\.", r"(^|\.)position_ids$"]
    ignored += list(causal._keys_to_ignore_on_load_unexpected or ())
    missing = sorted(expected - set(sizes))
    unknown = sorted(
        name
        for name in set(sizes) - expected - tied
        if not any(re.search(pattern, name) for pattern in ignored)
    )
    if missing or unknown:
        raise WeightsError(
            f"tensors must be those of {type(causal).__name__}: missing {missing[:3]}, "
            f"unknown {unknown[:3]}"
        )
    for name, view in stored.views.items():
        if tuple(sizes[name]) != view.size:
            raise WeightsError(f"{name} must have shape {view.size}, got {tuple(sizes[name])}")


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


# Loading


def _persistent_buffers(causal: nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in causal.state_dict().items() if name not in parameters}


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
    """Return the layers, each of which is sharded as one."""
    names = set(causal._no_split_modules or ())
    return [module for module in causal.modules() if type(module).__name__ in names]


def _compute_buffers(causal: "PreTrainedModel") -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies."""
    for tensor in (*causal.parameters(), *_persistent_buffers(causal).values()):
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
    first to the last stored tensor of each. `stored` has the parameter of every one.
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
        """Return space for the rows of a parameter; None if it is not divided so."""
        split = self._division.splits.get(name)
        if split is None or split.dim == 0:
            return None
        if name not in self._rows:
            count, *others = self._shapes[name]
            rows = own_rows(count, self._division.ranks)
            self._rows[name] = torch.empty(rows.stop - rows.start, *others)
        return self._rows[name]

    def read(self, name: str, own: torch.Tensor) -> None:
        """Note that a stored tensor was read. After the last one of a parameter, copy
        this rank's columns to `own`.
        """
        self._missing[name] -= 1
        if not self._missing[name] and name in self._rows:
            own.copy_(self._division.splits[name].take(self._rows.pop(name), self._division.ranks))


# Verification


@torch.no_grad()
def _probe(model: TransformersModel) -> None:
    """Compare packed log-probs with those of transformers' own attention on each
    sequence alone. Raises `TrainerError` if they differ.
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
    name = type(model._causal).__name__
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
