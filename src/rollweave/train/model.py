"""A decoder-only transformer (Llama, Qwen2, Qwen3) for training: packed inputs in,
hidden states of the predicting rows out.

Parameters have transformers' names, so that weights move between checkpoints, engines
and this model unchanged; transformers' own forward pass is the oracle of the tests. Two
things make this model faster: rows are packed without padding, and the last layer
computes keys and values for all rows but everything else only for the predicting rows.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollweave.schema.errors import ConfigError, TrainerError, WeightsError
from rollweave.train.attention import MAX_SCORES, attend, keeps_scores
from rollweave.train.distributed import (
    ALONE,
    RankGroup,
    local_tensor,
    own_rows,
    shard_model,
)
from rollweave.train.functions import linear, rms_norm, rotate, swiglu_linear, token_logprobs
from rollweave.train.lora import AdaptedLinear, NewAdapters
from rollweave.train.needs import MAX_LOGITS
from rollweave.train.packing import Grid, Packed, to_grid
from rollweave.weights.adapters import layer_of
from rollweave.weights.checkpoint import ModelShape, read_rows_of, read_shape, read_sizes
from rollweave.weights.views import StoredTensors


@dataclasses.dataclass(frozen=True, slots=True)
class RotaryTables:
    """The rotations that all layers of one forward pass share, as complex numbers, by
    grid.
    """

    rotations: torch.Tensor  # [1, T, 1, D / 2]
    query_rotations: torch.Tensor  # [B, Q, 1, D / 2]


class RmsNorm(nn.Module):
    """Root-mean-square normalization in float32, with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over packed rows."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.max_scores = MAX_SCORES
        self.kv_heads = shape.kv_heads
        self.heads = shape.heads
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, self.heads * self.head_dim, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden, self.kv_heads * self.head_dim, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden, self.kv_heads * self.head_dim, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden, bias=shape.out_bias)
        if shape.qk_norm:
            self.q_norm: RmsNorm | None = RmsNorm(self.head_dim, shape.eps)
            self.k_norm: RmsNorm | None = RmsNorm(self.head_dim, shape.eps)
        else:
            self.q_norm = self.k_norm = None

    def forward(
        self, x: torch.Tensor, packed: Packed, rotary: RotaryTables, last: bool
    ) -> torch.Tensor:
        """Map x [N, H] to the attention's output: [N, H], or [M, H] for the predicting
        rows in the `last` layer.

        In the last layer only these rows are queries, unless torch's kernels attend:
        for queries at chosen positions the kernels need a mask, and with a mask they
        compute all scores.
        """
        few = last and keeps_scores(x)
        keys, queries = packed.keys, packed.queries if few else packed.keys
        asking, places = (
            (x.index_select(0, packed.predicting), packed.predicting) if few else (x, None)
        )
        q = self._heads(asking, self.q_proj, queries, places)
        k, v = (self._heads(x, layer, keys, None) for layer in (self.k_proj, self.v_proj))
        rotations = rotary.query_rotations if few else rotary.rotations
        q = _normalize_and_rotate(q, self.q_norm, rotations)
        k = _normalize_and_rotate(k, self.k_norm, rotary.rotations)
        positions = queries.positions if few else None
        out = attend(q, k, v, positions, max_scores=self.max_scores).reshape(
            len(q) * q.shape[1], -1
        )
        if not queries.dense:
            out = out.index_select(0, queries.flat)
        if last and not few:
            out = out.index_select(0, packed.predicting)
        return _linear(out, self.o_proj)

    def _heads(
        self, x: torch.Tensor, layer: nn.Linear, grid: Grid, places: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the outputs of a projection in a grid, by head: [B, W, heads, D]."""
        return torch.unflatten(to_grid(_linear(x, layer), grid, places), -1, (-1, self.head_dim))


def _normalize_and_rotate(
    x: torch.Tensor, norm: RmsNorm | None, rotations: torch.Tensor
) -> torch.Tensor:
    """Normalize (if the architecture does) heads [B, W, heads, D], and rotate them to
    their positions by `rotations` [1 or B, W, 1, D / 2], in pairs.
    """
    x = x if norm is None else norm(x)
    return rotate(x.float(), rotations).to(x.dtype)


class Mlp(nn.Module):
    """The SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.mlp_bias
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # as one product, both would need a copy of their weights in each pass
        gate, up = (_linear(x, layer) for layer in (self.gate_proj, self.up_proj))
        down = self.down_proj
        if isinstance(down, AdaptedLinear) or down.bias is not None:
            return _linear(functional.silu(gate) * up, down)
        return swiglu_linear(gate, up, down.weight.to(x.dtype))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, and each added to the residual stream.

    With `recompute`, the forward pass keeps no activations, and the backward pass
    computes them again (activation checkpointing).
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.recompute = False
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)

    def forward(
        self, x: torch.Tensor, packed: Packed, rotary: RotaryTables, last: bool
    ) -> torch.Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return self._compute(x, packed, rotary, last)
        # inside of the module's forward pass, for which FSDP2 gathers its weights
        recomputed: torch.Tensor = checkpoint(
            self._compute, x, packed, rotary, last, use_reentrant=False, preserve_rng_state=False
        )
        return recomputed

    def _compute(
        self, x: torch.Tensor, packed: Packed, rotary: RotaryTables, last: bool
    ) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), packed, rotary, last)
        x = (x.index_select(0, packed.predicting) if last else x) + attended
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The layers below the head.

    `forward` returns hidden states of the predicting rows, [M, H].
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.eps)


