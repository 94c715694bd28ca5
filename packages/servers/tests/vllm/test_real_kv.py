"""KV moves between two real vLLM servers (`make test-vllm`)."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from packages.servers.tests.server_engines import TIE, Weights, greedy, started
from rollweave.schema.errors import KvError
from rollweave.schema.serving import GenerateResult
from rollweave_servers.vllm_kv import LEASE_S
from tests.support.engines import needs_vllm, vllm_spec

pytestmark = [*needs_vllm, pytest.mark.timeout(1800)]

COUNT = 200
WHOLE = 192


def context(first: int) -> tuple[int, ...]:
    return first, *((7 * at * at + 3 * at) % 120 + 2 for at in range(COUNT - 1))


def agree(one: GenerateResult, other: GenerateResult) -> None:
    """Assert that both have the same tokens, up to one that rounding may choose."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    end = next((at for at, (a, b) in enumerate(pairs) if a != b), len(one.tokens))
    assert one.logprobs[:end] == pytest.approx(other.logprobs[:end], abs=1e-5)
    if end < len(one.tokens):
        assert one.logprobs[end] == pytest.approx(other.logprobs[end], abs=TIE)


async def test_prompts_are_computed_in_one_server_and_continued_in_another(tmp_path: Path) -> None:
    """The first server computes prompts, and the second one samples. Then the KV of an
    update in between is dropped, and the first server is lost.
    """
    weights = Weights(tmp_path)
    spec = msgspec.structs.replace(vllm_spec(), moves_kv=True)
    logs = [tmp_path / name for name in ("prefill", "decode")]
    for folder in logs:
        folder.mkdir()
    try:
        async with (
            started(weights, logs[0], spec) as (prefill, _),
            started(weights, logs[1], spec) as (decode, _),
        ):
            assert (await prefill.ready()).moves_kv
            for first in range(3, 6):
                tokens = context(first)
                await prefill.generate(greedy(f"p{first}", tokens, count=1))
                manifest = await prefill.export_kv(tokens, "tcp")
                assert await decode.import_kv(tokens, manifest) == WHOLE
                prefill.release_kv(manifest.id)
                there = await decode.generate(greedy(f"d{first}", tokens))
                assert there.cached_tokens == WHOLE
                agree(there, await prefill.generate(greedy(f"c{first}", tokens)))

            # new weights between the two dispatches
            tokens, began = context(10), time.monotonic()
            manifest = await prefill.export_kv(tokens, "tcp")
            await decode.load(weights.published(1))
            with pytest.raises(KvError, match="publication_id of the KV must be this engine's 1"):
                await decode.import_kv(tokens, manifest)
            prefill.release_kv(manifest.id)
            await prefill.load(weights.published(1))
            assert time.monotonic() - began < LEASE_S, "KV that nothing reads delays an update"
            manifest = await prefill.export_kv(tokens, "tcp")
            assert await decode.import_kv(tokens, manifest) == WHOLE
            there = await decode.generate(greedy("new", tokens))
            agree(there, await weights.continued(1, greedy("reference", tokens)))

            # the lease ends before the KV is read, and other KV takes its place
            tokens = context(12)
            manifest = await prefill.export_kv(tokens, "tcp")
            await asyncio.sleep(LEASE_S)
            for first in range(13, 100):
                await prefill.generate(greedy(f"o{first}", context(first), count=1))
            with pytest.raises(KvError):
                await decode.import_kv(tokens, manifest)
            prefill.release_kv(manifest.id)
            there = await decode.generate(greedy("late", tokens))
            assert there.cached_tokens == 0
            agree(there, await weights.continued(1, greedy("reference", tokens)))

            # the server with the KV is lost
            tokens = context(11)
            manifest = await prefill.export_kv(tokens, "tcp")
            prefill.kill()
            await asyncio.wait([prefill.lost])
            with pytest.raises(KvError):
                await decode.import_kv(tokens, manifest)
            there = await decode.generate(greedy("alone", tokens))
            agree(there, await weights.continued(1, greedy("reference", tokens)))
            await decode.load(weights.published(2))
    finally:
        weights.close()
