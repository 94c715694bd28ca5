"""docs/HANDLERS.md: its handler and its agent program work as described, and its
tables are those of the code.
"""

import dataclasses
import inspect
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, payload_of
from rollweave.envs.handlers.base import Endpoint, Job, Tool
from rollweave.envs.handlers.program import OUTPUTS_BYTES, SCORE_S, Outcome, Program
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.sandbox.base import Limits
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.work import Unreadable
from rollweave_sandbox.folders import FILES, FOLDER_BYTES
from tests.support.pages import table_rows
from tests.support.programs import job, lived, scripted
from tests.support.sandboxes import needs
from tests.support.scripted_gateway import Script
from tests.support.variants import mostly_extended

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "HANDLERS.md"
AGENT = ROOT / "examples" / "agent"


class Adder:
    """An agent that adds with bash."""

    turns_left = 9

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Message:
        if messages[-1].role == "tool":
            return Message(role="assistant", content=messages[-1].content)
        numbers = re.findall(r"\d+", messages[0].content)
        command = f'{{"command": "echo $(({"+".join(numbers)}))"}}'
        return Message(
            role="assistant", content="", tool_calls=(ToolCall(name="bash", arguments=command),)
        )

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        raise NotImplementedError


async def test_the_documented_handler_works() -> None:
    needs("zygote")
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"__name__": "my_agent"}
    exec(block[1], names)
    task = names["Sums"].make_task(index=1, seed=2, split=Split.TRAIN, options={})
    sandboxes, handler = Sandboxes("zygote"), names["Sums"]()
    try:
        await handler.init(Job(task=task, seed=3, sandboxes=sandboxes))
        await handler.run(Adder())
        await handler.close()
        assert (await handler.eval()).success
        assert handler.final_result()["answer"].strip() == str(sum(payload_of(task)["numbers"]))
    finally:
        await sandboxes.close()


TYPES: dict[object, str] = {
    bool: "true or false",
    float: "number",
    str: "text",
    str | Sequence[str]: "text or list of text",
    Sequence[str]: "list of text",
    Sequence[str] | None: "list of text",
    Mapping[str, str] | None: "table of text",
    Mapping[str, Any] | None: "table",
    Unreadable: "text",
}


def rows_after(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the table that follows a heading."""
    section = PAGE.read_text().partition(f"\n#### {heading}\n")[2].partition("\n####")[0]
    return table_rows(section)


def test_the_options_of_program_are_those_of_the_code() -> None:
    parameters = list(inspect.signature(Program.__init__).parameters.values())[1:]

    def default(value: object) -> str:
        if value is inspect.Parameter.empty:
            return "must be set"
        return f"`{json.dumps({} if value is None else value)}`"

    expected = [
        [
            f"`{p.name}`",
            TYPES[p.annotation],
            '`["."]` for a command, none for a function'
            if p.name == "submission"
            else default(p.default),
        ]
        for p in parameters
    ]
    rows = rows_after("All options of `program`")
    assert [row[:3] for row in rows] == expected
    (limits,) = (row[3] for row in rows if row[0] == "`limits`")
    assert re.findall(r"`(\w+)`", limits) == list(Limits.__struct_fields__)
    assert f"{FILES:,} files and {FOLDER_BYTES >> 20:,} MiB" in PAGE.read_text()
    assert f"{OUTPUTS_BYTES >> 20} MiB together" in PAGE.read_text()
    assert f"`step_s` or {SCORE_S:.0f} s" in PAGE.read_text()


def test_the_fields_of_an_outcome_are_those_of_the_code() -> None:
    named = [re.findall(r"`(\w+)`", row[0]) for row in rows_after("The score")]
    assert [name for names in named for name in names] == [
        field.name for field in dataclasses.fields(Outcome)
    ]


def test_the_page_shows_the_files_of_the_agent() -> None:
    page = PAGE.read_text()
    for name in ("program/agent.py", "grading.py", "agent.toml"):
        assert f"\n{(AGENT / name).read_text()}```\n" in page


def agent_and_task() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the example's handler, and its first task."""
    (domain,) = tomllib.loads((AGENT / "agent.toml").read_text())["tasks"]
    names = ("command", "packages", "folder", "hidden", "score")
    task = json.loads((AGENT / "tasks.jsonl").read_text().splitlines()[0])
    return {name: domain["options"][name] for name in names}, task


ENDS: dict[str, tuple[list[str], Score]] = {
    "right": (["5"], Score(reward=1.0, success=True)),
    "right later": (["five", "It is 5."], Score(reward=1.0, success=True)),
    "wrong": (["4"], Score(reward=0.1, success=False)),
    "no number": (["four", "four"], Score(reward=0.0, success=False)),
}


@pytest.mark.parametrize("end", mostly_extended(ENDS, {"right later"}))
async def test_the_agent_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    needs("zygote")
    answers, score = ENDS[end]
    monkeypatch.chdir(AGENT)
    monkeypatch.syspath_prepend(AGENT)
    options, task = agent_and_task()
    sandboxes = Sandboxes("zygote")
    try:
        async with scripted(Script(answers)) as (_, agent):
            assert await lived(Program(**options), job(sandboxes, **task), agent) == score
    finally:
        await sandboxes.close()
