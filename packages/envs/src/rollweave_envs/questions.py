r"""Base of the handlers with a question, tools in a sandbox, and an answer in
`\boxed{}`: `math_tool` and `stem`.

Invariants: only the agent's last message counts, and only if it calls no tool: a tool's
output is no answer; a run that a limit cuts off has none.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

from rollweave.envs.base import Options, Split, payload_of
from rollweave.envs.handlers.answers import boxed_answer, check_expected
from rollweave.envs.handlers.base import Agent, Job, Tool
from rollweave.envs.handlers.sandboxes import SandboxHandler
from rollweave.envs.handlers.toolbox import check_positive, toolbox
from rollweave.envs.handlers.tools import CallStyle, converse, text_call_instructions
from rollweave.envs.jsonl import draw_record, numbered_records
from rollweave.sandbox.base import MIB, Limits, SandboxSpec
from rollweave.sandbox.provider import provider
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, EnvError
from rollweave.schema.work import Task

BOX = r"End with one message that calls no tool and has the final answer in \boxed{}."

LIMITS = Limits(memory_bytes=2048 * MIB, disk_bytes=256 * MIB, processes=64)
"""Limits for scripts and shells: numpy and sympy fit with much to spare."""

PACKAGES = ("ipython", "numpy", "scipy", "sympy")
"""Packages with which an agent computes, as far as they are installed."""

TOOL_S = 25.0
"""Time limit in seconds of a command or cell: two in one message are within the default
`step_s` of a domain, which bounds the time between turns.
"""

SHOWN = 200
"""Maximum characters of an answer that a result keeps."""


class Question(Struct, frozen=True, kw_only=True):
    """A question and its correct answer."""

    question: str
    answer: str


class QuestionHandler(SandboxHandler):
    """Base of the handlers of one attempt at a question."""

    def __init__(self, *, calls: CallStyle, tool_s: float) -> None:
        """Validate the options. `calls` is as in `tools.converse`; `tool_s` limits a
        command or cell in seconds.
        """
        if calls not in ("native", "text"):
            raise ConfigError(f"options.calls must be native or text, got {calls!r}")
        check_positive(tool_s=tool_s)
        self._calls, self._tool_s = calls, tool_s
        self._question = Question(question="", answer="")
        self._answer: str | None = None

    async def init(self, job: Job) -> None:
        """Start the sandbox.

        Raises EnvError for a payload that is no question, SandboxError.
        """
        self._question = question_of(job.task)
        self._sandbox = await job.sandboxes.start(
            SandboxSpec(limits=LIMITS, packages=provider().installed(*PACKAGES))
        )

    async def solve(
        self, agent: Agent, *, about: str, names: Sequence[str], tools: Sequence[Tool] = ()
    ) -> None:
        """Let the agent solve the question with the tools of these names, and `tools`.

        Stores its answer.
        """
        assert self._sandbox is not None, "init comes first"
        offered = [*toolbox(self._sandbox, names, timeout_s=self._tool_s), *tools]
        system = f"{about}\n{text_call_instructions(offered)}" if self._calls == "text" else about
        first = (
            Message(role="system", content=f"{system}\n{BOX}"),
            Message(role="user", content=self._question.question),
        )
        messages = await converse(agent, first, offered, calls=self._calls)
        self._answer = boxed_answer(messages[-1].content)

    def final_result(self) -> dict[str, Any]:
        """Return the answer, at most `SHOWN` characters of it."""
        return {"answer": self._answer if self._answer is None else self._answer[:SHOWN]}


def question_of(task: Task) -> Question:
    """Return the question of a task.

    Raises EnvError if the task has another payload.
    """
    payload = payload_of(task)
    question, answer = payload.get("question"), payload.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise EnvError(
            f"payload must have question and answer as text, got {json.dumps(payload)[:SHOWN]}"
        )
    return Question(question=question, answer=answer)


def own_question(options: Options, *, index: int, seed: int, split: Split) -> Question:
    """Return record number `index` of the split, from the user's file `options.path`.

    Raises ConfigError.
    """
    keys = _keys(options)
    file, row = draw_record(
        options["path"],
        options.get("held_out", ""),
        keys[0],
        index=index,
        seed=seed,
        split=split,
    )
    return _questions(file, *keys)[row]


def check_own_questions(options: Options) -> None:
    """Check all records of the user's files, if there are any. Raises ConfigError that
    names file and line.
    """
    for file in (options.get("path"), options.get("held_out")):
        if file:
            _questions(file, *_keys(options))


def _keys(options: Options) -> tuple[str, str]:
    return options.get("question", "question"), options.get("answer", "answer")


@functools.lru_cache(16)
def _questions(file: str, question_key: str, answer_key: str) -> tuple[Question, ...]:
    questions = []
    for number, record in numbered_records(file, question_key):
        question, answer = record[question_key], record.get(answer_key)
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if not isinstance(question, str) or not (is_number or isinstance(answer, str)):
            raise ConfigError(
                f"{file}:{number}: a record must have {question_key!r} as text and "
                f"{answer_key!r} as text or a number, got {record!r:.200}"
            )
        answer = str(answer)
        try:
            expected = boxed_answer(answer) or answer
            check_expected(expected)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {answer_key}: {error}") from error
        questions.append(Question(question=question, answer=expected))
    return tuple(questions)
