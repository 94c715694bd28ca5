"""A decoder-only transformer (Llama, Qwen2, Qwen3) for training: packed inputs in,
hidden states of the predicting rows out.

Parameters carry transformers' names, so weights travel between checkpoints, engines and
this model unchanged; transformers' own forward is the oracle of the tests. Two things
make it quicker: rows are packed without padding, and the last layer computes keys and
values for all rows but everything else only for the rows that predict something.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rollweave.schema.errors import ConfigError, TrainerError, WeightsError
from rollweave.train.attention import MAX_SCORES, attend
from rollweave.train.functions import rms_norm, rotate, swiglu, token_logprobs
from rollweave.train.packing import Grid, Packed
from rollweave.weights.checkpoint import ModelShape, read_shape, read_tensors_of

MAX_LOGITS = 1 << 26
"""Logits held at once (elements, 256 MB in fp32)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What all layers of one forward pass share: rotations as complex numbers, by grid."""

    turns: torch.Tensor  # [1, T, D / 2]
    query_turns: torch.Tensor  # [B, Q, D / 2]


class RmsNorm(nn.Module):
    """Root-mean-square normalisation in float32, with a weight."""

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

    def forward(self, x: torch.Tensor, packed: Packed, shared: Shared, last: bool) -> torch.Tensor:
        """x [N, H] to the attention's output: [N, H], or [M, H] for the predicting rows
        in the `last` layer.
        """
        keys, queries = packed.keys, packed.queries if last else packed.keys
        device, dim = x.device, self.head_dim
        key_value = [(self.k_proj, _pairs(self.kv_heads, dim, device)), (self.v_proj, None)]
        if last:
            query = [(self.q_proj, _pairs(self.heads, dim, device))]
            q = _to_grid(
                _joined(x.index_select(0, packed.predicting), query), queries, packed.predicting
            )
            q = self._placed(torch.unflatten(q, -1, (-1, dim)), self.heads, shared.query_turns)
            kv = torch.unflatten(_to_grid(_joined(x, key_value), keys, None), -1, (-1, dim))
            k = self._placed(kv[:, :, : self.kv_heads], 0, shared.turns)
        else:
            every = [(self.q_proj, _pairs(self.heads, dim, device)), *key_value]
            kv = torch.unflatten(_to_grid(_joined(x, every), keys, None), -1, (-1, dim))
            qk = self._placed(kv[:, :, : self.heads + self.kv_heads], self.heads, shared.turns)
            q, k = qk[:, :, : self.heads], qk[:, :, self.heads :]
        places = queries.positions if last else None
        out = attend(q, k, kv[:, :, -self.kv_heads :], places, max_scores=self.max_scores).reshape(
            len(q) * q.shape[1], -1
        )
        if not queries.dense:
            out = out.index_select(0, queries.flat)
        return _joined(out, [(self.o_proj, None)])

    def _placed(self, x: torch.Tensor, queries: int, turns: torch.Tensor) -> torch.Tensor:
        """Heads [B, W, heads, D], in pairs, of which `queries` are queries and the
        others keys.

        They are normalised where the architecture does, and turned to their position by
        `turns` [1 or B, W, D / 2].
        """
        heads = x.shape[-2]
        if self.q_norm is not None and self.k_norm is not None:
            order = _pairs(1, self.head_dim, x.device)
            rows = [
                self.q_norm.weight[order].expand(queries, -1),
                self.k_norm.weight[order].expand(heads - queries, -1),
            ]
            x = rms_norm(x.float(), torch.cat(rows).float(), self.q_norm.eps).to(x.dtype)
        # Tables as wide as the rows let one loop run over all heads.
        turned = rotate(x.float().flatten(-2), turns.repeat(1, 1, heads))
        return turned.to(x.dtype).view(x.shape)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.mlp_bias
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _joined(
            swiglu(_joined(x, [(self.gate_proj, None), (self.up_proj, None)])),
            [(self.down_proj, None)],
        )


class Layer(nn.Module):
    """Attention and MLP, each behind a norm, each added to the stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = RmsNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.eps)

    def forward(self, x: torch.Tensor, packed: Packed, shared: Shared, last: bool) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), packed, shared, last)
        x = (x.index_select(0, packed.predicting) if last else x) + attended
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The stack below the head.

    `forward` returns hidden states of the predicting rows, [M, H].
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.eps)


