"""Turns are resumed at servers that cannot resume."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.streams import merged_result, remaining_request, unextended_result
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError
from tests.engine.clients.wire import Exchange, prorl, serving


def partial(*tokens: int, generate_s: float = 0.0, version: int = 0) -> s.PartialOutput:
    spans = (s.VersionSpan(start=0, end=len(tokens), version=version),)
    return s.PartialOutput(
        tokens=tokens, logprobs=(-0.25,) * len(tokens), versions=spans, generate_s=generate_s
    )


def request(
    resumed: s.PartialOutput | None, *, count: int = 6, budget_s: float = 0.0, **sampling: Any
) -> s.GenerateRequest:
    sampling_of_request = s.Sampling(max_tokens=count, seed=40, **sampling)
    return s.GenerateRequest(
        id="r0", tokens=(5,), sampling=sampling_of_request, budget_s=budget_s, resumed=resumed
    )


def spec(url: str) -> HttpSpec:
    return HttpSpec(name="engine e0", url=url, vocab=100, dialect="prorl")


async def answered(resumed_request: s.GenerateRequest) -> tuple[s.GenerateResult, list[Any]]:
    """Return the answer of a model that counts, and the requests that it received."""
    async with serving(prorl(hot=-1.5)) as wire:
        engine = HttpEngine(spec(wire.url), check_s=1000.0)
        try:
            return await engine.generate(resumed_request), [
                exchange.json_body for exchange in wire.seen
            ]
        finally:
            await engine.close()


async def test_rest_is_requested_with_a_longer_prompt_and_another_seed() -> None:
    result, (body,) = await answered(request(partial(6, 7, generate_s=3.0)))
    assert (body["prompt_ids"], body["max_tokens"], body["seed"]) == ([5, 6, 7], 4, 42)
    assert result.tokens == (6, 7, 8, 9, 10, 11)
    assert result.logprobs == (-0.25, -0.25, -1.5, -1.5, -1.5, -1.5)
    assert result.versions == (s.VersionSpan(start=0, end=6, version=0),)
    assert (result.id, result.finish, result.resumed_tokens) == ("r0", s.FinishReason.LENGTH, 2)
    assert 3.0 < result.generate_s < 3.0 + 60.0
    assert result.queue_s < 60.0


@pytest.mark.parametrize(
    ("resumed", "sampling", "finish"),
    [
        (partial(6, 7), {"count": 2}, s.FinishReason.LENGTH),
        (partial(6, 7), {"stop_token_ids": (7,)}, s.FinishReason.STOP),
    ],
)
async def test_ended_turn_is_not_requested(
    resumed: s.PartialOutput, sampling: Any, finish: s.FinishReason
) -> None:
    result, bodies = await answered(request(resumed, **sampling))
    assert (result.tokens, result.finish, bodies) == (resumed.tokens, finish, [])


@pytest.mark.parametrize(("count", "stop_token_ids"), [(1, ()), (6, (6,))])
async def test_impossible_beginning_is_refused(count: int, stop_token_ids: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=r"resumed\.tokens must end where the turn stops"):
        await answered(request(partial(6, 7), count=count, stop_token_ids=stop_token_ids))
    with pytest.raises(EngineError, match=r"must be in \[0, 100\), got 5 to 100"):
        await answered(request(partial(6, 100)))


def test_stop_strings_restart_the_turn() -> None:
    resumed_request = request(partial(6, 7), stop=("end",))
    assert remaining_request(resumed_request) == msgspec.structs.replace(
        resumed_request, resumed=None
    )
    assert remaining_request(request(None)) == request(None)


async def test_remaining_budget_bounds_the_rest_and_the_beginning_is_kept() -> None:
    async def hang(exchange: Exchange) -> None:
        await exchange.hung_up()

    async with serving(hang) as wire:
        engine = HttpEngine(spec(wire.url), check_s=1000.0)
        try:
            result = await engine.generate(request(partial(6, 7, generate_s=5.0), budget_s=1.0))
            expected = (s.FinishReason.TIME, (6, 7), 2)
            assert (result.finish, result.tokens, result.resumed_tokens) == expected
            turn = engine.generate(request(partial(6, 7)))
            wire.arrived.clear()
            await asyncio.wait_for(wire.arrived.wait(), 10)
            engine.abort("r0")
            assert (await turn).tokens == (6, 7)
        finally:
            await engine.close()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_spans_are_merged_as_those_of_one_turn(before: list[int], after: list[int]) -> None:
    """The reference is the version of each token."""

    def spans(versions: list[int]) -> tuple[s.VersionSpan, ...]:
        return tuple(
            s.VersionSpan(start=at, end=at + 1, version=version)
            for at, version in enumerate(versions)
        )

    resumed = s.PartialOutput(
        tokens=(1,) * len(before), logprobs=(-1.0,) * len(before), versions=spans(before)
    )
    rest = s.GenerateResult(
        id="r0",
        tokens=(2,) * len(after),
        logprobs=(-2.0,) * len(after),
        versions=spans(after),
        finish=s.FinishReason.STOP,
    )
    resumed_request = s.GenerateRequest(id="r0", tokens=(5,), resumed=resumed)
    merged = merged_result(resumed_request, rest)
    assert s.spans_cover(merged.versions, len(merged.tokens))
    reported_versions = [
        span.version for span in merged.versions for _ in range(span.end - span.start)
    ]
    assert reported_versions == before + after
    assert merged.tokens == (1,) * len(before) + (2,) * len(after)
    assert unextended_result(resumed_request, s.FinishReason.ABORTED).tokens == resumed.tokens
