"""The suite of `MovesKv`."""

import asyncio

import msgspec
import pytest

from rollweave.schema.errors import EngineLostError, KvError
from rollweave.schema.serving import KvTransport
from tests.engine.clients.conformance.backends import KINDS, QUICK, SERVERS, Connect, request
from tests.support.echo_engine import DEAF, kv_manifest


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("over", ["shm", "tcp"])
async def test_next_turn_hits_migrated_kv(connect: Connect, kind: str, over: KvTransport) -> None:
    source, target = connect(kind), connect(kind)
    await asyncio.gather(source.ready(), target.ready())
    tokens = tuple(range(2, 42))
    await source.generate(request("r0", *tokens))
    exported = await source.export_kv([*tokens, 7, 7], over)
    assert exported.tokens > 0
    moved = await target.import_kv([*tokens, 7, 7], exported)
    assert moved == exported.tokens
    source.release_kv(exported.id)
    source.release_kv("unknown")
    assert (await target.generate(request("r1", *tokens, 7, 7))).cached_tokens == moved


@pytest.mark.parametrize("kind", QUICK)
async def test_refused_kv_raises_and_the_engine_still_serves(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    with pytest.raises(KvError, match="cache"):
        await client.export_kv([5] * 40, "shm")
    foreign = msgspec.structs.replace(kv_manifest("kv", 1), publication_id=9)
    with pytest.raises(KvError, match="publication_id"):
        await client.import_kv([5], foreign)
    assert (await client.generate(request("r0", 5))).id == "r0"


@pytest.mark.parametrize("kind", SERVERS)
async def test_servers_refuse_to_move_kv(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    with pytest.raises(KvError, match="cannot be moved"):
        await client.export_kv([5] * 40, "shm")
    with pytest.raises(KvError, match="cannot be moved"):
        await client.import_kv([5], kv_manifest("kv", 1))


async def test_a_killed_engine_moves_no_kv(connect: Connect) -> None:
    client = connect("fake in a process")
    await client.ready()
    deaf = client.generate(request("r0", DEAF))
    moves = [
        asyncio.ensure_future(call)
        for call in (client.export_kv([5], "shm"), client.import_kv([5], kv_manifest("kv", 1)))
    ]
    await asyncio.sleep(0)
    client.kill()
    for call in (deaf, *moves):
        with pytest.raises(EngineLostError, match="killed"):
            await call
    for later in (client.export_kv([5], "shm"), client.import_kv([5], kv_manifest("kv", 1))):
        with pytest.raises(EngineLostError, match="killed"):
            await later
    client.release_kv("kv")
