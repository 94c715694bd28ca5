"""Imports into a cache with little room, compared with the content that every key must
have.
"""

import queue
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.blocks import BlockLedger
from rollweave.engine.exchange import KvExchange
from rollweave.engine.kv import PagedPool
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.weights.checkpoint import ModelShape
from tests.support.properties import examples

SIZE = 2
"""Tokens of a block."""
SHAPE = ModelShape(
    vocab=9,
    hidden=8,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=2,
    ffn=4,
    context=99,
    eps=1e-6,
    tied=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    inv_freq=(1.0,),
    eos_token_ids=(),
)


class Cache:
    """An engine's cache without the engine.

    Whatever computes a block writes numbers that follow from its key.
    """

    def __init__(self, blocks: int, *, keep_s: float = 60.0) -> None:
        self.ledger = BlockLedger(blocks=blocks, block_tokens=SIZE)
        self.pool = PagedPool(
            SHAPE, blocks=blocks, block_tokens=SIZE, device=torch.device("cpu"), dtype=torch.float32
        )
        self.replies: queue.Queue[s.EngineReply] = queue.Queue()
        self.exchange = KvExchange(
            s.EngineSpec(id=EngineId("e"), model="m"),
            SHAPE,
            pool=self.pool,
            ledger=self.ledger,
            call_between_steps=lambda function: function(),  # the test waits in between
            reply=self.replies.put,
            is_finite=lambda: True,
            keep_s=keep_s,
        )

    def compute(self, tokens: Sequence[int]) -> list[int]:
        """Take blocks as a request with this context does, as many as there is room
        for; return them.
        """
        keys = self.ledger.keys(tokens)
        blocks = self.ledger.match(keys)
        self.ledger.share(blocks)
        for key in keys[len(blocks) :]:
            if not self.ledger.free:
                break
            (block,) = self.ledger.allocate(1)
            self.pool.by_block[:, block] = content(key)
            self.ledger.commit(block, key)
            blocks.append(block)
        return blocks

    def export(self, tokens: Sequence[int], over: s.KvTransport = "shm") -> s.EngineReply:
        self.exchange.start_export(
            s.ExportKv(id=str(random.random()), tokens=tuple(tokens), over=over)
        )
        return self.replies.get(timeout=20)

    def take(self, tokens: Sequence[int], exported: s.KvExported) -> s.EngineReply:
        self.exchange.start_import(
            s.ImportKv(id="i", tokens=tuple(tokens), manifest=exported.manifest)
        )
        return self.replies.get(timeout=20)

    def check(self) -> None:
        """Every block that can be hit holds what its key stands for."""
        self.ledger.check()
        for key, block in self.ledger._index.items():
            assert torch.equal(self.pool.by_block[:, block], content(key))


def content(key: bytes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
    return torch.rand(SHAPE.layers, SIZE * 2 * SHAPE.kv_heads * SHAPE.head_dim, generator=generator)


@contextmanager
def caches(*blocks: int) -> Iterator[list[Cache]]:
    built = [Cache(count) for count in blocks]
    try:
        yield built
    finally:
        for cache in built:
            cache.exchange.close()


contexts = st.lists(st.integers(0, 1), max_size=14)


@settings(max_examples=examples(150))
@given(
    room=st.integers(1, 9),
    before=st.lists(st.tuples(contexts, st.booleans()), max_size=5),
    moved=st.lists(contexts, min_size=1, max_size=3),
)
def test_import_fills_the_available_room(
    room: int, before: list[tuple[list[int], bool]], moved: list[list[int]]
) -> None:
    with caches(40, room) as (source, target):
        blocks_held: list[list[int]] = []
        # what the target has computed itself; some of it is still in use
        for tokens, stays in before:
            blocks = target.compute(tokens)
            blocks_held.append(blocks) if stays else target.ledger.release(blocks)
        matched = {
            block: target.pool.by_block[:, block].clone()
            for blocks in blocks_held
            for block in blocks
        }
        for tokens in moved:
            source.ledger.release(source.compute(tokens))
            exported = source.export(tokens)
            if not isinstance(exported, s.KvExported):
                assert len(tokens) < SIZE
                continue
            assert exported.manifest.tokens == len(tokens) // SIZE * SIZE
            keys = target.ledger.keys(tokens)
            present = target.ledger.match(keys)
            free = target.ledger.free
            reply = target.take(tokens, exported)
            target.check()
            assert target.ledger.free == free
            hit = target.ledger.match(keys)
            assert len(hit) == min(len(keys), len(present) + free - target.ledger.unused(present))
            assert hit[: len(present)] == present
            if hit:
                assert isinstance(reply, s.KvImported)
                assert reply.moved_tokens == len(hit) * SIZE
            else:
                assert isinstance(reply, s.KvRefused)
                assert "no block of the cache is free" in reply.error
            assert all(
                torch.equal(target.pool.by_block[:, block], was) for block, was in matched.items()
            )


@pytest.mark.parametrize("over", ["shm", "tcp"])
def test_unreleased_export_expires(over: s.KvTransport) -> None:
    tokens = list(range(8))
    source, target = Cache(8, keep_s=0.0), Cache(8)
    try:
        source.ledger.release(source.compute(tokens))
        exported = source.export(tokens, over)
        assert isinstance(exported, s.KvExported)
        # its time has come, not yet its turn on the side thread
        while isinstance(target.take(tokens, exported), s.KvImported):
            target.ledger.retag(-1)
        reply = target.take(tokens, exported)
        assert isinstance(reply, s.KvRefused)
        where = exported.manifest.where
        assert (
            "publisher is gone" if isinstance(where, s.KvMemory) else f"{where.host}:{where.port}"
        ) in reply.error
        assert not source.exchange._exports
    finally:
        source.exchange.close()
        target.exchange.close()