class Scores(NamedTuple):
    """The outputs of a forward pass for its M labels, each [M] in float32.

    `divergence` is KL(reference, policy), or 0 without a reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor


class Reference(NamedTuple):
    """Another policy at the same M labels: its last hidden states [M, H] and its output
    weights [V, H]. Both are constant.
    """

    hidden: torch.Tensor
    head: torch.Tensor


class Model(nn.Module):
    """A causal language model whose forward pass returns log-probs of the labels, so
    that only the necessary logits exist.
    """

    def __init__(self, shape: ModelShape, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.max_logits = MAX_LOGITS
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the head share the weights of the embedding, if the checkpoint does."""
        if self.shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return log-probs of `packed.labels` at `temperature`, and the policy's
        entropy and distance from `reference` there.
        """
        return scores_in_parts(
            self._head,
            self.hidden(packed),
            packed.labels,
            temperature,
            reference,
            rows=max(1, self.max_logits // self.vocab),
        )

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return self.shape.vocab

    @property
    def stored(self) -> StoredTensors:
        """The tensors of the model's checkpoint."""
        return StoredTensors.identical(
            {name: p.shape for name, p in self.named_parameters() if layer_of(name) is None}
        )

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint that training does not change."""
        return {}

    def output_weights(self) -> torch.Tensor:
        """Return the head's weights, [V, H]."""
        return self.lm_head.weight

    def recompute_activations(self, enabled: bool) -> None:
        """Set whether the backward pass computes the layers' activations again."""
        for layer in self.model.layers:
            cast(Layer, layer).recompute = enabled

    def hidden(self, packed: Packed) -> torch.Tensor:
        """Return the last hidden states at the labels, [M, H]."""
        x = functional.embedding(packed.tokens, self.model.embed_tokens.weight).to(
            self.compute_dtype
        )
        rotary = self._rotary(packed, x)
        final = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            x = layer(x, packed, rotary, index == final)
        return cast(torch.Tensor, self.model.norm(x))

    def _head(
        self, x: torch.Tensor, labels: torch.Tensor, temperature: float, reference: Reference | None
    ) -> Scores:
        other = None if reference is None else reference.hidden @ reference.head.T
        return scores_of(_linear(x, self.lm_head), labels, temperature, other)

    def _rotary(self, packed: Packed, x: torch.Tensor) -> RotaryTables:
        length = packed.keys.positions.shape[1]
        positions = torch.arange(length, device=x.device)
        angles = positions[:, None].float() * torch.tensor(self.shape.inv_freq, device=x.device)
        rotations = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        return RotaryTables(
            rotations=rotations, query_rotations=rotations[0][packed.queries.positions]
        )


def scores_in_parts(
    head: Callable[[torch.Tensor, torch.Tensor, float, Reference | None], Scores],
    x: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    reference: Reference | None,
    *,
    rows: int,
) -> Scores:
    """Return the `head`'s scores of hidden states x [M, H] for `labels`.

    If there are more than `rows`, too many logits would be in memory at the same time:
    they are computed in parts, and again for the gradient.
    """
    if len(x) <= rows:
        return head(x, labels, temperature, reference)
    parts = []
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        part_reference = (
            None if reference is None else Reference(reference.hidden[part], reference.head)
        )
        parts.append(
            checkpoint(
                head, x[part], labels[part], temperature, part_reference, use_reentrant=False
            )
        )
    return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))


def scores_of(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    reference_logits: torch.Tensor | None,
) -> Scores:
    """Return the scores of logits [M, V], and their distance from a reference's."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    logprobs, entropy = token_logprobs(logits, labels)
    if reference_logits is None:
        return Scores(logprobs, entropy, torch.zeros_like(entropy))
    reference_logprobs = (reference_logits.float() / temperature).log_softmax(-1)
    divergence = (reference_logprobs.exp() * (reference_logprobs - logits.log_softmax(-1))).sum(-1)
    return Scores(logprobs, entropy, divergence)


M = TypeVar("M", bound=Model)


def load_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> Model:
    """Load a model of this implementation, as `train/loading.load_trained_model`."""
    return load_as(Model, path, dtype=dtype, device=device, ranks=ranks, adapters=adapters)


def load_as(
    kind: type[M],
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> M:
    """Load a model of class `kind` as `load_model` does; parameters that only `kind`
    has are left empty, and parameters that it lacks are not read.

    A rank reads its own rows only: the full model is never in its memory. Raises
    `TrainerError` for an unsupported architecture, and for tensors that are missing or
    have the wrong shape.
    """
    try:
        shape = read_shape(path)
        shape.check(read_sizes(path))
    except (ConfigError, WeightsError) as error:
        raise TrainerError(f"{path}: {error}") from error
    with torch.device("meta"):
        model = kind(shape, getattr(torch, dtype))
    if adapters is not None:
        try:
            adapters.attach(model, head=model.lm_head)
        except ConfigError as error:
            raise TrainerError(str(error)) from error
    shard_model(model, list(model.model.layers), ranks, device=device)
    model.to_empty(device=device)
    model.tie()
    parameters = dict(model.named_parameters())
    rows = {
        name: own_rows(size[0], ranks)
        for name, size in shape.tensors().items()
        if name in parameters
    }
    try:
        with torch.no_grad():
            for name, tensor in read_rows_of(path, rows):
                local_tensor(parameters[name]).copy_(tensor)
    except ConfigError as error:
        raise TrainerError(f"{path}: {error}") from error
    if adapters is not None:
        try:
            adapters.initialize(model, ranks)
        except ConfigError as error:
            raise TrainerError(str(error)) from error
    return model


def _linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Apply a linear layer, with its adapter if there is one, to x [N, H]."""
    out = linear(x, layer.weight.to(x.dtype))
    if layer.bias is not None:
        out = out + layer.bias.to(x.dtype)
    return out + layer.adapter(x) if isinstance(layer, AdaptedLinear) else out
