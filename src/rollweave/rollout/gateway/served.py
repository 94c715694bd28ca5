"""The fields of vLLM's and OpenAI's APIs that only requests outside of a run have: they
change the distribution of sampled tokens, ask for several choices, or shape the prompt.
In a session of a run they are refused unless they ask for nothing. Pure.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, Field

from rollweave.io.http.messages import OpenModel
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.fields import Reading, Unread, bad
from rollweave.rollout.gateway.requests import (
    Chat,
    ChatRequest,
    PromptForm,
    chat_request,
    read,
)
from rollweave.schema.base import mix
from rollweave.schema.serving import Adjustments

MAX_CHOICES: Final = 1024
"""Maximum number of choices of one request."""

MAX_TOP: Final = 20
"""Maximum number of likeliest tokens that are shown for each token, as in vLLM."""

MAX_WORDS: Final = 1000
"""Maximum number of texts in `bad_words`, and of tokens in `logprob_token_ids`."""

BIAS: Final = 100.0
"""Maximum of a bias; larger biases are cut to it, as in vLLM."""

SEED: Final = (1 << 63) - 1
"""Mask of the seeds of further choices."""

Token = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Served(BaseModel):
    """The fields that chat and completions share."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_WORDS)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    logprob_token_ids: Annotated[list[Token], Field(max_length=MAX_WORDS)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None

    def fields(self, codec: TextCodec) -> dict[str, Any]:
        """Return these fields as fields of `ChatRequest`. Raises RequestError."""
        if self.prompt_logprobs is not None and getattr(self, "stream", None):
            raise bad("prompt_logprobs", "must be null where stream is true", self.prompt_logprobs)
        if getattr(self, "stream_options", None) is not None and not getattr(self, "stream", None):
            raise bad("stream_options", "must be null unless stream is true", self.stream_options)  # type: ignore[attr-defined]
        return {
            "allowed": tuple(self.allowed_token_ids or ()),
            "adjustments": self._adjustments(codec),
            "logprob_ids": tuple(dict.fromkeys(self.logprob_token_ids or ())),
            "prompt_logprobs": self.prompt_logprobs is not None,
            "prompt_top": self.prompt_logprobs or 0,
            "token_ids": bool(self.return_token_ids),
            "token_names": bool(self.return_tokens_as_token_ids),
            "hides_special": bool(self.skip_special_tokens),
            "shows_stop": bool(self.include_stop_str_in_output),
            "echo": bool(self.echo),
        }

    def _adjustments(self, codec: TextCodec) -> Adjustments | None:
        given: dict[str, Any] = {
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignores_eos": self.ignore_eos,
            "bias": tuple(_biases(self.logit_bias)) if self.logit_bias else None,
            "banned": tuple(_words(self.bad_words, codec)) if self.bad_words else None,
        }
        adjustments = Adjustments(**{name: each for name, each in given.items() if each})
        return None if adjustments == Adjustments() else adjustments

    def form(self, *, adds_special: bool, **more: Any) -> PromptForm:
        """Return how the prompt is made; `adds_special` is the API's default."""
        given = self.add_special_tokens
        return PromptForm(
            adds_special=adds_special if given is None else given,
            most=self.truncate_prompt_tokens,
            keeps_first=self.truncation_side == "right",
            **more,
        )


class _Batch(OpenModel):
    messages: Annotated[list[list[Any]], Field(min_length=1, max_length=MAX_CHOICES)]


class ServedChat(Chat, Served):
    """The fields of a chat request."""

    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str = ""

    def check_top(self) -> None:
        pass  # the embedded engine reports them

    def request(self, codec: TextCodec) -> ChatRequest:
        """Return the request that has these fields. Raises RequestError."""
        form = self.form(
            adds_special=False,
            opens_turn=self.add_generation_prompt is not False and not self.continue_final_message,
            continues_last=bool(self.continue_final_message),
        )
        if self.continue_final_message and self.add_generation_prompt:
            rule = "must be false where continue_final_message is true"
            raise bad("add_generation_prompt", rule, self.add_generation_prompt)
        chat = msgspec.structs.replace(
            chat_request(self),
            prompt_form=form,
            divides=form.opens_turn,  # thoughts may have begun before
            **self.fields(codec),
        )
        return with_choices([checked_length(chat)], self.n or 1)


