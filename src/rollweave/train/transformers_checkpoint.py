"""A checkpoint's model of transformers on the meta device, and the way in which the
checkpoint stores it.

transformers is imported only by the functions that need it, because that takes seconds.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rollweave.io.extras import from_extra
from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.train.attention import IMPLEMENTATION, register
from rollweave.weights.checkpoint import read_sizes
from rollweave.weights.views import StoredTensors, View

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers whose tokens see each other through attention alone."""


class UnloadedModel:
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
        the tensors of a vision tower. They get no gradient, and stay as they are.
        """
        used = [self.causal.get_decoder(), self.causal.get_output_embeddings()]
        of_text = {id(parameter) for module in used for parameter in module.parameters()}
        parameters = dict(self.causal.named_parameters())
        return [
            name
            for name, view in self.stored.views.items()
            if id(parameters[view.parameter]) not in of_text
        ]


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
    """Build the model on the meta device. Raises ConfigError if it is unsupported."""
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

    constants = persistent_buffers(causal)
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


def persistent_buffers(causal: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint has, or could have."""
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in causal.state_dict().items() if name not in parameters}
