"""Large requests: what they cost is paid beside the gateway's event loop, and ends."""

import asyncio
import threading
from typing import Any

import pytest

from rollweave.rollout.chat import template as templates
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.preparing import INLINE, MAX_ARGUMENTS, Aside
from rollweave.rollout.gateway.recorder import SessionRecorder
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.chat import Message
from tests.support.chats import CHATML, bpe, template
from tests.support.scripted_gateway import CODEC, TOOL, Client, Script, ask, encode, engine_result
from tests.support.scripted_gateway import gateway as serve

LONG = "a long history " * (INLINE // 10)


class Held(ChatCodec):
    """A codec that renders and tokenizes large texts when it is released."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.started, self.free = threading.Event(), threading.Event()
        super().__init__(*args, **options)

    def start(self, messages: Any, tools: Any = (), **options: Any) -> tuple[int, ...]:
        if sum(map(len, tools)) + sum(message.chars for message in messages) > INLINE:
            self._hold()
        return super().start(messages, tools, **options)

    def encode_literal(self, text: str, **options: Any) -> tuple[int, ...]:
        if len(text) > INLINE:
            self._hold()
        return super().encode_literal(text, **options)

    def _hold(self) -> None:
        self.started.set()
        assert self.free.wait(30), "it is released"


def many_tools(count: int) -> list[Any]:
    return [{**TOOL, "function": {**TOOL["function"], "name": f"add{i}"}} for i in range(count)]  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", ask(LONG)),
        ("/chat/completions", ask(tools=many_tools(200))),
        ("/completions", {"model": "m", "prompt": LONG}),
    ],
    ids=["history", "tools", "completion"],
)
async def test_a_large_request_does_not_delay_another_session(
    path: str, body: dict[str, Any]
) -> None:
    held = Held(bpe(), CODEC._template)
    limits = {"limits": SessionLimits(context=1_000_000)}
    async with serve(Script(), of=held, session=limits) as (server, client):
        other = Client(client.http, client.url, server.open("other"))
        large = asyncio.create_task(client.post(body, path=path))
        try:
            assert await asyncio.to_thread(held.started.wait, 30)
            async with asyncio.timeout(20):
                assert (await other.post(ask()))[0] == 200
                assert (await client.post(ask()))[0] == 200, "nor a small one of its own"
            assert not large.done()
        finally:
            held.free.set()
        assert (await large)[0] == 200


async def test_the_large_work_of_a_session_waits_in_line_and_not_for_ever() -> None:
    aside, line, free = Aside(wait_s=0.05), asyncio.Lock(), threading.Event()
    started = list[str]()

    def work(name: str) -> None:
        started.append(name)
        assert free.wait(30)

    runs = [aside.run(lambda name=name: work(name), size=INLINE + 1, line=line) for name in "ab"]  # type: ignore[misc]
    try:
        ended = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(error, RequestError) and error.status == 503 for error in ended)
        assert "must be prepared within 0.05 s" in str(ended[0])
        assert started == ["a"], "what has waited in vain is not done"
    finally:
        free.set()
        aside.close()


async def test_a_template_that_takes_too_long_for_a_history_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The template compares each message with all others."""
    source = "{% for a in messages %}{% for b in messages %}{{ b.nothing }}{% endfor %}{% endfor %}"
    slow = ChatCodec(bpe(), template(source + CHATML))
    long = {"model": "m", "messages": ask()["messages"] * 3000}
    async with serve(Script(), of=slow) as (_, client):
        monkeypatch.setattr(templates, "RENDER_S", 0.2)
        status, answer = await client.post(long)
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "must render this within 0.2 s" in answer["error"]["message"]
        assert (await client.post(ask()))[0] == 200


async def test_arguments_of_a_template_are_bounded() -> None:
    dated = ChatCodec(bpe(), template("{{ date }}" + CHATML))
    async with serve(Script(), of=dated) as (_, client):
        arguments = {"date": "x" * MAX_ARGUMENTS}
        status, answer = await client.post(ask(chat_template_kwargs=arguments))
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
        assert "at most 4096 characters" in answer["error"]["message"]


def test_a_prompt_may_be_prepared_before_what_it_continues_is_recorded() -> None:
    recorder = SessionRecorder(CODEC)
    asked = Message(role="user", content="go")
    first = recorder.begin("a", [asked])
    answer = Message(role="assistant", content="on")
    recorder.answer(first, engine_result((*encode("on"), CODEC.stop_token_ids[0])), answer)
    history = [asked, answer, asked]
    prepared = recorder.prepare(history)
    recorder.deliver(first)
    assert recorder.prepare(history) == prepared
    second = recorder.begin("b", history, prepared=prepared)
    assert second.continues is first
    assert second.prompt[: first.end] == first.context
