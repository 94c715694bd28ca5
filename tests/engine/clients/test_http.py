"""An engine behind HTTP, tested with real servers that fail in all the ways of
servers.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.probe import Logprobs
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError, EngineLostError
from tests.engine.clients.wire import HANG, Exchange, Handle, Wire, prorl, serving

FINE = prorl(hot=-1.5)


def request(
    id: str = "r0", *, count: int = 3, budget_s: float = 0.0, **sampling: Any
) -> s.GenerateRequest:
    return s.GenerateRequest(
        id=id,
        tokens=(5,),
        sampling=s.Sampling(max_tokens=count, **{"temperature": 1.0, **sampling}),
        budget_s=budget_s,
    )


def spec(url: str, **values: Any) -> HttpSpec:
    return HttpSpec(**{"name": "engine e0", "url": url, "vocab": 100, "dialect": "prorl", **values})


@asynccontextmanager
async def connected(
    wire: Wire, *, start_s: float = 20.0, **values: Any
) -> AsyncIterator[HttpEngine]:
    """Return an engine that is ready.

    It has no regular health checks, so that a test decides when it is checked.
    """
    limits = {name: values.pop(name) for name in ("reply_s", "check_s", "body_s") if name in values}
    engine = HttpEngine(spec(wire.url, **values), start_s=start_s, **{"check_s": 1000.0, **limits})
    try:
        await engine.ready()
        yield engine
    finally:
        await engine.close()


async def hang(exchange: Exchange) -> None:
    await exchange.hung_up()


def first(once: Handle, then: Handle = FINE) -> Handle:
    """Handle the first request by `once`, and all others by `then`."""
    handles = iter([once])

    async def handle(exchange: Exchange) -> None:
        await next(handles, then)(exchange)

    return handle


# What goes well.


async def test_request_and_answer() -> None:
    async with serving(FINE) as wire, connected(wire, slots=7, kv_tokens=700) as engine:
        ready = await engine.ready()
        assert ready.version == 0
        assert ready.max_slots == 7
        assert ready.max_context == 700
        assert ready.kv_total_tokens == 700
        results = await asyncio.gather(
            *(engine.generate(request(f"r{number}")) for number in range(20))
        )
        assert [result.id for result in results] == [f"r{number}" for number in range(20)]
        assert {result.tokens for result in results} == {(6, 7, 8)}
        assert all(result.queue_s >= 0 and result.generate_s > 0 for result in results)
        stats = await engine.stats()
        expected = (0, 0, 20, 60)
        assert (stats.running, stats.waiting, stats.prompt_tokens, stats.output_tokens) == expected


async def test_late_server_is_awaited() -> None:
    wire = Wire(FINE, FINE)
    await wire.start()
    wire.die()
    engine = HttpEngine(spec(wire.url), start_s=20)
    early = engine.generate(request())
    try:
        await asyncio.wait({asyncio.ensure_future(engine.ready())}, timeout=0.2)
        await wire.start()
        assert (await early).tokens == (6, 7, 8)
    finally:
        await engine.close()
        wire.die()


async def test_concurrency_is_bounded_by_slots_except_for_health_checks() -> None:
    most, now, full = 0, 0, asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        await go.wait()
        now -= 1
        await FINE(exchange)

    go = asyncio.Event()
    async with serving(slow) as wire, connected(wire, slots=3, check_s=0.01) as engine:
        answers = [engine.generate(request(f"r{number}")) for number in range(9)]
        await full.wait()
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (3, 6)
        go.set()
        await asyncio.gather(*answers)
        assert most == 3
        assert not engine.lost.done()


# Being ended.


async def test_cancellation_disconnects() -> None:
    disconnected = asyncio.Event()

    async def watch(exchange: Exchange) -> None:
        await exchange.hung_up()
        disconnected.set()

    async with serving(watch, probed=FINE) as wire, connected(wire) as engine:
        answer = engine.generate(request())
        await wire.arrived.wait()
        answer.cancel()
        await disconnected.wait()
        assert (await engine.stats()).running == 0
        wire.handle = FINE
        assert (await engine.generate(request())).id == "r0"  # the id is free again


async def test_abort_without_server_support_returns_at_once_with_no_tokens() -> None:
    async with serving(hang) as wire, connected(wire) as engine:
        answer = engine.generate(request())
        await wire.arrived.wait()
        engine.abort("r0")
        result = await answer
        assert (result.id, result.tokens, result.finish) == ("r0", (), s.FinishReason.ABORTED)


def sglang(tokens: list[int], reason: str) -> dict[str, Any]:
    pairs = [[-0.5, token, None] for token in tokens]
    meta = {
        "finish_reason": {"type": reason},
        "output_token_logprobs": pairs,
        "weight_version": "3",
    }
    return {"text": "", "output_ids": tokens, "meta_info": meta}


@pytest.mark.parametrize("ending", ["abort", "budget"])
async def test_abort_with_server_support_returns_the_tokens_so_far(ending: str) -> None:
    aborted_id: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def probed(exchange: Exchange) -> None:
        exchange.send(sglang([6, 7], "length"))

    async def handle(exchange: Exchange) -> None:
        if exchange.path == "/abort_request":
            aborted_id.set_result(exchange.json_body["rid"])
            exchange.send({})
        else:
            assert await aborted_id == exchange.json_body["rid"]
            exchange.send(sglang([6], "abort"))

    async with serving(handle, probed=probed) as wire, connected(wire, dialect="sglang") as engine:
        answer = engine.generate(request(budget_s=0.05 if ending == "budget" else 0.0))
        await wire.arrived.wait()
        if ending == "abort":
            engine.abort("r0")
        result = await answer
        assert (result.id, result.tokens, result.versions[0].version) == ("r0", (6,), 3)
        assert result.finish is (
            s.FinishReason.ABORTED if ending == "abort" else s.FinishReason.TIME
        )
        assert len(aborted_id.result()) == 32, (
            "SGLang aborts whatever begins so: no id may be the beginning of another"
        )


async def test_a_time_budget_ends_a_request_that_hangs() -> None:
    async with serving(hang) as wire, connected(wire) as engine:
        result = await engine.generate(request(budget_s=0.05))
        assert (result.tokens, result.finish) == ((), s.FinishReason.TIME)


async def test_a_request_that_waits_for_a_slot_can_be_aborted() -> None:
    async with serving(hang) as wire, connected(wire, slots=1) as engine:
        running, waiting = engine.generate(request("r0")), engine.generate(request("r1"))
        await wire.arrived.wait()
        engine.abort("r1")
        assert (await waiting).finish is s.FinishReason.ABORTED
        assert not running.done()
        assert len(wire.seen) == 1


@pytest.mark.parametrize(
    ("tokens", "allowed", "rule"),
    [
        ((), (), "at least one token"),
        ((100,), (), "got 100 to 100"),
        ((5, -1), (), "got -1 to 5"),
        ((5,), (100,), "5 to 100"),
    ],
)
async def test_invalid_token_ids_are_never_sent(
    tokens: tuple[int, ...], allowed: tuple[int, ...], rule: str
) -> None:
    async with serving(FINE) as wire, connected(wire) as engine:
        with pytest.raises(EngineError, match=rule):
            await engine.generate(
                s.GenerateRequest(id="r0", tokens=tokens, sampling=s.Sampling(allowed=allowed))
            )
        assert not wire.seen


async def test_ids_in_use_are_refused() -> None:
    async with serving(hang) as wire, connected(wire) as engine:
        engine.generate(request())
        with pytest.raises(EngineError, match="must be unique"):
            await engine.generate(request())


async def test_a_killed_engine_fails_everything_pending_and_later() -> None:
    async with serving(hang) as wire, connected(wire) as engine:
        pending = engine.generate(request())
        await wire.arrived.wait()
        engine.kill()
        with pytest.raises(EngineLostError, match="killed"):
            await pending
        assert "killed" in await engine.lost
        for call in (engine.generate(request()), engine.stats()):
            with pytest.raises(EngineLostError):
                await call
        engine.abort("r0")
        engine.kill()
        await engine.close()
        await engine.close()


# Failing.


def claims(body: object, **values: Any) -> Handle:
    """Send an answer, then close the connection."""

    async def handle(exchange: Exchange) -> None:
        exchange.send(body, **values)
        await exchange.writer.drain()
        exchange.writer.close()

    return handle


async def reset(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"hello\r\n\r\n")


GOOD = {"response_ids": [6, 7, 8], "logprobs": [-1, -1, -1]}
FAULTS = [
    (reset, "is still there, but its answer to /generate broke off"),
    (no_http, "is still there, but its answer to /generate broke off"),
    (claims(GOOD, length=500), "is still there, but its answer to /generate broke off"),
    (claims(b'{"response_ids": [6, 7'), "cannot be read"),
    (claims(b"\xff\xfe"), "cannot be read"),
    (claims(b'{"response_ids": [6], "logprobs": [NaN]}'), "cannot be read"),
    (claims({"response_ids": [6, 7, 8], "logprobs": [-1, -1]}), "2 log-probs for 3 tokens"),
    (claims({"response_ids": [6, 7, 100], "logprobs": [-1, -1, -1]}), r"must be in \[0, 100\)"),
    (claims({"error": "out of memory"}, status=500), "status 500: .*out of memory"),
    (claims({}, status=404), "status 404"),
    (claims({}, status=302, Location="http://127.0.0.1:1/"), "status 302"),
    (claims({}, status=503, Retry_After="3600"), "too busy: status 503, asked 1 times"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_failed_request_raises_with_the_reason_and_the_next_is_served(
    fault: Handle, reason: str
) -> None:
    async with serving(first(fault)) as wire, connected(wire) as engine:
        with pytest.raises(EngineError, match=reason) as caught:
            await engine.generate(request())
        assert not isinstance(caught.value, EngineLostError)
        assert str(caught.value).startswith("engine e0")
        assert (await engine.generate(request())).tokens == (6, 7, 8)
        assert len(wire.seen) == 2, "a request that broke is not sent again"


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_server_is_retried_after_its_pause(status: int) -> None:
    async with (
        serving(first(claims({}, status=status, Retry_After="0"))) as wire,
        connected(wire) as engine,
    ):
        assert (await engine.generate(request())).tokens == (6, 7, 8)
        assert len(wire.seen) == 2


async def test_request_fails_at_a_server_that_stays_busy() -> None:
    async with serving(claims({}, status=429, Retry_After="0")) as wire, connected(wire) as engine:
        with pytest.raises(EngineError, match="too busy: status 429, asked 5 times"):
            await engine.generate(request())
        assert not engine.lost.done()


async def test_slow_answer_is_cut_off() -> None:
    async def trickle(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not exchange.reader.at_eof():
            exchange.writer.write(b" ")
            await exchange.writer.drain()
            await asyncio.sleep(0.01)

    async with serving(trickle) as wire, connected(wire, body_s=0.3) as engine:
        with pytest.raises(EngineError, match=r"did not end its answer to /generate within 0\.3 s"):
            await engine.generate(request())


async def test_server_that_ends_during_a_turn_is_lost() -> None:
    async with serving(hang) as wire, connected(wire) as engine:
        answers = [engine.generate(request(f"r{number}")) for number in range(5)]
        await wire.arrived.wait()
        wire.die()
        for answer in answers:
            with pytest.raises(EngineLostError, match="does not answer"):
                await answer
        assert "does not answer" in await engine.lost


@pytest.mark.parametrize("symptom", ["health fails", "health hangs"])
async def test_unhealthy_server_is_lost_after_several_checks(symptom: str) -> None:
    async with serving(hang) as wire, connected(wire, check_s=0.02, reply_s=0.2) as engine:
        pending = engine.generate(request())
        await wire.arrived.wait()
        wire.health = 503 if symptom == "health fails" else HANG
        with pytest.raises(
            EngineLostError,
            match="health is status 503" if symptom == "health fails" else "no answer to a health",
        ):
            await pending


# Being ready.


async def test_absent_server_is_reported_in_time() -> None:
    async with serving(FINE) as wire:
        url = wire.url
    engine = HttpEngine(spec(url), start_s=0.3)
    try:
        with pytest.raises(
            EngineLostError,
            match=r"was not ready within 0\.3 s: connection refused",
        ):
            await engine.ready()
    finally:
        await engine.close()


PROBES: list[tuple[s.DialectName, Handle, str]] = [
    (
        "prorl",
        claims({"text": "hi"}),
        "cannot be used in the dialect prorl: .*required field `response_ids`",
    ),
    ("vllm", claims({}, status=404), "cannot be used in the dialect vllm: .*status 404"),
    (
        "completions",
        claims({"choices": [{"text": "hi", "finish_reason": "stop"}]}),
        "no choices.*an engine must return token ids and log-probs; .*judge or a teacher",
    ),
    (
        "completions",
        claims({"choices": [{"text": "hi", "finish_reason": "stop", "token_ids": [6]}]}),
        r"no choices\[0\].logprobs.*an engine must return",
    ),
    (
        "sglang",
        claims({"text": "hi", "meta_info": {"finish_reason": {"type": "stop"}}, "output_ids": [6]}),
        "no meta_info",
    ),
]


@pytest.mark.parametrize(("dialect", "probed", "reason"), PROBES)
async def test_a_server_that_cannot_serve_training_is_refused(
    dialect: s.DialectName, probed: Handle, reason: str
) -> None:
    async with serving(probed, probed=probed) as wire:
        engine = HttpEngine(spec(wire.url, dialect=dialect), start_s=20)
        try:
            with pytest.raises(EngineLostError, match=reason):
                await engine.ready()
        finally:
            await engine.close()


KINDS = [
    (-0.5, -1.5, Logprobs.SAMPLED, {}, ""),
    (-0.5, -0.5, Logprobs.RAW, {"temperature": 0.7}, "must be 0 or 1, got 0.7"),
    (-0.5, 0.0, Logprobs.CUT, {"top_p": 0.9}, "must have no top_p"),
    (-0.5, 0.0, Logprobs.CUT, {"top_k": 5, "temperature": 0.0}, "must have no top_p"),
    (0.0, 0.0, Logprobs.UNKNOWN, {"temperature": 0.7}, "temperature 0 or 1, without"),
]


@pytest.mark.parametrize(("cold", "hot", "kind", "sampling", "reason"), KINDS)
async def test_logprobs_of_another_distribution_are_refused(
    cold: float, hot: float, kind: Logprobs, sampling: dict[str, Any], reason: str
) -> None:
    model = prorl(cold=cold, hot=hot)
    async with serving(model, probed=model) as wire, connected(wire) as engine:
        assert engine._logprobs is kind
        assert (await engine.generate(request())).tokens == (6, 7, 8)
        odd = engine.generate(
            request(**(sampling or {"temperature": 0.3, "top_p": 0.5, "top_k": 2}))
        )
        if reason:
            with pytest.raises(EngineError, match=reason):
                await odd
        else:
            await odd


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"url": "ftp://x"}, "url must be http://host:port"),
        ({"vocab": 0}, "vocab must be at least 1"),
        ({"slots": 0}, "slots"),
    ],
)
def test_invalid_spec_is_refused(values: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        spec(**{"url": "http://x", **values})


@pytest.mark.parametrize(("leased", "error"), [(True, EngineLostError), (False, EngineError)])
async def test_a_leased_server_that_refuses_the_token_is_lost(
    leased: bool, error: type[EngineError]
) -> None:
    """It was started anew; any other server may be set right."""
    answers = [FINE]

    async def handle(exchange: Exchange) -> None:
        await answers[-1](exchange)

    async with serving(handle) as wire:
        engine = HttpEngine(spec(wire.url), check_s=1000.0, leased=leased)
        try:
            await engine.ready()
            answers.append(claims({}, status=401))
            with pytest.raises(error, match="its lease is over" if leased else "status 401"):
                await engine.generate(request())
            assert engine.lost.done() is leased
        finally:
            await engine.close()
