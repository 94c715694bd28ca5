"""KV migrations: each ends in one event with its result, even if one of the two engines
ends during it.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.engine.transfer import REQUEST
from rollweave.io.child import child_of
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId
from rollweave.schema.commands import RemoveEngine, RestartEngine
from rollweave.schema.errors import EngineLostError, KvError
from rollweave.schema.events import EngineJoined, EngineLost, EngineSlot
from tests.support.echo_engine import kv_manifest
from tests.support.engines import environment
from tests.support.migration import A, B, Stage, staged
from tests.support.pipelines import OneWordEngine
from tests.support.tiny_models import build, request, save

TOKENS = tuple((5 * i + 3) % 91 for i in range(450))
BLOCK = 16


# With scripted engines.


class Scripted(OneWordEngine):
    """An engine whose exports and imports return `kv`: a manifest, a number of tokens,
    an error to raise, or a coroutine to await.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv: Any = None
        self.released: list[tuple[str, bool]] = []  # True if abandoned

    async def ready(self) -> s.Ready:
        profile = (s.StepTime(batch=1, seconds=0.5),)
        return s.Ready(
            version=-1, kv_total_tokens=1000, max_slots=8, max_context=1000, profile=profile
        )

    async def export_kv(self, tokens: Sequence[int], over: s.KvTransport) -> s.KvManifest:
        return await self._play()  # type: ignore[no-any-return]

    async def import_kv(self, tokens: Sequence[int], manifest: s.KvManifest) -> int:
        return await self._play()  # type: ignore[no-any-return]

    def release_kv(self, export_id: str, *, abandoned: bool = False) -> None:
        self.released.append((export_id, abandoned))

    async def _play(self) -> Any:
        answer = await self.kv() if callable(self.kv) else self.kv
        if isinstance(answer, Exception):
            raise answer
        return answer


def scripted(path: Path) -> AbstractAsyncContextManager[Stage]:
    """Run engines of which the first exports 48 tokens, and the second imports them."""

    def make(slot: EngineSlot, epoch: int) -> Scripted:
        engine = Scripted()
        engine.kv = kv_manifest("kv7", 48) if slot.id == A else 48
        return engine

    return staged(make, path, migration_s=0.2)


async def test_a_migration_is_reported_traced_and_released(tmp_path: Path) -> None:
    async with scripted(tmp_path) as stage:
        done = await stage.migrate(TOKENS)
        assert (done.moved_tokens, done.error) == (48, "")
        assert stage.engines.backend(A).released == [("kv7", False)]  # type: ignore[union-attr]
        (span,) = (span for span in stage.spans() if "tokens" in span["name"])
        expected = ("48 tokens from a", {"trajectory": "t/2", "error": ""})
        assert (span["name"], span["args"]) == expected


async def test_an_engines_profile_is_reported(tmp_path: Path) -> None:
    async with scripted(tmp_path) as stage:
        for joined in await stage.until(EngineJoined, 2):
            assert joined.profile == (s.StepTime(batch=1, seconds=0.5),)


async def test_every_failure_is_reported_once(tmp_path: Path) -> None:
    async with scripted(tmp_path) as stage:
        source, target = stage.engines.backend(A), stage.engines.backend(B)
        assert isinstance(source, Scripted)
        assert isinstance(target, Scripted)

        async def never() -> None:
            await asyncio.Event().wait()

        for tokens, ends in (
            (None, (A, B)),
            ((), (A, B)),
            (TOKENS, (EngineId("x"), B)),
            (TOKENS, (A, EngineId("x"))),
        ):
            error = (await stage.migrate(tokens, *ends)).error
            assert error == (
                "x is not running" if tokens else "the attempt is over, or has sampled nothing yet"
            )
        for kv, error in (
            (KvError("is not cached"), "is not cached"),
            (EngineLostError("gone"), "gone"),
            (never, "not done within 0.2 s"),
        ):
            source.kv = kv
            assert (await stage.migrate(TOKENS)).error == error
        assert source.released == []
        source.kv = kv_manifest("kv8", 48)
        for kv, error in (
            (KvError("no room"), "no room"),
            (EngineLostError("gone"), "gone"),
            (never, "not done within 0.2 s"),
        ):
            target.kv = kv
            assert (await stage.migrate(TOKENS)).error == error
        assert source.released == [("kv8", False), ("kv8", True), ("kv8", True)]
        (span, *_) = (span for span in stage.spans() if span["args"].get("error") == "no room")
        assert span["name"] == "nothing from a"


