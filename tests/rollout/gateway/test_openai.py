"""OpenAI's client, unchanged, against a gateway with a real engine; and the resulting
training data.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from rollweave.engine.clients.base import OnTokens
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.server import Access
from rollweave.schema.errors import EngineLostError
from rollweave.schema.serving import GenerateResult, Sampling
from tests.support.real_gateway import CONTEXT, Turns, checkpoint, engine, logprob_error, served
from tests.support.scripted_gateway import TOOL

SHORT: dict[str, Any] = {"model": "any", "max_tokens": 12}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


def client(url: str, access: Access, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=url + access.path,
        api_key=access.token,
        **{"max_retries": 0, "timeout": 60.0, **more},
    )


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
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
            assert [model.id async for model in openai.models.list()] == ["tiny"]
            await converse(openai, 4)
            answer = await openai.chat.completions.create(
                messages=[{"role": "user", "content": "apart"}], logprobs=True, **SHORT
            )
        main, branch = server.close("s").sequences
    assert len(main.turns) == 4
    assert logprob_error(directory, main) < 1e-4
    assert answer.choices[0].logprobs is not None
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content or ()]
    assert logprobs == pytest.approx([value for value in branch.logprobs if value][: len(logprobs)])


async def test_a_stream_adds_up_to_the_answer(directory: Path) -> None:
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
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
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
            text = "once upon"
            for turn in range(3):
                same: Any = {"model": "any", "prompt": text, "max_tokens": 9, "seed": turn}
                if streamed:
                    chunks = [
                        chunk
                        async for chunk in await openai.completions.create(**same, stream=True)
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


async def test_a_stream_is_read_while_the_engine_samples(directory: Path) -> None:
    """The engine's answer is withheld until the client has read what was sampled."""
    async with engine(directory) as tiny:
        turns, read = Turns(tiny), asyncio.Event()

        async def generate(
            session: str,
            tokens: tuple[int, ...],
            sampling: Sampling,
            on_tokens: OnTokens | None,
        ) -> GenerateResult:
            result = await turns(session, tokens, sampling, on_tokens)
            async with asyncio.timeout(60):
                await read.wait()
            return result

        async with served(generate, directory, "s") as (server, url, access):
            async with client(url, access["s"]) as openai:
                question: Any = [{"role": "user", "content": "q"}]
                stream = await openai.chat.completions.create(
                    model="any", messages=question, max_tokens=200, stream=True, logprobs=True
                )
                entries: list[Any] = []
                async for chunk in stream:
                    (choice,) = chunk.choices
                    if choice.logprobs is not None:
                        entries += choice.logprobs.content or ()
                        read.set()
            (sequence,) = server.close("s").sequences
    sampled = [value for value in sequence.logprobs if value]
    assert [entry.logprob for entry in entries] == pytest.approx(sampled[: len(entries)])
    assert len(sampled) - len(entries) <= 1, "all but the token that ends the turn"
    assert logprob_error(directory, sequence) < 1e-4


async def test_the_clients_retries_count_once(directory: Path) -> None:
    async with engine(directory) as tiny:
        generate = Turns(tiny, fails=[EngineLostError("gone")])
        async with served(generate, directory, "s") as (server, url, access):
            async with client(url, access["s"], max_retries=2) as openai:
                await converse(openai, 1)
            (sequence,) = server.close("s").sequences
    assert len(sequence.turns) == 1


async def test_a_client_timeout_cancels_the_turn_and_the_retry_counts(
    directory: Path,
) -> None:
    stalled: asyncio.Queue[str] = asyncio.Queue()

    async with engine(directory) as tiny:
        turns = Turns(tiny)

        async def generate(
            session: str,
            tokens: tuple[int, ...],
            sampling: Sampling,
            on_tokens: OnTokens | None,
        ) -> GenerateResult:
            if not stalled.qsize():
                try:
                    await asyncio.Event().wait()
                finally:
                    stalled.put_nowait("cancelled")
            return await turns(session, tokens, sampling, on_tokens)

        async with served(generate, directory, "s") as (server, url, access):
            async with client(url, access["s"], max_retries=5, timeout=2.0) as openai:
                await converse(openai, 1)
            (sequence,) = server.close("s").sequences
    assert stalled.qsize() == 1
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


async def test_two_concurrent_branches_of_one_session(directory: Path) -> None:
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
            history = await converse(openai, 1)
            requests = (openai.chat.completions.create(messages=history, **SHORT) for _ in range(3))
            answers = await asyncio.gather(*requests)
        sequences = server.close("s").sequences
    assert sorted(len(sequence.turns) for sequence in sequences) == [1, 1, 2]
    assert sum(sum(sequence.output_mask()) for sequence in sequences) >= sum(
        a.usage.completion_tokens for a in answers
    )
    for sequence in sequences:
        assert logprob_error(directory, sequence) < 1e-4


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


async def test_accepts_the_clients_default_fields_and_honors_or_refuses_others(
    directory: Path,
) -> None:
    """Users send the fields of vLLM and SGLang by `extra_body`."""
    request: Any = {"messages": [{"role": "user", "content": "q"}], "seed": 1, **SHORT}
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        openai = client(url, access["s"])
        async with openai:
            plain = await openai.chat.completions.create(
                **request, store=False, user="u", modalities=["text"], verbosity="medium"
            )
            first = server.sequences("s")[0]
            token = first.tokens[first.turns[0].start]
            cut = await openai.chat.completions.create(
                **request, extra_body={"stop_token_ids": [token], "top_k": -1}
            )
            with pytest.raises(
                BadRequestError,
                match=r"min_p must be 0 or null: it is not supported, got 0\.1",
            ):
                await openai.chat.completions.create(**request, extra_body={"min_p": 0.1})
            raw = await openai.chat.completions.with_raw_response.create(
                **request, reasoning_effort="low"
            )
            assert raw.headers["X-Rollweave-Ignored"] == "reasoning_effort"
    assert plain.usage is not None
    assert cut.usage is not None
    assert (cut.choices[0].message.content, cut.usage.completion_tokens) == ("", 1)


class Move(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    move: Literal["left", "right"]
    hard: bool


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_has_the_form_that_is_asked_for(directory: Path, streamed: bool) -> None:
    """The recorded log-probs are those of the model, not of what the form left."""
    async with (
        engine(directory) as tiny,
        served(Turns(tiny), directory, "s") as (server, url, access),
    ):
        async with client(url, access["s"]) as openai:
            history: list[Any] = [{"role": "user", "content": "begin"}]
            for _ in range(2):
                wanted: Any = {
                    "model": "any",
                    "messages": history,
                    "response_format": Move,
                    "logprobs": True,
                    "max_tokens": 400,
                }
                if streamed:
                    async with openai.chat.completions.stream(**wanted) as stream:
                        answer = await stream.get_final_completion()
                else:
                    answer = await openai.chat.completions.parse(**wanted)
                parsed = answer.choices[0].message.parsed
                assert parsed is not None
                assert parsed.move in ("left", "right")
                assert answer.choices[0].logprobs is not None
                history += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": "again"},
                ]
        (sequence,) = server.close("s").sequences
    assert len(sequence.turns) == 2
    assert logprob_error(directory, sequence) < 1e-4
