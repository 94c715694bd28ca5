"""For any two layouts, shards assembled from the senders' slices equal the full
tensors, divided slowly.
"""

import itertools
import math
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from rollweave.schema.weights import TensorMeta
from rollweave.weights.parameters import Model, itemsize
from rollweave.weights.shards import (
    Fsdp,
    Layout,
    Piece,
    TensorParallel,
    Unsharded,
    assign_slices,
    piece_bytes,
    plan,
    runs,
)
from tests.support.properties import examples
from tests.weights.sharded import PADDING, Decoder, cases, slow


def window(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    size = (1,) * (len(start) - len(size)) + size
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


MOE = Decoder(
    vocab=9,
    hidden=3,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=4,
    experts=4,
    tied=True,
    bias=True,
    norms=True,
)


@settings(max_examples=examples(150))
@given(case=cases(), bucket=st.sampled_from([1, 64, 1 << 20]))
@example(
    (
        MOE,
        TensorParallel(tp=2, pp=3, dp=2, vocab_multiple=4),
        TensorParallel(tp=4, ep=2, fused=True, vocab_multiple=4),
    ),
    64,
)
def test_assembled_shards_equal_the_full_tensors(
    case: tuple[Decoder, Layout, Layout], bucket: int
) -> None:
    decoder, senders, receivers = case
    model = decoder.model()
    slicing = plan(model, senders, receivers, bucket_bytes=bucket)
    sent_by, expected_by = slow(decoder, senders), slow(decoder, receivers)
    assert (
        (len(slicing.sends), len(slicing.pulls))
        == (len(sent_by), len(expected_by))
        == (senders.ranks, receivers.ranks)
    )
    sizes = {meta.name: itemsize(meta) for meta in model.tensors}
    for receiver, expected in enumerate(expected_by):
        shapes = receivers.shard(model, receiver).shapes
        assert shapes == {name: array.shape for name, array in expected.items()}
        assembled = {name: np.full(shape, PADDING) for name, shape in shapes.items()}
        pulled = 0
        for transfer in slicing.transfers(receiver):
            target = assembled[transfer.target][window(transfer.target_at, transfer.size)]
            assert (target == PADDING).all(), "sent twice"
            target[...] = sent_by[transfer.sender][transfer.source][
                window(transfer.source_at, transfer.size)
            ].reshape(target.shape)
            pulled += math.prod(transfer.size) * sizes[transfer.tensor]
        for name, array in expected.items():
            np.testing.assert_array_equal(assembled[name], array, err_msg=name)
        assert pulled == sum(nbytes for _, nbytes in slicing.pulled_ranges(receiver))


@settings(max_examples=examples(100))
@given(case=cases(), bucket=st.sampled_from([1, 64, 1 << 20]))
def test_senders_slices_are_disjoint_and_cover_everything(
    case: tuple[Decoder, Layout, Layout], bucket: int
) -> None:
    decoder, senders, _ = case
    model = decoder.model()
    times = {meta.name: np.zeros(meta.shape, int) for meta in model.tensors}
    payload = np.zeros(sum(meta.nbytes for meta in model.tensors) + 64 * len(model.tensors), int)
    slicing = plan(model, senders, Unsharded(), bucket_bytes=bucket)
    for sender, pieces in enumerate(slicing.sends):
        for piece in pieces:
            times[piece.tensor][window(piece.start, piece.size)] += 1
        ranges = slicing.sent_ranges(sender)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(ranges)), (
            "ascending, and joined"
        )
        for offset, nbytes in ranges:
            payload[offset : offset + nbytes] += 1
        assert slicing.sent_bytes(sender) == sum(nbytes for _, nbytes in ranges)
    assert all((array == 1).all() for array in times.values())
    for meta in model.tensors:
        assert (payload[meta.offset : meta.offset + meta.nbytes] == 1).all()
    assert (
        payload.sum()
        == sum(meta.nbytes for meta in model.tensors)
        == sum(map(slicing.sent_bytes, range(senders.ranks)))
    )


@settings(max_examples=examples(50))
@given(case=cases(), replicas=st.integers(2, 5), bucket=st.sampled_from([1, 32, 1000]))
def test_replicas_send_even_loads(
    case: tuple[Decoder, Layout, Layout], replicas: int, bucket: int
) -> None:
    model = case[0].model()
    sent_by = assign_slices(model, TensorParallel(dp=replicas), bucket_bytes=bucket)
    loads = [piece_bytes(model, pieces) for pieces in sent_by]
    largest = max(piece_bytes(model, [piece]) for pieces in sent_by for piece in pieces)
    assert max(loads) - min(loads) <= largest
    assert largest <= max(
        bucket, *(math.prod(meta.shape[1:]) * itemsize(meta) for meta in model.tensors)
    )


