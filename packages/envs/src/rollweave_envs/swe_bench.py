"""Resolve an issue of a repository of the user's own: instances in the format of
SWE-bench, tests by name as the reward (ProRL Agent §4).

Invariants: of the agent's sandbox only its changes of text files count, and of these
none of the tests' files and of files that decide how tests run; the tests run in a
fresh sandbox with the base, these changes, and then the files of the test patch; a test
passes only by a report that the code under test does not write
(`pytest_judge.py`); where the tests cannot run at the base either, the
attempt has no reward.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rollweave.envs.base import Options, Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Agent, Job, LimitError
from rollweave.envs.handlers.sandboxes import SandboxHandler, check_seen, exec_after_agent
from rollweave.envs.handlers.toolbox import check_positive, check_tools, toolbox
from rollweave.envs.handlers.tools import CallStyle, converse
from rollweave.envs.jsonl import draw_record
from rollweave.sandbox.base import HOST, MIB, ExecResult, Limits, Sandbox, SandboxSpec
from rollweave.sandbox.provider import provider
from rollweave.sandbox.tools import plain
from rollweave.schema.errors import (
    ConfigError,
    RewardError,
    SandboxError,
    SandboxLostError,
    SandboxSpoiledError,
    SandboxTimeoutError,
)
from rollweave.schema.work import Task
from rollweave_envs.changes import (
    CHANGED,
    CHANGED_BYTES,
    SURVEY,
    Changes,
    patch,
    surveyed_changes,
)
from rollweave_envs.pytest_judge import (
    LOCATE,
    PASSED,
    Outcomes,
    Run,
    check_config,
    folders_of,
    is_control,
    matched,
)
from rollweave_envs.swe import LIST_S, end_of_work, first_messages, tools_or_default
from rollweave_envs.swe_instances import (
    Instance,
    base_archive,
    files_of_tests,
    folder_of,
    instances,
    touched,
)

ROOT = "/testbed"
"""The default folder of the repository in a sandbox, that of SWE-bench's images."""

FILE_BYTES = 16 * MIB
"""Maximum bytes of a file at the base that is read."""

SURVEY_BYTES = 16 * MIB
"""Maximum bytes of the output of one program in the sandbox."""

TAIL = 4000
"""Number of characters of the tests' output that a result keeps."""

UNPACK = """
import sys, tarfile
tarfile.TarFile.extraction_filter = staticmethod(lambda member, path: member)
tarfile.open("/tmp/base.tar.gz").extractall(sys.argv[1])
"""
"""A program that unpacks the base into a folder: links as the repository has them."""

PROMPT = """The repository in {root} has this issue:

{issue}

Change the repository so that the issue is resolved, then {end}. Hidden tests decide. Your \
changes of the tests, and of files that control how tests run (conftest.py, pytest.ini), are not \
taken over."""

OUTCOMES = frozenset({*PASSED, "FAILED", "ERROR", "SKIPPED", "XPASS"})

_running: set[Instance] = set()
"""Instances whose tests were found to run at the base, in this process."""

_checked: set[Instance] = set()
"""Instances whose tests were found to have the right outcomes at the base."""


