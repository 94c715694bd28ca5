"""Attention that reads the paged pool is what an obvious loop over tokens computes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from rollweave.engine.attention import Chunk, GatheredAttention
from rollweave.engine.batching import Entry
from rollweave.engine.kv import PagedPool
from rollweave.engine.paged_attention import (
    CHECK_TOLERANCE,
    Kernel,
    PagedAttention,
    compiled_kernel,
    obstacle,
    padded_rows,
)
from rollweave.weights.checkpoint import ModelShape
from tests.support.variants import mostly_slow

from .kernels import dense, unfused

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def uncompiled() -> Iterator[None]:
    """Call the unfused operation itself: torch would trace it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


def shape_of(*, kv_heads: int, shared: int, head_dim: int, context: int = 256) -> ModelShape:
    return ModelShape(
        vocab=11,
        hidden=8,
        layers=2,
        heads=kv_heads * shared,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=8,
        context=context,
        eps=1e-6,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        inv_freq=(),
        eos_token_ids=(),
    )


def pool_of(
    shape: ModelShape, *, blocks: int, size: int, dtype: torch.dtype = torch.float32
) -> PagedPool:
    return PagedPool(
        shape, blocks=blocks, block_tokens=size, device=torch.device("cpu"), dtype=dtype
    )


@dataclass
class Step:
    """Sequences that decode, and chunks of others, in blocks that lie anywhere."""

    decoding: list[Entry]
    prefilling: list[tuple[Entry, int]]

    def chunks(self, rows: list[Entry]) -> list[Chunk]:
        chunks = [Chunk(entry, entry.computed, 1, row) for row, entry in enumerate(rows)]
        offset = len(rows)
        for entry, count in self.prefilling:
            chunks.append(Chunk(entry, entry.computed, count, offset))
            offset += count
        return chunks


