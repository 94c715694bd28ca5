"""The interface of all APIs: a turn as a message and a reply, and what the streams of
several APIs share. Pure.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from rollweave.rollout.chat.replies import ParsedReply, Thinking, ToolFormat
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.deltas import ContradictionError, TextDelta, TokenEntry
from rollweave.rollout.gateway.fields import RequestError, TooLongError
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    TokenChances,
    openai_finish_reason,
)

Json = dict[str, Any]


class ReplyHead(Struct, frozen=True, kw_only=True):
    """The fields of all chunks of a reply. `created` is in seconds of Unix time, and
    `prompt_tokens` counts the tokens of the `prompt`.
    """

    id: str
    created: int
    model: str
    prompt: tuple[int, ...] = ()
    prompt_tokens: int = 0

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
    """The reply to a client for a complete turn. In a stream, `deltas` are the deltas
    that the client has not received yet. `thought_tokens` counts the tokens of thoughts
    and their marks.
    """

    message: Message
    deltas: tuple[TextDelta, ...]
    finish_reason: str
    prompt_tokens: int
    result: GenerateResult
    thought_tokens: int = 0

    def usage(self) -> Json:
        """Return the usage in the terms of OpenAI's chat API."""
        cached, thoughts = self.result.cached_tokens, self.thought_tokens
        count = len(self.result.tokens)
        return usage_of(self.prompt_tokens, count) | details_of(cached, thoughts)

    def entries(self, chat: ChatRequest) -> list[TokenEntry]:
        """Return the tokens of the deltas; all sampled tokens if the client asks for
        their ids or names, including the tokens whose text is not shown.
        """
        entries = [entry for delta in self.deltas for entry in delta.entries]
        if chat.token_ids or chat.token_names:
            entries += self.hidden(len(entries))
        return entries

    def hidden(self, shown: int) -> tuple[TokenEntry, ...]:
        """Return the tokens after the first `shown`, whose text the answer lacks."""
        result, tops = self.result, self.result.top_logprobs
        return tuple(
            TokenEntry(result.tokens[at], result.logprobs[at], tops[at] if tops else ())
            for at in range(shown, len(result.tokens))
        )


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the counts of a usage in the terms of OpenAI's APIs."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def details_of(cached_tokens: int, thought_tokens: int) -> Json:
    """Return the other fields of a usage."""
    thoughts = {"completion_tokens_details": {"reasoning_tokens": thought_tokens}}
    prompt = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return prompt | (thoughts if thought_tokens else {})


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

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        """Read a request; with `counts`, a request whose tokens are only counted.
        Raises RequestError.
        """

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        """Return the body of a response that is not streamed."""

    def stream(self, head: ReplyHead, chat: ChatRequest) -> TurnStream:
        """Return the stream of a turn."""

    def event(self, event: Json) -> bytes:
        """Return an event as it is sent."""

    @property
    def end(self) -> bytes:
        """The bytes after the last event of a complete stream."""

    def count(self, tokens: int) -> Json:
        """Return the answer to a client that counts a prompt's tokens."""

    def error(self, error: RequestError) -> Json:
        """Return the body of an error."""

    def failed(self, head: ReplyHead, error: RequestError, chat: ChatRequest) -> Iterator[Json]:
        """Yield the events of a stream that fails before its first text; no events if
        the client reads the error from a plain response.
        """


def read_turn(
    codec: TextCodec,
    tools: ToolFormat | None,
    result: GenerateResult,
    *,
    number: int | str,
    stop: Sequence[str],
    stop_tokens: Sequence[int] = (),
    shows_stop: bool = False,
    thinking: Thinking | None = None,
) -> tuple[Message, int]:
    """Return the message of turn `number` of a session, and how many characters of the
    sampled text it contains.

    `tools` is None if calls are not parsed. `stop` and `stop_tokens` end the turn and
    are not part of its message, unless it `shows_stop`. With `thinking`, thoughts are
    divided from the content.
    """
    text = codec.text(result.tokens)
    if result.tokens and result.tokens[-1] in stop_tokens and not shows_stop:
        text = text[: len(codec.decode(result.tokens[:-1]))]
    length, stopped = min(
        ((place, end) for end in stop if (place := text.find(end)) >= 0),
        default=(len(text), ""),
    )
    length += len(stopped) if shows_stop else 0
    thoughts, text_shown = "", text[:length]
    if thinking is not None:
        thoughts, text_shown = thinking.split(text_shown)
    parsed = tools.parse(text_shown) if tools is not None else ParsedReply(content=text_shown)
    calls = tuple(
        ToolCall(id=f"call_{number:0>5}{place:04d}", name=call.name, arguments=call.arguments)
        for place, call in enumerate(parsed.tool_calls)
    )
    cut = "length" if openai_finish_reason(result.finish) == "length" else ""
    message = Message(
        role="assistant",
        content=parsed.content,
        tool_calls=calls,
        finish_reason=cut,
        thoughts=thoughts,
    )
    return message, length


def finish_reason(message: Message, finish: FinishReason) -> str:
    """Return OpenAI's name for how a turn ended."""
    word = openai_finish_reason(finish)
    return "tool_calls" if word == "stop" and message.tool_calls else word


def check_begun(message: Message, thoughts: str, content: str) -> None:
    """Raise ContradictionError unless the message of a complete turn begins with the
    thoughts and the content that were sent.
    """
    if not message.thoughts.startswith(thoughts) or not message.content.startswith(content):
        raise ContradictionError("the message does not begin with the text that was sent")


