"""The loop of an agent with tools, without a sandbox."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.handlers.base import LimitError, Tool
from rollweave.envs.handlers.tools import (
    MAX_CALLS,
    Final,
    converse,
    fenced_blocks,
    text_call_instructions,
)
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.errors import SandboxLostError, SandboxRefusedError
from rollweave.schema.work import StopReason
from tests.envs.handlers.agents import Scripted, calls

ASK = [Message(role="user", content="Go.")]

NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}},
    "required": ["n"],
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Counter:
    """A tool that sums its arguments and remembers them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def tool(self, name: str = "add") -> Tool:
        async def call(arguments: dict[str, Any]) -> str:
            self.seen.append(arguments)
            return str(sum(entry["n"] for entry in self.seen))

        return Tool(name=name, description="Add n.", parameters=NUMBER, call=call)


def speaks(name: str, answer: str | Exception) -> Tool:
    async def call(arguments: dict[str, Any]) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer + arguments.get("text", "")

    return Tool(name=name, description="Speak.", parameters=TEXT, call=call)


def ending(name: str) -> Tool:
    async def call(arguments: dict[str, Any]) -> str:
        return Final("Over.")

    return Tool(
        name=name, description="End.", parameters={"type": "object", "properties": {}}, call=call
    )


async def test_answers_calls_in_order_until_there_are_none() -> None:
    counter = Counter()
    agent = Scripted(
        [calls(("add", {"n": 2}), ("add", {"n": 3})), calls(("add", {"n": 4})), "Nine."]
    )
    messages = await converse(agent, ASK, [counter.tool()])
    assert [(m.role, m.content) for m in messages] == [
        *[
            ("user", "Go."),
            ("assistant", ""),
            ("tool", "2"),
            ("tool", "5"),
            ("assistant", ""),
            ("tool", "9"),
        ],
        ("assistant", "Nine."),
    ]
    expected = [("call-0", "add"), ("call-1", "add"), ("call-0", "add")]
    assert [(m.tool_call_id, m.name) for m in messages if m.role == "tool"] == expected
    assert agent.messages == list(messages[:-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"n": ' + "[" * 900 + "]" * 900 + "}", "must be at most 100 levels deep"),
        ("[1]", "$: must be an object"),
        ("null", "$: must be an object"),
        ("{}", "'n' is a required property"),
        ('{"n": "3", "more": "\\ud800"}', "$.n: '3' is not of type 'integer'"),
        ('{"n": true}', "$.n: True is not of type"),
        ('{"n": -1}', "$.n: -1 is less than the minimum"),
        ('{"n": 1, "more": "\\ud800"}', "$.more: is no Unicode text"),
        ('{"n": 1, "more": "' + "x" * (1 << 20) + '"}', "must have at most"),
    ],
)
async def test_reports_invalid_arguments_and_runs_nothing(arguments: str, message: str) -> None:
    counter = Counter()
    agent = Scripted(
        [
            Message(
                role="assistant",
                content="",
                tool_calls=(ToolCall(id="1", name="add", arguments=arguments),),
            ),
            "Oh.",
        ]
    )
    messages = await converse(agent, ASK, [counter.tool()])
    assert message in messages[2].content
    assert len(messages[2].content) < 1000
    assert not messages[2].content.endswith("and more")
    assert counter.seen == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
async def test_any_json_is_run_or_reported(value: Any) -> None:
    counter = Counter()
    messages = await converse(
        Scripted([calls(("add", json.dumps(value))), "End."]), ASK, [counter.tool()]
    )
    fits = (
        isinstance(value, dict)
        and isinstance(value.get("n"), int)
        and value["n"] is not True
        and value["n"] is not False
    )
    ran = fits and value["n"] >= 0
    assert bool(counter.seen) == ran
    assert (
        messages[2].content == str(value["n"])
        if ran
        else messages[2].content.startswith("The arguments of add")
    )


async def test_an_unknown_tool_gets_the_list_of_tools() -> None:
    messages = await converse(
        Scripted([calls(("nothing", {})), "Oh."]), ASK, [Counter().tool(), speaks("say", "")]
    )
    assert messages[2].content == "There is no tool 'nothing'. The tools are: add, say."
    messages = await converse(Scripted([calls(("add", {})), "Oh."]), ASK)
    assert messages[2].content == "There is no tool 'add'. The tools are: none."


async def test_a_final_answer_ends_the_loop() -> None:
    counter = Counter()
    tools = [counter.tool(), ending("end")]
    messages = await converse(
        Scripted([calls(("add", {"n": 1}), ("end", {}), ("add", {"n": 1}))]), ASK, tools
    )
    assert [m.content for m in messages[2:]] == ["1", "Over."]
    assert len(counter.seen) == 1