def random_step(
    rng: random.Random, *, decoding: int, prefilling: int, blocks: int, size: int
) -> Step:
    """Draw a step. Sequences share whole blocks of prefixes that are computed."""
    free = list(range(blocks))
    rng.shuffle(free)
    entries: list[tuple[Entry, int]] = []
    room = blocks // (decoding + prefilling)
    for number in range(decoding + prefilling):
        most = room * size
        count = 1 if number < decoding else rng.randint(1, most)
        computed = rng.randint(0, most - count)
        shared: list[int] = []
        if entries and rng.random() < 0.5:
            other = rng.choice(entries)[0]
            shared = other.blocks[: rng.randint(0, min(other.computed, computed) // size)]
        needed = -(-(computed + count) // size) - len(shared)
        held = shared + [free.pop() for _ in range(needed)]
        entries.append(
            (Entry(id=str(number), tokens=[], limit=0, computed=computed, blocks=held), count)
        )
    return Step([entry for entry, _ in entries[:decoding]], entries[decoding:])


def expected(
    shape: ModelShape, pool: torch.Tensor, qkv: torch.Tensor, chunks: list[Chunk], size: int
) -> torch.Tensor:
    """Compute attention token by token and head by head. `pool` has the new KV."""
    head, shared = shape.head_dim, shape.heads // shape.kv_heads
    out = torch.zeros(len(qkv), shape.heads * head)
    for chunk in chunks:
        for at in range(chunk.count):
            positions = range(chunk.start + at + 1)
            slots = [chunk.entry.blocks[p // size] * size + p % size for p in positions]
            context = pool[slots].view(len(slots), 2, shape.kv_heads, head)
            row = chunk.offset + at
            for number in range(shape.heads):
                columns = slice(number * head, (number + 1) * head)
                keys, values = context[:, 0, number // shared], context[:, 1, number // shared]
                weights = torch.softmax(keys @ qkv[row, columns] * head**-0.5, dim=0)
                out[row, columns] = weights @ values
    return out


def check(
    shape: ModelShape, attention: PagedAttention, step: Step, *, tolerance: float = 1e-5
) -> None:
    pool, rows = attention.pool, attention.rows(step.decoding)
    assert rows[: len(step.decoding)] == step.decoding
    chunks = step.chunks(rows)
    tokens = sum(chunk.count for chunk in chunks)
    generator = torch.Generator().manual_seed(tokens)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.empty(tokens, width).normal_(generator=generator)
    for row, entry in enumerate(rows):
        qkv[row] = qkv[rows.index(entry)]  # a repetition computes the same token
    plan = attention.plan(chunks, rows=len(rows))
    for layer in range(shape.layers):
        pool.data.normal_(generator=generator)
        before = pool.data.clone()
        out = attention.attend(layer, qkv.clone(), plan)
        changed = (pool.data != before).any(dim=-1).nonzero().tolist()
        slots = sorted(set(plan.slots.tolist()))
        assert changed == [[layer, slot] for slot in slots]
        want = expected(shape, pool.data[layer], qkv, chunks, pool.block_tokens)
        assert (out - want).abs().max() <= tolerance


@pytest.mark.parametrize("kernel", mostly_slow([unfused, dense], {dense}))
@given(
    seed=st.integers(0, 1 << 30),
    decoding=st.integers(0, 5),
    prefilling=st.integers(0, 3),
    kv_heads=st.integers(1, 2),
    shared=st.integers(1, 3),
    size=st.sampled_from([1, 3, 4]),
)
def test_a_step_is_what_a_loop_over_tokens_computes(
    kernel: Kernel, seed: int, decoding: int, prefilling: int, kv_heads: int, shared: int, size: int
) -> None:
    """Several steps use the same buffers, in which the former ones have left their
    lists.
    """
    rng = random.Random(seed)
    shape = shape_of(kv_heads=kv_heads, shared=shared, head_dim=4)
    pool = pool_of(shape, blocks=24, size=size)
    attention = PagedAttention(shape, pool, max_rows=5, context=24 * size, kernel=kernel)
    for _ in range(2):
        some = decoding or prefilling
        step = random_step(
            rng, decoding=decoding if some else 1, prefilling=prefilling, blocks=24, size=size
        )
        check(shape, attention, step)
        decoding = rng.randint(0, 5)


def test_chunks_of_several_rows_of_queries() -> None:
    shape = shape_of(kv_heads=1, shared=2, head_dim=4)
    pool = pool_of(shape, blocks=70, size=16)
    attention = PagedAttention(shape, pool, max_rows=4, context=512, kernel=dense)
    rng = random.Random(1)
    rng.shuffle(places := list(range(70)))
    long, short = (
        Entry(
            id=id, tokens=[], limit=0, computed=computed, blocks=[places.pop() for _ in range(30)]
        )
        for id, computed in (("long", 37), ("short", 0))
    )
    decoding = Entry(id="d", tokens=[], limit=0, computed=100, blocks=places[:7])
    check(shape, attention, Step([decoding], [(long, 300), (short, 65)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of torch's compiler
@pytest.mark.parametrize("shared", [1, 3])
def test_the_compiled_kernel_computes_the_same(shared: int) -> None:
    """Each number of rows is compiled once, whatever the blocks are."""
    shape = shape_of(kv_heads=2, shared=shared, head_dim=16)
    pool = pool_of(shape, blocks=16, size=16)
    compiled = compiled_kernel()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        attention = PagedAttention(shape, pool, max_rows=4, context=256, kernel=compiled)
        rng = random.Random(0)
        for decoding, prefilling in [(3, 2), (4, 0), (1, 1), (3, 1), (1, 3), (4, 2)]:
            step = random_step(rng, decoding=decoding, prefilling=prefilling, blocks=16, size=16)
            check(shape, attention, step, tolerance=1e-4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3, "decoding of 1 and 4 rows, and prefills of 256 queries"


def test_few_numbers_of_rows_are_padded_little() -> None:
    for count in range(1, 200):
        rows = padded_rows(count)
        assert count <= rows < max(2 * count, 2)
        assert rows == padded_rows(rows)


def test_the_numbers_of_rows() -> None:
    assert sorted({padded_rows(count) for count in range(1, 129)}) == [
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128,
    ]  # fmt: skip


def test_the_kernel_is_compared_with_the_gathered_attention() -> None:
    shape = shape_of(kv_heads=2, shared=2, head_dim=16)
    pool = pool_of(shape, blocks=9, size=16)
    reference = GatheredAttention(shape, pool, None, tiles=False)

    def difference(kernel: Kernel) -> float:
        attention = PagedAttention(shape, pool, max_rows=8, context=64, kernel=kernel)
        return attention.difference(reference)

    assert difference(dense) < 1e-5
    assert not pool.data.any(), "it leaves no values"
    tolerance = CHECK_TOLERANCE[torch.float32]
    assert difference(lambda *args, **rest: dense(*args, **rest) * 1.1) > tolerance
    assert difference(lambda *args, **rest: dense(*args, **rest) * float("nan")) > tolerance


def test_a_cpu_has_no_kernel() -> None:
    shape = shape_of(kv_heads=1, shared=1, head_dim=16)
    assert obstacle(shape, pool_of(shape, blocks=4, size=16)) == "there is no GPU"
