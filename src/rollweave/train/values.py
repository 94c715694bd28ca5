"""Models of values: decoders whose head gives one number, the value of the state at
each label, in place of the log-prob of the label.

Invariants: a model has the names and shapes of the policy's parameters, except for the
head over the vocabulary, which it lacks, and its own head, `value`, which gives 0 after
loading.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rollweave.train.distributed import ALONE, RankGroup, local_tensor
from rollweave.train.loading import Implementation, implementation_of
from rollweave.train.model import Model, Reference, Scores, load_as
from rollweave.train.packing import Packed
from rollweave.train.transformers_loading import load_transformers_as
from rollweave.train.transformers_model import TransformersModel
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.views import StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(Model):
    """A decoder of this package's own implementation."""

    def __init__(self, shape: ModelShape, compute_dtype: torch.dtype) -> None:
        super().__init__(shape, compute_dtype)
        del self.lm_head
        self.value = nn.Parameter(torch.zeros(shape.hidden))

    def tie(self) -> None:
        """Do nothing: there is no head over the vocabulary."""

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return values in the place of log-probs."""
        return _scores(self.hidden(packed), self.value)


class TransformersValueModel(TransformersModel):
    """A decoder of transformers. It chooses experts by itself, even where the policy's
    experts are recorded.
    """

    def __init__(
        self, causal: "PreTrainedModel", stored: StoredTensors, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(causal, stored, compute_dtype)
        width = causal.get_output_embeddings().weight.shape[1]
        self.value = nn.Parameter(torch.empty(width, device="meta"))

    def parts_of(self, causal: "PreTrainedModel") -> Iterable[tuple[str, nn.Module]]:
        head = causal.get_output_embeddings()
        return ((name, child) for name, child in causal.named_children() if child is not head)

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return values in the place of log-probs."""
        return _scores(self.hidden(dataclasses.replace(packed, routes=None)), self.value)


def load_value_model(
    path: Path,
    implementation: Implementation | None,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
) -> ValueModel | TransformersValueModel:
    """Load the trunk of a Hugging Face checkpoint directory, sharded over `ranks`.
    Raises `TrainerError`, which names what is not supported or missing.
    """
    model: ValueModel | TransformersValueModel
    if (implementation or implementation_of(path)) == "transformers":
        model = load_transformers_as(
            TransformersValueModel, path, dtype=dtype, device=device, ranks=ranks
        )
    else:
        model = load_as(ValueModel, path, dtype=dtype, device=device, ranks=ranks)
    with torch.no_grad():
        local_tensor(model.value).zero_()
    return model


def _scores(states: torch.Tensor, value: nn.Parameter) -> Scores:
    values = states.float() @ value.float()
    nothing = torch.zeros_like(values)
    return Scores(values, nothing, nothing)
