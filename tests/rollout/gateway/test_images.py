"""Images through the gateway's APIs, by the real clients; and what is recorded."""

import base64
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError

from rollweave.engine.clients.base import OnTokens
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.recorder import SessionRecorder
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.chat import Message
from rollweave.schema.media import IMAGE_BYTES, Image, PlacedImage
from rollweave.schema.serving import FinishReason, GenerateResult, Sampling
from rollweave.schema.work import SequenceCause, StopReason
from tests.support.scripted_gateway import Client, engine_result, gateway
from tests.support.vision_models import picture, write_tokenizer

RED, GREEN, BLUE = (Image.of(picture(*color)) for color in ((255,), (0, 255), (0, 0, 255)))
EXPANSION = 50
"""Number of tokens of an image in the engine, beyond its placeholder."""


@functools.cache
def vision() -> ChatCodec:
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        return ChatCodec.from_directory(name)


class Sees:
    """`generate` of an engine that takes images: says how many it was given."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.images: list[tuple[PlacedImage, ...]] = []
        self.samplings: list[Sampling] = []
        self.answer: GenerateResult | None = None

    async def __call__(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        images: tuple[PlacedImage, ...] = (),
    ) -> GenerateResult:
        assert all(tokens[placed.at] == vision().image_token for placed in images)
        assert tokens.count(vision().image_token or -1) == len(images)
        self.prompts.append(tokens)
        self.images.append(images)
        self.samplings.append(sampling)
        result = self.answer or engine_result(vision().encode_turn(f"saw {len(images)}"))
        return msgspec.structs.replace(result, prompt_tokens=len(tokens) + EXPANSION * len(images))

    @property
    def seen(self) -> list[Image]:
        """The images of the newest turn."""
        return [placed.image for placed in self.images[-1]]


TAKES: dict[str, Any] = {"no_images": ""}
STRICT = {**TAKES, "unreadable": "refuse"}


def openai_of(client: Client) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=client.base_url, api_key=client.access.token, max_retries=0)


def chat_part(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image.url, "detail": "auto"}}


async def test_a_chat_with_images_is_one_sequence_with_their_places() -> None:
    sees = Sees()
    async with gateway(sees, of=vision(), session=TAKES) as (server, client):
        async with openai_of(client) as openai:
            history: list[Any] = [
                {"role": "user", "content": [{"type": "text", "text": "a"}, chat_part(RED)]}
            ]
            for image in (GREEN, BLUE):
                answer = await openai.chat.completions.create(messages=history, model="m")
                history += [answer.choices[0].message.model_dump(exclude_none=True)]
                history += [{"role": "user", "content": [chat_part(image)]}]
            answer = await openai.chat.completions.create(messages=history, model="m")
        (sequence,) = server.sequences("s")
    assert answer.choices[0].message.content == "saw 3"
    assert sees.seen == [RED, GREEN, BLUE]
    assert [placed.image for placed in sequence.images] == [
        image.reference() for image in (RED, GREEN, BLUE)
    ]
    assert all(sequence.tokens[each.at] == vision().image_token for each in sequence.images)
    assert len(sequence.turns) == 3


async def test_responses_and_tool_results_have_images() -> None:
    sees = Sees()
    async with (
        gateway(sees, of=vision(), session=TAKES) as (_, client),
        openai_of(client) as openai,
    ):
        shown = {"type": "input_image", "image_url": RED.url, "detail": "auto"}
        await openai.responses.create(
            model="m",
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "look"}, shown]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": GREEN.url}],
                },
            ],  # type: ignore[arg-type]
        )
    assert sees.seen == [RED, GREEN]
    assert "look<image>" in vision().decode(sees.prompts[-1])


async def test_messages_have_images_also_in_results() -> None:
    from anthropic import AsyncAnthropic  # seconds, and only here

    sees = Sees()

    def block(image: Image) -> dict[str, Any]:
        data = base64.b64encode(image.data).decode()
        source = {"type": "base64", "media_type": image.media_type, "data": data}
        return {"type": "image", "source": source}

    async with gateway(sees, of=vision(), session=TAKES) as (_, client):
        url = client.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=url, api_key=client.access.token) as anthropic:
            answer = await anthropic.messages.create(
                model="m",
                max_tokens=20,
                messages=[
                    {"role": "user", "content": [block(RED), {"type": "text", "text": "what?"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "is_error": True,
                                "content": [{"type": "text", "text": "got"}, block(GREEN)],
                            },
                            block(BLUE),
                        ],
                    },
                ],  # type: ignore[list-item]
            )
    assert answer.content[0].text == "saw 3"  # type: ignore[union-attr]
    assert sees.seen == [RED, GREEN, BLUE]
    assert "Error: got<image><|end|>" in vision().decode(sees.prompts[-1])


BIG = base64.b64encode(RED.data + bytes(IMAGE_BYTES)).decode()


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("https://example.com/a.png", " must be a data: URL, got "),
        ("file:///etc/passwd", " must be a data: URL, got "),
        ("data:image/png;base64,aGVsbG8=", ": an image must be PNG, JPEG, WebP or GIF"),
        (f"data:image/png;base64,{BIG}", f": an image must have at most {IMAGE_BYTES} bytes"),
    ],
)
async def test_bad_images_are_refused_in_one_line_that_names_them(url: str, rule: str) -> None:
    sees = Sees()
    async with (
        gateway(sees, of=vision(), session=STRICT) as (_, client),
        openai_of(client) as openai,
    ):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(BadRequestError) as raised:
            await openai.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
            )
    message = raised.value.body["message"]  # type: ignore[index]
    assert message.startswith(f"messages.0.content.0.image_url.url{rule}")
    assert "\n" not in message
    assert len(message) < 300
    assert not sees.prompts


async def test_an_image_by_url_is_refused_by_name_in_messages() -> None:
    async with gateway(Sees(), of=vision(), session=STRICT) as (_, client):
        source = {"type": "url", "url": "https://example.com/a.png"}
        message = {"role": "user", "content": [{"type": "image", "source": source}]}
        status, body = await client.post(
            {"model": "m", "max_tokens": 4, "messages": [message]}, path="/messages"
        )
    assert status == 400
    assert body["error"]["message"].startswith("messages.0.content.0.source.type must be base64")


async def test_a_session_without_images_says_so() -> None:
    sees = Sees()
    async with gateway(sees, of=vision(), session={"unreadable": "refuse"}) as (_, client):
        message = {"role": "user", "content": [chat_part(RED)]}
        status, body = await client.post({"model": "m", "messages": [message]})
    assert status == 400
    assert (
        body["error"]["message"]
        == "messages.0.content.0.image_url.url must be no image: this session takes none, "
        "got 'an image'"
    )


async def test_what_the_engine_counted_leaves_less_room_and_an_overflow_ends_the_context() -> None:
    sees = Sees()
    limits = {"context": 200, "turn_tokens": 200, "tokens": 1000}

    session = {**TAKES, "limits": SessionLimits(**limits)}
    async with gateway(sees, of=vision(), session=session) as (server, client):
        history: list[Any] = [{"role": "user", "content": [chat_part(RED)]}]
        _, body = await client.post({"model": "m", "messages": history})
        history += [body["choices"][0]["message"], {"role": "user", "content": "?"}]
        await client.post({"model": "m", "messages": history})
        room = [
            200 - len(prompt) - extra
            for prompt, extra in zip(sees.prompts, (0, EXPANSION), strict=True)
        ]
        assert [sampling.max_tokens for sampling in sees.samplings] == room
        sees.answer = GenerateResult(
            id="x",
            tokens=(),
            logprobs=(),
            versions=(),
            finish=FinishReason.CONTEXT,
            error="maximum context length is 200",
        )
        status, body = await client.post({"model": "m", "messages": history})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert server.session("s").exhausted is StopReason.MAX_TOKENS


# The recorder.


def user(*images: Image, text: str = "go") -> Message:
    return Message(role="user", content=text, images=images)


def turn(recorder: SessionRecorder, key: str, history: Sequence[Message]) -> Message:
    call = recorder.begin(key, history)
    message = Message(role="assistant", content="ok")
    recorder.answer(call, engine_result(vision().encode_turn("ok")), message)
    recorder.deliver(call)
    return message


def test_equal_tokens_with_different_images_are_different_conversations() -> None:
    recorder = SessionRecorder(vision())
    answers = [turn(recorder, image.digest, [user(image)]) for image in (RED, GREEN)]
    turn(recorder, "more", [user(GREEN), answers[1], user(text="on")])
    first, second = recorder.sequences()
    assert first.tokens == second.tokens[: len(first.tokens)]
    assert [placed.image.digest for placed in second.images] == [GREEN.digest]
    assert (len(first.turns), len(second.turns)) == (1, 2)


def test_an_image_that_the_program_changes_begins_a_new_sequence_that_says_why() -> None:
    recorder = SessionRecorder(vision())
    answer = turn(recorder, "a", [user(RED)])
    turn(recorder, "b", [user(GREEN), answer, user(text="on")])
    first, edited = recorder.sequences()
    assert edited.origin is not None
    assert edited.origin.cause is SequenceCause.HISTORY_EDITED
    assert [placed.image.digest for placed in edited.images] == [GREEN.digest]
    assert len(first.turns) == 1


@given(st.lists(st.lists(st.sampled_from([RED, GREEN, BLUE]), max_size=3), min_size=1, max_size=4))
def test_a_program_that_only_appends_has_one_sequence_with_all_images(
    shown: list[list[Image]],
) -> None:
    recorder, history = SessionRecorder(vision()), list[Message]()
    for number, images in enumerate(shown):
        history.append(user(*images, text=f"turn {number} <image>"))
        history.append(turn(recorder, str(number), history))
    (sequence,) = recorder.sequences()
    expected = [image.digest for images in shown for image in images]
    assert [placed.image.digest for placed in sequence.images] == expected
    places = [at for at, token in enumerate(sequence.tokens) if token == vision().image_token]
    assert [placed.at for placed in sequence.images] == places
