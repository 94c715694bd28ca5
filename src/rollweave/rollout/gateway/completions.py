"""OpenAI's chat and completions APIs, with vLLM's additions: how their requests are
read, and how a turn is written, complete or as a stream of chunks. Pure.

Invariants: the chunks' text and calls add up to the complete response; a chunk never
contains part of a character; the stop text and the token that ends a turn are not
shown. A completion continues text or tokens without a chat template.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from rollweave.rollout.chat.replies import openai_calls
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.deltas import TextDelta, TokenEntry
from rollweave.rollout.gateway.fields import bad
from rollweave.rollout.gateway.requests import ChatRequest, Common, parse_chat, read, reading_of
from rollweave.rollout.gateway.responses import (
    ChatReply,
    Json,
    OpenAIApi,
    ReplyHead,
    check_begun,
    prompt_scores,
    token_name,
    top_of,
    usage_so_far,
)
from rollweave.rollout.gateway.served import (
    MAX_CHOICES,
    MAX_TOP,
    Served,
    Token,
    checked_length,
    parse_batch,
    parse_served_chat,
    with_choices,
)
from rollweave.schema.serving import (
    FinishReason,
    TokenChances,
)

MAX_TOKENS: Final = 16
"""Tokens of an answer if the request does not say: OpenAI's default."""

MAX_PARTS: Final = 2**20 + 1000
"""Maximum number of JSON strings, commas and opening brackets in one request: a prompt
of a million token ids, which are read ten times as fast as messages.
"""

CHUNK: Final = "chat.completion.chunk"
"""The type of a part of a stream in OpenAI's API."""


KIND: Final = "text_completion"
"""The type of a response, and of a part of a stream."""

Tokens = Annotated[list[Token], Field(fail_fast=True)]


class _Completion(Common):
    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=1, fail_fast=True)]
    )
    model: str = ""
    logprobs: int | None = Field(None, ge=0)
    allowed_token_ids: Tokens | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check_top(self) -> None:
        """Raise RequestError for log-probs of tokens that are not known."""
        if self.logprobs and (self.logprobs, self.temperature) != (1, 0):
            rule = "must be 0 or null, or 1 at temperature 0: only the sampled token's is known"
            raise bad("logprobs", rule, self.logprobs)
        for name in ("return_token_ids", "return_tokens_as_token_ids"):
            if self.stream and getattr(self, name):
                raise bad(name, "must be null where stream is true", getattr(self, name))

    def fields(self, codec: TextCodec) -> dict[str, Any]:
        """Return the fields of `ChatRequest` that only completions have."""
        del codec
        return {
            "allowed": tuple(self.allowed_token_ids or ()),
            "token_ids": bool(self.return_token_ids),
            "token_names": bool(self.return_tokens_as_token_ids),
        }

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Return the prompts: texts or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        several = [
            each if isinstance(each, str) else tuple(_ids(each))
            for each in prompt
            if not isinstance(each, int)
        ]
        return several or [tuple(_ids(prompt))]


class _ServedCompletion(Served, _Completion):
    prompt: (  # type: ignore[assignment]
        str
        | Tokens
        | Annotated[list[str | Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)

    def check_top(self) -> None:
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens", "must be at least 1 unless echo is true", self.max_tokens)

    def fields(self, codec: TextCodec) -> dict[str, Any]:
        form = self.form(adds_special=True)
        alone = {"only_prompt": self.max_tokens == 0, "prompt_form": form}
        return {**Served.fields(self, codec), **alone}


class CompletionsApi(OpenAIApi):
    """The API of one model. With `served`, requests may have the fields that are
    allowed outside of a run.
    """

    prefix: Final = "cmpl"

    def __init__(self, codec: TextCodec, *, served: bool = False) -> None:
        self._codec, self._kind = codec, _ServedCompletion if served else _Completion

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        del counts
        asked = read(body, self._kind, most=MAX_PARTS)
        reading = reading_of(asked)
        asked.check_top()
        first, *others = asked.prompts()
        max_tokens = MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        chat = ChatRequest(
            **asked.given(),
            source="prompt",
            unread=tuple(reading.unread),
            divides=False,
            prompt=first,
            max_tokens=max(1, max_tokens),
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
            **asked.fields(self._codec),
        )
        prompts = [chat, *(msgspec.structs.replace(chat, prompt=prompt) for prompt in others)]
        n = getattr(asked, "n", None)
        return with_choices([checked_length(chat) for chat in prompts], n or 1)

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        result = reply.result
        choice: Json = {
            "index": 0,
            "text": self.echoed(head, chat) + ("" if chat.only_prompt else reply.message.content),
            "logprobs": self.logprobs(
                head,
                chat,
                () if chat.only_prompt else reply.entries(chat),
                reply if chat.echo else None,
            ),
            "finish_reason": _finish_reason(reply, chat),
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end}
                for span in result.versions
            ],
            "token_ids": result.tokens if chat.token_ids else None,
            "prompt_token_ids": head.prompt if chat.token_ids else None,
            "prompt_logprobs": prompt_scores(self._codec, head, reply, chat),
        }
        return {**head.of(KIND), "choices": [choice], "usage": reply.usage()}

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "TextStream":
        return TextStream(self, head, chat)

    def echoed(self, head: ReplyHead, chat: ChatRequest) -> str:
        """Return the text of the prompt, if it is wanted."""
        return self._codec.decode(head.prompt) if chat.echo else ""

    def logprobs(
        self,
        head: ReplyHead,
        chat: ChatRequest,
        entries: Sequence[TokenEntry],
        prompt: ChatReply | None = None,
        *,
        offset: int = 0,
    ) -> Json | None:
        """Return the log-probs of tokens. If a reply is given, the log-probs of its
        prompt come first. `offset` is the place of the tokens' text.
        """
        if not chat.logprobs:
            return None
        shown: list[tuple[TokenEntry, TokenChances]] = [
            (entry, top_of(entry, chat)) for entry in entries
        ]
        names, offsets = list[str](), list[int]()
        logprobs, tops = list[float | None](), list[Json | None]()

        def name(token: int) -> None:
            nonlocal offset
            names.append(token_name(self._codec, token, chat))
            offsets.append(offset)
            offset += len(self._codec.decode([token]))

        if prompt is not None:
            name(head.prompt[0])
            logprobs.append(None)
            tops.append(None)
            shown = [*_scored(head, prompt, chat), *shown]
        for entry, top in shown:
            name(entry.token)
            logprobs.append(entry.logprob)
            sampled = (entry.token, entry.logprob)
            named = dict[str, float]()
            for each, logprob in (sampled, *top):  # tokens may share a text
                named.setdefault(token_name(self._codec, each, chat), logprob)
            tops.append(named)
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _ids(tokens: Sequence[object]) -> Iterator[int]:
    return (token for token in tokens if isinstance(token, int))