class Scores(NamedTuple):
    """What a pass gives for its M labels, each [M] in float32.

    `divergence` is KL(reference, policy), 0 without reference.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor


class Reference(NamedTuple):
    """Another policy at the same M labels: its last hidden states [M, H] and its output
    weights [V, H]. Both constant.
    """

    hidden: torch.Tensor
    head: torch.Tensor


class Model(nn.Module):
    """A causal language model whose forward gives log-probs of the labels, so that no
    more logits exist than needed.
    """

    def __init__(self, shape: ModelShape, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.max_logits = MAX_LOGITS
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Log-probs of `packed.labels` at `temperature`, the policy's entropy there,
        and how far it is from `reference`.
        """
        x = self.hidden(packed)
        rows = max(1, self.max_logits // self.lm_head.out_features)
        if len(x) <= rows:
            return self._head(x, packed.labels, temperature, reference)
        # More logits than that are made, and made again for the gradient, a part at a
        # time.
        parts = []
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            beside = (
                None if reference is None else Reference(reference.hidden[part], reference.head)
            )
            parts.append(
                checkpoint(
                    self._head,
                    x[part],
                    packed.labels[part],
                    temperature,
                    beside,
                    use_reentrant=False,
                )
            )
        return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def hidden(self, packed: Packed) -> torch.Tensor:
        """The last hidden states at the labels, [M, H]."""
        x = functional.embedding(packed.tokens, self.model.embed_tokens.weight).to(
            self.compute_dtype
        )
        shared = self._shared(packed, x)
        final = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            x = layer(x, packed, shared, index == final)
        return cast(torch.Tensor, self.model.norm(x))

    def _head(
        self, x: torch.Tensor, labels: torch.Tensor, temperature: float, reference: Reference | None
    ) -> Scores:
        logits = _joined(x, [(self.lm_head, None)]).float() / temperature
        logprobs, entropy = token_logprobs(logits, labels)
        if reference is None:
            return Scores(logprobs, entropy, torch.zeros_like(entropy))
        wanted = ((reference.hidden @ reference.head.T).float() / temperature).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
        return Scores(logprobs, entropy, divergence)

    def _shared(self, packed: Packed, x: torch.Tensor) -> Shared:
        length = packed.keys.positions.shape[1]
        places = torch.arange(length, device=x.device)
        angles = places[:, None].float() * torch.tensor(self.shape.inv_freq, device=x.device)
        turns = torch.polar(torch.ones_like(angles), angles)[None]
        return Shared(turns=turns, query_turns=turns[0][packed.queries.positions])


def load_model(path: Path, *, dtype: str, device: str) -> Model:
    """Read a Hugging Face checkpoint directory. Weights are kept in float32; `dtype` is
    that of the computation.

    Raises `TrainerError` for an architecture that this model does not cover, and for
    tensors that are missing or misshapen.
    """
    try:
        shape = read_shape(path)
        tensors = {name: tensor.float() for name, tensor in read_tensors_of(path)}
        shape.check({name: tensor.shape for name, tensor in tensors.items()})
    except (ConfigError, WeightsError) as error:
        raise TrainerError(f"{path}: {error}") from error
    with torch.device("meta"):
        model = Model(shape, getattr(torch, dtype))
    model.load_state_dict(
        {name: tensors[name] for name in shape.tensors()}, assign=True, strict=False
    )
    if shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.to(device)


def _joined(
    x: torch.Tensor, layers: Sequence[tuple[nn.Linear, torch.Tensor | None]]
) -> torch.Tensor:
    """Several linear layers of the same input as one product, each with its outputs in
    the given order: [N, sum of outs].
    """
    weights = [
        layer.weight if order is None else layer.weight.index_select(0, order)
        for layer, order in layers
    ]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if layers[0][0].bias is None:
        return functional.linear(x, weight.to(x.dtype))
    biases = [
        layer.bias if order is None else layer.bias.index_select(0, order)
        for layer, order in layers
    ]
    return functional.linear(x, weight.to(x.dtype), torch.cat(biases).to(x.dtype))


@functools.cache
def _pairs(heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """The order of a projection's outputs that puts the two numbers which a rotation
    mixes side by side.

    Checkpoints hold them half a head apart. Queries and keys in the same order have the
    same products.
    """
    one = torch.arange(head_dim).view(2, -1).t().flatten()
    return (torch.arange(heads)[:, None] * head_dim + one).flatten().to(device)


def _to_grid(x: torch.Tensor, grid: Grid, packed_rows: torch.Tensor | None) -> torch.Tensor:
    """Arrange rows of x by sequence: [B, W, C].

    `packed_rows` says that x holds only those packed rows, in grid order.
    """
    batch, width = grid.positions.shape
    if grid.dense:
        return x.view(batch, width, -1)
    if packed_rows is None:
        return x.index_select(0, grid.rows).view(batch, width, -1)
    out = x.new_zeros(batch * width, x.shape[-1])
    return out.index_copy(0, grid.flat, x).view(batch, width, -1)
