"""Random decoders and a slow sharding of their full tensors, which is the oracle of the
plans.
"""

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np

from rollweave.schema.weights import TensorMeta
from rollweave.weights.parameters import Model
from rollweave.weights.shards import Fsdp, Layout, TensorParallel, Unsharded

Arrays = dict[str, np.ndarray]
PADDING = -1


@dataclass(frozen=True)
class Decoder:
    """A small decoder, defined by its tensors. `experts` is 0 for a dense MLP; with
    `joined`, q, k and v, and gate and up, are one tensor each.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tied: bool = False
    bias: bool = False
    norms: bool = False
    joined: bool = False
    experts: int = 0
    stacked: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        names_and_shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            own = f"model.layers.{layer}."
            linear = {"self_attn.o_proj": (self.hidden, q)}
            linear |= (
                {"self_attn.qkv_proj": (q + 2 * kv, self.hidden)}
                if self.joined
                else {
                    f"self_attn.{role}_proj": (rows, self.hidden)
                    for role, rows in (("q", q), ("k", kv), ("v", kv))
                }
            )
            for name, (rows, columns) in linear.items():
                names_and_shapes[f"{own}{name}.weight"] = (rows, columns)
                if self.bias:
                    names_and_shapes[f"{own}{name}.bias"] = (rows,)
            if self.norms:
                names_and_shapes[f"{own}self_attn.q_norm.weight"] = names_and_shapes[
                    f"{own}self_attn.k_norm.weight"
                ] = (self.head_dim,)
            names_and_shapes[f"{own}input_layernorm.weight"] = (self.hidden,)
            names_and_shapes |= {f"{own}{name}": shape for name, shape in self._mlp().items()}
        names_and_shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            names_and_shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return names_and_shapes

    def _mlp(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn = self.hidden, self.ffn
        one = {
            "gate_proj.weight": (ffn, hidden),
            "up_proj.weight": (ffn, hidden),
            "down_proj.weight": (hidden, ffn),
        }
        if not self.experts:
            if self.joined:
                return {
                    "mlp.gate_up_proj.weight": (2 * ffn, hidden),
                    "mlp.down_proj.weight": (hidden, ffn),
                }
            return {f"mlp.{name}": shape for name, shape in one.items()}
        names_and_shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.experts, hidden)}
        names_and_shapes |= {f"mlp.shared_expert.{name}": shape for name, shape in one.items()}
        if self.stacked:
            names_and_shapes["mlp.experts.gate_up_proj"] = (self.experts, 2 * ffn, hidden)
            names_and_shapes["mlp.experts.down_proj"] = (self.experts, hidden, ffn)
        else:
            names_and_shapes |= {
                f"mlp.experts.{e}.{name}": shape
                for e in range(self.experts)
                for name, shape in one.items()
            }
        return names_and_shapes

    def arrays(self) -> Arrays:
        """Return arrays in which every element has a unique number."""
        tensors, first = {}, 0
        for name, shape in self.shapes().items():
            tensors[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
            first += math.prod(shape)
        return tensors

    def model(self) -> Model:
        """Return the model of its payload: tensors of different element sizes, each at
        a multiple of 64 bytes.
        """
        metas, offset = [], 0
        for index, (name, shape) in enumerate(self.shapes().items()):
            each = (2, 4, 1)[index % 3]
            nbytes = math.prod(shape) * each
            metas.append(
                TensorMeta(name=name, dtype="any", shape=shape, offset=offset, nbytes=nbytes)
            )
            offset += -(-nbytes // 64) * 64
        return Model(tuple(metas), heads=self.heads, kv_heads=self.kv_heads)


DEGREES = (1, 2, 3, 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Decoder, Layout, Layout]:
    """Draw a decoder, and two layouts that are possible for it."""
    degrees = [draw(st.sampled_from(DEGREES)) for _ in range(2)]
    common = math.lcm(*degrees)
    # Key-value heads are distributed evenly, or shared by ranks evenly.
    kv_heads = draw(
        st.sampled_from(
            [n for n in range(1, 7) if all(n % tp == 0 or tp % n == 0 for tp in degrees)]
        )
    )
    layers = draw(st.integers(1, 4))
    stacked = draw(st.booleans())
    decoder = Decoder(
        vocab=draw(st.integers(1, 40)),
        hidden=draw(st.integers(1, 5)),
        layers=layers,
        heads=math.lcm(kv_heads, common) * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn=common * draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        norms=draw(st.booleans()),
        joined=draw(st.booleans()),
        experts=draw(st.sampled_from([0, common, 2 * common])),
        stacked=stacked,
    )

    def layout(tp: int) -> Layout:
        return draw(
            st.one_of(
                st.builds(Unsharded),
                st.builds(Fsdp, ranks=st.integers(1, 7)),
                st.builds(
                    TensorParallel,
                    tp=st.just(tp),
                    pp=st.integers(1, layers),
                    ep=st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0]),
                    dp=st.integers(1, 3),
                    fused=st.booleans(),
                    vocab_multiple=st.sampled_from([tp, 4 * tp]),
                ),
            )
        )

    return decoder, layout(degrees[0]), layout(degrees[1])


def slow(decoder: Decoder, layout: Layout) -> list[Arrays]:
    """Return the arrays of each rank, from full tensors; `PADDING` where there is no
    canonical element.
    """
    full = decoder.arrays()
    if isinstance(layout, Unsharded):
        return [full]
    if isinstance(layout, Fsdp):
        return [
            {name: _chunk(array, layout.ranks, rank) for name, array in full.items()}
            for rank in range(layout.ranks)
        ]
    replica = [
        _parallel(decoder, full, layout, stage, rank)
        for stage in _stages(decoder, layout)
        for rank in range(layout.tp)
    ]
    return replica * layout.dp


def _chunk(array: np.ndarray, ranks: int, rank: int) -> np.ndarray:
    rows = math.ceil(len(array) / ranks)
    return array[rows * rank : rows * (rank + 1)]


def _stages(decoder: Decoder, layout: TensorParallel) -> list[set[str]]:
    """Return the names on each stage."""
    counts = [decoder.layers // layout.pp] * layout.pp
    for place in range(2, decoder.layers % layout.pp + 2):
        counts[-place] += 1
    layers = list(range(decoder.layers))
    stages = []
    for count in counts:
        own, layers = layers[:count], layers[count:]
        stages.append(
            {name for name in decoder.shapes() for layer in own if f".layers.{layer}." in name}
        )
    stages[0].add("model.embed_tokens.weight")
    stages[-1] |= {
        "model.norm.weight",
        "model.embed_tokens.weight" if decoder.tied else "lm_head.weight",
    }
    return stages


def _parallel(
    decoder: Decoder, full: Arrays, layout: TensorParallel, names: set[str], rank: int
) -> Arrays:
    tp, joined, local = layout.tp, decoder.joined, {}
    inner = tp // layout.ep  # ranks that share an expert

    def heads(array: np.ndarray) -> np.ndarray:
        if tp <= decoder.kv_heads:
            return np.split(array, tp)[rank]
        return np.split(array, decoder.kv_heads)[rank // (tp // decoder.kv_heads)]

    for name in full:
        if name not in names:
            continue
        array = full[name]
        if "embed_tokens" in name or "lm_head" in name:
            rows = math.ceil(len(array) / layout.vocab_multiple) * layout.vocab_multiple
            padded = np.full((rows, array.shape[1]), PADDING)
            padded[: len(array)] = array
            local[name] = np.split(padded, tp)[rank]
        elif "norm" in name or ".mlp.gate.weight" in name or name.endswith("o_proj.bias"):
            local[name] = array
        elif "qkv_proj" in name:
            q, k, v = np.split(
                array, np.cumsum([decoder.heads, decoder.kv_heads])[:2] * decoder.head_dim
            )
            local[name] = np.concatenate([np.split(q, tp)[rank], heads(k), heads(v)])
        elif "k_proj" in name or "v_proj" in name:
            local[name] = heads(array)
        elif "o_proj" in name:
            local[name] = np.split(array, tp, axis=1)[rank]
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(np.split(array, layout.ep)[rank // inner], 2, axis=1)
            local[name] = np.concatenate(
                [np.split(one, inner, axis=1)[rank % inner] for one in (gate, up)], axis=1
            )
        elif name.endswith("experts.down_proj"):
            local[name] = np.split(np.split(array, layout.ep)[rank // inner], inner, axis=2)[
                rank % inner
            ]
        elif ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            if expert // (decoder.experts // layout.ep) == rank // inner:
                local[name] = np.split(array, inner, axis=int("down" in name))[rank % inner]
        elif "gate_up_proj" in name:
            local[name] = np.concatenate([np.split(half, tp)[rank] for half in np.split(array, 2)])
        else:
            local[name] = np.split(array, tp, axis=int("down_proj" in name))[rank]
    return _fused(decoder, local, joined) if layout.fused else local


def _fused(decoder: Decoder, local: Arrays, joined: bool) -> Arrays:
    """Fuse q, k and v into one array, gate and up into one, and stack experts."""
    local = dict(local)
    for layer in range(decoder.layers):
        own = f"model.layers.{layer}."
        for target, sources in (
            ("self_attn.qkv_proj", "qkv"),
            ("mlp.gate_up_proj", ("gate", "up")),
        ):
            for kind in ("weight", "bias"):
                names = [f"{own}{target.split('.')[0]}.{source}_proj.{kind}" for source in sources]
                if names[0] in local:
                    local[f"{own}{target}.{kind}"] = np.concatenate(
                        [local.pop(name) for name in names]
                    )
        shared = [f"{own}mlp.shared_expert.{role}_proj.weight" for role in ("gate", "up")]
        if shared[0] in local:
            local[f"{own}mlp.shared_expert.gate_up_proj.weight"] = np.concatenate(
                [local.pop(name) for name in shared]
            )
        experts = [
            e for e in range(decoder.experts) if f"{own}mlp.experts.{e}.down_proj.weight" in local
        ]
        if experts:
            both = [
                np.concatenate(
                    [
                        local.pop(f"{own}mlp.experts.{e}.{role}_proj.weight")
                        for role in ("gate", "up")
                    ]
                )
                for e in experts
            ]
            local[f"{own}mlp.experts.gate_up_proj"] = np.stack(both)
            down = [local.pop(f"{own}mlp.experts.{e}.down_proj.weight") for e in experts]
            local[f"{own}mlp.experts.down_proj"] = np.stack(down)
    return local
