"""KV that moves between engines yields the tokens of one that stays, and incompatible
KV is refused with the reason.
"""

import asyncio
import itertools
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.exchange import MAX_EXPORTS
from rollweave.engine.transfer import REQUEST
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError, EngineLostError, KvError
from rollweave.weights.memory import seal
from rollweave.weights.publication import Publisher
from tests.support.engines import engine_in_thread
from tests.support.tiny_models import build, request, save, spec

torch.set_num_threads(1)

BLOCK = 8
PROMPT = [(5 * i + 3) % 91 for i in range(43)]
OBSERVATIONS = ([7, 8, 9], [11] * 13, [4, 2])
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 3}
NUMBERS = itertools.count()
OVER: tuple[s.KvTransport, ...] = ("shm", "tcp")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build("qwen3")


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


def threads_alive() -> list[str]:
    """Files that this process has open, and its threads."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry).split(":")[0])
        except OSError:
            continue  # that of the listing itself
    threads = [
        thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")
    ]
    return sorted([*links, *threads])


Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture
async def start(path: str) -> AsyncIterator[Start]:
    """Starts engines in threads. After the test nothing of them is left."""
    clients: list[EngineClient] = []
    before = threads_alive()

    async def begin(**changes: Any) -> EngineClient:
        of: s.EngineSpec = spec(**({"model": path} | changes))
        clients.append(engine_in_thread(of, name=f"e{len(clients)}"))
        await clients[-1].ready()
        return clients[-1]

    yield begin
    for client in clients:
        await client.close()
    # connections of the tests themselves take turns of the event loop to close
    for _ in range(100):
        if threads_alive() == before:
            break
        await asyncio.sleep(0)
    assert threads_alive() == before


async def move(
    source: EngineClient, target: EngineClient, tokens: Sequence[int], over: s.KvTransport
) -> int:
    manifest = await source.export_kv(tokens, over)
    moved = await target.import_kv(tokens, manifest)
    source.release_kv(manifest.id)
    return moved


async def converse(
    turns: Sequence[EngineClient], *, over: s.KvTransport | None, **sampling: Any
) -> list[s.GenerateResult]:
    """A trajectory whose n-th turn is on `turns[n]`; its KV moves there in the tool
    interval (`over` None: it does not).
    """
    context, context_tokens = list(PROMPT), 0
    results: list[s.GenerateResult] = []
    for number, engine in enumerate(turns):
        if over is not None and number and engine is not turns[number - 1]:
            moved = await move(turns[number - 1], engine, context[:context_tokens], over)
            # the last token was sampled, and never computed
            assert moved == (context_tokens - 1) // BLOCK * BLOCK
        result = await engine.generate(
            request(f"turn{next(NUMBERS)}", context, max_tokens=11, **sampling)
        )
        results.append(result)
        context_tokens = len(context) + len(result.tokens)
        context += [*result.tokens, *OBSERVATIONS[number % len(OBSERVATIONS)]]
    return results


def assert_same(results: Sequence[s.GenerateResult], expected: Sequence[s.GenerateResult]) -> None:
    for one, other in zip(results, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_migration_does_not_affect_requests_of_either_engine(start: Start) -> None:
    """Trajectories move to and fro while both engines decode others, of which one
    preempts and is preempted.
    """
    reference, a, b = await start(), await start(max_slots=3), await start(max_slots=3)
    others = [
        request(f"o{n}", PROMPT[n : 3 * n + 4], seed=n, rank=n % 3, max_tokens=90) for n in range(6)
    ]
    expected = [await reference.generate(each) for each in others]
    stayed = await converse([reference] * 6, over=None, seed=1)
    running = [engine.generate(each) for engine in (a, b) for each in others]
    results = await asyncio.gather(
        *(
            converse(order, over=over, seed=1)
            for order, over in (([a, b] * 3, "shm"), ([b, a, a] * 2, "tcp"))
        )  # type: ignore[arg-type]
    )
    for moved in results:
        assert_same(moved, stayed)
    assert_same(await asyncio.gather(*running), expected * 2)


@pytest.mark.variants
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_migrated_trajectory_equals_one_that_stays(
    start: Start, over: s.KvTransport, sampling: dict[str, Any]
) -> None:
    reference, a, b = await start(), await start(), await start()
    stayed = await converse([reference] * 5, over=None, **sampling)
    moved = await converse([a, b, b, a, b], over=over, **sampling)
    assert_same(moved, stayed)
    assert [result.cached_tokens for result in moved] == [result.cached_tokens for result in stayed]
    # only the tail block and the tool's output were computed
    assert moved[1].cached_tokens == 48
    one, two, both = await a.stats(), await b.stats(), await reference.stats()
    assert one.cached_tokens + two.cached_tokens == both.cached_tokens
    assert one.prompt_tokens + two.prompt_tokens == both.prompt_tokens
    # imported blocks are idle, and may be evicted
    assert (one.kv_used_tokens, two.kv_used_tokens) == (0, 0)


# What is not moved.


async def in_small_chunks(source: EngineClient, context: Sequence[int]) -> s.KvManifest:
    """An export over TCP whose chunks are single blocks, so that not all of it need be
    fetched.
    """
    manifest = await source.export_kv(context, "tcp")
    digests = block_digests(manifest, await fetched(manifest))
    again = await source.export_kv(context, "tcp")
    return msgspec.structs.replace(again, chunk_blocks=1, digests=digests)


async def test_cached_chunks_are_not_fetched(start: Start) -> None:
    """The target has cached the same prompt for another request: only the rest is
    fetched.
    """
    source, target = await start(), await start()
    (conversation,) = await converse([source], over=None)
    context = [*PROMPT, *conversation.tokens]
    await target.generate(request("sibling", PROMPT, seed=9, max_tokens=1))
    manifest = await in_small_chunks(source, context)
    requested_ranges: list[tuple[int, int]] = []
    where = await relay(manifest, lambda payload: [payload], requested_ranges=requested_ranges)
    assert await target.import_kv(context, msgspec.structs.replace(manifest, where=where)) == 48
    assert requested_ranges == [
        (5 * block_nbytes(manifest), block_nbytes(manifest))
    ]  # 43 tokens are 5 blocks
    again = await target.export_kv(context, "shm")
    assert memory_of(again) == memory_of(await source.export_kv(context, "shm"))
    nothing = msgspec.structs.replace(manifest, where=s.KvMemory(path="/nowhere"))
    assert await target.import_kv(context, nothing) == 48


async def test_cached_blocks_evicted_during_the_fetch(start: Start) -> None:
    source, target = await start(), await start(kv_tokens=64)
    (conversation,) = await converse([source], over=None)
    context = [*PROMPT, *conversation.tokens]
    await target.generate(request("sibling", PROMPT, seed=9, max_tokens=1))
    manifest = await in_small_chunks(source, context)
    other = request("other", [90] * 60, max_tokens=2)  # takes every block of the cache
    where = await relay(
        manifest, lambda payload: [payload[:9], payload[9:]], then=lambda: target.generate(other)
    )
    with pytest.raises(KvError, match="the cache has changed"):
        await target.import_kv(context, msgspec.structs.replace(manifest, where=where))
    await assert_untouched(target)


async def test_uncached_context_is_not_exported(start: Start) -> None:
    engine, forgetful = await start(), await start(prefix_cache=False)
    for tokens in ([], PROMPT[: BLOCK - 1], PROMPT):
        with pytest.raises(KvError, match="no part of the context is cached"):
            await engine.export_kv(tokens, "shm")
    await engine.generate(request("x", PROMPT, max_tokens=2))
    assert (await engine.export_kv([*PROMPT, 1, 2, 3, 4, 5, 6], "shm")).tokens == 40
    with pytest.raises(KvError, match="no part of the context"):
        await engine.export_kv([0, *PROMPT], "shm")
    await forgetful.generate(request("x", PROMPT, max_tokens=2))
    with pytest.raises(KvError, match="no part of the context"):
        await forgetful.export_kv(PROMPT, "shm")
    with pytest.raises(KvError, match="no prefix cache"):
        await forgetful.import_kv(PROMPT, await engine.export_kv(PROMPT, "shm"))


# What does not fit.


def block_nbytes(manifest: s.KvManifest) -> int:
    return manifest.nbytes * manifest.block_tokens // manifest.tokens


def block_digests(manifest: s.KvManifest, payload: bytes) -> tuple[int, ...]:
    size = block_nbytes(manifest)
    return tuple(
        xxhash.xxh3_64_intdigest(payload[at : at + size]) for at in range(0, len(payload), size)
    )


def memory_of(manifest: s.KvManifest) -> bytes:
    assert isinstance(manifest.where, s.KvMemory)
    return Path(manifest.where.path).read_bytes()


async def fetched(
    manifest: s.KvManifest, *, secret: bytes = b"", start: int = 0, length: int | None = None
) -> bytes:
    """Return the bytes that the source sends to a client with the manifest's secret (or
    another).
    """
    port = manifest.where
    assert isinstance(port, s.KvPort)
    reader, writer = await asyncio.open_connection(port.host, port.port)
    writer.write(
        REQUEST.pack(secret or port.secret, start, manifest.nbytes if length is None else length)
    )
    async with asyncio.timeout(20):
        data = await reader.read()
    writer.close()
    return data


async def relay(
    manifest: s.KvManifest,
    alter: Callable[[bytes], Sequence[bytes]],
    *,
    requested_ranges: list[tuple[int, int]] | None = None,
    then: Callable[[], Awaitable[object]] | None = None,
) -> s.KvPort:
    """A port that gives what the source gives, in pieces and as `alter` leaves it;
    before the last piece it awaits `then`.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        _, start, length = REQUEST.unpack(await reader.readexactly(REQUEST.size))
        if requested_ranges is not None:
            requested_ranges.append((start, length))
        *pieces, last = alter(await fetched(manifest, start=start, length=length))
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        if then is not None:
            await then()
        writer.write(last)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return s.KvPort(host="127.0.0.1", port=server.sockets[0].getsockname()[1], secret=bytes(32))