@pytest.mark.parametrize("ending", ["restarted", "removed", "lost"])
async def test_a_target_that_ends_during_a_migration_has_no_kv(tmp_path: Path, ending: str) -> None:
    async with scripted(tmp_path) as stage:
        target = stage.engines.backend(B)
        assert isinstance(target, Scripted)

        async def end() -> int:
            match ending:
                case "restarted":
                    stage.engines.restart(
                        RestartEngine(engine_id=B, degree=1, epoch=1, reason="test")
                    )
                    await stage.until(EngineJoined, 3)
                case "removed":
                    stage.engines.remove(RemoveEngine(engine_id=B, reason="test"))
                case _:
                    target.kill()
            return 48

        target.kv = end
        assert (await stage.migrate(TOKENS)).error == "b ended during the migration"


# With our engines in processes, which can be killed and stopped.


class Meddled:
    """Our engine in a process, whose exports go through `meddle` if the test has set
    it.
    """

    meddle: Callable[[s.KvManifest], Awaitable[s.KvManifest]] | None = None

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def export_kv(self, tokens: Sequence[int], over: s.KvTransport) -> s.KvManifest:
        manifest = await self.client.export_kv(tokens, over)
        return manifest if self.meddle is None else await self.meddle(manifest)

    def send(self, number: int) -> None:
        os.kill(self.client._link.pid, number)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with 16 KiB of KV per token, so that a payload exceeds the buffers
    of sockets.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    return save(build("qwen3", num_hidden_layers=4, **heads), tmp_path_factory.mktemp("model"))


def living(model: str, path: Path, **options: Any) -> AbstractAsyncContextManager[Stage]:
    """Run engines in processes."""

    def make(slot: EngineSlot, epoch: int) -> Meddled:
        of = s.EngineSpec(id=slot.id, model=model, max_slots=4, kv_tokens=4096, block_tokens=BLOCK)
        model_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model_ready.set_result(None)
        module, log = "rollweave.runtime.entrypoints.engine", path / f"{slot.id}.log"
        spawn = child_of(module, env=environment())
        link = in_process(of, spawn=spawn, log=log, model_ready=model_ready)
        return Meddled(EngineClient(f"engine {slot.id}", link, start_s=60.0, reply_s=60.0))

    return staged(make, path, **options)


async def run_turn(engine: Any, tokens: Sequence[int], **sampling: Any) -> s.GenerateResult:
    """Run one turn."""
    result: s.GenerateResult = await engine.generate(
        request("turn", tokens, max_tokens=9, **sampling)
    )
    return result


