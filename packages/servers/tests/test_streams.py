"""Streamed answers of servers that this project starts, from servers that fail in all
the ways of servers.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.servers.tests.streamed import (
    begin,
    connected,
    event,
    probed,
    request,
    streams,
    vllm_part,
    write,
)
from rollweave.engine.clients.responses import ResponseError
from rollweave.engine.clients.streams import Part, StreamedAnswer
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave_servers.sglang import OwnSglang
from rollweave_servers.versions import OwnDialect
from rollweave_servers.vllm import OwnVllm
from rollweave_servers.vllm_control import ABORT
from tests.engine.clients.wire import Exchange, Handle, serving


def sglang_part(count: int, *tokens: int, finish: str | None = None, **meta: Any) -> dict[str, Any]:
    """Return a part with the last of `count` tokens."""
    meta |= {
        "finish_reason": {"type": finish} if finish else None,
        "completion_tokens": count,
        "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
    }
    return {"output_ids": tokens, "meta_info": meta}


ALL = [("default", 0, 3)]
LAST = vllm_part(8, finish="length", spans=ALL)


async def test_tokens_are_reported_as_they_arrive_and_the_result_has_all() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
    parts = (vllm_part(6), b": a comment\n\n", vllm_part(7), LAST, usage)
    async with serving(streams(*parts), probed=probed) as wire, connected(wire) as engine:
        deltas = list[s.TokenDelta]()
        result = await engine.generate(request(), deltas.append)
        expected = [("r0", 0, (6,)), ("r0", 1, (7,)), ("r0", 2, (8,))]
        assert [(delta.id, delta.start, delta.tokens) for delta in deltas] == expected
        assert [delta.logprobs for delta in deltas] == [(-0.6,), (-0.7,), (-0.8,)]
        assert deltas[1].versions == (s.VersionSpan(start=1, end=2, version=0),)
        assert (result.tokens, result.logprobs) == ((6, 7, 8), (-0.6, -0.7, -0.8))
        assert result.versions == (s.VersionSpan(start=0, end=3, version=0),)
        assert (result.finish, result.cached_tokens) == (s.FinishReason.LENGTH, 1)
        assert 0.0 <= deltas[0].generate_s <= deltas[-1].generate_s <= result.generate_s


async def test_answers_are_streamed_only_if_their_tokens_are_wanted() -> None:
    async def whole(exchange: Exchange) -> None:
        assert exchange.json_body["stream"] is False
        exchange.send(vllm_part(6, finish="stop", spans=[("default", 0, 1)]))

    async with serving(whole, probed=probed) as wire, connected(wire) as engine:
        assert (await engine.generate(request())).tokens == (6,)


async def test_a_grammar_is_compiled_here_before_the_server_gets_it() -> None:
    """vLLM would compile it without a bound, on the process of all its requests."""

    async def asked(exchange: Exchange) -> None:
        raise AssertionError(f"the server was asked: {exchange.json_body}")

    sampling = s.Sampling(stop_token_ids=(7,), constraint=s.Constraint(kind="regex", text="("))
    async with serving(asked, probed=probed) as wire, connected(wire) as engine:
        result = await engine.generate(s.GenerateRequest(id="r", tokens=(1,), sampling=sampling))
        assert result.finish is s.FinishReason.REFUSED
        assert result.error.startswith("sampling.constraint cannot be constrained: ")


async def test_parts_that_are_split_between_packets_are_joined() -> None:
    async def handle(exchange: Exchange) -> None:
        begin(exchange)
        for part in (vllm_part(6), vllm_part(7), LAST):
            data = event(part)
            for start in range(0, len(data), 7):
                write(exchange, data[start : start + 7])
                await exchange.writer.drain()
        write(exchange, b"")

    async with serving(handle, probed=probed) as wire, connected(wire) as engine:
        assert (await engine.generate(request(), lambda _: None)).tokens == (6, 7, 8)


async def cut(exchange: Exchange) -> None:
    """Break the connection after the first part."""
    begin(exchange)
    write(exchange, event(vllm_part(6)))
    await exchange.writer.drain()
    exchange.writer.close()


async def refused(exchange: Exchange) -> None:
    exchange.send({"error": "no such model"}, status=404)


TWO_CHOICES = {"choices": [*vllm_part(6)["choices"], *vllm_part(6)["choices"]]}
NO_LOGPROBS = {"choices": [{"token_ids": [6]}]}
OTHER_TOKENS = {
    "choices": [{"token_ids": [6], "logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]}}]
}
ONE = [("default", 0, 1)]
SIX = vllm_part(6, spans=ONE)
FAULTS: list[tuple[Handle, str]] = [
    (cut, "is still there, but its answer to /inference/v1/generate broke off"),
    (refused, "status 404: .*no such model"),
    (streams(vllm_part(6)), "ended after 1 tokens, without a finish reason"),
    (streams(), "ended after 0 tokens, without a finish reason"),
    (streams(b'data: {"choices": [{\n\n'), "cannot be read"),
    (streams(b"data: \xff\n\n"), "cannot be read"),
    (streams(TWO_CHOICES), "must have 1 choice, got 2"),
    (streams(NO_LOGPROBS), "no choices.0..logprobs.content"),
    (streams(OTHER_TOKENS), "its log-probs are of other tokens than its 1 token_ids"),
    (streams(vllm_part(6), vllm_part(100)), r"must be in \[0, 100\), got 100 to 100"),
    (streams(vllm_part(6), vllm_part(-50)), r"must be in \[0, 100\)"),
    (streams(vllm_part(*range(9))), "it gave 9 tokens, max_tokens is 8"),
    (
        streams(vllm_part(6, finish="stop", spans=ONE), vllm_part(9)),
        "continues after its finish reason",
    ),
    (streams(vllm_part(6), LAST), r"must cover its 2 tokens in order"),
    (streams(vllm_part(6), {"error": {"message": "out of memory"}}), "failed: out of memory"),
    (streams(vllm_part(6, spans=[("4", 0, 1)])), "of version 4, which it has not had"),
    (streams(SIX, SIX), "version spans must cover its 2 tokens in order"),
    (streams(SIX, vllm_part(8, spans=ALL)), "version spans must cover its 2 tokens in order"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
async def test_a_broken_stream_fails_its_turn_with_the_reason(fault: Handle, reason: str) -> None:
    async with serving(fault, probed=probed) as wire, connected(wire) as engine:
        with pytest.raises(EngineError, match=reason) as caught:
            await engine.generate(request(), lambda _: None)
        assert not isinstance(caught.value, EngineLostError)
        assert str(caught.value).startswith("vLLM")
        wire.handle = streams(vllm_part(6, 7), LAST)
        assert (await engine.generate(request(), lambda _: None)).tokens == (6, 7, 8)
        assert len(wire.seen) == 2, "a request that broke is not sent again"


async def test_a_bad_log_prob_fails_its_turn() -> None:
    part = vllm_part(6)
    part["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    async with (
        serving(streams(vllm_part(5), part), probed=probed) as wire,
        connected(wire) as engine,
    ):
        with pytest.raises(EngineError, match="the log-prob of its token 1 is -9999"):
            await engine.generate(request(), lambda _: None)


async def test_a_stream_that_stalls_is_cut_off_after_its_limit() -> None:
    stalled = streams(vllm_part(6), end=False)
    async with (
        serving(stalled, probed=probed) as wire,
        connected(wire, silence_s=0.2) as engine,
    ):
        with pytest.raises(
            EngineError,
            match=r"vLLM did not continue its answer to /inference/v1/generate within 0\.2 s",
        ):
            await engine.generate(request(), lambda _: None)
        assert not engine.lost.done()


async def test_a_turn_may_wait_for_its_first_token() -> None:
    first = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        begin(exchange)
        await exchange.writer.drain()
        await first.wait()
        for part in (vllm_part(6, 7), LAST):
            write(exchange, event(part))
        write(exchange, b"")

    async with serving(late, probed=probed) as wire, connected(wire, silence_s=0.05) as engine:
        turn = engine.generate(request(), lambda _: None)
        await wire.arrived.wait()
        await asyncio.wait({turn}, timeout=0.2)
        first.set()
        assert (await turn).tokens == (6, 7, 8)


async def test_a_busy_server_is_asked_again() -> None:
    """Neither the tokens nor the result count the pause as time of generation."""

    async def busy(exchange: Exchange) -> None:
        wire.handle = streams(vllm_part(6, 7), LAST)
        exchange.send({}, status=503, Retry_After="1")

    deltas = list[s.TokenDelta]()
    async with serving(busy, probed=probed) as wire, connected(wire) as engine:
        result = await engine.generate(request(), deltas.append)
        assert (result.tokens, len(wire.seen)) == ((6, 7, 8), 2)
        assert 0.0 <= deltas[0].generate_s <= deltas[-1].generate_s <= result.generate_s


@pytest.mark.parametrize("answers", [True, False])
async def test_an_abort_in_mid_stream_returns_the_tokens_so_far(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer the abort has at least sent what was reported."""
    monkeypatch.setattr("rollweave.engine.clients.http.ABORT_S", 20.0 if answers else 0.05)
    aborted, reported = asyncio.Event(), asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        if exchange.path == ABORT:
            aborted.set()
            exchange.send({})
            return
        begin(exchange)
        write(exchange, event(vllm_part(6, 7)))
        await exchange.writer.drain()
        await aborted.wait()
        if answers:
            write(exchange, event(vllm_part(8, finish="abort", spans=ALL)))
            write(exchange, b"")
        else:
            await exchange.hung_up()

    async with serving(handle, probed=probed) as wire, connected(wire) as engine:
        resumed = s.PartialOutput(
            tokens=(1,),
            logprobs=(-1.0,),
            versions=(s.VersionSpan(start=0, end=1, version=3),),
            generate_s=2.0,
        )
        turn = engine.generate(request(resumed=resumed), lambda _: reported.set())
        await reported.wait()
        engine.abort("r0")
        result = await turn
        assert result.finish is s.FinishReason.ABORTED
        assert result.tokens == ((1, 6, 7, 8) if answers else (1, 6, 7))
        assert len(result.logprobs) == len(result.tokens)
        assert [span.version for span in result.versions] == [3, 0]
        assert result.generate_s >= 2.0