class TextStream:
    """The chunks of one stream. A stream that begins with its prompt waits for the
    log-probs of the prompt, which come with the complete turn.
    """

    def __init__(self, api: CompletionsApi, head: ReplyHead, chat: ChatRequest) -> None:
        self._api, self._head, self._chat = api, head, chat
        self._content, self._tokens = "", 0
        self._waits = chat.echo or chat.only_prompt
        self._begun = False

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        if not self._waits:
            for delta in deltas:
                yield self._chunk(delta.text, delta.entries)

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        check_begun(reply.message, "", self._content)
        chat, reason = self._chat, _finish_reason(reply, self._chat)
        deltas = () if chat.only_prompt else reply.deltas
        if chat.echo:
            text = self._api.echoed(self._head, chat)
            yield self._chunk(text, (), reason if chat.only_prompt else None, reply)
        hidden = reply.hidden(self._tokens + sum(len(delta.entries) for delta in deltas))
        for number, delta in enumerate(deltas, 1):
            ends = number == len(deltas) and not hidden
            yield self._chunk(delta.text, delta.entries, reason if ends else None)
        if not chat.only_prompt and (hidden or not deltas):
            yield self._chunk("", hidden, reason)
        if chat.include_usage:
            yield {**self._head.of(KIND), "choices": [], "usage": reply.usage()}

    def _chunk(
        self,
        text: str,
        entries: Sequence[TokenEntry],
        reason: str | None = None,
        prompt: ChatReply | None = None,
    ) -> Json:
        chat, offset = self._chat, len(self._content)
        shown = entries if text or chat.token_ids or chat.token_names else ()
        logprobs = None
        if shown or prompt is not None:
            logprobs = self._api.logprobs(self._head, chat, shown, prompt, offset=offset)
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if chat.token_ids:
            choice["token_ids"] = [entry.token for entry in entries]
            if not self._begun:
                choice["prompt_token_ids"] = self._head.prompt
        self._begun = True
        self._content += "" if prompt is not None else text
        self._tokens += len(entries)
        usage = usage_so_far(self._head, chat, self._tokens)
        return {**self._head.of(KIND), "choices": [choice], **usage}


def _scored(
    head: ReplyHead, reply: ChatReply, chat: ChatRequest
) -> Iterator[tuple[TokenEntry, TokenChances]]:
    """Yield the tokens of the prompt from the second on, each with the likeliest tokens
    in its place.
    """
    scores, tops = reply.result.prompt_logprobs, reply.result.prompt_top_logprobs
    for at, (token, logprob) in enumerate(zip(head.prompt[1:], scores, strict=True)):
        yield TokenEntry(token, logprob), tops[at][: chat.top_logprobs] if tops else ()


def _finish_reason(reply: ChatReply, chat: ChatRequest) -> str:
    """Return the finish reason. A client that asks for token ids, as vLLM's clients do,
    learns that a turn was aborted.
    """
    if chat.only_prompt:
        return "length"
    aborted = reply.result.finish is FinishReason.ABORTED
    return "abort" if aborted and chat.token_ids else reply.finish_reason


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
        "logprobs": _logprobs(codec, reply.entries(chat), chat),
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
