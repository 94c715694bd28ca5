"""Render a turn as a response of OpenAI's chat API, complete or as a stream of chunks.
Pure.

Invariants: the chunks' text and calls add up to those of the complete response; a chunk
never contains part of a character; the stop text and the token that ends a turn are not
shown.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.tools import ParsedReply, ToolFormat, openai_calls
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import FinishReason, GenerateResult, openai_finish_reason

Json = dict[str, Any]


class TextDelta(Struct, frozen=True, kw_only=True):
    """The text of one or several tokens: the smallest run of complete characters.

    `entries` are the tokens' `(text, log-prob)`.
    """

    text: str
    entries: tuple[tuple[str, float], ...]


class ChatReply(Struct, frozen=True, kw_only=True):
    """What a client receives for a turn. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str
    message: Message
    deltas: tuple[TextDelta, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def read_turn(
    codec: ChatCodec,
    tools: ToolFormat | None,
    result: GenerateResult,
    *,
    number: int,
    forced: str,
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
    text_shown = forced + text[:length]
    parsed = tools.parse(text_shown) if tools is not None else ParsedReply(content=text_shown)
    calls = tuple(
        ToolCall(id=f"call_{number:05d}{place:04d}", name=call.name, arguments=call.arguments)
        for place, call in enumerate(parsed.tool_calls)
    )
    cut = "length" if openai_finish_reason(result.finish) == "length" else ""
    return Message(
        role="assistant", content=parsed.content, tool_calls=calls, finish_reason=cut
    ), length


def text_deltas(
    codec: ChatCodec, result: GenerateResult, *, length: int, logprobs: bool
) -> tuple[TextDelta, ...]:
    """Return the first `length` characters of the turn's text as deltas; without
    `logprobs` they have no entries.
    """
    deltas: list[TextDelta] = []
    entries: list[tuple[str, float]] = []
    for token, logprob, text in zip(
        result.tokens, result.logprobs, codec.token_texts(result.tokens), strict=True
    ):
        if not length:
            break
        if logprobs:
            entries.append((codec.decode([token]), logprob))
        if text:
            deltas.append(TextDelta(text=text[:length], entries=tuple(entries)))
            length -= len(deltas[-1].text)
            entries = []
    return tuple(deltas)


def finish_reason(message: Message, finish: FinishReason) -> str:
    """Return OpenAI's name for how a turn ended."""
    word = openai_finish_reason(finish)
    return "tool_calls" if word == "stop" and message.tool_calls else word


def completion(reply: ChatReply, chat: ChatRequest) -> Json:
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
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def completion_chunks(reply: ChatReply, chat: ChatRequest, *, forced: str) -> Iterator[Json]:
    """Yield the chunks of a stream, the first of which names the role."""
    message = reply.message

    def chunk(delta: Json, entries: Sequence[TextDelta] = (), reason: str | None = None) -> Json:
        logprobs = _logprobs(entries, chat) if entries else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        tail = {"usage": None} if chat.include_usage else {}
        return {**_head(reply, "chat.completion.chunk"), "choices": [choice], **tail}

    yield chunk({"role": "assistant", "content": None if message.tool_calls else ""})
    if message.tool_calls:
        # Calls are parsed once the turn is complete: only then it is known where a call
        # begins and which text surrounds it.
        yield chunk({"content": message.content or None}, reply.deltas)
        for index, call in enumerate(openai_calls(message)):
            yield chunk(
                {
                    "tool_calls": [
                        {"index": index, **call, "function": {**call["function"], "arguments": ""}}
                    ]
                }
            )
            arguments = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
            yield chunk({"tool_calls": [arguments]})
    else:
        if forced:
            yield chunk({"content": forced})
        for delta in reply.deltas:
            yield chunk({"content": delta.text}, [delta])
    yield chunk({}, (), reply.finish_reason)
    if chat.include_usage:
        yield {**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)}


def _logprobs(deltas: Sequence[TextDelta], chat: ChatRequest) -> Json | None:
    if not chat.logprobs:
        return None
    content: list[Json] = []
    for text, logprob in (entry for delta in deltas for entry in delta.entries):
        # The bytes of part of a character cannot be told from its text.
        entry: Json = {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }
        content.append({**entry, "top_logprobs": [entry] * chat.top_logprobs})
    return {"content": content, "refusal": None}


def _head(reply: ChatReply, kind: str) -> Json:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": None,
    }


def _usage(reply: ChatReply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