def parse_served_chat(body: bytes, codec: TextCodec) -> ChatRequest:
    """Parse the body of a chat request outside of a run. Raises RequestError."""
    return read(body, ServedChat).request(codec)


def parse_batch(body: bytes, codec: TextCodec) -> ChatRequest:
    """Parse the body of a request with several conversations, with one choice for each
    conversation. Raises RequestError.
    """
    asked = read(body, _Batch)
    fields = asked.model_extra or {}
    if fields.get("stream") or fields.get("n") not in (None, 1):
        raise bad("stream", "must be false, and n 1, with several conversations", True)
    chats = [
        parse_served_chat(json.dumps({**fields, "messages": messages}).encode(), codec)
        for messages in asked.messages
    ]
    return with_choices(chats, 1)


def checked_length(chat: ChatRequest) -> ChatRequest:
    """Return the request. Raises RequestError if its minimum of tokens exceeds its
    maximum.
    """
    least = 0 if chat.adjustments is None else chat.adjustments.min_tokens
    if chat.max_tokens is not None and least > chat.max_tokens:
        raise bad("min_tokens", f"must be at most max_tokens ({chat.max_tokens})", least)
    return chat


def with_choices(prompts: Sequence[ChatRequest], n: int) -> ChatRequest:
    """Return the first request, whose `others` are all further choices, `n` for each
    request. Raises RequestError for too many choices.
    """
    if len(prompts) * n > MAX_CHOICES:
        rule = f"must be at most {MAX_CHOICES} for all prompts together"
        raise bad("n", rule, len(prompts) * n)
    choices = [
        chat
        if number == 0
        else msgspec.structs.replace(
            chat, repeats=True, seed=None if chat.seed is None else mix(chat.seed, number) & SEED
        )
        for chat in prompts
        for number in range(n)
    ]
    return msgspec.structs.replace(choices[0], others=tuple(choices[1:]))


def _biases(given: Mapping[str, float]) -> Iterator[tuple[int, float]]:
    wrong = [key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 10)]
    if wrong:
        raise bad("logit_bias", "must have token ids as its keys", wrong)
    for key, value in given.items():
        yield int(key), max(-BIAS, min(BIAS, value))


def _words(words: Sequence[str], codec: TextCodec) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each text, at the beginning of a text and after a space."""
    for word in words:
        if not word.strip():
            raise bad("bad_words", "must have texts that are not blank", word)
        text = word.lstrip()
        alone, behind = codec.encode_literal(text), codec.encode_literal(" " + text)
        yield alone
        if behind[-len(alone) :] != alone:
            yield behind


# Text and tokens.


class _Either(OpenModel):
    messages: Any = None


class _Texts(OpenModel):
    model: str = ""
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    prompt: str


class _Conversation(ServedChat):
    return_token_strs: bool | None = None


class _Tokens(OpenModel):
    model: str = ""
    tokens: Annotated[list[Token], Field(fail_fast=True)]


def parse_tokenize(body: bytes, codec: TextCodec) -> tuple[ChatRequest, bool]:
    """Parse a request for the tokens of a text or of a conversation; return the
    request, and whether the tokens' spellings are wanted, too. Raises RequestError.
    """
    if read(body, _Either).messages is not None:
        asked = read(body, _Conversation)
        return asked.request(codec), bool(asked.return_token_strs)
    text, reading = read(body, _Texts), Reading()
    reading.request(text)
    form = PromptForm(adds_special=text.add_special_tokens is not False)
    chat = ChatRequest(
        model=text.model,
        source="prompt",
        unread=tuple(reading.unread),
        prompt=text.prompt,
        prompt_form=form,
    )
    return chat, bool(text.return_token_strs)


def parse_detokenize(body: bytes) -> tuple[tuple[int, ...], list[Unread]]:
    """Parse a request for the text of tokens; return the tokens, and the fields that
    are ignored. Raises RequestError.
    """
    asked, reading = read(body, _Tokens, most=2**20), Reading()
    reading.request(asked)
    return tuple(asked.tokens), reading.unread
