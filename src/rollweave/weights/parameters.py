"""Divides each parameter for tensor parallelism, inferred from its transformers name
and its shape (ROSE §4.2).

Pure. A tensor has one or several parts (in fused projections, one per projection), and
each part is divided among the ranks separately, as vLLM and Megatron do. Embedding and
head are divided by vocabulary; q, k, v, gate and up by outputs, biases too; o and down
by inputs, with full biases; norms and routers are replicated on every rank. An unknown
tensor is rejected by name, because a guess would serve wrong weights.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollweave.schema.weights import TensorMeta

End = Literal["first", "last", "ends"]
"""A place outside the layers: the first pipeline stage, the last, or both (an embedding
that is also the head).
"""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
_COLUMNS = {"gate_proj": "gate", "up_proj": "up", "w1": "gate", "w3": "up"}
_ROWS = {"down_proj": "down", "w2": "down"}
_QKV = ("q", "k", "v")
_ROUTERS = ("gate", "shared_expert_gate", "router")


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `[start, start + size)` along `dim` of a tensor, in indivisible `units`.
    If `dim` is None, the tensor is not divided.

    `kind` is how units are distributed. "even" gives all ranks the same number.
    "shared" does too, but if there are fewer units than ranks, adjacent ranks hold the
    same one (key and value heads). "padded" first pads to a multiple, so that the last
    ranks may hold less (vocabulary).
    """

    dim: int | None
    start: int = 0
    size: int = 0
    units: int = 1
    kind: Literal["even", "shared", "padded"] = "even"


WHOLE = (Part(None),)


@dataclass(frozen=True, slots=True)
class Rule:
    """Describes how one tensor is distributed. `where` is its layer, or an end of the
    pipeline.

    `experts` is the number of experts, of which this tensor holds number `expert`, or
    all of them, stacked along dimension 0 (`expert` None); it is 0 without experts. A
    fused layout puts the tensor into the one named `fused`, as its part number `slot`.
    """

    parts: tuple[Part, ...]
    where: int | End
    expert: int | None = None
    experts: int = 0
    fused: str = ""
    slot: int = 0


