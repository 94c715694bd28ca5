r"""A question, tools in a sandbox, and an answer in `\boxed{}`: what `math_tool` and
`stem` have in common.

Invariants: only the agent's last message counts, and only where it calls no tool: what
a tool printed is no answer; a run that is cut off by a limit has none.
"""

import json
from collections.abc import Sequence
from typing import Any

from rollweave.envs.base import Options, Split, payload_of
from rollweave.envs.handlers.answers import MOST_CHARS, boxed
from rollweave.envs.handlers.base import Agent, Job, Tool
from rollweave.envs.handlers.boxed import Boxed
from rollweave.envs.handlers.toolbox import check_positive, toolbox
from rollweave.envs.handlers.tools import Calls, converse, told_in_text
from rollweave.envs.records import drawn, records
from rollweave.sandbox.base import MIB, Limits, SandboxSpec
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Task

BOX = r"End with one message that calls no tool and has the final answer in \boxed{}."

SPEC = SandboxSpec(limits=Limits(memory_bytes=2048 * MIB, disk_bytes=256 * MIB, processes=64))
"""For scripts and shells: numpy and sympy fit in with much to spare."""

TOOL_S = 25.0
"""For a command or cell: two in one message are within the default `step_s` of a
domain, which bounds what a turn waits for.
"""

SHOWN = 200
"""Characters of an answer that a result keeps."""


class Question(Struct, frozen=True, kw_only=True):
    """What is asked, and the right answer."""

    question: str
    answer: str


class Solving(Boxed):
    """To be derived from: one attempt at a question."""

    def __init__(self, *, calls: Calls, tool_s: float) -> None:
        """`calls` as in `tools.converse`; `tool_s` seconds for a command or cell."""
        if calls not in ("native", "text"):
            raise ConfigError(f"options.calls must be native or text, got {calls!r}")
        check_positive(tool_s=tool_s)
        self._calls, self._tool_s = calls, tool_s
        self._asked = Question(question="", answer="")
        self._answer: str | None = None

    async def init(self, job: Job) -> None:
        """Start the sandbox.

        Raises EnvError for a payload that is no question, SandboxError.
        """
        self._asked = question_of(job.task)
        self._sandbox = await job.sandboxes.start(SPEC)

    async def solve(
        self, agent: Agent, *, about: str, names: Sequence[str], tools: Sequence[Tool] = ()
    ) -> None:
        """Let the agent solve it with the tools of these names, and `tools`.

        Its answer is kept.
        """
        assert self._sandbox is not None, "init comes first"
        offered = [*toolbox(self._sandbox, names, timeout_s=self._tool_s), *tools]
        told = f"{about}\n{told_in_text(offered)}" if self._calls == "text" else about
        first = (
            Message(role="system", content=f"{told}\n{BOX}"),
            Message(role="user", content=self._asked.question),
        )
        said = await converse(agent, first, offered, calls=self._calls)
        self._answer = boxed(said[-1].content)

    def final_result(self) -> dict[str, Any]:
        """The answer that was found, at most `SHOWN` characters of it."""
        return {"answer": self._answer if self._answer is None else self._answer[:SHOWN]}


def question_of(task: Task) -> Question:
    """The question of a task.

    Raises EnvError where somebody brought another payload.
    """
    payload = payload_of(task)
    question, answer = payload.get("question"), payload.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise EnvError(
            f"payload must have question and answer as text, got {json.dumps(payload)[:SHOWN]}"
        )
    return Question(question=question, answer=answer)


def own_question(options: Options, *, index: int, seed: int, split: Split) -> Question:
    """The record number `index` of the split, from the user's file `options.path`.

    Raises ConfigError.
    """
    asked, right = options.get("question", "question"), options.get("answer", "answer")
    file, row = drawn(
        options["path"], options.get("held_out", ""), asked, index=index, seed=seed, split=split
    )
    record = records(file, asked)[row]
    question, answer = record[asked], record.get(right)
    number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if not isinstance(question, str) or not (
        number or (isinstance(answer, str) and answer.strip())
    ):
        raise ConfigError(
            f"{file}: every record must have {asked!r} as text and {right!r} as text or number, "
            f"got {record!r:.200}"
        )
    answer = str(answer)
    if len(answer) > MOST_CHARS:
        raise ConfigError(
            f"{file}: {right!r} must have at most {MOST_CHARS} characters, got {len(answer)}"
        )
    return Question(question=question, answer=boxed(answer) or answer)
