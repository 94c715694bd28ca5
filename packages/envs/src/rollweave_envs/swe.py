"""Fix a bug: a small repository in a sandbox, an issue that describes the symptom, and
hidden tests as the reward (ProRL Agent §4).

Invariants: of the agent's sandbox only the files that it changed count; they are judged
in a fresh sandbox, by tests whose verdict is made outside it
(`probes.py`); files below `tests/` are ignored.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollweave.envs.base import Options, Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Agent, Job, LimitError, Tool
from rollweave.envs.handlers.sandboxes import SandboxHandler, exec_after_agent
from rollweave.envs.handlers.toolbox import check_positive, check_tools, packages_of, toolbox
from rollweave.envs.handlers.tools import CallStyle, converse, text_call_instructions
from rollweave.sandbox.base import MIB, Limits, Sandbox, SandboxSpec
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import SandboxError
from rollweave.schema.work import Task
from rollweave_envs.changes import CHANGED_BYTES, LISTING, Changes, changes, patch
from rollweave_envs.probes import Notes, passed, run_probes
from rollweave_envs.swe_bugs import (
    TESTS,
    Bug,
    broken,
    bugs,
    bugs_of,
    files_of,
    suite_sources,
    visible_files,
)

ROOT = "/project"

SPEC = SandboxSpec(
    workdir=ROOT, limits=Limits(memory_bytes=1024 * MIB, disk_bytes=256 * MIB, cpu_s=600.0)
)
"""Specification of the sandbox in which the agent's files are tested, and of the
agent's own, which also has the packages of its tools.
"""

LIST_S = 20.0
"""Time limit in seconds of listing the project's files."""

PROMPT = """The Python project in {root} has a bug. One of its users writes:

{issue}

Mend the project, then {end}. `python3 -m unittest` runs its tests: they pass already; others, \
which you do not see, fail as long as the bug is there. Changes of tests are not taken over."""

_expected: dict[str, Notes] = {}
"""The notes of a repository's tests on the correct code, computed once in each process.
"""