async def test_limits_the_calls_of_a_message() -> None:
    counter = Counter()
    messages = await converse(
        Scripted([calls(*[("add", {"n": 1})] * (MAX_CALLS + 2)), "End."]), ASK, [counter.tool()]
    )
    assert len(counter.seen) == MAX_CALLS
    assert [m.content.startswith("Not run") for m in messages if m.role == "tool"] == [
        False
    ] * MAX_CALLS + [True] * 2


async def test_a_refusal_is_an_answer_but_a_lost_sandbox_raises() -> None:
    messages = await converse(
        Scripted([calls(("say", {"text": ""})), "Oh."]),
        ASK,
        [speaks("say", SandboxRefusedError("no NUL"))],
    )
    assert messages[2].content == "Refused: no NUL"
    with pytest.raises(SandboxLostError):
        await converse(
            Scripted([calls(("say", {"text": ""}))]), ASK, [speaks("say", SandboxLostError("gone"))]
        )


async def test_limit_errors_propagate() -> None:
    with pytest.raises(LimitError):
        await converse(
            Scripted(lambda _: calls(("add", {"n": 1})), turns=3), ASK, [Counter().tool()]
        )
    with pytest.raises(LimitError):
        await converse(
            Scripted([LimitError(StopReason.MAX_TOKENS, "full")]), ASK, [Counter().tool()]
        )


async def test_refuses_invalid_tools_at_once() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        await converse(Scripted([]), ASK, [Counter().tool(), Counter().tool()])
    bad = Tool(
        name="bad", description="", parameters={"type": "nothing"}, call=Counter().tool().call
    )
    with pytest.raises(ValueError, match="'bad' must have a JSON schema"):
        await converse(Scripted([]), ASK, [bad])
    with pytest.raises(ValueError, match="'add' must need one text at most"):
        await converse(Scripted([]), ASK, [Counter().tool()], calls="text")


# --- calls in text ---


async def test_a_fenced_block_calls_a_tool_and_its_output_is_the_users() -> None:
    agent = Scripted(
        [
            "I look:\n```say\nls -l\n\ncat x\n```\nand wait",
            "```python\nprint(1)\n```\nis the answer",
        ]
    )
    messages = await converse(agent, ASK, [speaks("say", "heard ")], calls="text")
    assert [(m.role, m.content) for m in messages[2:3]] == [("user", "heard ls -l\n\ncat x")]
    assert len(messages) == 4
    assert agent.tools == [(), ()]  # the template shows none


async def test_a_message_has_one_closed_block() -> None:
    counter: list[str] = []

    async def call(arguments: dict[str, Any]) -> str:
        counter.append(arguments["text"])
        return "ran"

    tool = Tool(name="bash", description="", parameters=TEXT, call=call)
    replies = ["```bash\na\n```\n```bash\nb\n```", "```bash\nrm x", "```bash\nc\n```", "done"]
    messages = await converse(Scripted(replies), ASK, [tool], calls="text")
    outputs = [m.content for m in messages if m.role == "user"][1:]
    assert "and this has 2" in outputs[0]
    assert "does not end" in outputs[1]
    assert outputs[2] == "ran"
    assert counter == ["c"]


async def test_a_tool_without_parameters_is_an_empty_block() -> None:
    tool = ending("submit")
    messages = await converse(Scripted(["```submit\n```"]), ASK, [tool], calls="text")
    assert messages[-1].content == "Over."
    assert "- submit (TEXT is empty): End." in text_call_instructions([tool])
    assert "- say (TEXT is the text): Speak." in text_call_instructions([speaks("say", "")])


BODY = st.text(st.characters(codec="utf-8", exclude_characters="`\r\n"), max_size=20)


@given(
    st.lists(
        st.tuples(st.sampled_from(["bash", "python"]), st.lists(BODY, max_size=3)), max_size=4
    ),
    BODY,
)
def test_parses_fenced_blocks(written: list[tuple[str, list[str]]], between: str) -> None:
    expected = [(name, "\n".join(lines)) for name, lines in written]
    text = between.join(
        f"\n```{name}\n{body}\n```\n" if lines else f"\n```{name}\n```\n"
        for (name, body), (_, lines) in zip(expected, written, strict=True)
    )
    assert fenced_blocks(text) == (expected, "")


@given(st.text(st.sampled_from("`ab \n"), max_size=60))
def test_parsing_blocks_never_raises(text: str) -> None:
    blocks, unclosed = fenced_blocks(text)
    assert all(name for name, _ in blocks)
    assert not unclosed or "```" in text