def test_assigns_the_largest_slices_first() -> None:
    metas = [
        TensorMeta(
            name=f"model.layers.{i}.norm.weight", dtype="uint8", shape=(1,), offset=i, nbytes=1
        )
        for i in range(8)
    ]
    metas.append(
        TensorMeta(name="model.norm.weight", dtype="uint8", shape=(8,), offset=8, nbytes=8)
    )
    model = Model(tuple(metas), heads=1, kv_heads=1)
    sent_by = assign_slices(model, TensorParallel(dp=2))
    assert [piece_bytes(model, pieces) for pieces in sent_by] == [8, 8]
    assert {len(pieces) for pieces in sent_by} == {1, 8}


@settings(max_examples=examples(200))
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4))
def test_runs_are_the_elements_of_a_rectangle(data: st.DataObject, shape: list[int]) -> None:
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    least = data.draw(st.sampled_from([1, 1, 1, 0]))
    size = [data.draw(st.integers(least, n - first)) for n, first in zip(shape, start, strict=True)]
    numbers = np.arange(math.prod(shape)).reshape(shape)[window(tuple(start), tuple(size))].ravel()
    elements = list(runs(shape, start, size))
    assert [i for first, count in elements for i in range(first, first + count)] == numbers.tolist()
    if len(shape) > 1 and size[1:] == shape[1:] and math.prod(size):
        assert len(elements) == 1, "rows of whole width are one stretch"


@given(rows=st.integers(0, 40), ranks=st.integers(1, 9))
def test_fsdp_divides_like_torch_chunk(rows: int, ranks: int) -> None:
    model = Model(
        (
            TensorMeta(
                name="any.name", dtype="float32", shape=(rows, 3), offset=0, nbytes=rows * 12
            ),
        ),
        1,
        1,
    )
    chunks = [len(chunk) for chunk in torch.empty(rows, 3).chunk(ranks)]
    expected = chunks + [0] * (ranks - len(chunks))
    assert [
        Fsdp(ranks).shard(model, rank).shapes["any.name"][0] for rank in range(ranks)
    ] == expected


def test_only_ranks_that_hold_a_slice_send_it() -> None:
    """Key-value heads that ranks share are sent once and pulled by each; a tied
    embedding is on the first and last stage.
    """
    decoder = Decoder(
        vocab=8, hidden=2, layers=2, heads=4, kv_heads=1, head_dim=1, ffn=4, tied=True
    )
    slicing = plan(
        decoder.model(),
        TensorParallel(tp=4, pp=2, vocab_multiple=4),
        TensorParallel(tp=2, pp=2, vocab_multiple=4),
    )
    keys = "model.layers.0.self_attn.k_proj.weight"
    assert sum(piece.tensor == keys for pieces in slicing.sends for piece in pieces) == 1
    assert [any(piece.tensor == keys for piece in pieces) for pieces in slicing.pulls] == [
        True,
        True,
        False,
        False,
    ]
    embedding = [
        sum(piece.size[0] for piece in pieces if "embed" in piece.tensor)
        for pieces in slicing.pulls
    ]
    assert embedding == [4, 4, 4, 4]
    assert (
        sum(
            piece.size[0] for pieces in slicing.sends for piece in pieces if "embed" in piece.tensor
        )
        == 8
    )


DENSE = Decoder(vocab=10, hidden=4, layers=2, heads=6, kv_heads=2, head_dim=2, ffn=6)
MANY = Decoder(vocab=10, hidden=4, layers=2, heads=8, kv_heads=8, head_dim=2, ffn=8, experts=4)


