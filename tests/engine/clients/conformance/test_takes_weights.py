"""The suite of `TakesWeights`."""

import asyncio

import pytest

from rollweave.schema.errors import EngineLostError, WeightsError
from rollweave.schema.serving import LoadCheckpoint
from tests.engine.clients.conformance.backends import FAKES, QUICK, SERVERS, Connect, request
from tests.support.echo_engine import DEAF
from tests.support.engines import manifest


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_suspended_engines_answer_after_they_resume(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    await client.suspend()
    waiting = client.generate(request("r0", 5))
    stats = await client.stats()  # taken after the request: the engine has seen it, and holds it
    assert stats.kv_total_tokens > 0
    assert not waiting.done()
    assert (await client.beat()).for_s < 60
    client.resume()
    assert (await waiting).id == "r0"


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_bad_weights_are_refused_and_the_engine_still_serves(
    connect: Connect, kind: str
) -> None:
    client = connect(kind)
    await client.ready()
    with pytest.raises(WeightsError):
        await client.stage(manifest(3, digest="bad"))
    with pytest.raises(WeightsError):
        await client.load(manifest(3, digest="bad"))
    assert (await client.stats()).version == -1
    assert (await client.generate(request("r0", 5))).id == "r0"


@pytest.mark.parametrize("kind", FAKES)
async def test_good_weights_mark_the_tokens(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    await client.stage(manifest(7))
    assert (await client.stats()).version == -1
    await client.load(manifest(7))
    assert (await client.generate(request("r0", 5))).versions[0].version == 7
    await client.load(LoadCheckpoint(version=6, publication_id=6, directory="", dtype="float32"))
    assert (await client.generate(request("r1", 5))).versions[0].version == 6


@pytest.mark.parametrize("kind", FAKES)
async def test_unresponsive_engine_is_killed(
    monkeypatch: pytest.MonkeyPatch, connect: Connect, kind: str
) -> None:
    monkeypatch.setattr("rollweave.engine.clients.client.JOIN_S", 0.1)
    client = connect(kind, reply_s=0.3)
    await client.ready()
    deaf = client.generate(request("r0", DEAF))
    await asyncio.sleep(0)
    with pytest.raises(EngineLostError, match=r"did not suspend within 0\.3 s and was killed"):
        await client.suspend()
    with pytest.raises(EngineLostError):
        await deaf


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_a_killed_engine_takes_no_weights(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    suspending = asyncio.ensure_future(client.suspend())
    await asyncio.sleep(0)
    client.kill()
    for call in (suspending, client.suspend(), client.stage(manifest(1)), client.load(manifest(1))):
        with pytest.raises(EngineLostError, match="killed"):
            await call
    client.resume()
