"""One suite for every backend: in a thread, in a process and over HTTP, with the fake
and the embedded engine.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from rollweave.engine.clients.base import EngineBackend
from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.inproc import in_thread
from rollweave.engine.clients.process import in_process
from rollweave.engine.clients.server import EngineServer
from rollweave.io.child import child_of
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError, EngineLostError, KvError, WeightsError
from rollweave.schema.serving import (
    EngineCommand,
    EngineReply,
    EngineSpec,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResult,
    KvTransport,
    LoadCheckpoint,
    PartialOutput,
    Progress,
    Sampling,
    TokenDelta,
    VersionSpan,
)
from tests.support.echo_engine import (
    CRASH,
    DEAF,
    HOLD,
    PROGRESS,
    PROGRESS_TOKENS,
    REFUSE,
    EchoLoop,
    kv_manifest,
)
from tests.support.engines import (
    environment,
    manifest,
    needs_vllm,
    real_loop,
    tiny_checkpoint,
    vllm_checkpoint,
    vllm_spec,
)
from tests.support.sglang import sglang_spec
from tests.support.vllm_server import attached_spec, free_port, start_vllm_server

Connect = Callable[..., EngineBackend]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_checkpoint(tmp_path_factory.mktemp("vllm"))


KINDS = ("fake in a thread", "fake in a process", "ours in a thread", "ours in a process")
QUICK = KINDS[:3]
FAKES = KINDS[:2]
"""The backends with the fake engine. The embedded engine in a process takes seconds to
import; one test of it covers the connection.
"""
SERVERS = (
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("sglang", marks=pytest.mark.slow),
    pytest.param("attached", marks=pytest.mark.slow),
)
"""A server behind the process of an engine: a real vLLM, which starts in tens of
seconds, `tests/support/sglang_server.py`, which computes with the embedded engine, and
`tests/support/vllm_server.py`, which does so too and is started before the engine.
"""
HTTP = ("fake over HTTP", "ours over HTTP")
"""An engine in a thread, served to a client, which controls neither its weights and KV
nor its suspension.
"""


def over_http(engine: EngineClient) -> HttpEngine:
    """Return a client of a server of `engine`.

    The server starts at once; a request before it listens waits.
    """
    place = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    client = HttpEngine(HttpSpec(name="engine e0", url=url, vocab=128), start_s=60.0, reply_s=20.0)
    runner = web.AppRunner(
        EngineServer(engine, model="m").application(),
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )

    async def serve() -> None:
        await runner.setup()
        await web.SockSite(runner, place).start()
        await asyncio.wait([client.lost])
        await runner.cleanup()

    serving = asyncio.ensure_future(serve())
    client.lost.add_done_callback(lambda _: serving)  # kept until then
    return client


@pytest.fixture(scope="module")
def vllm_server(vllm_model: Path) -> Iterator[Callable[[], int]]:
    """Return the port of a server, which starts when it is first needed."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start() -> int:
            port = free_port()
            stack.enter_context(start_vllm_server(vllm_model, port, "--slots", "4"))
            return port

        yield start


@pytest.fixture
async def connect(
    tmp_path: Path, model: Path, vllm_model: Path, vllm_server: Callable[[], int]
) -> AsyncIterator[Connect]:
    """Start engines, and end all of them."""
    clients: list[EngineClient | HttpEngine] = []

    def start(
        kind: str, *, broken: bool = False, reply_s: float = 20.0
    ) -> EngineClient | HttpEngine:
        server = None
        if kind == "vllm":
            server = vllm_spec()
        elif kind == "sglang":
            server = sglang_spec(tmp_path)
        elif kind == "attached":
            server = attached_spec(vllm_server())
        path = "broken" if broken else str(vllm_model if kind in ("vllm", "attached") else model)
        spec = EngineSpec(
            id=EngineId("e0"),
            model=path,
            max_slots=4,
            kv_tokens=512,
            server=server,
        )
        model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(model_ready.set_result, None)
        if "process" not in kind and server is None:
            link = in_thread(
                spec, EchoLoop if "fake" in kind else real_loop(), model_ready=model_ready
            )
        else:
            module = (
                "tests.support.echo_engine"
                if "fake" in kind
                else f"rollweave.runtime.entrypoints.{'engine' if server is None else 'server_engine'}"
            )
            link = in_process(
                spec,
                spawn=child_of(module, env=environment()),
                log=tmp_path / "logs" / "e0.log",
                model_ready=model_ready,
            )
        start_s = 60.0 if server is None else server.start_s
        engine = EngineClient("engine e0", link, start_s=start_s, reply_s=reply_s)
        clients.append(engine)
        if "HTTP" in kind:
            clients.append(over_http(engine))
        return clients[-1]

    yield start
    for client in reversed(clients):
        await client.close()


