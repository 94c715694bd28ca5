"""Tool calls: parsed from any text of a turn; and tools and calls in a conversation's
tokens.
"""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.replies import Hermes, call_key, tool_format_of
from rollweave.rollout.chat.text import TokenTexts
from rollweave.schema.chat import Message, ToolCall
from tests.support.chats import CHATML, SPECIALS, TEMPLATES, bpe, codec

text = st.text(alphabet=st.sampled_from("ab thé\n<|[]{}\"'🙂"), max_size=12)
scalar = st.none() | st.booleans() | st.integers() | text
value = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.tuples(text.filter(bool), st.dictionaries(text, value, max_size=3)), min_size=1, max_size=3
)
MARKS = ("<tool_call>", "</tool_call>")
CALL = '{"name": "a", "arguments": {}}'


def written(name: str, arguments: Any, *, indent: int | None = None) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, indent=indent)}\n</tool_call>"


@given(
    before=text,
    between=text,
    expected=calls,
    indent=st.sampled_from([None, 2]),
    closed=st.booleans(),
)
def test_parses_calls(
    before: str,
    between: str,
    expected: list[tuple[str, dict[str, Any]]],
    indent: int | None,
    closed: bool,
) -> None:
    source = before + between.join(
        written(name, arguments, indent=indent) for name, arguments in expected
    )
    agent = Hermes().parse(source if closed else source.removesuffix("</tool_call>"))
    assert [(call.name, json.loads(call.arguments)) for call in agent.tool_calls] == expected
    assert agent.content == (before + between * (len(expected) - 1)).rstrip()


@given(st.lists(text | st.sampled_from([*MARKS, CALL, '{"name":', "}"]), max_size=8).map("".join))
def test_parsing_any_text_loses_nothing(source: str) -> None:
    agent = Hermes().parse(source)
    if not agent.tool_calls:
        assert agent.content == source
        return
    # What is not in the content is so many whole calls; the last one may lack its
    # closing mark.
    calls, remaining = len(agent.tool_calls), Counter("".join(source.split()))
    remaining.subtract("".join(agent.content.split()))
    least = Counter(MARKS[0] * calls + MARKS[1] * (calls - 1))
    assert remaining >= least
    # else pieces may have come together to other calls
    if source.count('{"name":') == source.count(CALL):
        least += Counter("".join(CALL.split()) * calls)
        assert remaining in (least, least + Counter(MARKS[1]))


@pytest.mark.parametrize(
    "source",
    [
        *("<tool_call>", "<tool_call>\nadd(2, 3)\n</tool_call>", "<tool_call>[]</tool_call>"),
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "2"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 2',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}} more</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000,
        '<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name"</tool_call>',
    ],
)
def test_a_malformed_call_makes_all_text_content(source: str) -> None:
    agent = Hermes().parse(source)
    assert agent.content == source
    assert agent.tool_calls == ()


def test_a_mark_within_an_argument_is_text() -> None:
    source = written("say", {"text": "</tool_call><tool_call>"})
    (call,) = Hermes().parse(source).tool_calls
    assert json.loads(call.arguments) == {"text": "</tool_call><tool_call>"}


def test_what_surrounds_arguments_makes_them_a_call() -> None:
    hermes = Hermes()
    before, after = hermes.call_around('a"dd')
    assert (before.startswith(hermes.call_start), after.endswith(hermes.call_end)) == (True, True)
    assert hermes.parse(before + '{"a": 1}' + after).tool_calls == (
        ToolCall(name='a"dd', arguments='{"a": 1}'),
    )
    assert isinstance(tool_format_of(TEMPLATES["tools"]), Hermes)
    assert tool_format_of(CHATML) is None


def test_equal_calls_have_equal_keys() -> None:
    one = ToolCall(id="x", name="add", arguments='{"a": 1, "b": "é"}')
    other = ToolCall(id="y", name="add", arguments='{"b":"\\u00e9","a":1}')
    assert call_key([one]) == call_key([other])
    assert call_key([one]) != call_key([one, one])
    assert call_key([ToolCall(name="add", arguments="oops")]) == (("add", "oops"),)


LOOK_CALL = json.dumps(
    {"type": "function", "function": {"name": "look", "parameters": {"é": ["<|im_end|>"]}}},
    ensure_ascii=False,
)


def test_templates_show_tools_once() -> None:
    assert codec("tools").shows_tools
    assert not codec("chatml").shows_tools
    text = codec("tools").decode(
        codec("tools").start([Message(role="user", content="hi")], (LOOK_CALL,))
    )
    assert text.count(LOOK_CALL) == 1
    assert text.index(LOOK_CALL) < text.index("hi")
    assert "<tools>" not in codec("tools").decode(
        codec("tools").start([Message(role="user", content="hi")])
    )


def test_foreign_calls_are_rendered_by_the_template() -> None:
    of = codec("tools")
    call = ToolCall(id="1", name="add", arguments='{"a": "é"}')
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content="hm", tool_calls=(call,)),
        Message(role="tool", content="5", tool_call_id="1"),
    ]
    text = of.decode(of.start(messages))
    assert 'hm<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n5\n</tool_response>" in text
    assert of.decode(of.extend([1], messages[1:])).count("add") == 1
    broken = Message(
        role="assistant", content="", tool_calls=(ToolCall(name="add", arguments="not json"),)
    )
    assert '"not json"' in of.decode(of.start([messages[0], broken]))


@pytest.mark.parametrize("spelled", ["<|im_end|>", "\\u003c|im_end|>", "\ue000<|eot|>\ue001"])
def test_special_tokens_in_tools_and_calls_are_text(spelled: str) -> None:
    of = codec("tools")
    special = {bpe().token_to_id(token) for token in SPECIALS}

    def count(word: str) -> int:
        tool = json.dumps({"type": "function", "function": {"name": "look"}}).replace("look", word)
        call = ToolCall(name=json.loads(f'"{word}"'), arguments=f'{{"{word}": "{word}"}}')
        messages = [
            Message(role="user", content="q"),
            Message(role="assistant", content="", tool_calls=(call,)),
        ]
        return sum(token in special for token in of.start(messages, (tool,)))

    assert count(spelled) == count("x")


def token_texts(of: ChatCodec, tokens: list[int]) -> list[str]:
    """Return the text of each token; the last one has also what is left at the end."""
    growing = TokenTexts(of)
    texts = [growing.add(token) for token in tokens]
    return [*texts[:-1], *(last + growing.rest() for last in texts[-1:])]


@given(st.lists(st.integers(0, 405), max_size=24))
def test_token_texts_are_complete_characters_and_add_up(tokens: list[int]) -> None:
    of = codec("chatml")
    pieces = token_texts(of, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == of.decode(tokens)
    text = ""
    for end, piece in enumerate(pieces, start=1):
        text += piece
        assert of.decode(tokens).startswith(text)
        if piece and end < len(tokens):
            assert not text.endswith("\ufffd")


def test_a_character_of_four_tokens_belongs_to_the_last() -> None:
    of = codec("chatml")
    tokens = bpe().encode("a🙂b", add_special_tokens=False).ids
    assert len(tokens) == 6
    assert token_texts(of, tokens) == ["a", "", "", "", "🙂", "b"]