async def exported(engine: EngineClient, over: s.KvTransport = "shm") -> s.KvManifest:
    """The manifest of PROMPT's five blocks."""
    await engine.generate(request("p", PROMPT, max_tokens=1))
    return await engine.export_kv(PROMPT, over)


async def settled(ask: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Ask until the answer is `wanted`, or of that type: exports are freed a moment
    later, on the side thread.
    """
    async with asyncio.timeout(20):
        while True:
            try:
                value = await ask()
            except KvError:
                continue
            if value == expected or (isinstance(expected, type) and isinstance(value, expected)):
                return


async def assert_untouched(engine: EngineClient) -> None:
    """Assert that the prompt is computed from its first token, with the usual
    result.
    """
    result = await engine.generate(request("check", PROMPT, seed=2, max_tokens=6))
    assert (result.cached_tokens, result.finish) == (0, s.FinishReason.LENGTH)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "bfloat16"}, "dtype of the KV must be this engine's float32, got bfloat16"),
    ({"layout": "other"}, "layout of the KV must be"),
    ({"layers": 3}, "layers of the KV must be this engine's 2, got 3"),
    ({"kv_heads": 4}, "kv_heads of the KV"),
    ({"head_dim": 8}, "head_dim of the KV"),
    ({"block_tokens": 16}, "block_tokens of the KV must be this engine's 8, got 16"),
    ({"model": "0" * 32}, "model of the KV"),
    ({"publication_id": 7}, "publication_id of the KV must be this engine's -1, got 7"),
    ({"tokens": 39}, "whole blocks"),
    ({"tokens": 0}, "whole blocks"),
    ({"tokens": -8}, "whole blocks"),
    ({"tokens": 48}, "whole blocks of the 43 of the context, got 48"),
    ({"tokens": 32}, "4 blocks have"),
    ({"nbytes": 1}, "5 blocks have"),
    ({"key": bytes(16)}, "the KV belongs to other tokens"),
    ({"chunk_blocks": 0}, "in chunks of 0"),
    ({"chunk_blocks": 2}, "5 blocks in chunks of 2 do not have 1 digests"),
    ({"digests": ()}, "do not have 0 digests"),
    ({"digests": (1,)}, "differs from what was exported"),
    ({"where": s.KvMemory(path="/proc/1/fd/99")}, "cannot open, the publisher is gone"),
    ({"where": s.KvMemory(path="/dev/zero")}, "not a payload"),
    ({"where": s.KvPort(host="127.0.0.1", port=1, secret=bytes(32))}, "127.0.0.1:1: "),
]


async def test_incompatible_manifest_is_refused(start: Start) -> None:
    source, target = await start(), await start()
    manifest = await exported(source)
    for changes, error in REFUSED:
        with pytest.raises(KvError, match=re.escape(error)):
            await target.import_kv(PROMPT, msgspec.structs.replace(manifest, **changes))
    with pytest.raises(KvError, match="other tokens"):
        await target.import_kv([PROMPT[0] + 1, *PROMPT[1:]], manifest)
    await assert_untouched(target)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"block_tokens": 16}, "block_tokens"),
        ({"deterministic": True}, "layout"),
    ],
)
async def test_an_engine_of_another_kind_refuses(
    start: Start, changes: dict[str, Any], error: str
) -> None:
    source, target = await start(), await start(**changes)
    with pytest.raises(KvError, match=error):
        await target.import_kv(PROMPT, await exported(source))
    with pytest.raises(KvError, match=error):
        await source.import_kv(PROMPT, await exported(target))


async def test_a_model_of_the_same_shape_and_other_weights_is_another(
    start: Start, tmp_path: Path
) -> None:
    source, target = await start(), await start(model=save(build("qwen3", seed=1), tmp_path))
    with pytest.raises(KvError, match="model"):
        await target.import_kv(PROMPT, await exported(source))


@contextmanager
def elsewhere(manifest: s.KvManifest, content: bytes) -> Iterator[s.KvManifest]:
    """The manifest with this content in other memory."""
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    seal(fd)
    yield msgspec.structs.replace(manifest, where=s.KvMemory(path=f"/proc/self/fd/{fd}"))
    os.close(fd)


async def test_flipped_bit_is_detected(start: Start) -> None:
    source, target = await start(), await start()
    for place in (0, 1, 1000, -1):

        def flipped(payload: bytes, place: int = place) -> bytes:
            changed = bytearray(payload)
            changed[place] ^= 16
            return bytes(changed)

        manifest = await exported(source)
        with (
            elsewhere(manifest, flipped(memory_of(manifest))) as other,
            pytest.raises(KvError, match="differs from what was exported"),
        ):
            await target.import_kv(PROMPT, other)
        source.release_kv(manifest.id)
        manifest = await exported(source, "tcp")
        where = await relay(manifest, lambda payload, flipped=flipped: [flipped(payload)])  # type: ignore[misc]
        with pytest.raises(KvError, match="differs from what was exported"):
            await target.import_kv(PROMPT, msgspec.structs.replace(manifest, where=where))
        source.release_kv(manifest.id)
    await assert_untouched(target)


async def test_truncated_payload_is_detected(start: Start) -> None:
    source, target = await start(), await start()
    manifest = await exported(source)
    with (
        elsewhere(manifest, memory_of(manifest)[:-1]) as cut,
        pytest.raises(
            KvError, match=f"{manifest.nbytes - 1} bytes, the manifest says {manifest.nbytes}"
        ),
    ):
        await target.import_kv(PROMPT, cut)
    for count in (0, 1, manifest.nbytes - 1):
        manifest = await exported(source, "tcp")
        where = await relay(manifest, lambda payload, count=count: [payload[:count]])  # type: ignore[misc]
        with pytest.raises(KvError, match=f"sent {count} of {manifest.nbytes} bytes"):
            await target.import_kv(PROMPT, msgspec.structs.replace(manifest, where=where))
    await assert_untouched(target)


async def test_payload_in_small_pieces_is_complete(start: Start) -> None:
    source, target = await start(), await start()
    manifest = await exported(source, "tcp")
    where = await relay(
        manifest, lambda payload: [payload[at : at + 997] for at in range(0, len(payload), 997)]
    )
    assert await target.import_kv(PROMPT, msgspec.structs.replace(manifest, where=where)) == 40


async def test_export_is_immutable(start: Start) -> None:
    manifest = await exported(await start())
    assert isinstance(manifest.where, s.KvMemory)
    fd = os.open(manifest.where.path, os.O_RDWR)
    try:
        for change in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


async def test_export_at_a_foreign_address_leaks_nothing(start: Start) -> None:
    source, target = await start(kv_host="192.0.2.1"), await start()
    for _ in range(2 * MAX_EXPORTS):
        with pytest.raises(KvError, match="OSError"):
            await exported(source, "tcp")
    assert await move(source, target, PROMPT, "shm") == 40


# Secrets.


async def test_secret_is_required_and_valid_once(
    start: Start,
) -> None:
    engine = await start()
    manifest = await exported(engine, "tcp")
    port = manifest.where
    assert isinstance(port, s.KvPort)
    assert port.host == "127.0.0.1"
    assert await fetched(manifest, secret=bytes(32)) == b""
    assert await fetched(manifest, start=1) == b""  # beyond the end; and now the secret is used up
    assert await fetched(manifest) == b""
    manifest = await exported(engine, "tcp")
    payload = await fetched(manifest)
    assert block_digests(manifest, payload) == block_digests(
        manifest, memory_of(await exported(engine))
    )
    assert await fetched(manifest) == b""
    manifest = await exported(engine, "tcp")
    engine.release_kv(manifest.id)
    await engine.stats()
    await settled(lambda: fetched(manifest), b"")


async def test_silent_connections_do_not_block_others(start: Start) -> None:
    source, target = await start(), await start()
    manifest = await exported(source, "tcp")
    port = manifest.where
    assert isinstance(port, s.KvPort)
    silent = [await asyncio.open_connection(port.host, port.port) for _ in range(5)]
    silent[0][1].write(b"short")
    silent[1][1].write(b"too long" * 1000)
    assert await target.import_kv(PROMPT, manifest) == 40
    for _, writer in silent:
        writer.close()


async def test_source_that_never_finishes_does_not_block_the_target(
    start: Start,
) -> None:
    """The target ends during its import; nothing of the import is left."""
    source, target = await start(), await start()
    manifest = await exported(source, "tcp")
    stuck, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        stuck.set()
        await go_on.wait()

    where = await relay(manifest, lambda payload: [payload[:100], payload[100:]], then=wait)
    importing = asyncio.ensure_future(
        target.import_kv(PROMPT, msgspec.structs.replace(manifest, where=where))
    )
    await stuck.wait()
    # its loop continues
    assert (
        await target.generate(request("x", PROMPT, max_tokens=5))
    ).finish is s.FinishReason.LENGTH
    await target.close()
    with pytest.raises(EngineLostError):
        await importing
    go_on.set()


# Weights.


async def test_kv_of_other_weights_is_never_imported(
    start: Start, model: torch.nn.Module, publisher: Publisher
) -> None:
    source, target, reference = await start(), await start(), await start()
    first = publisher.publish(model.state_dict(), version=1, publication_id=1)
    second = publisher.publish(build("qwen3", seed=1).state_dict(), version=2, publication_id=2)
    for engine in (source, target, reference):
        await engine.load(first)
    old = await exported(source)
    await source.load(second)
    with pytest.raises(KvError, match="no part of the context"):
        await source.export_kv(PROMPT, "shm")
    new = await exported(source)
    with pytest.raises(KvError, match="publication_id of the KV must be this engine's 1, got 2"):
        await target.import_kv(PROMPT, new)
    await target.load(second)
    with pytest.raises(KvError, match="publication_id of the KV must be this engine's 2, got 1"):
        await target.import_kv(PROMPT, old)
    await assert_untouched(target)
    await reference.load(second)
    assert_same(
        await converse([source, target] * 2, over="shm", seed=8),
        await converse([reference] * 4, over=None, seed=8),
    )


async def test_weights_change_during_a_transfer(
    start: Start, model: torch.nn.Module, publisher: Publisher
) -> None:
    source, target = await start(), await start()
    loads = publisher.publish(model.state_dict(), version=1, publication_id=1)
    manifest = await exported(source, "tcp")
    where = await relay(
        manifest, lambda payload: [payload[:-1], payload[-1:]], then=lambda: target.load(loads)
    )
    with pytest.raises(KvError, match="the weights have changed from -1 to 1"):
        await target.import_kv(PROMPT, msgspec.structs.replace(manifest, where=where))
    await assert_untouched(target)


async def test_nonfinite_kv_is_not_exported(
    start: Start, model: torch.nn.Module, publisher: Publisher
) -> None:
    engine = await start()
    poison = {
        name: torch.full_like(value, float("nan")) for name, value in model.state_dict().items()
    }
    await engine.load(publisher.publish(poison, version=1, publication_id=1))
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(request("x", PROMPT, max_tokens=3))
    with pytest.raises(KvError, match="not finite"):
        await engine.export_kv(PROMPT, "shm")


# Room.


async def test_suspended_engine_exports_and_imports(start: Start) -> None:
    source, target = await start(), await start()
    await exported(source)
    await source.suspend()
    await target.suspend()
    for over in OVER:
        assert await move(source, target, PROMPT, over) == 40
    target.resume()
    assert (await target.generate(request("x", PROMPT, max_tokens=2))).cached_tokens == 40


async def test_exports_are_bounded_in_number(start: Start) -> None:
    source = await start()
    manifests = [await exported(source) for _ in range(MAX_EXPORTS)]
    with pytest.raises(KvError, match=f"{MAX_EXPORTS} exports are open already"):
        await source.export_kv(PROMPT, "shm")
    source.release_kv("nobody")
    source.release_kv(manifests[3].id)
    source.release_kv(manifests[3].id)
    assert await source.export_kv(PROMPT, "tcp")


async def test_exports_are_bounded_in_bytes(start: Start) -> None:
    source = await start(kv_tokens=64)
    manifest = await exported(source)
    with pytest.raises(KvError, match="open exports must stay within the"):
        await source.export_kv(PROMPT, "shm")
    source.release_kv(manifest.id)
    assert (await source.export_kv(PROMPT, "shm")).tokens == 40


async def test_cancelled_export_is_freed(start: Start) -> None:
    source = await start()
    await exported(source)
    for _ in range(3 * MAX_EXPORTS):
        export = asyncio.ensure_future(source.export_kv(PROMPT, "shm"))
        await asyncio.sleep(0)
        export.cancel()
        await source.stats()
    await settled(lambda: source.export_kv(PROMPT, "shm"), s.KvManifest)