@dataclass(frozen=True)
class Model:
    """The tensors of a model as they are in its payload (canonical), and what their
    shapes do not reveal.

    If `lm_head.weight` is not among the tensors, the head is the embedding. Raises
    `ValueError` for impossible head counts.
    """

    tensors: tuple[TensorMeta, ...]
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < self.kv_heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}"
            )

    @functools.cached_property
    def layers(self) -> int:
        """The number of decoder layers."""
        return max(
            (int(layer[1]) + 1 for meta in self.tensors if (layer := _LAYER.search(meta.name))),
            default=0,
        )

    @functools.cached_property
    def rules(self) -> Mapping[str, Rule]:
        """The rule of each tensor, by name.

        Raises `ValueError` for a tensor without a known rule.
        """
        experts: dict[str, int] = {}
        for meta in self.tensors:
            if expert := _EXPERT.match(meta.name):
                experts[expert[1]] = max(experts.get(expert[1], 0), int(expert[2]) + 1)
        tied = not any(meta.name == "lm_head.weight" for meta in self.tensors)
        return {meta.name: self._rule(meta, experts, tied=tied) for meta in self.tensors}

    def _rule(self, meta: TensorMeta, experts: Mapping[str, int], *, tied: bool) -> Rule:
        name, shape = meta.name, meta.shape
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        layer = _LAYER.search(name)
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return self._stacked(meta, layer)
        if kind not in ("weight", "bias"):
            if layer and name.endswith(".gate.e_score_correction_bias"):
                return Rule(WHOLE, int(layer[1]))
            raise _unknown(meta)
        if leaf in ("embed_tokens", "lm_head") and not layer:
            vocabulary = Part(0, 0, shape[0], shape[0], "padded")
            return Rule((vocabulary,), "last" if leaf == "lm_head" else "ends" if tied else "first")
        if layer is None:
            if leaf.endswith("norm"):
                return Rule(WHOLE, "last")
            raise _unknown(meta)
        number, expert = int(layer[1]), _EXPERT.match(name)
        if leaf.endswith("norm") or leaf in _ROUTERS:
            return Rule(WHOLE, number)
        parts, role = self._parts(meta, leaf, bias=kind == "bias")
        if expert is None:
            fused, slot = _fused(module.removesuffix(leaf), role, f".{kind}")
            return Rule(parts, number, fused=fused, slot=slot)
        stack, slot = (
            ("down_proj", 0) if role == "down" else ("gate_up_proj", ("gate", "up").index(role))
        )
        fused = f"{expert[1]}.{stack}" + ("_bias" if kind == "bias" else "")
        return Rule(parts, number, int(expert[2]), experts[expert[1]], fused, slot)

    def _parts(self, meta: TensorMeta, leaf: str, *, bias: bool) -> tuple[tuple[Part, ...], str]:
        """Return the parts of a layer's projection, and its role."""
        name, shape = meta.name, meta.shape
        if len(shape) != (1 if bias else 2):
            raise ValueError(f"{name} must have {1 if bias else 2} dimensions, got shape {shape}")
        if leaf in ("q_proj", "k_proj", "v_proj"):
            part = self._heads(name, 0, shape[0], kv=leaf != "q_proj")
            return (part,), leaf[0]
        if leaf == "qkv_proj":
            each = _divided(
                name,
                shape[0],
                self.heads + 2 * self.kv_heads,
                "attention heads with keys and values",
            )
            q, kv = each * self.heads, each * self.kv_heads
            return tuple(
                self._heads(name, s, n, kv=bool(s)) for s, n in ((0, q), (q, kv), (q + kv, kv))
            ), "qkv"
        if leaf == "o_proj":
            if bias:
                return WHOLE, "o"
            _divided(name, shape[1], self.heads, "attention heads")
            return (Part(1, 0, shape[1], self.heads),), "o"
        if leaf in _COLUMNS:
            return (Part(0, 0, shape[0], shape[0]),), _COLUMNS[leaf]
        if leaf in _ROWS:
            return (WHOLE if bias else (Part(1, 0, shape[1], shape[1]),)), _ROWS[leaf]
        if leaf == "gate_up_proj":
            half = _divided(name, shape[0], 2, "gate and up")
            return (Part(0, 0, half, half), Part(0, half, half, half)), "gate_up"
        raise _unknown(meta)

    def _heads(self, name: str, start: int, size: int, *, kv: bool) -> Part:
        units = self.kv_heads if kv else self.heads
        _divided(name, size, units, "key-value heads" if kv else "attention heads")
        return Part(0, start, size, units, "shared" if kv else "even")

    def _stacked(self, meta: TensorMeta, layer: re.Match[str] | None) -> Rule:
        """Return the rule of a tensor with all experts of a layer: [experts, 2 x inner,
        hidden] and [experts, hidden, inner].

        Some models store them transposed, with gate and up alternating, so check that
        the embedding's hidden size is where it belongs.
        """
        name, shape = meta.name, meta.shape
        gate_up = name.endswith("gate_up_proj")
        hidden = next(
            (
                other.shape[1]
                for other in self.tensors
                if other.name.endswith("embed_tokens.weight")
            ),
            -1,
        )
        if layer is None or len(shape) != 3 or shape[2 if gate_up else 1] != hidden:
            wanted = "[experts, 2 x inner, hidden]" if gate_up else "[experts, hidden, inner]"
            raise ValueError(f"{name} must have shape {wanted} with hidden {hidden}, got {shape}")
        number = int(layer[1])
        if not gate_up:
            return Rule((Part(2, 0, shape[2], shape[2]),), number, experts=shape[0])
        half = _divided(name, shape[1], 2, "gate and up")
        return Rule((Part(1, 0, half, half), Part(1, half, half, half)), number, experts=shape[0])


def itemsize(meta: TensorMeta) -> int:
    """Return the bytes of an element, or 0 if there are no elements."""
    count = math.prod(meta.shape)
    return meta.nbytes // count if count else 0


def _fused(path: str, role: str, suffix: str) -> tuple[str, int]:
    """Return the tensor of a fused layout that contains a projection, and its slot;
    ("", 0) if there is none.
    """
    if role in _QKV:
        return f"{path}qkv_proj{suffix}", _QKV.index(role)
    if role in ("gate", "up"):
        return f"{path}gate_up_proj{suffix}", ("gate", "up").index(role)
    return "", 0


def _divided(name: str, size: int, units: int, what: str) -> int:
    if size % units:
        raise ValueError(f"{name} must be a multiple of its {units} {what}, got {size}")
    return size // units


def _unknown(meta: TensorMeta) -> ValueError:
    return ValueError(
        f"{meta.name} must be a tensor whose sharding is known, got shape {meta.shape}: serve it "
        "unsharded, or by FSDP"
    )
