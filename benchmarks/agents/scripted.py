"""A model whose answers are written down, behind a real gateway."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollweave.engine.clients.base import OnTokens
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import ChatTemplate
from rollweave.rollout.gateway.server import Access, Gateway, serve_gateway
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    Sampling,
    TokenDelta,
    VersionSpan,
)
from rollweave.schema.work import TokenSequence

CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
CALLS: Final = f"{CALL}\n{CALL.replace('2', '4')}"
SESSION: Final = "s"

TEMPLATE: Final = """
{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- '<|im_start|>system\\n' }}
        {%- if message.role == 'system' %}{{- message.content + '\\n' }}{%- endif %}
        {{- '<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""A template with tools, in the manner of Qwen 3: it reads `enable_thinking`."""


@functools.cache
def chat_codec() -> ChatCodec:
    """Return the codec of the scripted model: its tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in specials]
    )
    special = {"eos_token": "<|im_end|>"}
    template = ChatTemplate(TEMPLATE, special=special, name="scripted")
    vocabulary = tokenizer.get_vocab()
    return ChatCodec(tokenizer, template, eos=[vocabulary["<|im_end|>"]])


@dataclass
class Script:
    """`generate` of a gateway: the texts in turn, then the last one again."""

    texts: Sequence[str]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    async def __call__(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> GenerateResult:
        text = self.texts[min(len(self.prompts), len(self.texts) - 1)]
        self.prompts.append(tokens)
        self.samplings.append(sampling)
        return await say(session, text, sampling, on_tokens)


async def say(
    session: str, text: str, sampling: Sampling, on_tokens: OnTokens | None
) -> GenerateResult:
    """Return a turn of this text up to the first stop text, as an engine would."""
    ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
    codec = chat_codec()
    turn = codec.encode_literal(text[: min(ends)]) if ends else codec.encode_turn(text)
    sampled = turn[: sampling.max_tokens]
    logprobs = tuple(-0.5 - place / 1024 for place in range(len(sampled)))
    for place, token in enumerate(sampled if on_tokens is not None else ()):
        assert on_tokens is not None, "only a stream is reported"
        delta = TokenDelta(
            id=session,
            start=place,
            tokens=(token,),
            logprobs=logprobs[place : place + 1],
            versions=(VersionSpan(start=place, end=place + 1, version=0),),
        )
        on_tokens(delta)
        await asyncio.sleep(0)
    cut = len(sampled) == sampling.max_tokens < len(turn)
    return GenerateResult(
        id=session,
        tokens=sampled,
        logprobs=logprobs,
        versions=(VersionSpan(start=0, end=len(sampled), version=0),),
        finish=FinishReason.LENGTH if cut else FinishReason.STOP,
    )


@dataclass
class Scripted:
    """A gateway with one open session over a script."""

    script: Script
    gateway: Gateway
    url: str
    access: Access

    @property
    def base_url(self) -> str:
        """The URL of OpenAI's APIs."""
        return self.url + self.access.path

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return what is recorded so far."""
        return self.gateway.sequences(SESSION)

    def prompt(self) -> str:
        """Return the text of the newest prompt."""
        return chat_codec().decode(self.script.prompts[-1])


@contextlib.asynccontextmanager
async def scripted(*texts: str) -> AsyncIterator[Scripted]:
    """Serve a gateway whose agent says the texts in turn."""
    script = Script(texts)
    gateway = Gateway(chat_codec(), script, model="scripted")
    access = gateway.open(SESSION)
    async with serve_gateway(gateway) as url:
        yield Scripted(script, gateway, url, access)
