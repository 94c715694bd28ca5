"""The suite of `Generates`, and of `Reranks`."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from rollweave.engine.clients.base import Beats, MovesKv, Reranks, TakesWeights
from rollweave.engine.clients.client import EngineClient
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError, EngineLostError
from tests.engine.clients.conformance.backends import (
    FAKES,
    HTTP,
    KINDS,
    QUICK,
    SERVERS,
    Connect,
    request,
)
from tests.support.echo_engine import CRASH, HOLD, PROGRESS, PROGRESS_TOKENS, REFUSE


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
    assert (await aborted).finish is s.FinishReason.ABORTED
    client.resume()
    stats = await client.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (await client.generate(request("r1", 5))).id == "r1"  # the id is free again


def partial_of(result: s.GenerateResult, count: int) -> s.PartialOutput:
    """Return the first `count` tokens of a turn, all of one version."""
    spans = (msgspec.structs.replace(result.versions[0], end=count),)
    return s.PartialOutput(
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
        assert result.finish in (s.FinishReason.LENGTH, s.FinishReason.STOP)
        assert result.resumed_tokens == at
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
    client, deltas, others = connect(kind), list[s.TokenDelta](), list[s.TokenDelta]()
    several = asyncio.Event()

    def on_tokens(delta: s.TokenDelta) -> None:
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
            reported = asyncio.create_task(several.wait())  # or the turn was too fast for it
            await asyncio.wait([turn, reported], return_when=asyncio.FIRST_COMPLETED)
            reported.cancel()
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
    assert aborted.finish is s.FinishReason.ABORTED
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
    on_reply_callbacks: list[Callable[[s.EngineReply], None]] = []

    class Link:
        def send(self, command: s.EngineCommand) -> None:
            return

        def kill(self) -> None:
            return

        async def joined(self) -> None:
            return

    def open_link(
        on_reply: Callable[[s.EngineReply], None], on_lost: Callable[[str], None]
    ) -> Link:
        on_reply_callbacks.append(on_reply)
        return Link()

    client, deltas = EngineClient("e0", open_link, start_s=1.0, reply_s=1.0), list[s.TokenDelta]()
    report = on_reply_callbacks[0]

    def piece(id: str, start: int) -> s.TokenDelta:
        span = s.VersionSpan(start=start, end=start + 1, version=0)
        return s.TokenDelta(id=id, start=start, tokens=(7,), logprobs=(-1.0,), versions=(span,))

    turn, quiet, cancelled = (
        client.generate(request("r0", 5), deltas.append),
        client.generate(request("r1", 5)),
        client.generate(request("r2", 5), deltas.append),
    )
    cancelled.cancel()
    report(s.Progress(pieces=(piece("r0", 0), piece("r1", 0), piece("r2", 0), piece("unknown", 0))))
    span = s.VersionSpan(start=0, end=1, version=0)
    report(
        s.Generated(
            result=s.GenerateResult(
                id="r0",
                tokens=(7,),
                logprobs=(-1.0,),
                versions=(span,),
                finish=s.FinishReason.LENGTH,
            )
        )
    )
    report(s.Progress(pieces=(piece("r0", 1),)))
    assert [(each.id, each.start) for each in deltas] == [("r0", 0)]
    assert (await turn).tokens == (7,)
    quiet.cancel()


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


@pytest.mark.parametrize("kind", ["ours in a thread", SERVERS[0]])
async def test_a_request_whose_rank_rises_takes_the_slot_of_another(
    connect: Connect, kind: str
) -> None:
    """The preempted request continues where it was, with the same tokens."""

    def long(id: str, number: int) -> s.GenerateRequest:
        endless = s.Sampling(max_tokens=110, seed=number, allowed=(7, 8, 9))
        return s.GenerateRequest(id=id, tokens=(5, number), sampling=endless)

    client = connect(kind)
    assert (await client.ready()).preempts
    await client.suspend()
    running = [client.generate(long(f"r{number}", number)) for number in range(5)]
    client.resume()
    while (await client.stats()).running < 4:  # noqa: ASYNC110 (the engine's own count)
        await asyncio.sleep(0)
    for number, answer in enumerate(running):
        client.rerank(f"r{number}", 1.0 if answer is running[-1] else 0.0)
    preempted = await asyncio.gather(*running)
    assert (await client.stats()).preemptions >= 1
    alone = [await client.generate(long(f"a{number}", number)) for number in range(5)]
    assert [one.tokens for one in preempted] == [one.tokens for one in alone]


@pytest.mark.parametrize("kind", HTTP)
async def test_engines_over_http_refuse_abort_forget_and_end(connect: Connect, kind: str) -> None:
    """This covers without suspension what the other tests show of other backends."""
    client = connect(kind)
    assert not isinstance(client, Reranks | Beats | TakesWeights | MovesKv)
    ready = await client.ready()
    assert (ready.stages, ready.moves_kv) == (False, False)
    with pytest.raises(EngineError):
        await client.generate(request("r0", REFUSE if "fake" in kind else 10_000))
    hold_token = HOLD if "fake" in kind else 5
    aborted, cancelled, again = (
        client.generate(request(id, hold_token, count=200)) for id in ("r1", "r2", "r1")
    )
    with pytest.raises(EngineError, match="must be unique"):
        await again
    cancelled.cancel()
    client.abort("r1")
    client.abort("unknown")
    assert (await aborted).finish is s.FinishReason.ABORTED
    assert (await client.generate(request("r2", 5))).id == "r2"
    left = client.generate(request("r3", hold_token, count=200))
    client.kill()
    with pytest.raises(EngineLostError, match="killed"):
        await left
    for call in (client.generate(request("r4", 5)), client.stats()):
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
    for call in (client.generate(request("r1", 5)), client.stats(), client.beat()):
        with pytest.raises(EngineLostError):
            await call
    client.abort("r0")
    client.rerank("r0", 1.0)
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
