"""OpenAI's client, unchanged, against a gateway with a real engine; and the resulting
training data.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.server import Access, Gateway
from rollweave.schema.errors import EngineLostError
from rollweave.schema.serving import GenerateResult
from tests.support.real_gateway import CONTEXT, Turns, engine, logprob_error, served
from tests.support.scripted_gateway import CODEC, TOOL, Script, engine_result, gateway

SHORT: dict[str, Any] = {"model": "any", "max_tokens": 12}


def client(url: str, access: Access, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=url + access.path,
        api_key=access.token,
        **{"max_retries": 0, "timeout": 60.0, **more},
    )


@contextlib.asynccontextmanager
async def session(directory: Path) -> AsyncIterator[tuple[Gateway, AsyncOpenAI]]:
    """Open a session of a real engine, and OpenAI's client of it."""
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
        client(url, access["s"]) as openai,
    ):
        yield server, openai


async def converse(openai: AsyncOpenAI, turns: int, *, start: str = "begin") -> list[Any]:
    history: list[Any] = [{"role": "user", "content": start}]
    for turn in range(turns):
        answer = await openai.chat.completions.create(messages=history, **SHORT)
        history += [
            answer.choices[0].message.model_dump(),
            {"role": "user", "content": f"and {turn}?"},
        ]
    return history


async def test_a_conversation_is_one_sequence_whose_logprobs_are_those_of_the_model(
    directory: Path,
) -> None:
    async with session(directory) as (server, openai):
        assert [model.id async for model in openai.models.list()] == ["tiny"]
        await converse(openai, 4)
        answer = await openai.chat.completions.create(
            messages=[{"role": "user", "content": "apart"}], logprobs=True, **SHORT
        )
        main, branch = server.close("s").sequences
    assert len(main.turns) == 4
    assert logprob_error(directory, main) < 1e-4
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content or ()]
    assert logprobs == pytest.approx([value for value in branch.logprobs if value][: len(logprobs)])


async def test_a_stream_adds_up_to_the_answer(directory: Path) -> None:
    async with session(directory) as (server, openai):
        same: Any = {"messages": [{"role": "user", "content": "q"}], "temperature": 0, **SHORT}
        complete = await openai.chat.completions.create(**same)
        stream = await openai.chat.completions.create(
            **same, stream=True, stream_options={"include_usage": True}
        )
        completion_chunks = [chunk async for chunk in stream]
        assert len(server.sequences("s")) == 2
    text = "".join(
        choice.delta.content or "" for chunk in completion_chunks for choice in chunk.choices
    )
    assert text == complete.choices[0].message.content
    assert completion_chunks[-1].usage == complete.usage
    assert completion_chunks[-2].choices[0].finish_reason == complete.choices[0].finish_reason


@pytest.mark.parametrize("streamed", [False, True])
async def test_completions_whose_text_is_resent_are_one_sequence(
    directory: Path, streamed: bool
) -> None:
    async with session(directory) as (server, openai):
        text = "once upon"
        for turn in range(3):
            same: Any = {"model": "any", "prompt": text, "max_tokens": 9, "seed": turn}
            if streamed:
                chunks = [
                    chunk async for chunk in await openai.completions.create(**same, stream=True)
                ]
                text += "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text += (await openai.completions.create(**same)).choices[0].text
            text += f" and {turn}?"
        await openai.completions.create(model="any", prompt="another text", max_tokens=3)
        main, other = server.close("s").sequences
    assert [len(main.turns), len(other.turns)] == [3, 1]
    assert logprob_error(directory, main) < 1e-4
    assert ChatCodec.from_directory(directory).decode(main.tokens) + " and 2?" == text


async def test_the_clients_retries_count_once() -> None:
    async with gateway(Script([EngineLostError("gone"), "a"])) as (server, other):
        async with client(other.url, other.access, max_retries=2) as openai:
            await converse(openai, 1)
        (sequence,) = server.close("s").sequences
    assert len(sequence.turns) == 1


async def test_a_client_timeout_cancels_the_turn_and_the_retry_counts() -> None:
    cancelled = asyncio.Event()

    async def generate(*_: object) -> GenerateResult:
        if not cancelled.is_set():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return engine_result(CODEC.encode_turn("a"))

    async with gateway(generate) as (server, other):
        async with client(other.url, other.access, max_retries=5, timeout=0.5) as openai:
            await converse(openai, 1)
        (sequence,) = server.close("s").sequences
    assert cancelled.is_set()
    assert len(sequence.turns) == 1


async def test_killing_a_program_stops_its_generation_in_the_engine(directory: Path) -> None:
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
            call = openai.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "q"}],
                extra_body={"seed": 1},
                max_tokens=CONTEXT,
            )
            asking = asyncio.create_task(call)  # type: ignore[arg-type]
            while not (await tiny.stats()).running:
                assert not asking.done()
            asking.cancel()
            while (stats := await tiny.stats()).running:
                pass
        assert stats.output_tokens < CONTEXT // 2
        assert server.close("s").sequences == ()


async def test_concurrent_sessions_are_separate(directory: Path) -> None:
    names = [f"s{number}" for number in range(6)]
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, *names) as (server, url, access),
    ):
        clients = [client(url, access[name]) for name in names]
        histories = await asyncio.gather(
            *(converse(each, 3, start=name) for each, name in zip(clients, names, strict=True))
        )
        for each in clients:
            await each.close()
        for name, history in zip(names, histories, strict=True):
            (sequence,) = server.close(name).sequences
            assert len(sequence.turns) == 3
            assert logprob_error(directory, sequence) < 1e-4
            assert history[0]["content"] == name


async def test_errors_map_to_the_clients_exceptions(directory: Path) -> None:
    async with engine(directory) as tiny, served(Turns(tiny), directory, "s") as (_, url, access):
        async with client(url, access["s"]) as openai:
            with pytest.raises(BadRequestError, match=r"n must be 1 .*got 2") as caught:
                await openai.chat.completions.create(
                    messages=[{"role": "user", "content": "q"}], n=2, **SHORT
                )
            assert caught.value.param == "n"
            tools: Any = [TOOL]
            forced = await openai.chat.completions.create(
                messages=[{"role": "user", "content": "q"}],
                tools=tools,
                tool_choice="required",
                **SHORT,
            )
            assert forced.choices[0].message.content  # random weights: no call, so plain words
        async with client(url, Access(path="/s/none/v1", token="x")) as openai:
            with pytest.raises(NotFoundError):
                await openai.models.list()
