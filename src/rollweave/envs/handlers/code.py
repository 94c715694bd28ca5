"""Write a program: a task in words with an example, hidden cases of input and output as
the reward (ProRL Agent §4).

Invariant: what the program should print never enters a sandbox, and the program runs in
a fresh one, so there is nothing that it could read or forge: it has to print the right
thing.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from rollweave.envs.base import Options, Score, Split, mix, new_task, payload_of, split_of
from rollweave.envs.handlers.base import Agent, Job, LimitError, Tool
from rollweave.envs.handlers.boxed import Boxed
from rollweave.envs.handlers.code_tasks import FAMILIES, Problem, drawn
from rollweave.envs.handlers.toolbox import check_positive, check_tools, toolbox
from rollweave.envs.handlers.tools import Calls, blocks, converse, told_in_text
from rollweave.sandbox.base import MIB, Limits, SandboxSpec
from rollweave.sandbox.rootfs import python_of
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, SandboxError, SandboxLostError, SandboxTimeoutError
from rollweave.schema.work import Task

ROOT = "/project"

FILE = f"{ROOT}/solution.py"

SPEC = SandboxSpec(
    workdir=ROOT,
    limits=Limits(
        memory_bytes=512 * MIB,
        disk_bytes=64 * MIB,
        processes=64,
        cpu_s=300.0,
        output_bytes=MIB // 4,
    ),
)
"""Of the agent's sandbox and of that in which its program runs."""

PROGRAM_BYTES = 1 << 16

COMMAND_S = 30.0
"""Of a tool's command: less than a stage may be silent by default (`step_s`)."""

TRIES = 1000
"""Draws until a problem of the split is found: an eighth of them belongs to a held-out
split.
"""

PYTHON = ("python", "py", "python3")

PROMPT = """Write a Python program that reads standard input and prints to standard output.

{text}

{end}"""

ANSWER = "Answer with the program in one block:\n```python\n...\n```"


class Code(Boxed):
    """A task is a family of `code_tasks.py` with parameters, and the seed of its hidden
    cases.

    Without `tools` the agent has one turn, and answers with a block of Python. With
    tools it works in a sandbox, and its program is the block of its last message, or
    solution.py in its folder. The reward is the share of `cases` that the program gets
    right within `timeout_s` seconds each; with `partial = false` only all of them
    count.
    """

    def __init__(
        self,
        *,
        families: Sequence[str] = (),
        tools: Sequence[str] = (),
        calls: Calls = "native",
        cases: int = 10,
        partial: bool = True,
        timeout_s: float = 5.0,
    ) -> None:
        self._families, self._tools = tuple(families or FAMILIES), tuple(tools)
        for name in self._families:
            if name not in FAMILIES:
                raise ConfigError(
                    f"options.families must be some of {', '.join(FAMILIES)}, got {name!r}"
                )
        check_tools(self._tools, calls)
        if not 1 <= cases <= 100:
            raise ConfigError(f"options.cases must be from 1 to 100, got {cases}")
        check_positive(timeout_s=timeout_s)
        self._calls: Calls = calls
        self._cases, self._partial, self._timeout_s = cases, partial, timeout_s
        self._program: str | None = None
        self._passed: list[bool] = []

    async def init(self, job: Job) -> None:
        """Start a sandbox, if there are tools.

        Raises ConfigError where the cases may take longer than the stage.
        """
        whole_s, step_s = self._cases * self._timeout_s, job.task.limits.step_s
        if whole_s >= step_s:
            rule = f"options.timeout_s times cases must be less than step_s ({step_s:g})"
            raise ConfigError(f"{rule}, got {self._timeout_s:g} times {self._cases}")
        self._problem = msgspec.convert(payload_of(job.task), Problem)
        self._seed, self._sandboxes = job.task.seed, job.sandboxes
        if self._tools:
            self._sandbox = await job.sandboxes.start(SPEC)

    async def run(self, agent: Agent) -> None:
        """Ask for the program."""
        tools = (
            toolbox(self._sandbox, self._tools, timeout_s=COMMAND_S)
            if self._sandbox is not None
            else []
        )
        try:
            said = await converse(
                agent, prompt(self._problem, tools, self._calls), tools, calls=self._calls
            )
        except LimitError:
            await self._collect("")
            raise
        spoken = [message.content for message in said if message.role == "assistant"]
        await self._collect(spoken[-1])

    async def eval(self) -> Score:
        """Run the program on the hidden cases."""
        if self._program is not None:
            await self._judge(self._program)
        share = sum(self._passed) / self._cases
        return Score(reward=share if self._partial else float(share == 1.0), success=share == 1.0)

    def final_result(self) -> dict[str, Any]:
        """The program, and which cases it got right, as far as they were tried."""
        return {"program": self._program, "passed": self._passed}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """A random problem of the split.

        Raises ConfigError where the families have too few different ones.
        """
        handler, rng = cls(**options), random.Random(mix(seed, split, index))
        for _ in range(TRIES):
            problem = drawn(rng, handler._families)
            if split_of(problem.content) is split:
                return new_task(
                    seed=rng.getrandbits(32), family=problem.family, params=problem.params
                )
        raise ConfigError(
            f"options.families must have problems for split {split}, "
            f"{', '.join(handler._families)} have too few"
        )

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """A problem of the training split and a right program: it gives the answer
        away.
        """
        task = cls.make_task(
            index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
        )
        problem = msgspec.convert(payload_of(task), Problem)
        answer = Message(role="assistant", content=f"```python\n{problem.program()}\n```")
        return [*prompt(problem, (), "native"), answer]

    async def _collect(self, last: str) -> None:
        """The program in the last message, or in the sandbox."""
        found = [body for language, body in blocks(last)[0] if language in PYTHON]
        if found:
            self._program = found[-1]
        elif self._sandbox is not None:
            try:
                self._program = (await self._sandbox.read(FILE, limit=PROGRAM_BYTES)).decode(
                    errors="replace"
                )
            except (SandboxLostError, SandboxTimeoutError):
                raise
            except SandboxError:  # there is no such file, or it is no file
                self._program = None

    async def _judge(self, program: str) -> None:
        sandbox = self._sandbox = await self._sandboxes.start(SPEC)
        try:
            await sandbox.write(FILE, program.encode(errors="replace"))
            for given in self._problem.cases(self._seed, self._cases):
                found = await sandbox.exec(
                    [python_of(SPEC), "-I", FILE], stdin=given.encode(), timeout_s=self._timeout_s
                )
                said = found.stdout.decode(errors="replace")
                self._passed.append(
                    found.rc == 0
                    and not found.timed_out
                    and same(said, self._problem.answer(given))
                )
                if found.timed_out or not (self._partial or self._passed[-1]):
                    # what has no end is not asked again: all cases have to fit into the
                    # time of a stage
                    break
        finally:
            await self.close()


def prompt(problem: Problem, tools: Sequence[Tool], calls: Calls) -> list[Message]:
    """The first message."""
    end = f"{ANSWER}\nor leave it in {FILE}." if tools else ANSWER
    text = PROMPT.format(text=problem.text(), end=end)
    return [
        Message(
            role="user",
            content=f"{text}\n\n{told_in_text(tools)}" if tools and calls == "text" else text,
        )
    ]


def same(one: str, other: str) -> bool:
    """Equal lines, but for white space at their ends and empty lines at the end."""
    return [line.rstrip() for line in one.rstrip().split("\n")] == [
        line.rstrip() for line in other.rstrip().split("\n")
    ]
