"""Render a turn as a response of OpenAI's chat API, complete or as a stream of chunks,
and the interface of all APIs. Pure.

Invariants: the chunks' text and calls add up to the complete response; a chunk never
contains part of a character; the stop text and the token that ends a turn are not
shown.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.chat.thoughts import Thinking
from rollweave.rollout.chat.tools import ParsedReply, ToolFormat, openai_calls
from rollweave.rollout.gateway.deltas import ContradictionError, TextDelta, TokenEntry
from rollweave.rollout.gateway.refusals import RequestError, TooLongError
from rollweave.rollout.gateway.requests import ChatRequest, parse_chat
from rollweave.rollout.gateway.served import parse_batch, parse_served_chat
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    TokenChances,
    openai_finish_reason,
)

Json = dict[str, Any]

CHUNK: Final = "chat.completion.chunk"
"""The type of a part of a stream in OpenAI's API."""


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


class OpenAIApi:
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

    def failed(self, head: ReplyHead, error: RequestError, chat: ChatRequest) -> Iterator[Json]:
        del head, error, chat
        yield from ()


class ChatApi(OpenAIApi):
    """OpenAI's chat API. With `served`, requests may have the fields that are allowed
    outside of a run.
    """

    prefix: Final = "chatcmpl"

    def __init__(self, codec: TextCodec, *, served: bool = False) -> None:
        self._codec, self._served = codec, served

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        del counts
        return parse_served_chat(body, self._codec) if self._served else parse_chat(body)

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        return completion(self._codec, head, reply, chat)

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "Chunks":
        return Chunks(self._codec, head, chat)


class BatchApi(ChatApi):
    """vLLM's chat API of several conversations in one request."""

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        del counts
        return parse_batch(body, self._codec)


def completion(codec: TextCodec, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
    """Return the body of a response that is not streamed."""
    entries = [entry for delta in reply.deltas for entry in delta.entries]
    if chat.token_ids or chat.token_names:
        entries += reply.hidden(len(entries))
    content = echoed(chat) + reply.message.content
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": content or (None if reply.message.tool_calls else ""),
            "refusal": None,
            **({"reasoning_content": reply.message.thoughts} if reply.message.thoughts else {}),
            **({"tool_calls": openai_calls(reply.message)} if reply.message.tool_calls else {}),
        },
        "logprobs": _logprobs(codec, entries, chat),
        "finish_reason": reply.finish_reason,
        "token_ids": reply.result.tokens if chat.token_ids else None,
    }
    return {
        **head.of("chat.completion"),
        "choices": [choice],
        "usage": reply.usage(),
        "prompt_token_ids": head.prompt if chat.token_ids else None,
        "prompt_logprobs": prompt_scores(codec, head, reply, chat),
    }


def echoed(chat: ChatRequest) -> str:
    """Return the given beginning of the agent's message, if the client wants it."""
    last = chat.messages[-1:] if chat.echo and chat.prompt_form.continues_last else ()
    return last[0].content if last else ""


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


class Chunks:
    """The chunks of one stream. The first chunk names the role."""

    def __init__(self, codec: TextCodec, head: ReplyHead, chat: ChatRequest) -> None:
        self._codec, self._head, self._chat = codec, head, chat
        self._content = self._thoughts = ""
        self._begun = False
        self._tokens = 0

    def progress(self, deltas: Sequence[TextDelta], reason: str | None = None) -> Iterator[Json]:
        """Yield chunks with the text that is certain before the turn is complete; the
        last chunk has the `reason` for which the turn has ended.
        """
        if deltas and not self._begun:
            yield from self._begin()
        for number, delta in enumerate(deltas, 1):
            self._content += delta.text
            self._thoughts += delta.thoughts
            ends, entries = reason if number == len(deltas) else None, delta.entries
            if delta.thoughts:
                told = {"reasoning_content": delta.thoughts}
                yield self._chunk(told, entries, None if delta.text else ends)
                entries = ()
            if delta.text or not delta.thoughts:
                yield self._chunk({"content": delta.text}, entries, ends)

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        """Yield the other chunks of a complete turn.

        Raises ContradictionError if its message does not begin with what was sent.
        """
        message = reply.message
        check_begun(message, self._thoughts, self._content)
        if not self._begun:
            yield from self._begin(no_content=bool(message.tool_calls))
        sent = self._tokens + sum(len(delta.entries) for delta in reply.deltas)
        hidden = reply.hidden(sent)
        shows_all = self._chat.token_ids or self._chat.token_names
        ended = False
        if message.tool_calls:
            # Calls are parsed once the turn is complete: only then is the text around
            # them known.
            if left := message.thoughts[len(self._thoughts) :]:
                yield self._chunk({"reasoning_content": left})
            left = message.content[len(self._content) :]
            entries = [entry for delta in reply.deltas for entry in delta.entries]
            yield self._chunk({"content": left or None}, entries)
            for index, call in enumerate(openai_calls(message)):
                named = {**call, "function": {**call["function"], "arguments": ""}}
                yield self._chunk({"tool_calls": [{"index": index, **named}]})
                arguments = {"arguments": call["function"]["arguments"]}
                yield self._chunk({"tool_calls": [{"index": index, "function": arguments}]})
        else:
            ended = bool(reply.deltas) and not hidden
            yield from self.progress(reply.deltas, reply.finish_reason if ended else None)
        if not ended:
            self._tokens = len(reply.result.tokens) - (len(hidden) if shows_all else 0)
            yield self._chunk({}, hidden if shows_all else (), reply.finish_reason)
        if self._chat.include_usage:
            yield {**self._head.of(CHUNK), "choices": [], "usage": reply.usage()}

    def _begin(self, *, no_content: bool = False) -> Iterator[Json]:
        self._begun = True
        chunk = self._chunk({"role": "assistant", "content": None if no_content else ""})
        yield chunk | ({"prompt_token_ids": self._head.prompt} if self._chat.token_ids else {})
        if given := echoed(self._chat):
            yield self._chunk({"content": given})

    def _chunk(
        self, delta: Json, entries: Sequence[TokenEntry] = (), reason: str | None = None
    ) -> Json:
        self._tokens += len(entries)
        logprobs = _logprobs(self._codec, entries, self._chat) if entries else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._chat.token_ids and entries:
            choice["token_ids"] = [entry.token for entry in entries]
        return {
            **self._head.of(CHUNK),
            "choices": [choice],
            **usage_so_far(self._head, self._chat, self._tokens),
        }


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


def _logprobs(codec: TextCodec, entries: Sequence[TokenEntry], chat: ChatRequest) -> Json | None:
    if not chat.logprobs:
        return None

    def shown(token: int, logprob: float) -> Json:
        text = token_name(codec, token, chat)
        # The bytes of part of a character cannot be recovered from its text.
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    content = [
        {
            **shown(entry.token, entry.logprob),
            "top_logprobs": [shown(*each) for each in top_of(entry, chat)],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}
