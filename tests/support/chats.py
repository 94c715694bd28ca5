"""Chat templates of several families, and small tokenizers, for the tests of chat."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header|>' + message['role'] + '<|end_header|>\\n\\n' + message['content'] + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}"""
TRIMMING = HEADERS.replace("message['content']", "message['content'] | trim")
THINKING = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and not loop.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
PLAIN = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}{{ '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ '\n' }}{% endif %}"
)
ALTERNATING = """{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CALLS_AND_RESULTS = """\
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (message.role == 'system' and loop.first and tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
SHOWN_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
"""
TOOLS = (
    SHOWN_TOOLS
    + """    {{- '\\n</tools>\\ncall one: <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
"""
    + CALLS_AND_RESULTS
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
QWEN = (
    SHOWN_TOOLS
    + """    {{- '\\n</tools>\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > asked.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
"""
    + CALLS_AND_RESULTS
    + """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
"""A template with tools and thoughts that leaves out the thoughts before the last
question, as Qwen 3's.
"""
SWITCHED = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""A template with an argument, as Qwen 3's."""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "trimming": TRIMMING,
    "thinking": THINKING,
    "plain": PLAIN,
    "alternating": ALTERNATING,
    "tools": TOOLS,
    "switched": SWITCHED,
    "qwen": QWEN,
}
SPECIALS = (
    "<|bos|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header|>",
    "<|end_header|>",
    "<|eot|>",
)
SPECIAL_MAP = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


@functools.cache
def bpe() -> Tokenizer:
    """Return a byte-level BPE. Line ends are separate from words, as in Llama 3 and
    Qwen: the following text changes no token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+| ?[^\s]+| +"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(
        ["the user said to the assistant: think, then answer\n\n", "[user] [assistant]\n"] * 3,
        trainer,
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return tokenizer


@functools.cache
def codec(name: str) -> ChatCodec:
    return ChatCodec(bpe(), template(TEMPLATES[name]))


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special=SPECIAL_MAP, name="template")


def checkpoint(
    directory: Path, source: str | list[dict[str, str]] | None, **config: object
) -> Path:
    """Write the tokenizer and chat template of a checkpoint directory."""
    bpe().save(str(directory / "tokenizer.json"))
    full = {**SPECIAL_MAP, **config} | ({} if source is None else {"chat_template": source})
    (directory / "tokenizer_config.json").write_text(json.dumps(full))
    return directory
