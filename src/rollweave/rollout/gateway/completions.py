"""OpenAI's completions API, with vLLM's additions: text or tokens continue, without a
chat template. Pure.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from pydantic import Field

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.deltas import ContradictionError, TextDelta
from rollweave.rollout.gateway.refusals import bad
from rollweave.rollout.gateway.requests import ChatRequest, Common, check_others, read
from rollweave.rollout.gateway.responses import ChatReply, Json, OpenAIApi, ReplyHead
from rollweave.schema.serving import FinishReason

MAX_TOKENS: Final = 16
"""Tokens of an answer if the request does not say: OpenAI's default."""

MAX_PARTS: Final = 2**20 + 1000
"""Maximum number of JSON strings, commas and opening brackets in one request: a prompt
of a million token ids, which are read ten times as fast as messages.
"""

KIND: Final = "text_completion"
"""The type of a response, and of a part of a stream."""

Token = Annotated[int, Field(ge=0, lt=2**31)]


class _Completion(Common):
    prompt: (
        str
        | Annotated[list[Token], Field(fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=1)]
        | Annotated[list[list[Token]], Field(min_length=1, max_length=1, fail_fast=True)]
    )
    model: str = ""
    logprobs: int | None = Field(None, ge=0)
    allowed_token_ids: Annotated[list[Token], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionsApi(OpenAIApi):
    """The API of one model. `scores_prompts` is true if `prompt_logprobs` is served."""

    prefix: Final = "cmpl"

    def __init__(self, codec: TextCodec, *, scores_prompts: bool = False) -> None:
        self._codec, self._scores_prompts = codec, scores_prompts

    def parse(self, body: bytes) -> ChatRequest:
        asked = read(body, _Completion, most=MAX_PARTS)
        check_others("", asked)
        if asked.logprobs and (asked.logprobs, asked.temperature) != (1, 0):
            rule = "must be 0 or null, or 1 at temperature 0: only the sampled token's is known"
            raise bad("logprobs", rule, asked.logprobs)
        if not self._scores_prompts and asked.prompt_logprobs is not None:
            raise bad("prompt_logprobs", "must be null in a session", asked.prompt_logprobs)
        if asked.prompt_logprobs not in (None, 0):
            rule = "must be 0 or null: only those of the prompt's tokens are known"
            raise bad("prompt_logprobs", rule, asked.prompt_logprobs)
        for name in ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"):
            value = getattr(asked, name)
            if asked.stream and value is not None and value is not False:
                raise bad(name, "must be null where stream is true", value)
        prompt = asked.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return ChatRequest(
            **asked.given(),
            source="prompt",
            prompt=prompt if isinstance(prompt, str) else tuple(_tokens(prompt)),
            max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs is not None,
            top_logprobs=asked.logprobs or 0,
            allowed=tuple(asked.allowed_token_ids or ()),
            prompt_logprobs=asked.prompt_logprobs is not None,
            token_ids=bool(asked.return_token_ids),
            token_names=bool(asked.return_tokens_as_token_ids),
        )

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        result = reply.result
        logprobs = _logprobs(reply.deltas, chat, offset=0)
        if chat.logprobs and (chat.token_names or chat.token_ids):
            # Token for token what was sampled, also those whose text is not shown.
            logprobs = {
                "tokens": [f"token_id:{token}" for token in result.tokens]
                if chat.token_names
                else [self._codec.decode([token]) for token in result.tokens],
                "token_logprobs": result.logprobs,
                "top_logprobs": None,
                "text_offset": [],
            }
        choice: Json = {
            "index": 0,
            "text": reply.message.content,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(reply, chat),
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end}
                for span in result.versions
            ],
        }
        if chat.token_ids:
            choice["token_ids"] = result.tokens
        if chat.prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs(chat, result.prompt_logprobs)
        return {**head.of(KIND), "choices": [choice], "usage": reply.usage()}

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "TextStream":
        return TextStream(head, chat)

    def _prompt_logprobs(self, chat: ChatRequest, logprobs: Sequence[float]) -> list[Json | None]:
        """Return each token of the prompt with its log-prob and text, as vLLM does: the
        first has none.
        """
        prompt = chat.prompt or ()
        tokens = self._codec.encode_literal(prompt) if isinstance(prompt, str) else prompt
        has_text = bool(self._codec.decode(tokens))
        entries: list[Json | None] = [None]
        for token, logprob in zip(tokens[1:], logprobs, strict=True):
            text = self._codec.decode([token]) if has_text else None
            entries.append({str(token): {"logprob": logprob, "decoded_token": text}})
        return entries


class TextStream:
    """The chunks of one stream."""

    def __init__(self, head: ReplyHead, chat: ChatRequest) -> None:
        self._head, self._chat = head, chat
        self._content = ""

    def progress(self, deltas: Sequence[TextDelta]) -> Iterator[Json]:
        for delta in deltas:
            yield self._chunk([delta])
            self._content += delta.text

    def rest(self, reply: ChatReply) -> Iterator[Json]:
        if not reply.message.content.startswith(self._content):
            raise ContradictionError("the text does not begin with what was sent")
        yield from self.progress(reply.deltas)
        yield self._chunk((), reply.finish_reason)
        if self._chat.include_usage:
            yield {**self._head.of(KIND), "choices": [], "usage": reply.usage()}

    def _chunk(self, deltas: Sequence[TextDelta], reason: str | None = None) -> Json:
        logprobs = _logprobs(deltas, self._chat, offset=len(self._content)) if deltas else None
        choice = {
            "index": 0,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        tail = {"usage": None} if self._chat.include_usage else {}
        return {**self._head.of(KIND), "choices": [choice], **tail}


def _tokens(prompt: object) -> Iterator[int]:
    assert isinstance(prompt, list), "text was handled"
    for token in prompt:
        assert isinstance(token, int), "of token ids, as validated"
        yield token


def _finish_reason(reply: ChatReply, chat: ChatRequest) -> str:
    """Return the finish reason: a client that asks for token ids, as vLLM's do, learns
    that a turn was aborted.
    """
    aborted = reply.result.finish is FinishReason.ABORTED
    return "abort" if aborted and chat.token_ids else reply.finish_reason


def _logprobs(deltas: Sequence[TextDelta], chat: ChatRequest, *, offset: int) -> Json | None:
    if not chat.logprobs:
        return None
    entries = [entry for delta in deltas for entry in delta.entries]
    texts = [text for text, _ in entries]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob in entries],
        "top_logprobs": [{text: logprob} for text, logprob in entries]
        if chat.top_logprobs
        else None,
        "text_offset": list(itertools.accumulate(map(len, texts), initial=offset))[:-1],
    }
