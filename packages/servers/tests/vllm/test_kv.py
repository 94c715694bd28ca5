"""KV moves by requests of a server that are recorded here: what they ask for, what is
refused, and what a pause waits for.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollweave.schema.base import EngineId
from rollweave.schema.errors import KvError
from rollweave.schema.serving import EngineSpec, KvHeld, KvManifest, ServerSpec
from rollweave.weights.checkpoint import read_shape
from rollweave_servers.process import PLUGIN
from rollweave_servers.vllm_control import ABORT, GENERATE
from rollweave_servers.vllm_kv import GRANULE, RELEASE, RPC, NixlKv
from tests.support.engines import vllm_checkpoint

CONTEXT = tuple(range(3, 103))
WHOLE = len(CONTEXT) // GRANULE * GRANULE
HELD = {
    "do_remote_prefill": True,
    "remote_request_id": "generate-tokens-7",
    "remote_blocks_expiry_time": 12.5,
}
CACHED_THERE = {"remote_prefill_cached_tokens": 0}


class FakeServer:
    """Answers requests for one token, unless `hangs`, until they are aborted."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.finish, self.hangs = "length", False
        self.on_request: Callable[[], None] = lambda: None
        self.began, self.aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.began.set()
        self.on_request()
        finish = self.finish
        if self.hangs:
            await self.aborted.wait()
            finish = "abort"
        exports = body["kv_transfer_params"].get("do_remote_decode")
        choice = {"finish_reason": finish, "token_ids": [] if finish == "abort" else [9]}
        details = {"cached_tokens": len(body["token_ids"])}
        if "remote_prefill_cached_tokens" in body["kv_transfer_params"]:
            details = {"cached_tokens": 0}  # it reports those of the other server
        return web.json_response(
            {
                "choices": [choice],
                "kv_transfer_params": HELD | CACHED_THERE if exports else None,
                "usage": None if exports else {"prompt_tokens_details": details},
            }
        )

    async def call(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json()))
        if request.path == ABORT:
            self.aborted.set()
        return web.json_response({})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def server(model: Path) -> AsyncIterator[tuple[FakeServer, NixlKv]]:
    fake, app = FakeServer(), web.Application()
    app.router.add_post(GENERATE, fake.generate)
    for path in (ABORT, RPC):
        app.router.add_post(path, fake.call)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    spec = EngineSpec(
        id=EngineId("e0"),
        model=str(model),
        kv_tokens=4096,
        server=ServerSpec(kind="vllm", start_s=1.0, control_s=1.0, moves_kv=True),
    )
    here: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}", token="t")
    kv = NixlKv(spec, read_shape(model), here)
    yield fake, kv
    await kv.close()
    await runner.cleanup()


async def test_kv_is_told_by_the_weights_that_computed_it(
    server: tuple[FakeServer, NixlKv], tmp_path: Path
) -> None:
    """Published weights are the same for all engines; those of a folder are not."""
    _, kv = server
    other: Any = SimpleNamespace(url="http://127.0.0.1:9", token="t")
    elsewhere = msgspec.structs.replace(kv._spec, model=str(tmp_path))
    second = NixlKv(elsewhere, kv._shape, other)
    for publication_id in (-1, 0, 1):
        one, two = (each._compatibility(publication_id) for each in (kv, second))
        assert (one == two) == (publication_id >= 0)
        assert one["publication_id"] == publication_id
    await second.close()


async def test_an_export_and_an_import_are_requests_for_one_token(
    server: tuple[FakeServer, NixlKv],
) -> None:
    fake, kv = server
    kv.publication_id = 4
    manifest = await kv.export("kv0", CONTEXT)
    assert (manifest.id, manifest.tokens, manifest.publication_id) == ("kv0", WHOLE, 4)
    assert isinstance(manifest.where, KvHeld)
    assert msgspec.json.decode(manifest.where.parameters) == HELD | CACHED_THERE
    assert await kv.take(CONTEXT, manifest) == WHOLE
    exporting, importing = fake.requests
    assert exporting["kv_transfer_params"] == {"do_remote_decode": True}
    assert importing["kv_transfer_params"] == HELD
    for body in fake.requests:
        assert body["token_ids"] == list(CONTEXT[:WHOLE])
        assert body["sampling_params"]["max_tokens"] == 1
        assert body["cache_salt"] == "4", "or other weights would continue it"
    assert exporting["request_id"] != importing["request_id"]