async def test_cancellation_disconnects_and_reports_nothing_more() -> None:
    reported, disconnected = asyncio.Event(), asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        begin(exchange)
        write(exchange, event(vllm_part(6)))
        await exchange.writer.drain()
        await exchange.hung_up()
        disconnected.set()

    async with serving(handle, probed=probed) as wire, connected(wire) as engine:
        turn = engine.generate(request(), lambda _: reported.set())
        await reported.wait()
        turn.cancel()
        await disconnected.wait()


async def test_a_server_that_ends_in_mid_stream_is_lost() -> None:
    reported = asyncio.Event()
    stream = streams(vllm_part(6), end=False)
    async with serving(stream, probed=probed) as wire, connected(wire) as engine:
        turn = engine.generate(request(), lambda _: reported.set())
        await reported.wait()
        wire.die()
        with pytest.raises(EngineLostError, match="does not answer"):
            await turn


async def test_a_turn_that_starts_over_reports_nothing() -> None:
    """Its tokens need not be those that it was to resume."""

    async def whole(exchange: Exchange) -> None:
        assert exchange.json_body["stream"] is False
        exchange.send(vllm_part(6, finish="stop", spans=[("default", 0, 1)]))

    resumed = s.PartialOutput(
        tokens=(9,), logprobs=(-1.0,), versions=(s.VersionSpan(start=0, end=1, version=0),)
    )
    again = msgspec.structs.replace(
        request(resumed=resumed), sampling=s.Sampling(max_tokens=8, stop=("x",))
    )
    async with serving(whole, probed=probed) as wire, connected(wire) as engine:
        assert (await engine.generate(again, lambda _: None)).tokens == (6,)


