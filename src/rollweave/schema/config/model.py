"""The sections `[model]` and `[lora]`: what is trained."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from rollweave.schema.config.values import Positive, PositiveInt, Section, listed
from rollweave.schema.errors import FieldError

HEAD_DIM = 16
"""Width of an attention head of a model from scratch; two heads share keys and
values.
"""

VLLM_HEAD_DIM = 32
"""Width of an attention head of a model from scratch in a run with engines of kind
vllm, which on a CPU compute no narrower heads.
"""


class ScratchModel(Section):
    """A Qwen3-style model that starts from random weights, with a word-level tokenizer
    of the tasks' words.
    """

    hidden: Annotated[PositiveInt, Field(multiple_of=2 * HEAD_DIM)] = Field(
        64, description="Width of the model; an MLP is three times as wide."
    )
    layers: PositiveInt = Field(2, description="Number of layers.")

    @property
    def ffn(self) -> int:
        """Width of an MLP."""
        return 3 * self.hidden


def _json(given: Any) -> Any:
    """Require values that JSON has as well: TOML also has dates, times, nan and inf."""
    pending = [given]
    while pending:
        value, known = pending.pop(), True
        if isinstance(value, dict | list | tuple):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, float):
            known = math.isfinite(value)
        else:
            known = value is None or isinstance(value, str | int)
        if not known:
            rule = "hold text, finite numbers, booleans, lists and tables"
            raise PydanticCustomError("rule", rule)
    return given


class ModelConfig(Section):
    """The model that is trained: a checkpoint, or random weights."""

    path: str | None = Field(
        None,
        description="Checkpoint directory (config.json, safetensors, tokenizer) to start from.",
    )
    scratch: ScratchModel | None = Field(
        None, description="Start from random weights of this shape instead of a checkpoint."
    )
    implementation: Literal["native", "transformers"] | None = Field(
        None,
        description="Code with which the trainer computes the model: this package's own, for "
        "Llama, Qwen2 and Qwen3, or that of transformers, for any causal language model. If "
        "unset, native where it supports the model.",
    )
    template_arguments: Annotated[dict[str, JsonValue], BeforeValidator(_json)] = Field(
        {},
        description="Arguments of the checkpoint's chat template for all conversations of the "
        "run, such as { enable_thinking = false } for Qwen 3. A client of the gateway may give "
        "others with a request.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and activations."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of engines and trainer: auto is a GPU where their host has one, which "
        "CUDA_VISIBLE_DEVICES may choose.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            given = "neither" if self.path is None else "both"
            raise FieldError("", "have exactly one of path and [model.scratch]", given)
        return self


ALL_LINEAR = "all-linear"
"""Every linear layer but the output head, as peft names them."""


class LoraConfig(Section):
    """Low-rank adapters, which are trained instead of the model's weights
    (`docs/LORA.md`).
    """

    rank: PositiveInt = Field(16, description="Rank of each adapter.")
    alpha: Positive = Field(32.0, description="An adapter's output is multiplied by alpha / rank.")
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(listed)] = Field(
        (ALL_LINEAR,),
        description="Linear layers with an adapter: all-linear for all but the output head, or a "
        'list of names or of their ends, such as ["q_proj", "v_proj"].',
    )

    path: str | None = Field(
        None,
        description="Directory of an adapter of the model, as peft writes it, to start from; new "
        "ones if unset.",
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank
