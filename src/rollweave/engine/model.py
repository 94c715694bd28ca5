"""A compact decoder for Llama, Qwen2 and Qwen3 checkpoints that computes many
sequences' tokens at once over the paged cache.

Weights are stored in the layout of the computation: query, key and value in one matrix,
gate and up in one, all transposed; the rotary halves of query and key are interleaved,
so that rotation is one complex product (attention is invariant to a permutation of
both). `load` takes tensors under their transformers names and shapes. A model with a
base takes adapters instead, and adds them to the weights of the base
(`weights/adapters.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch.nn.functional import silu

from rollweave.engine.attention import TILE_ROWS, Attention, Plan
from rollweave.schema.errors import WeightsError
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.needs import packed_head
from rollweave.weights.staging import on_device

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

PACKED_ROWS = {torch.float32: 4, torch.bfloat16: 1} if torch._C._has_mkldnn else {}
"""Fewest rows for which a CPU multiplies with the output head faster in oneDNN's own
layout, by number format; none where torch was built without it.
"""


@dataclass(slots=True)
class Layer:
    """One layer's weights, [in, out] each.

    Biases and norms of queries and keys are None if the architecture has none.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    ffn_norm: torch.Tensor
    qk_norm: torch.Tensor | None
    qkv_bias: torch.Tensor | None
    out_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class Batch:
    """The flat list of one step's tokens, [tokens] each; positions are below `longest`.

    `sampled` are indices; None means all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    longest: int
    sampled: torch.Tensor | None


class DecoderWeights:
    """One version of a decoder's parameters, in the layout of the computation. With
    `packs`, a large output head is also in oneDNN's layout, `packed_head`.
    """

    def __init__(
        self, shape: ModelShape, *, device: torch.device, dtype: torch.dtype, packs: bool = False
    ) -> None:
        self.shape, self.device = shape, device
        self._packs = packs and packed_head(shape) > 0 and dtype in PACKED_ROWS
        self.packed_head: torch.Tensor | None = None

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, device=device, dtype=dtype)

        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embed = zeros(shape.vocab, shape.hidden)
        self.norm = zeros(shape.hidden)
        self.head = self.embed.t() if shape.tied else zeros(shape.vocab, shape.hidden).t()
        self.layers = [
            Layer(
                qkv=zeros(shape.hidden, q + 2 * kv),
                out=zeros(q, shape.hidden),
                gate_up=zeros(shape.hidden, 2 * shape.ffn),
                down=zeros(shape.ffn, shape.hidden),
                norm=zeros(shape.hidden),
                ffn_norm=zeros(shape.hidden),
                qk_norm=zeros(shape.heads + shape.kv_heads, shape.head_dim)
                if shape.qk_norm
                else None,
                qkv_bias=zeros(q + 2 * kv) if shape.qkv_bias else None,
                out_bias=zeros(shape.hidden) if shape.out_bias else None,
                gate_up_bias=zeros(2 * shape.ffn) if shape.mlp_bias else None,
                down_bias=zeros(shape.hidden) if shape.mlp_bias else None,
            )
            for _ in range(shape.layers)
        ]
        self._interleave = torch.arange(shape.head_dim, device=device).view(2, -1).t().reshape(-1)

    def copy_from(self, other: "DecoderWeights") -> None:
        """Copy another version of the same model over this one, in place."""
        for own, new in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(new)
        self._pack()

    def _pack(self) -> None:
        if self._packs:
            head = self.head.t()
            self.packed_head = torch.ops.mkldnn._reorder_linear_weight(head, TILE_ROWS)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.embed, self.norm)
        if not self.shape.tied:
            yield self.head
        for layer in self.layers:
            parts = (getattr(layer, field.name) for field in fields(layer))
            yield from (part for part in parts if part is not None)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the parameters.

        Names and shapes must have passed `Decoder.check`; a tied `lm_head.weight` is
        skipped.
        """
        for name, tensor in tensors:
            if name == "lm_head.weight":
                if not self.shape.tied:
                    self.head.t().copy_(tensor)
            elif name == "model.embed_tokens.weight":
                self.embed.copy_(tensor)
            elif name == "model.norm.weight":
                self.norm.copy_(tensor)
            else:
                self._load_layer(name, tensor.to(self.device))
        self._pack()

    def _load_layer(self, name: str, tensor: torch.Tensor) -> None:
        _, _, index, rest = name.split(".", 3)
        layer, shape = self.layers[int(index)], self.shape
        q, kv, ffn = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ffn
        module, parameter = rest.rsplit(".", 1)
        part = module.rsplit(".", 1)[-1]
        columns = {
            "q_proj": slice(0, q),
            "k_proj": slice(q, q + kv),
            "v_proj": slice(q + kv, q + 2 * kv),
            "gate_proj": slice(0, ffn),
            "up_proj": slice(ffn, 2 * ffn),
        }
        if part in ("q_proj", "k_proj"):
            tensor = tensor.reshape(-1, shape.head_dim, *tensor.shape[1:])[
                :, self._interleave
            ].flatten(0, 1)
        match part, parameter:
            case (("q_proj" | "k_proj" | "v_proj"), "weight"):
                layer.qkv[:, columns[part]] = tensor.t()
            case (("q_proj" | "k_proj" | "v_proj"), "bias"):
                _present(layer.qkv_bias)[columns[part]] = tensor
            case (("gate_proj" | "up_proj"), "weight"):
                layer.gate_up[:, columns[part]] = tensor.t()
            case (("gate_proj" | "up_proj"), "bias"):
                _present(layer.gate_up_bias)[columns[part]] = tensor
            case "o_proj", "weight":
                layer.out.copy_(tensor.t())
            case "o_proj", "bias":
                _present(layer.out_bias).copy_(tensor)
            case "down_proj", "weight":
                layer.down.copy_(tensor.t())
            case "down_proj", "bias":
                _present(layer.down_bias).copy_(tensor)
            case "q_norm", "weight":
                _present(layer.qk_norm)[: shape.heads] = tensor[self._interleave]
            case "k_norm", "weight":
                _present(layer.qk_norm)[shape.heads :] = tensor[self._interleave]
            case "input_layernorm", "weight":
                layer.norm.copy_(tensor)
            case "post_attention_layernorm", "weight":
                layer.ffn_norm.copy_(tensor)
            case _:
                raise WeightsError(f"{name} is not a parameter of this model")


class Decoder:
    """The model. It is not thread-safe: only its owner's loop calls it, except for
    `check`, `incoming` and `allocate`, which any thread may call.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tiles: bool = False,
        released: bool = False,
    ) -> None:
        self.shape, self.device, self.dtype, self.tiles = shape, device, dtype, tiles
        self.base: AdapterBase | None = None
        """The weights of which new versions are adapters, if any."""
        self.weights = self._without_memory() if released else self.allocate()
        self._eps = torch.tensor(shape.eps, device=device)
        self._inv_freq = torch.tensor(shape.inv_freq, dtype=torch.float32, device=device)
        self._rotations = torch.empty(
            0, 1, len(shape.inv_freq), dtype=torch.complex64, device=device
        )

    # Weights

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise WeightsError unless `tensors` are exactly this model's parameters by
        name and shape, in floating point, or adapters of the base if there is one.
        """
        if self.base is not None:
            self.base.check(tensors)
            return
        self.shape.check({name: tensor.shape for name, tensor in tensors.items()})
        for name in self.shape.tensors():
            if tensors[name].dtype not in FLOATS:
                raise WeightsError(
                    f"{name} must be float32, bfloat16 or float16, got {tensors[name].dtype}"
                )

    def incoming(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters on the device, one after the other, each valid until
        the next. `tensors` must have passed `check`.

        The call itself allocates memory for the largest one. Raises
        torch.OutOfMemoryError.
        """
        if self.base is not None:
            return self.base.with_adapters(tensors, self.device)
        return on_device(tensors, self.device)

    def allocate(self) -> DecoderWeights:
        """Allocate memory for one more version of the parameters.

        Raises torch.OutOfMemoryError on a GPU without room.
        """
        packs = self.device.type == "cpu" and not self.tiles
        return DecoderWeights(self.shape, device=self.device, dtype=self.dtype, packs=packs)

    def update(self, staged: DecoderWeights, *, in_place: bool) -> None:
        """Use these parameters from now on: themselves, or copied over those in use."""
        if in_place:
            self.weights.copy_from(staged)
        else:
            self.weights = staged

    def release(self) -> None:
        """Free the memory of the parameters."""
        self.weights = self._without_memory()

    def _without_memory(self) -> DecoderWeights:
        return DecoderWeights(self.shape, device=torch.device("meta"), dtype=self.dtype)

    @property
    def weight_bytes(self) -> int:
        """The size of one version of the parameters."""
        return self.shape.parameters() * self.dtype.itemsize

    # Computation

    def forward(self, batch: Batch, attention: Attention[Plan], plan: Plan) -> torch.Tensor:
        """Return the last hidden states of the sampled tokens of `batch`, after the
        final norm, [sampled, hidden], of which `logits` are computed.

        Writes the KV of all its tokens.
        """
        shape, weights = self.shape, self.weights
        ids, sampled = batch.ids, batch.sampled
        rotations = self._rotation(batch.positions, batch.longest)
        rotated, size = shape.heads + shape.kv_heads, shape.head_dim
        x = weights.embed.index_select(0, ids)
        tokens = len(x)
        for index, layer in enumerate(weights.layers):
            qkv = self._project(self._rms(x, layer.norm), layer.qkv, layer.qkv_bias)
            # Queries and keys are the first columns of qkv, in pairs that are rotated
            # together.
            pairs = qkv.as_strided((tokens, rotated, size // 2, 2), (qkv.stride(0), size, 2, 1))
            if layer.qk_norm is not None:
                qk = qkv.as_strided((tokens, rotated, size), (qkv.stride(0), size, 1))
                qk.mul_(self._scale(qk)).mul_(layer.qk_norm)
            if self.dtype is torch.float32:
                torch.view_as_complex(pairs).mul_(rotations)
            else:
                pairs.copy_(
                    torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(rotations))
                )
            self._accumulate(x, attention.attend(index, qkv, plan), layer.out, layer.out_bias)
            both = self._project(self._rms(x, layer.ffn_norm), layer.gate_up, layer.gate_up_bias)
            gate, up = both.split_with_sizes((shape.ffn, shape.ffn), dim=1)
            self._accumulate(x, silu(gate).mul_(up), layer.down, layer.down_bias)
        if sampled is not None:
            x = x.index_select(0, sampled)
        return self._rms(x, weights.norm)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (fp32) for last hidden states, [sampled, vocab]."""
        packed = self.weights.packed_head
        if packed is None or len(x) < PACKED_ROWS[self.dtype]:
            return self._project(x, self.weights.head, None).float()
        linear = torch.ops.mkldnn._linear_pointwise
        logits: torch.Tensor = linear(x, packed, None, "none", [], "")
        return logits.float()

    def _scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1 / root mean square over the last axis: [..., 1]."""
        if self.dtype is torch.float32:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_().to(self.dtype)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * self._scale(x)).mul_(weight)

    def _project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.tiles:
            return torch.cat([self._tile(tile, weight, bias) for tile in torch.split(x, TILE_ROWS)])
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def _accumulate(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        if self.tiles:
            x.add_(self._project(y, weight, bias))
            return
        x.addmm_(y, weight)
        if bias is not None:
            x.add_(bias)

    def _tile(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = len(x)
        if rows < TILE_ROWS:
            x = torch.cat((x, x.new_zeros(TILE_ROWS - rows, x.shape[1])))
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        return y[:rows]

    def _rotation(self, positions: torch.Tensor, needed: int) -> torch.Tensor:
        """Return unit complex numbers, [tokens, 1, head_dim / 2].

        The table grows by doubling, up to the longest sequence that occurs.
        """
        if needed > len(self._rotations):
            self.reserve(max(needed, 2 * len(self._rotations), 1024))
        return self._rotations.index_select(0, positions)

    def reserve(self, length: int) -> None:
        """Compute the rotations of the first `length` positions now, so that a step
        within them allocates no other table.
        """
        angles = torch.arange(length, device=self.device).float()[:, None, None] * self._inv_freq
        self._rotations = torch.polar(torch.ones_like(angles), angles)


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise WeightsError("a parameter was given that this architecture does not have")
    return tensor