# New weights in mid-stream.


def answer_of(dialect: OwnDialect) -> StreamedAnswer:
    asked = request(count=1000)
    dialect.encode_streamed(asked, every=1)
    return StreamedAnswer(dialect.parts(asked), asked, vocab=100)


def read(answer: StreamedAnswer, part: object) -> s.TokenDelta | None:
    return answer.read(json.dumps(part).encode())


def test_tokens_whose_version_is_not_certain_wait_for_the_end() -> None:
    dialect = OwnSglang(version=-1, stop_ids=(), max_context=100)
    dialect.changed(1, 1)
    answer = answer_of(dialect)
    first = read(answer, sglang_part(2, 6, 7))
    assert first is not None
    assert first.versions == (s.VersionSpan(start=0, end=2, version=1),)
    dialect.changed(2, 2)
    assert read(answer, sglang_part(3, 8)) is None  # sampled before or after the change
    assert answer.so_far(s.FinishReason.ABORTED, id="r0").tokens == (6, 7)
    spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 4}]
    last = read(answer, sglang_part(4, 9, finish="stop", weight_versions=spans))
    assert last is not None
    assert (last.start, last.tokens) == (2, (8, 9))
    assert [span.version for span in last.versions] == [1, 2]
    assert answer.result().tokens == (6, 7, 8, 9)


def test_parts_that_name_their_versions_are_reported_behind_new_weights() -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    answer = answer_of(dialect)
    read(answer, vllm_part(6, spans=[("default", 0, 1)]))
    dialect.changed(2, 2)
    delta = read(answer, vllm_part(7, 8, spans=[("default", 0, 2), ("2", 2, 3)]))
    assert delta is not None
    expected = (s.VersionSpan(start=1, end=2, version=0), s.VersionSpan(start=2, end=3, version=2))
    assert delta.versions == expected


