"""Render a turn as a response of OpenAI's chat API, complete or as a stream of chunks,
and the interface of all APIs. Pure.

Invariants: the chunks' text and calls add up to those of the complete response; a chunk
never contains part of a character; the stop text and the token that ends a turn are not
shown.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.chat.tools import ParsedReply, ToolFormat, openai_calls
from rollweave.rollout.gateway.deltas import ContradictionError, TextDelta
from rollweave.rollout.gateway.refusals import RequestError
from rollweave.rollout.gateway.requests import ChatRequest, parse_chat
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import FinishReason, GenerateResult, openai_finish_reason

Json = dict[str, Any]

CHUNK: Final = "chat.completion.chunk"
"""The type of a part of a stream in OpenAI's API."""


class ReplyHead(Struct, frozen=True, kw_only=True):
    """The fields of all chunks of a reply. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str

    def of(self, kind: str) -> Json:
        """Return the fields of OpenAI's object `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class ChatReply(Struct, frozen=True, kw_only=True):
    """The reply to a client for a complete turn. In a stream, `deltas` are those that
    it has not received yet.
    """

    message: Message
    deltas: tuple[TextDelta, ...]
    finish_reason: str
    prompt_tokens: int
    result: GenerateResult

    def usage(self) -> Json:
        """Return the usage in the terms of OpenAI's chat API."""
        completion_tokens = len(self.result.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.result.cached_tokens},
        }


class TurnStream(Protocol):
    """The events of one turn in one API."""

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        """Yield events with the text that is certain before the turn is complete."""

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other events of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """


class Api(Protocol):
    """An API in front of the agent's turns: how requests are read, and turns are
    written.
    """

    @property
    def prefix(self) -> str:
        """The beginning of the id of each response."""

    def parse(self, body: bytes) -> ChatRequest:
        """Read a request. Raises RequestError."""

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        """Return the body of a response that is not streamed."""

    def stream(self, head: ReplyHead, chat: ChatRequest) -> TurnStream:
        """Return the stream of a turn."""

    def event(self, event: Json) -> bytes:
        """Return an event as it is sent."""

    @property
    def end(self) -> bytes:
        """The bytes after the last event of a complete stream."""

    def error(self, error: RequestError) -> Json:
        """Return the body of an error."""


def read_turn(
    codec: TextCodec,
    tools: ToolFormat | None,
    result: GenerateResult,
    *,
    number: int,
    stop: Sequence[str],
    stop_tokens: Sequence[int] = (),
) -> tuple[Message, int]:
    """Return the message of turn `number` of a session, and how many characters of the
    sampled text it contains.

    `tools` is None if calls are not parsed. `stop` and `stop_tokens` end the turn and
    are not part of its message.
    """
    text = codec.text(result.tokens)
    if result.tokens and result.tokens[-1] in stop_tokens:
        text = text[: len(codec.decode(result.tokens[:-1]))]
    length = min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))
    text_shown = text[:length]
    parsed = tools.parse(text_shown) if tools is not None else ParsedReply(content=text_shown)
    calls = tuple(
        ToolCall(id=f"call_{number:05d}{place:04d}", name=call.name, arguments=call.arguments)
        for place, call in enumerate(parsed.tool_calls)
    )
    cut = "length" if openai_finish_reason(result.finish) == "length" else ""
    return Message(
        role="assistant", content=parsed.content, tool_calls=calls, finish_reason=cut
    ), length


def finish_reason(message: Message, finish: FinishReason) -> str:
    """Return OpenAI's name for how a turn ended."""
    word = openai_finish_reason(finish)
    return "tool_calls" if word == "stop" and message.tool_calls else word


class OpenAIApi:
    """The form of events and errors that OpenAI's APIs share."""

    end: Final = b"data: [DONE]\n\n"

    def event(self, event: Json) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def error(self, error: RequestError) -> Json:
        return error.body()


class ChatApi(OpenAIApi):
    """OpenAI's chat API."""

    prefix: Final = "chatcmpl"

    def parse(self, body: bytes) -> ChatRequest:
        return parse_chat(body)

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        return completion(head, reply, chat)

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "Chunks":
        return Chunks(head, chat)


def completion(head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
    """Return the body of a response that is not streamed."""
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": reply.message.content or (None if reply.message.tool_calls else ""),
            "refusal": None,
            **({"tool_calls": openai_calls(reply.message)} if reply.message.tool_calls else {}),
        },
        "logprobs": _logprobs(reply.deltas, chat),
        "finish_reason": reply.finish_reason,
    }
    return {**head.of("chat.completion"), "choices": [choice], "usage": reply.usage()}


class Chunks:
    """The chunks of one stream, the first of which names the role."""

    def __init__(self, head: ReplyHead, chat: ChatRequest) -> None:
        self._head, self._chat = head, chat
        self._content = ""
        self._begun = False

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        """Yield chunks with the text that is certain before the turn is complete."""
        if deltas and not self._begun:
            yield self._begin()
        for delta in deltas:
            self._content += delta.text
            yield self._chunk({"content": delta.text}, [delta])

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other chunks of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """
        message = reply.message
        if not message.content.startswith(self._content):
            raise ContradictionError("the message does not begin with the text that was sent")
        if not self._begun:
            yield self._begin(no_content=bool(message.tool_calls))
        if message.tool_calls:
            # Calls are parsed once the turn is complete: only then it is known which
            # text surrounds them.
            left = message.content[len(self._content) :]
            yield self._chunk({"content": left or None}, reply.deltas)
            for index, call in enumerate(openai_calls(message)):
                named = {**call, "function": {**call["function"], "arguments": ""}}
                yield self._chunk({"tool_calls": [{"index": index, **named}]})
                arguments = {"arguments": call["function"]["arguments"]}
                yield self._chunk({"tool_calls": [{"index": index, "function": arguments}]})
        else:
            yield from self.progress(reply.deltas)
        yield self._chunk({}, (), reply.finish_reason)
        if self._chat.include_usage:
            yield {**self._head.of(CHUNK), "choices": [], "usage": reply.usage()}

    def _begin(self, *, no_content: bool = False) -> Json:
        self._begun = True
        return self._chunk({"role": "assistant", "content": None if no_content else ""})

    def _chunk(
        self, delta: Json, deltas: Sequence[TextDelta] = (), reason: str | None = None
    ) -> Json:
        logprobs = _logprobs(deltas, self._chat) if deltas else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        tail = {"usage": None} if self._chat.include_usage else {}
        return {**self._head.of(CHUNK), "choices": [choice], **tail}


def _logprobs(deltas: Sequence[TextDelta], chat: ChatRequest) -> Json | None:
    if not chat.logprobs:
        return None
    content: list[Json] = []
    for text, logprob in (entry for delta in deltas for entry in delta.entries):
        # The bytes of part of a character cannot be recovered from its text.
        entry: Json = {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }
        content.append({**entry, "top_logprobs": [entry] * chat.top_logprobs})
    return {"content": content, "refusal": None}