class PlainErrors:
    """An API whose clients read errors before the first text from plain responses."""

    def failed(self, head: ReplyHead, error: RequestError, chat: ChatRequest) -> Iterator[Json]:
        del head, error, chat
        yield from ()


class OpenAIApi(PlainErrors):
    """The form of events and errors that OpenAI's APIs share."""

    end: Final = b"data: [DONE]\n\n"

    def event(self, event: Json) -> bytes:
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def count(self, tokens: int) -> Json:
        return {"count": tokens}

    def error(self, error: RequestError) -> Json:
        body: Json = error.body()
        if isinstance(error, TooLongError):
            body["error"]["message"] = (
                f"This model's maximum context length is {error.limit} tokens. However, your "
                f"messages resulted in {error.tokens} tokens. Please reduce the length of the "
                "messages."
            )
        return body


class BlockApi:
    """The form of events in APIs that send a turn as blocks."""

    end: Final = b""

    def event(self, event: Json) -> bytes:
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def prompt_scores(
    codec: TextCodec, head: ReplyHead, reply: ChatReply, chat: ChatRequest
) -> list[Json | None] | None:
    """Return each token of the prompt with its log-prob and text, and the likeliest
    tokens in its place, as vLLM does: the first token has no log-prob. None if they are
    not wanted.
    """
    if not chat.prompt_logprobs:
        return None
    logprobs, tops = reply.result.prompt_logprobs, reply.result.prompt_top_logprobs
    has_text = bool(codec.decode(head.prompt))

    def score(token: int, logprob: float, rank: int | None) -> Json:
        text = codec.decode([token]) if has_text else None
        return {str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}}

    scores: list[Json | None] = [None]
    for at, token in enumerate(head.prompt[1:]):
        place = score(token, logprobs[at], None)
        for rank, (each, logprob) in enumerate(tops[at][: chat.prompt_top] if tops else (), 1):
            place |= score(each, logprob, rank)
        scores.append(place)
    return scores


def usage_so_far(head: ReplyHead, chat: ChatRequest, tokens: int) -> Json:
    """Return the field `usage` of a part of a stream, if the stream has usages."""
    if not chat.include_usage:
        return {}
    return {"usage": usage_of(head.prompt_tokens, tokens) if chat.usage_always else None}


def token_name(codec: TextCodec, token: int, chat: ChatRequest) -> str:
    """Return how a token is named in log-probs: by its text, or by its id."""
    return f"token_id:{token}" if chat.token_names else codec.decode([token])


def top_of(entry: TokenEntry, chat: ChatRequest) -> TokenChances:
    """Return the tokens that are shown as alternatives to a sampled token: the
    likeliest tokens, or the tokens that the request names, and the sampled token.
    """
    sampled = (entry.token, entry.logprob)
    if chat.logprob_ids:
        named = entry.top[-len(chat.logprob_ids) :]
        return named if any(entry.token == token for token, _ in named) else (*named, sampled)
    if chat.top_logprobs and not entry.top:
        return (sampled,)  # greedy: the sampled token is the likeliest
    return entry.top[: chat.top_logprobs]


THOUGHTS: Final = "thoughts"
TEXT: Final = "text"
"""Kinds of blocks."""


class BlockStream(ABC):
    """The events of one turn: a block of thoughts, a block of text, and a block for
    each call, as far as the turn has them.
    """

    def __init__(self) -> None:
        self._begun = False
        self._blocks = 0
        """Number of complete blocks, and therefore the number of the next block."""
        self._open = ""
        """The kind of the block that is being sent; "" if no block is."""
        self._sent = {THOUGHTS: "", TEXT: ""}

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        """Yield events with the text that is certain before the turn is complete."""
        yield from self._more(THOUGHTS, "".join(delta.thoughts for delta in deltas))
        yield from self._more(TEXT, "".join(delta.text for delta in deltas))

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other events of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """
        message = reply.message
        check_begun(message, self._sent[THOUGHTS], self._sent[TEXT])
        yield from self._more(THOUGHTS, message.thoughts[len(self._sent[THOUGHTS]) :])
        yield from self._more(TEXT, message.content[len(self._sent[TEXT]) :])
        if not self._begun:
            yield from self._begin()
        yield from self._complete()
        for call in message.tool_calls:
            yield from self._call(self._blocks, call)
            self._blocks += 1
        yield from self._end(reply)

    def _more(self, kind: str, text: str) -> Iterator[Json]:
        """Yield events with more text of a block, after the events that must precede
        it.
        """
        if not text:
            return
        if not self._begun:
            self._begun = True
            yield from self._begin()
        if self._open != kind:
            yield from self._complete()
            self._open = kind
            yield from self._open_block(kind)
        self._sent[kind] += text
        yield from self._delta(kind, text)

    def _complete(self) -> Iterator[Json]:
        if self._open:
            yield from self._close_block(self._open, self._sent[self._open])
            self._blocks += 1
            self._open = ""

    @abstractmethod
    def _begin(self) -> Iterator[Json]:
        """Yield the events before the first block."""

    @abstractmethod
    def _open_block(self, kind: str) -> Iterator[Json]:
        """Yield the events at the beginning of block number `_blocks`."""

    @abstractmethod
    def _delta(self, kind: str, text: str) -> Iterator[Json]:
        """Yield events with more of the block."""

    @abstractmethod
    def _close_block(self, kind: str, text: str) -> Iterator[Json]:
        """Yield the events at the end of the block, whose whole text is `text`."""

    @abstractmethod
    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        """Yield the events of a call, which is block `index`."""

    @abstractmethod
    def _end(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the events after the last block."""