def test_versions_that_change_after_they_were_reported_are_refused() -> None:
    dialect = OwnVllm(version=-1, stop_ids=())
    answer = answer_of(dialect)
    read(answer, vllm_part(6, 7, spans=[("default", 0, 2)]))
    dialect.changed(2, 2)
    with pytest.raises(ResponseError, match="the versions of its first 2 tokens were"):
        read(answer, vllm_part(8, spans=[("default", 0, 1), ("2", 1, 3)]))


@pytest.mark.parametrize("whole", [False, True])
def test_sglang_may_repeat_what_it_has_sent(whole: bool) -> None:
    dialect = OwnSglang(version=0, stop_ids=(), max_context=100)
    answer, tokens = answer_of(dialect), (6, 7, 8, 9)
    for count in range(1, 5):
        spans = {"weight_versions": [{"version": "0", "start": 0, "end": 4}]} if count == 4 else {}
        given = tokens[:count] if whole else tokens[count - 1 : count]
        delta = read(
            answer, sglang_part(count, *given, finish="length" if count == 4 else None, **spans)
        )
        assert delta is not None
        assert (delta.start, delta.tokens) == (count - 1, (tokens[count - 1],))
    assert answer.result().tokens == tokens


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (sglang_part(4, 9), "continues at token 3, not 2"),
        (sglang_part(1, 8, 9), "continues at token -1, not 2"),
        (sglang_part(3, 9, 7, 8), "changed tokens that it had sent"),
        ({"output_ids": [8]}, "no meta_info"),
        ({"error": {"message": "too long"}}, "failed: too long"),
        (
            {
                "meta_info": {
                    "finish_reason": {"type": "abort", "message": "full", "status_code": 503}
                }
            },
            "failed: full",
        ),
        (sglang_part(3, 8) | {"output_ids": [9]}, "of other tokens than its 1 output_ids"),
    ],
)
def test_other_parts_of_sglang_are_refused(part: dict[str, Any], reason: str) -> None:
    dialect = OwnSglang(version=0, stop_ids=(), max_context=100)
    answer = answer_of(dialect)
    read(answer, sglang_part(2, 6, 7))
    with pytest.raises(ResponseError, match=reason):
        read(answer, part)


# Against a slow reference.


class Scripted:
    """Parts of an answer of which `versions` are those of each token."""

    def __init__(self, versions: Sequence[int], certain: Sequence[bool]) -> None:
        self.versions, self.certain = versions, certain

    def read(self, event: bytes, known: int) -> Part | None:
        count, at = json.loads(event)
        tokens = list(range(known, known + count))
        return Part(
            start=known,
            tokens=tokens,
            logprobs=[-1.0] * count,
            versions=self.spans(known + count) if self.certain[at] else None,
            ends=known + count == len(self.versions),
        )

    def spans(self, end: int) -> tuple[s.VersionSpan, ...]:
        singles = [
            s.VersionSpan(start=at, end=at + 1, version=version)
            for at, version in enumerate(self.versions[:end])
        ]
        return s.spans_between(singles, 0, end)

    def result(self, tokens: Sequence[int], logprobs: Sequence[float]) -> s.GenerateResult:
        return s.GenerateResult(
            id="r0",
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=self.spans(len(tokens)),
            finish=s.FinishReason.LENGTH,
        )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_deltas_add_up_to_what_is_certain(
    parts: list[tuple[int, bool]], changes: list[bool]
) -> None:
    total = sum(count for count, _ in parts)
    versions = [sum(changes[: at + 1]) for at in range(total)]
    script = Scripted(versions, [certain for _, certain in parts])
    answer = StreamedAnswer(script, request(count=40), vocab=100)
    known, certain_count = 0, 0
    deltas = list[s.TokenDelta]()
    for at, (count, certain) in enumerate(parts):
        if known == total and at:
            break
        delta = answer.read(json.dumps([count, at]).encode())
        known += count
        if certain and known > certain_count:
            assert delta is not None
            assert delta.start == certain_count
            assert delta.tokens == tuple(range(certain_count, known))
            assert s.spans_cover(delta.versions, known, start=certain_count)
            for span in delta.versions:
                assert set(versions[span.start : span.end]) == {span.version}
            deltas.append(delta)
            certain_count = known
        else:
            assert delta is None
    assert answer.so_far(s.FinishReason.ABORTED, id="r0").tokens == tuple(range(certain_count))
    assert answer.result().tokens == tuple(range(total))