@pytest.mark.parametrize(
    ("decoder", "layout", "words"),
    [
        (
            DENSE,
            TensorParallel(tp=4, vocab_multiple=4),
            "tp must divide the 6 units of model.layers.0.self_attn.o_proj.weight, got 4",
        ),
        (
            DENSE,
            TensorParallel(tp=3, vocab_multiple=3),
            "key-value heads must divide the 3 tp ranks.*got 2",
        ),
        (
            DENSE,
            TensorParallel(tp=3),
            "tp must divide the 64 padded rows of model.embed_tokens.weight, got 3",
        ),
        (DENSE, TensorParallel(pp=3), r"pp must be at most the model's layers \(2\), got 3"),
        (
            MANY,
            TensorParallel(tp=8, ep=8),
            "ep must divide the 4 experts of model.layers.0.mlp.experts.0.gate_proj.*, got 8",
        ),
    ],
)
def test_refuses_impossible_layouts(decoder: Decoder, layout: Layout, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(decoder.model(), Unsharded(), layout)


def test_refuses_impossible_numbers() -> None:
    for build, words in (
        (lambda: Fsdp(0), "ranks must be at least 1, got 0"),
        (lambda: TensorParallel(tp=0), "tp must be at least 1, got 0"),
        (lambda: TensorParallel(tp=4, ep=3), r"ep must divide tp \(4\), got 3"),
        (
            lambda: Model((), heads=4, kv_heads=3),
            r"heads must be a multiple of kv_heads \(3\), got 4",
        ),
        (lambda: Fsdp(2).shard(DENSE.model(), 2), r"rank must be in \[0, 2\), got 2"),
        (
            lambda: assign_slices(DENSE.model(), Unsharded(), bucket_bytes=0),
            "bucket_bytes must be at least 1, got 0",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            build()


def one(name: str, *shape: int) -> Model:
    tensors = (("model.embed_tokens.weight", (8, 4)), (name, shape))
    return Model(
        tuple(
            TensorMeta(name=n, dtype="bfloat16", shape=s, offset=0, nbytes=2 * math.prod(s))
            for n, s in tensors
        ),
        2,
        1,
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            one("model.layers.0.mixer.in_proj.weight", 4, 4),
            "in_proj.weight must be a tensor whose sharding is known",
        ),
        (
            one("model.layers.0.self_attn.sinks", 4),
            "sinks must be a tensor whose sharding is known",
        ),
        (
            one("visual.proj.weight", 4, 4),
            "visual.proj.weight must be a tensor whose sharding is known",
        ),
        (
            one("model.layers.0.self_attn.q_proj.weight", 3, 4),
            "q_proj.weight must be a multiple of its 2 attention heads, got 3",
        ),
        (one("model.layers.0.self_attn.q_proj.weight", 4), "q_proj.weight must have 2 dimensions"),
        (
            one("model.layers.0.self_attn.qkv_proj.weight", 6, 4),
            "must be a multiple of its 4 attention heads",
        ),
        (
            one("model.layers.0.mlp.gate_up_proj.weight", 5, 4),
            "must be a multiple of its 2 gate and up, got 5",
        ),
        (
            one("model.layers.0.mlp.experts.gate_up_proj", 2, 4, 6),
            r"must have shape \[experts, 2 x inner, hidden\] with hidden 4",
        ),
        (
            one("model.layers.0.mlp.experts.down_proj", 2, 3, 4),
            r"must have shape \[experts, hidden, inner\] with hidden 4",
        ),
    ],
)
def test_refuses_unknown_tensors_by_name(model: Model, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorParallel().shard(model, 0)


def test_fsdp_refuses_a_scalar_which_an_unsharded_layout_accepts() -> None:
    model = one("scale")
    with pytest.raises(ValueError, match="scale must have a dimension"):
        Fsdp(2).shard(model, 0)
    assert plan(model, Unsharded(), Unsharded()).sends[0][1] == Piece("scale", (), (), "scale", ())


FAMILIES = {
    "LlamaConfig": {"attention_bias": True, "mlp_bias": True},
    "Qwen2Config": {},
    "Qwen3Config": {"tie_word_embeddings": True},
    "Phi3Config": {"pad_token_id": 0},
    "MixtralConfig": {"num_local_experts": 4},
    "Qwen3MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "Qwen2MoeConfig": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_knows_the_names_of_transformers(family: str) -> None:
    """Every parameter of real architectures has a rule, and the slices that one rank of
    four sends to one of two add up.
    """
    import transformers

    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    config = getattr(transformers, family)(
        **{"tie_word_embeddings": False, **sizes, **FAMILIES[family]}
    )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    parameters = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    metas = tuple(
        TensorMeta(name=n, dtype="bfloat16", shape=s, offset=0, nbytes=2 * math.prod(s))
        for n, s in parameters.items()
    )
    model = Model(metas, heads=8, kv_heads=2)
    slicing = plan(model, TensorParallel(tp=4, pp=2, ep=2), TensorParallel(tp=2, fused=True))
    assert sum(map(slicing.sent_bytes, range(8))) == sum(meta.nbytes for meta in metas)
    full = [0, 0]
    for name, shape in parameters.items():
        cut = not (
            "norm" in name
            or name.endswith(
                ("mlp.gate.weight", "expert_gate.weight", "o_proj.bias", "down_proj.bias")
            )
        )
        for rank in range(2):
            count = math.prod(shape)
            if "embed_tokens" in name or "lm_head" in name:
                count = (64, 36)[rank] * shape[1]
            elif cut:
                count //= 2
            full[rank] += 2 * count
    pulled = [sum(2 * math.prod(t.size) for t in slicing.transfers(rank)) for rank in range(2)]
    assert pulled == full


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; import rollweave.weights.shards; assert 'torch' not in sys.modules and "
        "'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