async def test_the_model_s_own_weights_have_no_salt(server: tuple[FakeServer, NixlKv]) -> None:
    fake, kv = server
    await kv.export("kv0", CONTEXT)
    assert "cache_salt" not in fake.requests[0]
    with pytest.raises(KvError, match=f"must have {GRANULE} tokens to be moved, got 3"):
        await kv.export("kv1", (1, 2, 3))


def _other(**changes: Any) -> Callable[[KvManifest], KvManifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **changes)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_other(publication_id=5), "publication_id of the KV must be this engine's -1, got 5"),
        (_other(model="other"), "model of the KV must be"),
        (_other(layout="blocks"), "layout of the KV must be .* got blocks"),
        (_other(key=b"other"), "the KV belongs to other tokens"),
    ],
)
async def test_other_kv_is_refused_before_a_request(
    server: tuple[FakeServer, NixlKv], change: Callable[[KvManifest], KvManifest], error: str
) -> None:
    fake, kv = server
    manifest = change(await kv.export("kv0", CONTEXT))
    with pytest.raises(KvError, match=error):
        await kv.take(CONTEXT, manifest)
    assert len(fake.requests) == 1


async def test_kv_of_an_update_in_between_is_dropped(server: tuple[FakeServer, NixlKv]) -> None:
    fake, kv = server
    manifest = await kv.export("kv0", CONTEXT)

    def update() -> None:
        kv.publication_id += 1

    fake.on_request = update
    with pytest.raises(KvError, match="the weights have changed from -1 to 0"):
        await kv.take(CONTEXT, manifest)
    with pytest.raises(KvError, match="the weights have changed from 0 to 1"):
        await kv.export("kv1", CONTEXT)


async def test_a_request_that_fails_moves_nothing(server: tuple[FakeServer, NixlKv]) -> None:
    fake, kv = server
    manifest = await kv.export("kv0", CONTEXT)
    fake.finish = "error"
    with pytest.raises(KvError, match="which ended with \\['error'\\]"):
        await kv.take(CONTEXT, manifest)