class SweBench(SandboxHandler):
    """A task is a line of `instances`, a JSONL file in the format of SWE-bench.

    - `repositories` is a folder with the repositories, git or plain (`folder_of`).
      Without it, the image has the repository in the folder `root`.
    - `image` and `limits` configure the sandboxes; `image_field` names the field of an
      instance with its image.
    - `python` is the command of the interpreter that has pytest and what the tests
      need. On the image `host`, it is the interpreter that runs Rollweave, with
      `packages` besides pytest.
    - `test` is a command that runs the tests in place of pytest. It gets the files of
      the tests (of names without `::`, the names), and prints outcomes as `pytest -rA`
      does.
    - `check_base` runs the tests before the first attempt at an instance in a process:
      FAIL_TO_PASS must fail, and PASS_TO_PASS pass.
    - `held_out` is a file of held-out instances; without it two eighths are held out.
    - `tools`, `calls`, `partial`, `timeout_s` and `output_bytes` are those of `swe`;
      `test_s` limits the tests in seconds. `step_s` of the tasks must be longer by one
      run of the tests at the base.
    """

    def __init__(
        self,
        *,
        instances: str,
        repositories: str = "",
        held_out: str = "",
        image: str = HOST,
        image_field: str = "",
        limits: Mapping[str, Any] | None = None,
        root: str = ROOT,
        packages: Sequence[str] = (),
        python: Sequence[str] = ("python",),
        test: Sequence[str] = (),
        test_s: float = 40.0,
        check_base: bool = False,
        tools: Sequence[str] | None = None,
        calls: CallStyle = "native",
        partial: bool = False,
        timeout_s: float = 30.0,
        output_bytes: int = 10_000,
    ) -> None:
        """Validate the options. Raises ConfigError that names the option."""
        del instances, held_out  # used by `make_task`
        self._tools = tools_or_default(tools, calls)
        check_tools(self._tools, calls)
        check_positive(timeout_s=timeout_s, output_bytes=output_bytes, test_s=test_s)
        for option, command in (("test", test), ("python", python)):
            if isinstance(command, str) or not (command or option == "test"):
                raise ConfigError(f"options.{option} must be a command, a list, got {command!r}")
        if not (repositories or image_field or image != HOST):
            raise ConfigError(
                "options.repositories must be a folder of repositories where no image has them, "
                "got ''"
            )
        try:
            self._packages = _packages(packages, test)
            self._spec = _spec(image, root, limits or {}, self._packages)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"options of the sandbox: {error}") from error
        self._repositories, self._image_field = repositories, image_field
        self._test, self._test_s, self._check_base = [*test], test_s, check_base
        self._interpreter = [*python]
        self._calls: CallStyle = calls
        self._partial, self._timeout_s, self._output_bytes = partial, timeout_s, output_bytes
        self._root = root
        self._instance: Instance | None = None
        self._survey = b""
        self._tests: dict[str, bytes | None] = {}
        self._changed: Changes = {}
        self._executable: frozenset[str] = frozenset()
        self._refused = self._patch = self._output = ""
        self._passed: dict[str, bool] = {}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next instance of the split. Raises ConfigError for an invalid one
        anywhere in the files.
        """
        packages = _packages(options.get("packages", ()), options.get("test", ()))
        check_seen({**options, "packages": packages})
        path, held_out = options["instances"], options.get("held_out", "")
        for file in filter(None, (path, held_out)):
            _read(file, options)
        file, row = draw_record(
            path, held_out, "", option="instances", index=index, seed=seed, split=split
        )
        return new_task(file=file, row=row)

    @classmethod
    def images(cls, options: Options) -> Iterable[str]:
        """Return the images of all instances. Raises ConfigError."""
        files = filter(None, (options["instances"], options.get("held_out", "")))
        named = [instance.image for file in files for instance in _read(file, options)]
        return dict.fromkeys([options.get("image", HOST), *filter(None, named)])

    async def init(self, job: Job) -> None:
        """Start a sandbox with the base. Raises ConfigError for an invalid instance."""
        payload = payload_of(job.task)
        file, row = payload["file"], payload["row"]
        instance = instances(file, self._repositories, self._image_field)[row]
        if instance.image:
            try:
                self._spec = _spec(instance.image, self._root, self._spec.limits, self._packages)
            except ValueError as error:
                raise ConfigError(f"{instance.where}: {self._image_field}: {error}") from error
        self._instance, self._sandboxes = instance, job.sandboxes
        self._sandbox = await self._start_base(instance)
        paths = touched(instance)
        before = await _read_files(self._sandbox, self._root, paths)
        self._tests = await asyncio.to_thread(files_of_tests, instance, before)
        if self._check_base:
            await self.close()
            await self._check(instance)
            self._sandbox = await self._start_base(instance)
        survey = await self._sandbox.exec(self._python(SURVEY, self._root), timeout_s=LIST_S)
        if survey.rc or survey.truncated:
            raise SandboxError(f"{instance.where}: the repository's files could not be listed")
        self._survey = survey.stdout

    async def run(self, agent: Agent) -> None:
        """Let the agent work; its changes are stored, also if it reaches a limit."""
        assert self._sandbox is not None, "init comes first"
        assert self._instance is not None, "init comes first"
        tools = toolbox(
            self._sandbox, self._tools, timeout_s=self._timeout_s, output_bytes=self._output_bytes
        )
        issue = self._instance.problem
        text = PROMPT.format(root=self._root, issue=issue, end=end_of_work(tools))
        try:
            await converse(
                agent, first_messages(text, tools, self._calls), tools, calls=self._calls
            )
        except LimitError:
            await self._collect(self._sandbox)
            raise
        await self._collect(self._sandbox)

    async def eval(self) -> Score:
        """Run the tests on the changed base, in a fresh sandbox.

        Raises RewardError if they cannot run at the base either.
        """
        assert self._instance is not None, "init comes first"
        instance = self._instance
        if self._changed:
            self._passed = await self._judge(instance)
        fixed = [self._passed.get(name, False) for name in instance.fails]
        others_pass = all(self._passed.get(name, False) for name in instance.passes)
        success = all(fixed) and others_pass
        if self._partial:
            return Score(reward=sum(fixed) / len(fixed) if others_pass else 0.0, success=success)
        return Score(reward=float(success), success=success)

    def final_result(self) -> dict[str, Any]:
        """Return the change as a patch, and which tests passed: None for those that did
        not run, because nothing was changed.
        """
        if self._instance is None:
            return {}
        return {
            "instance_id": self._instance.id,
            "git_patch": self._patch,
            "refused": self._refused,
            "FAIL_TO_PASS": {name: self._passed.get(name) for name in self._instance.fails},
            "PASS_TO_PASS": {name: self._passed.get(name) for name in self._instance.passes},
            "output": self._output,
        }

    async def _start_base(self, instance: Instance) -> Sandbox:
        """Return a sandbox with the repository as it is at the base."""
        archive = b""
        if self._repositories:
            folder = folder_of(self._repositories, instance)
            archive = await asyncio.to_thread(base_archive, folder, instance)
        sandbox = self._sandbox = await self._sandboxes.start(self._spec)
        if archive:
            await sandbox.write("/tmp/base.tar.gz", archive)
            done = await sandbox.exec(self._python(UNPACK, self._root), timeout_s=self._test_s)
            if done.rc or done.timed_out:
                error = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise SandboxError(f"{instance.where}: the base could not be unpacked: {error}")
            await sandbox.exec(["rm", "/tmp/base.tar.gz"])
        return sandbox

    async def _collect(self, sandbox: Sandbox) -> None:
        program = self._python(CHANGED, self._root, str(CHANGED_BYTES))
        listing = await exec_after_agent(sandbox, program, stdin=self._survey, timeout_s=LIST_S)
        if listing.timed_out:  # the base was listed in time
            self._refused = f"the changes could not be listed within {LIST_S:g} s"
            return
        self._changed, self._executable, self._refused = surveyed_changes(
            listing.stdout, self._survey, keep=self._is_taken_over
        )

    async def _judge(self, instance: Instance) -> dict[str, bool]:
        """Return which tests pass with the agent's change. None does if the tests end
        without an outcome, although they have one at the base.

        Raises SandboxSpoiledError if the change spoils the sandbox.
        """
        try:
            passed = await self._run_tests(instance, self._changed)
        except SandboxSpoiledError:
            await self._check_tests_run(instance)
            raise
        if passed is None:
            await self._check_tests_run(instance)
            return dict.fromkeys(instance.tests, False)
        return passed

    async def _run_tests(self, instance: Instance, changed: Changes) -> dict[str, bool] | None:
        """Return which tests pass with the changes; None if there is no outcome, or the
        changes cannot be made.
        """
        sandbox = await self._start_base(instance)
        try:
            run = await self._prepared(sandbox, instance.files, changed)
            if changed:
                before = await _read_files(sandbox, self._root, changed)
                texts = {path: data.decode(errors="replace") for path, data in before.items()}
                self._patch = await asyncio.to_thread(patch, texts, changed)
            try:
                await self._write(sandbox, changed)
            except (SandboxLostError, SandboxTimeoutError):
                raise
            except SandboxError as error:  # a file where the tests need a folder, for example
                if not changed:
                    raise
                self._output = f"the change cannot be made at the base: {error}"
                return None
            command = run.command(self._interpreter) if run else [*self._test, *instance.files]
            stdin = run.stdin() if run else b""
            result = await sandbox.exec(
                command, stdin=stdin, cwd=self._root, timeout_s=self._test_s
            )
        finally:
            await self.close()
        return await asyncio.to_thread(self._outcomes, instance, run, result)

    async def _prepared(
        self, sandbox: Sandbox, files: Sequence[str], changed: Iterable[str]
    ) -> Run | None:
        """Return the run of pytest at the base, whose settings are those of the base;
        None if another command runs the tests.
        """
        if self._test:
            return None
        name = f".{secrets.token_hex(8)}"
        program = self._python(LOCATE, self._root, name, *files)
        located = await sandbox.exec(program, timeout_s=LIST_S)
        config = check_config(located.stdout, self._root)
        return Run(self._root, config, files, changed=[*changed])

    async def _write(self, sandbox: Sandbox, changed: Changes) -> None:
        """Make the changes, and write the files of the tests over them."""
        for path, text in changed.items():
            mode = 0o755 if path in self._executable else 0o644
            await _put(sandbox, self._root, path, None if text is None else text.encode(), mode)
        for path, data in self._tests.items():
            await _put(sandbox, self._root, path, data, 0o644)

    def _outcomes(
        self, instance: Instance, run: Run | None, result: ExecResult
    ) -> dict[str, bool] | None:
        printed = plain(result.stdout.decode(errors="replace"))
        errors = plain(result.stderr.decode(errors="replace"))
        late = f"the tests did not end within {self._test_s:g} s\n" if result.timed_out else ""
        self._output = f"{'' if run else printed}{errors}{late}"[-TAIL:]
        pairs = run.outcomes(result.stdout) if run else printed_outcomes(printed)
        return None if late or pairs is None else matched(pairs, instance.tests)

    async def _check_tests_run(self, instance: Instance) -> None:
        """Raise RewardError if no test has an outcome at the base either: then the
        agent's change is not the reason.
        """
        if instance in _running:
            return
        output = self._output
        if await self._at_base(instance) is None:
            raise RewardError(
                f"{instance.where}: {self._rule()}, also at the base, got {self._output[-400:]!r}"
            )
        _running.add(instance)
        self._output = output

    async def _check(self, instance: Instance) -> None:
        """Raise ConfigError if the instance's tests have other outcomes at the base."""
        if instance in _checked:
            return
        passed = await self._at_base(instance)
        if passed is None:
            raise ConfigError(f"{instance.where}: {self._rule()}, got {self._output[-400:]!r}")
        if wrong := _wrong_at_base(instance, passed):
            raise ConfigError(wrong)
        _running.add(instance)
        _checked.add(instance)
        self._output = ""

    async def _at_base(self, instance: Instance) -> dict[str, bool] | None:
        try:
            return await self._run_tests(instance, {})
        except SandboxSpoiledError as error:  # by code of the repository, not of the agent
            raise SandboxError(f"{instance.where}: the tests at the base: {error}") from error

    def _rule(self) -> str:
        if self._test:
            return "options.test must print outcomes of tests as pytest -rA does"
        return "options.python must run the tests by pytest"

    def _is_taken_over(self, path: str) -> bool:
        assert self._instance is not None, "init comes first"
        files = self._instance.files
        below = any(path.startswith(f"{folder}/") for folder in folders_of(files))
        return not (path in self._tests or path in files or below or is_control(path))

    def _python(self, program: str, *arguments: str) -> list[str]:
        return [self._spec.python(), "-I", "-S", "-c", program, *arguments]


