"""OpenAI's completions API, with vLLM's additions: text or tokens continue, without a
chat template. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.deltas import TextDelta, TokenEntry
from rollweave.rollout.gateway.refusals import bad
from rollweave.rollout.gateway.requests import ChatRequest, Common, read, reading_of
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
    with_choices,
)
from rollweave.schema.serving import FinishReason, TokenChances

MAX_TOKENS: Final = 16
"""Tokens of an answer if the request does not say: OpenAI's default."""

MAX_PARTS: Final = 2**20 + 1000
"""Maximum number of JSON strings, commas and opening brackets in one request: a prompt
of a million token ids, which are read ten times as fast as messages.
"""

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
        entries = [entry for delta in reply.deltas for entry in delta.entries]
        if chat.token_names or chat.token_ids:
            # All sampled tokens, including the tokens whose text is not shown.
            entries += reply.hidden(len(entries))
        choice: Json = {
            "index": 0,
            "text": self.echoed(head, chat) + ("" if chat.only_prompt else reply.message.content),
            "logprobs": self.logprobs(
                head, chat, () if chat.only_prompt else entries, reply if chat.echo else None
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