async def test_a_pause_aborts_what_does_not_end(
    server: tuple[FakeServer, NixlKv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave_servers.vllm_kv.SETTLE_S", 0.05)
    fake, kv = server
    manifest = await kv.export("kv0", CONTEXT)
    kv.release("kv0")
    fake.hangs = True
    for transfer in (kv.take(CONTEXT, manifest), kv.export("kv1", CONTEXT)):
        fake.began.clear()
        fake.aborted.clear()
        moving = asyncio.ensure_future(transfer)
        await fake.began.wait()
        pausing = asyncio.ensure_future(kv.pause())
        with pytest.raises(KvError, match="which ended with"):
            await moving
        await pausing
        aborted = [body["request_ids"] for path, body in fake.calls if path == ABORT]
        assert aborted[-1] == [f"generate-tokens-{fake.requests[-1]['request_id']}"]
        for refused in (kv.export("kv2", CONTEXT), kv.take(CONTEXT, manifest)):
            with pytest.raises(KvError, match="the engine is paused"):
                await refused
        kv.resume()
    fake.hangs = False
    assert (await kv.export("kv3", CONTEXT)).tokens == WHOLE


async def test_a_pause_ends_all_leases_after_the_readers_have_answered(
    server: tuple[FakeServer, NixlKv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave_servers.vllm_kv.SETTLE_S", 0.01)
    fake, kv = server
    await kv.pause()
    assert not fake.calls, "there is nothing to release"
    kv.resume()
    await kv.export("kv0", CONTEXT)
    await kv.export("kv1", CONTEXT)
    pausing = asyncio.ensure_future(kv.pause())
    for id in ("unknown", "kv0"):
        kv.release(id)
    done, _ = await asyncio.wait([pausing], timeout=0.05)
    assert not done
    assert not fake.calls
    kv.release("kv1")
    await pausing
    assert fake.calls == [(RPC, {"method": RELEASE})]


async def test_an_abandoned_export_keeps_its_lease(
    server: tuple[FakeServer, NixlKv], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing releases it, since its reader may still read: the lease ends itself."""
    monkeypatch.setattr("rollweave_servers.vllm_kv.LEASE_S", 0.3)
    fake, kv = server
    await kv.export("kv0", CONTEXT)
    began = time.monotonic()
    await kv.pause()
    assert time.monotonic() - began > 0.2
    assert fake.calls in ([], [(RPC, {"method": RELEASE})])


async def test_an_import_without_an_answer_lasts_until_its_kv_is_useless(
    server: tuple[FakeServer, NixlKv], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its KV might be released and replaced while the server reads it."""
    monkeypatch.setattr("rollweave_servers.vllm_kv.LEASE_S", 1.5)
    fake, kv = server
    manifest = await kv.export("kv0", CONTEXT)
    kv._calls._limit_s = 0.1
    kv._calls._session._timeout = aiohttp.ClientTimeout(total=0.1)
    fake.hangs = True
    began = time.monotonic()
    with pytest.raises(KvError, match="did not answer"):
        await kv.take(CONTEXT, manifest)
    assert time.monotonic() - began >= 1.4


class Connector:
    """What the plug-in uses of vLLM's NixlConnector."""

    class Scheduler:
        def __init__(self, ends: dict[str, float]) -> None:
            self._reqs_need_send = ends

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
            held = request.request_id in self._reqs_need_send
            return held, {"remote_request_id": request.request_id} if held else None

    class Worker:
        def __init__(self, offset_s: float, ends: dict[str, float | None]) -> None:
            self._engine_clock_offset = {"p": offset_s}
            self._recving_metadata = {
                id: SimpleNamespace(remote=SimpleNamespace(engine_id="p", blocks_expiry_time=end))
                for id, end in ends.items()
            }

        def _pop_done_transfers(self, transfers: dict[str, Any]) -> tuple[set[str], set[str]]:
            return set(transfers), {"broken"} & set(transfers)


def test_an_export_names_the_end_of_its_lease_and_a_late_import_fails() -> None:
    sys.path.insert(0, str(PLUGIN))
    try:
        import rollweave_vllm as plugin
    finally:
        sys.path.remove(str(PLUGIN))
    for _ in range(2):  # vLLM registers plug-ins several times
        plugin.observe(Connector.Scheduler, Connector.Worker)
    scheduler = Connector.Scheduler({"r": 7.5})
    request = SimpleNamespace(request_id="r")
    expected = (True, {"remote_request_id": "r", "remote_blocks_expiry_time": 7.5})
    assert scheduler.request_finished(request, []) == expected
    assert scheduler.request_finished(SimpleNamespace(request_id="x"), []) == (False, None)

    offset_s = 1000.0  # the other host has run for longer
    now = time.perf_counter() + offset_s
    soon = plugin.MARGIN_S / 2
    ends = {
        "early": now + 60,
        "late": now - 1,
        "close": now + soon,
        "none": None,
        "broken": now + 60,
    }
    worker = Connector.Worker(offset_s, ends)
    done, failed = worker._pop_done_transfers(dict.fromkeys(ends))
    assert done == set(ends)
    assert failed == {"late", "close", "none", "broken"}
    assert worker._pop_done_transfers({}) == (set(), set())
    unknown = Connector.Worker(offset_s, ends)
    unknown._engine_clock_offset.clear()
    assert unknown._pop_done_transfers({"early": None}) == ({"early"}, {"early"})