@pytest.mark.variants
@pytest.mark.parametrize("over", ["shm", "tcp"])
async def test_a_migrated_trajectory_samples_the_same_tokens(
    model: str, tmp_path: Path, over: s.KvTransport
) -> None:
    async with living(model, tmp_path, kv_over=over) as stage:
        a, b = stage.engines.backend(A), stage.engines.backend(B)
        for number, sampling in enumerate(({"temperature": 0.0}, {"seed": 5})):
            context = [number, *TOKENS]
            first = await run_turn(a, context, **sampling)
            sampled = [*context, *first.tokens]
            done = await stage.migrate(sampled)
            assert (done.moved_tokens, done.error) == ((len(sampled) - 1) // BLOCK * BLOCK, "")
            context = [*sampled, 4, 5, 6]
            moved, stayed = await asyncio.gather(
                run_turn(b, context, **sampling), run_turn(a, context, **sampling)
            )
            assert moved.tokens == stayed.tokens
            assert moved.logprobs == pytest.approx(stayed.logprobs, abs=1e-4)
            assert moved.cached_tokens == stayed.cached_tokens == done.moved_tokens
            back = await stage.migrate([*context, *moved.tokens], B, A)
            assert back.moved_tokens == (len(context) + len(moved.tokens) - 1) // BLOCK * BLOCK


async def half_way(manifest: s.KvManifest, then: Callable[[], None]) -> s.KvManifest:
    """Offer the same KV through our own port, which calls `then` when some of it has
    arrived and the source still has most of it.
    """
    port = manifest.where
    assert isinstance(port, s.KvPort)
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        try:
            with socket.socket() as closed:
                closed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                closed.setblocking(False)
                await loop.sock_connect(closed, (port.host, port.port))
                await loop.sock_sendall(closed, await reader.readexactly(REQUEST.size))
                writer.write(await loop.sock_recv(closed, 1 << 16))
                then()
                while data := await loop.sock_recv(closed, 1 << 16):
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    relayed = msgspec.structs.replace(port, port=server.sockets[0].getsockname()[1])
    return msgspec.structs.replace(manifest, where=relayed)


async def check_fallback(stage: Stage, error: str) -> None:
    """Check that the migration fails for this reason, and that the next turn recomputes
    its context on the target, to the same tokens.
    """
    a, b = stage.engines.backend(A), stage.engines.backend(B)
    assert isinstance(a, Meddled)
    expected, other = await run_turn(a, TOKENS, seed=7), await run_turn(b, TOKENS[:100], seed=8)
    assert error in (await stage.migrate(TOKENS)).error
    result = await run_turn(b, TOKENS, seed=7)
    assert result.cached_tokens == 96  # tokens that the target has computed itself
    assert result.tokens == expected.tokens
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert (await run_turn(b, TOKENS[:100], seed=8)).tokens == other.tokens


@pytest.mark.extended
async def test_a_source_is_killed_before_its_memory_was_opened(model: str, tmp_path: Path) -> None:
    async with living(model, tmp_path, kv_over="shm") as stage:
        source = stage.engines.backend(A)
        assert isinstance(source, Meddled)

        async def kill(manifest: s.KvManifest) -> s.KvManifest:
            source.send(signal.SIGKILL)
            await source.lost
            return manifest

        source.meddle = kill
        await check_fallback(stage, "the publisher is gone")


async def test_a_source_is_killed_while_it_sends(model: str, tmp_path: Path) -> None:
    async with living(model, tmp_path, kv_over="tcp") as stage:
        source = stage.engines.backend(A)
        assert isinstance(source, Meddled)
        source.meddle = lambda manifest: half_way(manifest, lambda: source.send(signal.SIGKILL))
        await check_fallback(stage, "of 7340032 bytes")


@pytest.mark.extended
@pytest.mark.parametrize("over", ["shm", "tcp"])
async def test_a_source_hangs(model: str, tmp_path: Path, over: s.KvTransport) -> None:
    """It hangs before it has exported anything, or with the target connected to it."""
    async with living(model, tmp_path, kv_over=over, migration_s=1.0) as stage:
        source = stage.engines.backend(A)
        assert isinstance(source, Meddled)

        async def stop(manifest: s.KvManifest) -> s.KvManifest:
            source.send(signal.SIGSTOP)
            return manifest

        if over == "tcp":
            source.meddle = stop
            await check_fallback(stage, "not done within 1 s")
            return
        target = stage.engines.backend(B)
        await run_turn(source, TOKENS)
        source.send(signal.SIGSTOP)
        assert (await stage.migrate(TOKENS)).error == "not done within 1 s"
        assert (await run_turn(target, TOKENS)).cached_tokens == 0
        source.send(signal.SIGCONT)
        while (await stage.migrate(TOKENS)).error:
            pass  # on a busy machine it may take longer than that second


@pytest.mark.extended
async def test_a_target_is_killed_while_it_receives(model: str, tmp_path: Path) -> None:
    async with living(model, tmp_path, kv_over="tcp") as stage:
        source, target = stage.engines.backend(A), stage.engines.backend(B)
        assert isinstance(source, Meddled)
        assert isinstance(target, Meddled)
        before = await run_turn(source, TOKENS, seed=7)
        source.meddle = lambda manifest: half_way(manifest, lambda: target.send(signal.SIGKILL))
        assert "SIGKILL" in (await stage.migrate(TOKENS)).error
        assert len(await stage.until(EngineLost)) == 1
        after = await run_turn(source, TOKENS, seed=7)
        assert after.tokens == before.tokens
        assert after.cached_tokens == (len(TOKENS) - 1) // BLOCK * BLOCK
        stage.engines.restart(RestartEngine(engine_id=B, degree=1, epoch=1, reason="test"))
        await stage.until(EngineJoined, 3)
        source.meddle = None
        assert (await stage.migrate(TOKENS)).error == ""