def printed_outcomes(output: str) -> Outcomes | None:
    """Return the lines `STATUS NAME` or `STATUS NAME - message` of pytest's short
    summary; None if there is no such line.
    """
    summary = output.rpartition("short test summary info")[2]
    split = (line.partition(" ") for line in summary.splitlines())
    return [(status, rest) for status, _, rest in split if status in OUTCOMES and rest] or None


def _wrong_at_base(instance: Instance, passed: Mapping[str, bool]) -> str:
    """Return what is wrong with the outcomes at the base, "" if nothing is."""
    for field, names, right in (
        ("FAIL_TO_PASS", instance.fails, False),
        ("PASS_TO_PASS", instance.passes, True),
    ):
        wrong = [name for name in names if passed[name] is not right]
        if wrong:
            rule = "pass" if right else "fail"
            return (
                f"{instance.where}: {field} must {rule} at the base, got {len(wrong)} of "
                f"{len(names)} that do not, such as {wrong[0]}"
            )
    return ""


def _read(file: str, options: Options) -> tuple[Instance, ...]:
    return instances(file, options.get("repositories", ""), options.get("image_field", ""))


def _packages(packages: Sequence[str], test: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of the interpreter on the image HOST: pytest too, unless
    another command that does not need it runs the tests.
    """
    return tuple(
        dict.fromkeys((*(provider().installed("pytest") if test else ("pytest",)), *packages))
    )


def _spec(image: str, root: str, limits: Any, packages: tuple[str, ...]) -> SandboxSpec:
    """Return the specification of the sandboxes. Raises ValueError, ValidationError."""
    limits = msgspec.convert(limits, Limits) if isinstance(limits, Mapping) else limits
    limits = msgspec.structs.replace(limits, output_bytes=max(SURVEY_BYTES, limits.output_bytes))
    packages = packages if image == HOST else ()
    return SandboxSpec(image=image, workdir=root, limits=limits, packages=packages)


async def _read_files(sandbox: Sandbox, root: str, paths: Iterable[str]) -> dict[str, bytes]:
    """Return the files that exist. Raises SandboxError."""
    files: dict[str, bytes] = {}
    for path in paths:
        try:
            files[path] = await sandbox.read(f"{root}/{path}", limit=FILE_BYTES)
        except (SandboxLostError, SandboxTimeoutError):
            raise
        except SandboxError:  # missing, or not a file
            continue
    return files


async def _put(sandbox: Sandbox, root: str, path: str, data: bytes | None, mode: int) -> None:
    """Write the file; without data, remove it and the folders that it leaves empty."""
    if data is None:
        program = 'rm -f "$1" && rmdir -p "$(dirname "$1")" 2>/dev/null; true'
        await sandbox.exec(["sh", "-c", program, "sh", f"./{path}"], cwd=root)
    else:
        await sandbox.write(f"{root}/{path}", data, mode=mode)
