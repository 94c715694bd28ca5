"""A turn as OpenAI's chat API tells it: whole, or as the chunks of a stream. Pure.

Invariants: the chunks' text and calls add up to those of the whole reply; a chunk never
holds part of a character; the stop text and the token that ends a turn are not shown.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.tools import Speech, ToolFormat
from rollweave.rollout.gateway.dialogue import Ask
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import Finish, GenerateResult, finish_word

Json = dict[str, Any]


class Piece(Struct, frozen=True, kw_only=True):
    """Text that one or several tokens show, the smallest of whole characters.

    `entries` are their `(text, log-prob)`.
    """

    text: str
    entries: tuple[tuple[str, float], ...]


class Reply(Struct, frozen=True, kw_only=True):
    """What the client sees of a turn. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str
    message: Message
    pieces: tuple[Piece, ...]
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
    """The message of turn `number` of a session, and how many characters of the sampled
    text are in it.

    `tools` is None where calls are not read. `stop` and `stop_tokens` end the turn and
    are not part of its message.
    """
    text = codec.text(result.tokens)
    if result.tokens and result.tokens[-1] in stop_tokens:
        text = text[: len(codec.decode(result.tokens[:-1]))]
    length = min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))
    said = forced + text[:length]
    speech = tools.read(said) if tools is not None else Speech(content=said)
    calls = tuple(
        ToolCall(id=f"call_{number:05d}{place:04d}", name=call.name, arguments=call.arguments)
        for place, call in enumerate(speech.tool_calls)
    )
    cut = "length" if finish_word(result.finish) == "length" else ""
    return Message(
        role="assistant", content=speech.content, tool_calls=calls, finish_reason=cut
    ), length


def pieces_of(
    codec: ChatCodec, result: GenerateResult, *, length: int, logprobs: bool
) -> tuple[Piece, ...]:
    """The first `length` characters of the turn's text, in pieces; without `logprobs`
    they have no entries.
    """
    found: list[Piece] = []
    entries: list[tuple[str, float]] = []
    for token, logprob, text in zip(
        result.tokens, result.logprobs, codec.pieces(result.tokens), strict=True
    ):
        if not length:
            break
        if logprobs:
            entries.append((codec.decode([token]), logprob))
        if text:
            found.append(Piece(text=text[:length], entries=tuple(entries)))
            length -= len(found[-1].text)
            entries = []
    return tuple(found)


def finish_reason(message: Message, finish: Finish) -> str:
    """OpenAI's word for how a turn ended."""
    word = finish_word(finish)
    return "tool_calls" if word == "stop" and message.tool_calls else word


def whole(reply: Reply, ask: Ask) -> Json:
    """The body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": reply.message.content or (None if reply.message.tool_calls else ""),
            "refusal": None,
            **({"tool_calls": _calls(reply.message)} if reply.message.tool_calls else {}),
        },
        "logprobs": _logprobs(reply.pieces, ask),
        "finish_reason": reply.finish_reason,
    }
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, ask: Ask, *, forced: str) -> Iterator[Json]:
    """The chunks of a stream, the first of which names the role."""
    message = reply.message

    def chunk(delta: Json, pieces: Sequence[Piece] = (), reason: str | None = None) -> Json:
        logprobs = _logprobs(pieces, ask) if pieces else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        tail = {"usage": None} if ask.include_usage else {}
        return {**_head(reply, "chat.completion.chunk"), "choices": [choice], **tail}

    yield chunk({"role": "assistant", "content": None if message.tool_calls else ""})
    if message.tool_calls:
        # Read once the turn is whole: where a call begins and what is text around it is
        # known only then.
        yield chunk({"content": message.content or None}, reply.pieces)
        for index, call in enumerate(_calls(message)):
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
        for piece in reply.pieces:
            yield chunk({"content": piece.text}, [piece])
    yield chunk({}, (), reply.finish_reason)
    if ask.include_usage:
        yield {**_head(reply, "chat.completion.chunk"), "choices": [], "usage": _usage(reply)}


def _calls(message: Message) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


def _logprobs(pieces: Sequence[Piece], ask: Ask) -> Json | None:
    if not ask.logprobs:
        return None
    content: list[Json] = []
    for text, logprob in (entry for piece in pieces for entry in piece.entries):
        # Part of a character has no bytes that its text would tell.
        entry: Json = {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }
        content.append({**entry, "top_logprobs": [entry] * ask.top_logprobs})
    return {"content": content, "refusal": None}


def _head(reply: Reply, kind: str) -> Json:
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": None,
    }


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
