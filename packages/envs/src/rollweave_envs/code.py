"""Write a program: a task in words with an example, and hidden cases of input and
output as the reward (ProRL Agent §4).

Invariant: the expected output never enters a sandbox, and the program runs in a fresh
one, so there is nothing that it could read or forge: it has to print the right output.
"""

import random
from collections.abc import Sequence
from functools import partial as bound
from typing import Any

import msgspec

from rollweave.envs.base import Options, Score, Split, new_task, payload_of, split_of
from rollweave.envs.handlers.base import Agent, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import SandboxHandler, exec_after_agent
from rollweave.envs.handlers.toolbox import check_positive, check_tools, packages_of, toolbox
from rollweave.envs.handlers.tools import CallStyle, converse, fenced_blocks, text_call_instructions
from rollweave.sandbox.base import MIB, Limits, SandboxSpec
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, SandboxError, SandboxLostError, SandboxTimeoutError
from rollweave.schema.work import Task
from rollweave_envs.code_tasks import FAMILIES, Problem, draw_problem

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
"""Specification of the sandbox in which the agent's program runs, and of the agent's
own, which also has the packages of its tools.
"""

PROGRAM_BYTES = 1 << 16

COMMAND_S = 30.0
"""Time limit in seconds of a tool's command: less than the default limit between two
turns (`step_s`).
"""

TRIES = 1000
"""Maximum draws of a problem of the split: an eighth of all problems belongs to each
held-out split.
"""

PYTHON = ("python", "py", "python3")

PROMPT = """Write a Python program that reads standard input and prints to standard output.

{text}

{end}"""

ANSWER = "Answer with the program in one block:\n```python\n...\n```"


class Code(SandboxHandler):
    """A task is a family of `code_tasks.py` with parameters, and the seed of its hidden
    cases.

    Without `tools` the agent has one turn, and answers with a block of Python. With
    tools it works in a sandbox, and its program is the block of its last message, or
    solution.py in its folder. The reward is the share of `cases` that the program
    solves within `timeout_s` seconds each; with `partial = false` the reward is 1 only
    if it solves all of them.
    """

    def __init__(
        self,
        *,
        families: Sequence[str] = (),
        tools: Sequence[str] = (),
        calls: CallStyle = "native",
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
        self._calls: CallStyle = calls
        self._cases, self._partial, self._timeout_s = cases, partial, timeout_s
        self._program: str | None = None
        self._passed: list[bool] = []

    async def init(self, job: Job) -> None:
        """Start a sandbox, if there are tools.

        Raises ConfigError if the cases may take longer than the stage.
        """
        cases_s, step_s = self._cases * self._timeout_s, job.task.limits.step_s
        if cases_s >= step_s:
            rule = f"options.timeout_s times cases must be less than step_s ({step_s:g})"
            raise ConfigError(f"{rule}, got {self._timeout_s:g} times {self._cases}")
        self._problem = msgspec.convert(payload_of(job.task), Problem)
        self._seed, self._sandboxes = job.task.seed, job.sandboxes
        if self._tools:
            spec = msgspec.structs.replace(SPEC, packages=packages_of(self._tools))
            self._sandbox = await job.sandboxes.start(spec)

    async def run(self, agent: Agent) -> None:
        """Let the agent write the program."""
        tools = (
            toolbox(self._sandbox, self._tools, timeout_s=COMMAND_S)
            if self._sandbox is not None
            else []
        )
        try:
            messages = await converse(
                agent, prompt(self._problem, tools, self._calls), tools, calls=self._calls
            )
        except LimitError:
            await self._collect("")
            raise
        replies = [message.content for message in messages if message.role == "assistant"]
        await self._collect(replies[-1])

    async def eval(self) -> Score:
        """Run the program on the hidden cases."""
        if self._program is not None:
            await self._judge(self._program)
        share = sum(self._passed) / self._cases
        return Score(reward=share if self._partial else float(share == 1.0), success=share == 1.0)

    def final_result(self) -> dict[str, Any]:
        """Return the program, and which of the tried cases it solved."""
        return {"program": self._program, "passed": self._passed}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a random problem of the split.

        Raises ConfigError if the families have too few different ones.
        """
        handler, rng = cls(**options), random.Random(mix(seed, split, index))
        for _ in range(TRIES):
            problem = draw_problem(rng, handler._families)
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
        """Return a problem of the training split and a correct program: it reveals the
        answer.
        """
        task = cls.make_task(
            index=rng.getrandbits(32), seed=rng.getrandbits(32), split=Split.TRAIN, options=options
        )
        problem = msgspec.convert(payload_of(task), Problem)
        answer = Message(role="assistant", content=f"```python\n{problem.program()}\n```")
        return [*prompt(problem, (), "native"), answer]

    async def _collect(self, last: str) -> None:
        """Store the program in the last message, or in the sandbox."""
        programs = [body for language, body in fenced_blocks(last)[0] if language in PYTHON]
        if programs:
            self._program = programs[-1]
        elif self._sandbox is not None:
            try:
                self._program = (await self._sandbox.read(FILE, limit=PROGRAM_BYTES)).decode(
                    errors="replace"
                )
            except (SandboxLostError, SandboxTimeoutError):
                raise
            except SandboxError:  # there is no such file, or it is not a regular file
                self._program = None

    async def _judge(self, program: str) -> None:
        sandbox = self._sandbox = await self._sandboxes.start(SPEC)
        try:
            await sandbox.write(FILE, program.encode(errors="replace"))
            for stdin in self._problem.cases(self._seed, self._cases):
                # The program has run here from the second case on.
                execute = bound(exec_after_agent, sandbox) if self._passed else sandbox.exec
                result = await execute(
                    [SPEC.python(), "-I", FILE],
                    stdin=stdin.encode(),
                    timeout_s=self._timeout_s,
                )
                output = result.stdout.decode(errors="replace")
                self._passed.append(
                    result.rc == 0
                    and not result.timed_out
                    and same_output(output, self._problem.answer(stdin))
                )
                if result.timed_out or not (self._partial or self._passed[-1]):
                    # Stop after a timeout: all cases must fit into the time of a stage.
                    break
        finally:
            await self.close()


def prompt(problem: Problem, tools: Sequence[Tool], calls: CallStyle) -> list[Message]:
    """Return the first message."""
    end = f"{ANSWER}\nor leave it in {FILE}." if tools else ANSWER
    text = PROMPT.format(text=problem.text(), end=end)
    return [
        Message(
            role="user",
            content=f"{text}\n\n{text_call_instructions(tools)}"
            if tools and calls == "text"
            else text,
        )
    ]


def same_output(one: str, other: str) -> bool:
    """Return whether the lines are equal, except for trailing white space and trailing
    empty lines.
    """
    return [line.rstrip() for line in one.rstrip().split("\n")] == [
        line.rstrip() for line in other.rstrip().split("\n")
    ]
