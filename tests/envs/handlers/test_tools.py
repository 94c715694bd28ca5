"""The loop of an agent with tools, without a sandbox."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.handlers.base import LimitError, Tool
from rollweave.envs.handlers.tools import AT_ONCE, Final, blocks, converse, told_in_text
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
    """A tool that adds up, and remembers what it was called with."""

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


async def test_calls_are_answered_in_their_order_until_none_is_made() -> None:
    counter = Counter()
    agent = Scripted(
        [calls(("add", {"n": 2}), ("add", {"n": 3})), calls(("add", {"n": 4})), "Nine."]
    )
    said = await converse(agent, ASK, [counter.tool()])
    assert [(m.role, m.content) for m in said] == [
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
    assert [(m.tool_call_id, m.name) for m in said if m.role == "tool"] == [
        ("call-0", "add"),
        ("call-1", "add"),
        ("call-0", "add"),
    ]
    assert agent.heard == list(said[:-1])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[1]", "$: must be an object"),
        ("null", "$: must be an object"),
        ("{}", "'n' is a required property"),
        ('{"n": "3"}', "$.n: '3' is not of type 'integer'"),
        ('{"n": true}', "$.n: True is not of type"),
        ('{"n": -1}', "$.n: -1 is less than the minimum"),
        ('{"n": 1, "more": "\\ud800"}', "$.more: is no Unicode text"),
        ('{"n": 1, "more": "' + "x" * (1 << 20) + '"}', "must have at most"),
    ],
)
async def test_what_is_wrong_with_arguments_is_told_and_nothing_runs(
    arguments: str, told: str
) -> None:
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
    said = await converse(agent, ASK, [counter.tool()])
    assert told in said[2].content
    assert len(said[2].content) < 1000
    assert counter.seen == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
async def test_any_json_is_either_run_or_told(value: Any) -> None:
    counter = Counter()
    said = await converse(
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
        said[2].content == str(value["n"])
        if ran
        else said[2].content.startswith("The arguments of add")
    )


async def test_unknown_tools_are_told_which_there_are() -> None:
    said = await converse(
        Scripted([calls(("nothing", {})), "Oh."]), ASK, [Counter().tool(), speaks("say", "")]
    )
    assert said[2].content == "There is no tool 'nothing'. The tools are: add, say."
    said = await converse(Scripted([calls(("add", {})), "Oh."]), ASK)
    assert said[2].content == "There is no tool 'add'. The tools are: none."


async def test_a_final_answer_ends_it_and_later_calls_are_not_run() -> None:
    counter = Counter()
    tools = [counter.tool(), ending("end")]
    said = await converse(
        Scripted([calls(("add", {"n": 1}), ("end", {}), ("add", {"n": 1}))]), ASK, tools
    )
    assert [m.content for m in said[2:]] == ["1", "Over."]
    assert len(counter.seen) == 1


async def test_no_message_runs_more_than_so_many_calls() -> None:
    counter = Counter()
    said = await converse(
        Scripted([calls(*[("add", {"n": 1})] * (AT_ONCE + 2)), "End."]), ASK, [counter.tool()]
    )
    assert len(counter.seen) == AT_ONCE
    assert [m.content.startswith("Not run") for m in said if m.role == "tool"] == [
        False
    ] * AT_ONCE + [True] * 2


async def test_a_refusal_is_an_answer_and_a_lost_sandbox_is_not() -> None:
    said = await converse(
        Scripted([calls(("say", {"text": ""})), "Oh."]),
        ASK,
        [speaks("say", SandboxRefusedError("no NUL"))],
    )
    assert said[2].content == "Refused: no NUL"
    with pytest.raises(SandboxLostError):
        await converse(
            Scripted([calls(("say", {"text": ""}))]), ASK, [speaks("say", SandboxLostError("gone"))]
        )


async def test_limits_pass() -> None:
    with pytest.raises(LimitError):
        await converse(
            Scripted(lambda _: calls(("add", {"n": 1})), turns=3), ASK, [Counter().tool()]
        )
    with pytest.raises(LimitError):
        await converse(
            Scripted([LimitError(StopReason.MAX_TOKENS, "full")]), ASK, [Counter().tool()]
        )


async def test_tools_that_cannot_be_offered_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="names of their own"):
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
    said = await converse(agent, ASK, [speaks("say", "heard ")], calls="text")
    assert [(m.role, m.content) for m in said[2:3]] == [("user", "heard ls -l\n\ncat x")]
    assert len(said) == 4
    assert agent.tools == [(), ()]  # the template shows none


async def test_one_block_a_message_and_closed() -> None:
    counter: list[str] = []

    async def call(arguments: dict[str, Any]) -> str:
        counter.append(arguments["text"])
        return "ran"

    tool = Tool(name="bash", description="", parameters=TEXT, call=call)
    replies = ["```bash\na\n```\n```bash\nb\n```", "```bash\nrm x", "```bash\nc\n```", "done"]
    said = await converse(Scripted(replies), ASK, [tool], calls="text")
    heard = [m.content for m in said if m.role == "user"][1:]
    assert "and this has 2" in heard[0]
    assert "does not end" in heard[1]
    assert heard[2] == "ran"
    assert counter == ["c"]


async def test_a_tool_without_parameters_is_an_empty_block() -> None:
    tool = ending("submit")
    said = await converse(Scripted(["```submit\n```"]), ASK, [tool], calls="text")
    assert said[-1].content == "Over."
    assert "- submit (TEXT is empty): End." in told_in_text([tool])
    assert "- say (TEXT is the text): Speak." in told_in_text([speaks("say", "")])


BODY = st.text(st.characters(codec="utf-8", exclude_characters="`\r\n"), max_size=20)


@given(
    st.lists(
        st.tuples(st.sampled_from(["bash", "python"]), st.lists(BODY, max_size=3)), max_size=4
    ),
    BODY,
)
def test_blocks_read_what_was_written(written: list[tuple[str, list[str]]], between: str) -> None:
    wanted = [(name, "\n".join(lines)) for name, lines in written]
    text = between.join(
        f"\n```{name}\n{body}\n```\n" if lines else f"\n```{name}\n```\n"
        for (name, body), (_, lines) in zip(wanted, written, strict=True)
    )
    assert blocks(text) == (wanted, "")


@given(st.text(st.sampled_from("`ab \n"), max_size=60))
def test_blocks_never_fail(text: str) -> None:
    found, unclosed = blocks(text)
    assert all(name for name, _ in found)
    assert not unclosed or "```" in text