def request(id: str, *tokens: int, count: int = 3) -> GenerateRequest:
    return GenerateRequest(id=id, tokens=tokens, sampling=Sampling(max_tokens=count, seed=5))


@pytest.mark.parametrize("kind", [*KINDS, *HTTP, *SERVERS])
async def test_requests_are_answered_each_once(connect: Connect, kind: str) -> None:
    client = connect(kind)
    ready = await client.ready()
    assert ready.max_slots == 4
    results = await asyncio.gather(
        *(client.generate(request(f"r{number}", 5, number)) for number in range(10))
    )
    assert [result.id for result in results] == [f"r{number}" for number in range(10)]
    for result in results:
        assert 1 <= len(result.tokens) == len(result.logprobs) <= 3
        assert result.versions[-1].end == len(result.tokens)


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
async def test_refusals_and_ids_in_use_raise(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    first = REFUSE if "fake" in kind else 10_000  # outside our engine's vocabulary
    with pytest.raises(EngineError):
        await client.generate(request("r0", first))
    await client.suspend()
    waiting = client.generate(request("r1", 5))
    await client.stats()
    with pytest.raises(EngineError, match="must be unique"):
        await client.generate(request("r1", 5))
    client.resume()
    await waiting


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_abort_answers_and_cancel_forgets(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    await client.suspend()
    first = HOLD if "fake" in kind else 5
    aborted = client.generate(request("r0", first, count=200))
    cancelled = client.generate(request("r1", first, count=200))
    await client.stats()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    if "fake" in kind:
        client.resume()
        await client.stats()
    client.abort("r0")
    client.abort("unknown")
    assert (await aborted).finish is FinishReason.ABORTED
    client.resume()
    stats = await client.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (await client.generate(request("r1", 5))).id == "r1"  # the id is free again


def partial_of(result: GenerateResult, count: int) -> PartialOutput:
    """Return the first `count` tokens of a turn, all of one version."""
    spans = (msgspec.structs.replace(result.versions[0], end=count),)
    return PartialOutput(
        tokens=result.tokens[:count],
        logprobs=result.logprobs[:count],
        versions=spans,
        generate_s=1.0,
    )


@pytest.mark.parametrize("kind", KINDS + HTTP)
async def test_partial_turn_is_resumed(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    uninterrupted = await client.generate(request("whole", 5, 6, count=9))
    count = len(uninterrupted.tokens)  # it may stop before 9
    requests = [
        msgspec.structs.replace(
            request(f"r{at}", 5, 6, count=count), resumed=partial_of(uninterrupted, at)
        )
        for at in range(1, count + 1)
    ]
    for at, result in enumerate(await asyncio.gather(*map(client.generate, requests)), 1):
        assert result.tokens == uninterrupted.tokens
        assert result.logprobs == pytest.approx(uninterrupted.logprobs, abs=1e-4)
        assert (
            result.finish in (FinishReason.LENGTH, FinishReason.STOP),
            result.resumed_tokens,
        ) == (True, at)
        assert (result.versions[0].start, result.versions[-1].end) == (0, count)
        assert result.cached_tokens <= 2
    if "ours" in kind:
        with pytest.raises(EngineError, match=r"resumed\.tokens"):
            await client.generate(
                msgspec.structs.replace(
                    request("long", 5, 6, count=1), resumed=partial_of(uninterrupted, 2)
                )
            )


@pytest.mark.parametrize("kind", [*KINDS, *SERVERS])
async def test_tokens_are_reported_during_the_turn(connect: Connect, kind: str) -> None:
    """The embedded engine reports all sampled tokens when it is suspended: during both
    turns, or they are repeated. A server reports them as they arrive.
    """
    client, deltas, others = connect(kind), list[TokenDelta](), list[TokenDelta]()
    several = asyncio.Event()

    def on_tokens(delta: TokenDelta) -> None:
        deltas.append(delta)
        if delta.start + len(delta.tokens) >= 2:
            several.set()

    await client.ready()
    while True:
        before = (await client.stats()).output_tokens
        turn = client.generate(
            request("r0", PROGRESS if "fake" in kind else 5, count=200), on_tokens
        )
        quiet = client.generate(request("r1", PROGRESS if "fake" in kind else 5, count=200))
        while "ours" in kind and (await client.stats()).output_tokens < before + 4:
            pass
        if kind in ("vllm", "sglang", "attached"):
            await several.wait()
        await client.suspend()
        if not turn.done() and not quiet.done():
            break
        # this thread was kept waiting for the time of a whole turn
        client.resume()
        await asyncio.gather(turn, quiet)
        deltas.clear()
        several.clear()
    tokens = tuple(token for piece in deltas for token in piece.tokens)
    assert [piece.start for piece in deltas] == [
        sum(len(p.tokens) for p in deltas[:at]) for at in range(len(deltas))
    ]
    assert len(tokens) >= (PROGRESS_TOKENS if "fake" in kind else 2)
    client.abort("r0")
    aborted = await turn
    assert aborted.finish is FinishReason.ABORTED
    assert aborted.tokens[: len(tokens)] == tokens
    assert aborted.logprobs[: len(tokens)] == tuple(
        value for piece in deltas for value in piece.logprobs
    )
    count = len(deltas)
    again = client.generate(
        msgspec.structs.replace(
            request("r2", 5, count=200), resumed=partial_of(aborted, len(tokens))
        ),
        others.append,
    )
    client.kill()
    for lost in (quiet, again):
        with pytest.raises(EngineLostError):
            await lost
    assert len(deltas) == count
    assert all(piece.id == "r2" and piece.start >= len(tokens) for piece in others)


async def test_late_or_unknown_deltas_are_ignored() -> None:
    """The link sends arbitrary replies."""
    on_reply_callbacks: list[Callable[[EngineReply], None]] = []

    class Link:
        def send(self, command: EngineCommand) -> None:
            return

        def kill(self) -> None:
            return

        async def joined(self) -> None:
            return

    def open_link(on_reply: Callable[[EngineReply], None], on_lost: Callable[[str], None]) -> Link:
        on_reply_callbacks.append(on_reply)
        return Link()

    client, deltas = EngineClient("e0", open_link, start_s=1.0, reply_s=1.0), list[TokenDelta]()
    report = on_reply_callbacks[0]

    def piece(id: str, start: int) -> TokenDelta:
        span = VersionSpan(start=start, end=start + 1, version=0)
        return TokenDelta(id=id, start=start, tokens=(7,), logprobs=(-1.0,), versions=(span,))

    turn, quiet, cancelled = (
        client.generate(request("r0", 5), deltas.append),
        client.generate(request("r1", 5)),
        client.generate(request("r2", 5), deltas.append),
    )
    cancelled.cancel()
    report(Progress(pieces=(piece("r0", 0), piece("r1", 0), piece("r2", 0), piece("unknown", 0))))
    span = VersionSpan(start=0, end=1, version=0)
    report(
        Generated(
            result=GenerateResult(
                id="r0", tokens=(7,), logprobs=(-1.0,), versions=(span,), finish=FinishReason.LENGTH
            )
        )
    )
    report(Progress(pieces=(piece("r0", 1),)))
    assert [(each.id, each.start) for each in deltas] == [("r0", 0)]
    assert (await turn).tokens == (7,)
    quiet.cancel()


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


async def test_lost_engine_fails_pending_kv_transfers(connect: Connect) -> None:
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


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_a_rank_may_change_at_any_time(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    await client.suspend()
    waiting = client.generate(request("r0", 5))
    client.rerank("r0", 3.0)
    client.rerank("r0", float("nan"))  # invalid, and without effect
    client.rerank("unknown", 3.0)
    client.resume()
    assert (await waiting).id == "r0"


@pytest.mark.parametrize("kind", HTTP)
async def test_engines_over_http_refuse_abort_forget_and_end(connect: Connect, kind: str) -> None:
    """This covers without suspension what the other tests show of other backends."""
    client = connect(kind)
    await client.ready()
    with pytest.raises(EngineError):
        await client.generate(request("r0", REFUSE if "fake" in kind else 10_000))
    hold_token = HOLD if "fake" in kind else 5
    aborted, cancelled, again = (
        client.generate(request(id, hold_token, count=200)) for id in ("r1", "r2", "r1")
    )
    with pytest.raises(EngineError, match="must be unique"):
        await again
    cancelled.cancel()
    client.rerank("r1", 3.0)
    client.abort("r1")
    client.abort("unknown")
    assert (await aborted).finish is FinishReason.ABORTED
    assert (await client.generate(request("r2", 5))).id == "r2"
    left = client.generate(request("r3", hold_token, count=200))
    client.kill()
    with pytest.raises(EngineLostError, match="killed"):
        await left
    for call in (
        client.generate(request("r4", 5)),
        client.stats(),
        client.suspend(),
        client.stage(manifest(1)),
        client.load(manifest(1)),
    ):
        with pytest.raises(EngineLostError):
            await call
    client.kill()


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_a_killed_engine_fails_everything_pending_and_later(
    connect: Connect, kind: str
) -> None:
    client = connect(kind)
    await client.ready()
    await client.suspend()
    waiting = client.generate(request("r0", 5))
    await client.stats()
    client.kill()
    with pytest.raises(EngineLostError, match="killed"):
        await waiting
    assert "killed" in await client.lost
    kv = kv_manifest("kv", 1)
    later = (
        client.suspend(),
        client.stage(manifest(1)),
        client.load(manifest(1)),
        client.stats(),
        client.export_kv([5], "shm"),
        client.import_kv([5], kv),
    )
    for call in (client.generate(request("r1", 5)), *later):
        with pytest.raises(EngineLostError):
            await call
    client.abort("r0")
    client.rerank("r0", 1.0)
    client.release_kv("kv")
    client.resume()
    client.kill()


@pytest.mark.parametrize("kind", [*QUICK, *HTTP, *SERVERS])
async def test_close_is_orderly_and_may_be_repeated(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    await client.close()
    assert client.lost.done()
    await client.close()


@pytest.mark.parametrize("kind", FAKES)
async def test_crash_is_a_loss_with_the_reason(connect: Connect, kind: str) -> None:
    client = connect(kind)
    await client.ready()
    with pytest.raises(EngineLostError, match="the fake engine crashed"):
        await client.generate(request("r0", CRASH))


@pytest.mark.parametrize("kind", [*QUICK, *SERVERS])
async def test_failed_start_is_reported_with_the_reason(connect: Connect, kind: str) -> None:
    client = connect(kind, broken=True)
    with pytest.raises(EngineLostError, match="cannot start" if "fake" in kind else "broken"):
        await client.ready()


@pytest.mark.parametrize("kind", FAKES)
async def test_unresponsive_engine_is_killed(connect: Connect, kind: str) -> None:
    client = connect(kind, reply_s=0.3)
    await client.ready()
    deaf = client.generate(request("r0", DEAF))
    await asyncio.sleep(0)
    with pytest.raises(EngineLostError, match=r"did not suspend within 0\.3 s and was killed"):
        await client.suspend()
    with pytest.raises(EngineLostError):
        await deaf