class Swe(SandboxHandler):
    """A task is a bug of `swe_repos`; its payload names it: `{"bug":
    "ledger-0168b0"}`.

    `tools` and `calls` choose how the agent works; `calls = "text"` permits only tools
    that take one text. The reward is 1 if all tests pass, otherwise 0; with `partial`
    it is the share of the failing tests that now pass, unless another one broke.
    """

    def __init__(
        self,
        *,
        tools: Sequence[str] | None = None,
        calls: CallStyle = "native",
        partial: bool = False,
        timeout_s: float = 30.0,
        output_bytes: int = 10_000,
    ) -> None:
        self._tools = tools_or_default(tools, calls)
        check_tools(self._tools, calls)
        check_positive(timeout_s=timeout_s, output_bytes=output_bytes)
        self._calls: CallStyle = calls
        self._partial, self._timeout_s, self._output_bytes = partial, timeout_s, output_bytes
        self._bug: Bug | None = None
        self._changed: Changes = {}
        self._passed: dict[str, bool] = {}
        self._refused = ""

    async def init(self, job: Job) -> None:
        """Start a sandbox and write the broken repository."""
        name = str(payload_of(job.task).get("bug"))
        if name not in bugs():
            raise ValueError(f"task.payload.bug must be the id of a bug, got {name!r}")
        self._bug, self._sandboxes = bugs()[name], job.sandboxes
        spec = msgspec.structs.replace(SPEC, packages=packages_of(self._tools))
        self._sandbox = await job.sandboxes.start(spec)
        await _write(self._sandbox, visible_files(self._bug))

    async def run(self, agent: Agent) -> None:
        """Let the agent work; its changes are stored, also if it reaches a limit."""
        assert self._sandbox is not None
        assert self._bug is not None
        tools = toolbox(
            self._sandbox, self._tools, timeout_s=self._timeout_s, output_bytes=self._output_bytes
        )
        try:
            await converse(agent, prompt(self._bug, tools, self._calls), tools, calls=self._calls)
        except LimitError:
            await self._collect(self._sandbox, self._bug)
            raise
        await self._collect(self._sandbox, self._bug)

    async def eval(self) -> Score:
        """Run all tests on the changed files, in a fresh sandbox."""
        assert self._bug is not None
        if self._changed:
            self._passed = await self._run_tests(self._bug)
        fixed = [self._passed.get(name, False) for name in self._bug.fails]
        others_pass = all(ok for name, ok in self._passed.items() if name not in self._bug.fails)
        success = all(fixed) and others_pass
        if self._partial:
            return Score(reward=sum(fixed) / len(fixed) if others_pass else 0.0, success=success)
        return Score(reward=float(success), success=success)

    def final_result(self) -> dict[str, Any]:
        """Return the change as a patch, and which tests passed."""
        if self._bug is None:
            return {}
        fails = self._bug.fails
        return {
            "bug": self._bug.id,
            "git_patch": patch(visible_files(self._bug), self._changed),
            "refused": self._refused,
            "FAIL_TO_PASS": {name: self._passed.get(name, False) for name in fails},
            "PASS_TO_PASS": {name: ok for name, ok in self._passed.items() if name not in fails},
        }

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the bugs of the split in a random order, repeatedly."""
        split_bugs = bugs_of(split)
        epoch, place = divmod(index, len(split_bugs))
        order = random.Random(mix(seed, split, epoch)).sample(split_bugs, len(split_bugs))
        return new_task(bug=order[place].id)

    async def _collect(self, sandbox: Sandbox, bug: Bug) -> None:
        program = [SPEC.python(), "-I", "-S", "-c", LISTING, ROOT, str(CHANGED_BYTES)]
        listing = await exec_after_agent(sandbox, program, timeout_s=LIST_S)
        self._changed, self._refused = changes(listing.stdout, visible_files(bug), keep=_is_no_test)

    async def _run_tests(self, bug: Bug) -> dict[str, bool]:
        if bug.repo not in _expected:
            right = await self._run_probes(bug.repo, files_of(bug.repo))
            if not all(passed(right, right).values()):
                raise SandboxError(
                    f"the tests of {bug.repo} must come to their end on this machine, and did not"
                )
            _expected[bug.repo] = right
        files = {path: text for path, text in broken(bug).items() if _is_no_test(path)}
        changed = {path: text for path, text in self._changed.items() if text is not None}
        unchanged = {path: text for path, text in files.items() if path not in self._changed}
        return passed(await self._run_probes(bug.repo, unchanged | changed), _expected[bug.repo])

    async def _run_probes(self, repo: str, files: Mapping[str, str]) -> Notes:
        sandbox = self._sandbox = await self._sandboxes.start(SPEC)
        try:
            await _write(sandbox, files)
            return await run_probes(sandbox, SPEC, suite_sources(repo), root=ROOT)
        finally:
            await self.close()


def prompt(bug: Bug, tools: Sequence[Tool], calls: CallStyle) -> list[Message]:
    """Return the first messages."""
    text = PROMPT.format(root=ROOT, issue=bug.issue, end=end_of_work(tools))
    return first_messages(text, tools, calls)


def tools_or_default(tools: Sequence[str] | None, calls: CallStyle) -> tuple[str, ...]:
    """Return the names of an agent's tools, by default those with which it edits."""
    if tools is not None:
        return tuple(tools)
    return ("bash", "submit") if calls == "text" else ("bash", "str_replace_editor", "submit")


def end_of_work(tools: Sequence[Tool]) -> str:
    """Return how an agent with these tools ends its work."""
    return (
        "call submit" if any(tool.name == "submit" for tool in tools) else "say that you are done"
    )


def first_messages(text: str, tools: Sequence[Tool], calls: CallStyle) -> list[Message]:
    """Return the text as a user's message, with how to call the tools where the agent's
    template does not show them.
    """
    content = f"{text}\n\n{text_call_instructions(tools)}" if calls == "text" else text
    return [Message(role="user", content=content)]


async def _write(sandbox: Sandbox, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        await sandbox.write(f"{ROOT}/{path}", text.encode())


def _is_no_test(path: str) -> bool:
    return not path.startswith(TESTS)
