"""Any agent program as a handler: it runs in a sandbox without a network, and reaches
the agent through OpenAI's chat API only.

`init` starts the sandbox and writes the files, and the task as `task.json`, into the
folder in which the program will run. `run` starts the program with OPENAI_BASE_URL and
OPENAI_API_KEY and waits for its end; beyond the agent's turns or tokens the gateway
answers 429 or 400, and the turns so far count. `eval` scores the files that the program
wrote.

Invariants: the program never sees the fields of its task that are `hidden`, nor
`score_files`; a scoring command runs in a clean sandbox, in which only the files of the
submission come from the program, in a folder outside the one in which the command runs;
a program that could not run to its end gives no reward, unless it exceeded the
sandbox's memory, processes or CPU, which gives 0.
"""

import asyncio
import inspect
import json
import os
import posixpath
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, get_args

import msgspec

from rollweave.envs.base import Options, Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Agent, Job
from rollweave.envs.handlers.sandboxes import SandboxHandler, StartsSandboxes, check_seen, forget
from rollweave.envs.handlers.toolbox import check_positive
from rollweave.envs.jsonl import draw_record, numbered_records, record_at
from rollweave.envs.registry import load
from rollweave.sandbox.base import (
    HOST,
    MIB,
    ExecResult,
    Sandbox,
    SandboxSpec,
    Snapshot,
    check_snapshot_paths,
)
from rollweave.sandbox.tools import plain
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError, RewardError, SandboxError, SandboxLostError
from rollweave.schema.text import decimal
from rollweave.schema.work import Task, Unreadable

TASK = "task.json"

SCORE_S = 600.0
"""Time limit in seconds of a scoring command, for example a test suite."""

OUTPUTS_BYTES = 8 * MIB
"""Maximum bytes of all files of `outputs` together: a scoring command gets the files as
JSON.
"""

TAIL = 4000
"""Number of characters of output that a result keeps."""

SUBMISSION = "SUBMISSION"
"""Environment variable with the submission's folder, for a scoring command."""

SUBMITTED = "/home/submission"
"""Folder of the submission. It is outside the home, so that tools that search the home
for modules, tests or settings do not find it.
"""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a command that ran in a sandbox with a submission. `rc` is the exit
    status, or the negated number of a signal.
    """

    rc: int
    stdout: str
    stderr: str
    timed_out: bool


class RunsSubmission(Protocol):
    """Runs a command in a clean sandbox."""

    async def __call__(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Ran:
        """Run `command` in the home of a sandbox that has `files`, and the submission
        in the folder that the variable SUBMISSION names.

        Each call has a separate sandbox, so that code of one call cannot reach another.
        Raises SandboxSpoiledError if code inside ends or overloads its sandbox; if this
        error propagates, the attempt gets reward 0.
        """


async def _no_submission(command: Sequence[str], **_: Any) -> Ran:
    raise RewardError(
        "options.submission must list the files beside which outcome.run is to run "
        f"{' '.join(command)!r:.100}, got none"
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The argument of a scoring function. `task` is the complete task, including hidden
    fields; `outputs` are the existing output files. If the option `submission` is
    given, `run` runs submitted code, so that the function can judge what the code does
    (`RunsSubmission`).
    """

    task: Mapping[str, Any]
    rc: int
    stdout: str
    stderr: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    run: RunsSubmission = field(default=_no_submission, repr=False, compare=False)

    def as_json(self) -> bytes:
        """Return the fields except `run`, for a scoring command."""
        fields = {name: value for name, value in vars(self).items() if name != "run"}
        return json.dumps(fields).encode()


class Program(SandboxHandler):
    """An `AgentHandler` that runs an agent program. Paths in the sandbox may be
    relative to its home, where the program runs.

    - `command` is the program and its arguments. On the image `host`, `python` is the
      interpreter that runs Rollweave, and it can import `packages`.
    - `score` is `package.module:function`, called with an `Outcome`; it may be async,
      and returns a number or a `Score`. Or it is a command: it runs in the home of a
      clean sandbox, with the `Outcome` as JSON on standard input and the folder of the
      submission in the variable SUBMISSION; the last line that it prints is the reward.
    - `submission` lists the files and folders below the program's home that a scoring
      command receives, by default the complete home, or beside which a scoring function
      runs commands (`Outcome.run`), by default none. Other files that the program wrote
      are left out, and so are symbolic links that lead out of the home.
    - `score_files` maps paths to texts, written before the scoring command only: the
      tests, for example.
    - `tasks` and `held_out` are JSONL files with one task per line. Without `tasks`
      each task is empty; without `held_out` two eighths of `tasks` are held out.
      `hidden` lists fields of a task that the program does not see.
    - `files` maps paths to texts; `folder` is a folder of the host whose files are in
      the home; `outputs` lists text files that are read when the program has ended.
    - `env` holds further variables. `image`, `limits` and `network` configure the
      sandbox (`docs/SANDBOX.md`). `image_field` names a field of a task; where a task
      has it, it is its image, in place of `image`.
    - `unreadable` says whether fields of its requests that neither the model nor its
      chat template can read are ignored and recorded ("ignore"), or refused ("refuse").
    - `timeout_s` limits the program in seconds, including its waits; beyond it the
      attempt fails.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        score: str | Sequence[str],
        submission: Sequence[str] | None = None,
        score_files: Mapping[str, str] | None = None,
        tasks: str = "",
        held_out: str = "",
        hidden: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        folder: str = "",
        outputs: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        image: str = HOST,
        image_field: str = "",
        packages: Sequence[str] = (),
        limits: Mapping[str, Any] | None = None,
        network: bool = False,
        unreadable: Unreadable = "ignore",
        timeout_s: float = 3600.0,
    ) -> None:
        """Validate the options. Raises ConfigError that names the option."""
        del tasks, held_out  # used by `make_task`
        self._command = _typed("command", command, list[str])
        if not self._command:
            raise ConfigError("options.command must have at least a program, got []")
        self._score = score if isinstance(score, str) else _typed("score", score, list[str])
        if not self._score:
            raise ConfigError(f"options.score must be a function or a command, got {score!r}")
        self._function = _function(score) if isinstance(score, str) else None
        self._is_submitted = self._function is None or submission is not None
        self._submission = _typed(
            "submission", ["."] if submission is None else submission, list[str]
        )
        if not self._submission:
            raise ConfigError("options.submission must have at least one path, got []")
        try:
            check_snapshot_paths(self._submission, SUBMITTED)
        except ValueError as error:
            raise ConfigError(f"options.submission: {error}") from error
        self._score_files = _typed("score_files", score_files or {}, dict[str, str])
        self._hidden = _typed("hidden", hidden, list[str])
        self._files = _typed("files", files or {}, dict[str, str])
        self._outputs = _typed("outputs", outputs, list[str])
        self._env = _typed("env", env or {}, dict[str, str])
        if unreadable not in get_args(Unreadable):
            rule = "must be 'ignore' or 'refuse'"
            raise ConfigError(f"options.unreadable {rule}, got {unreadable!r:.100}")
        self._unreadable: Unreadable = unreadable
        self._timeout_s = _typed("timeout_s", timeout_s, float)
        check_positive(timeout_s=self._timeout_s)
        try:
            spec = {"image": image, "network": network, "limits": limits or {}, "env": self._env}
            spec |= {"packages": packages, "folder": os.path.abspath(folder) if folder else ""}
            # Without `env`, all programs share one pool.
            self._spec = msgspec.structs.replace(msgspec.convert(spec, SandboxSpec), env={})
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"options of the sandbox: {error}") from error
        self._image_field = image_field
        self._sandboxes: StartsSandboxes | None = None
        self._snapshot: Snapshot | None = None
        self._forget: weakref.finalize[Any, Program] | None = None
        self._outcome: Outcome | None = None
        self._task: dict[str, Any] = {}
        self._score_output = ""
        self._unread: dict[str, str] = {}

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next line of `tasks`. Raises ConfigError."""
        check_seen(options)
        path, own = options.get("tasks", ""), mix(seed, split, index)
        if not path:
            return new_task(seed=own)
        file, row = draw_record(
            path,
            options.get("held_out", ""),
            "",
            option="tasks",
            index=index,
            seed=seed,
            split=split,
        )
        return msgspec.structs.replace(
            new_task(seed=own), payload=json.dumps(record_at(file, "", row, "tasks"))
        )

    @classmethod
    def images(cls, options: Options) -> Iterable[str]:
        """Return the images of all tasks. Raises ConfigError."""
        named = {options.get("image", HOST): None}
        if field := options.get("image_field", ""):
            for option in ("tasks", "held_out"):
                if path := options.get(option, ""):
                    named |= {
                        _image_of(task, field): None
                        for _, task in numbered_records(path, "", option)
                        if field in task
                    }
        return list(named)

    async def init(self, job: Job) -> None:
        self._task = payload_of(job.task)
        if self._image_field and self._image_field in self._task:
            image = _image_of(self._task, self._image_field)
            packages = self._spec.packages if image == HOST else ()
            self._spec = msgspec.structs.replace(self._spec, image=image, packages=packages)
        self._sandboxes = job.sandboxes
        self._sandbox = await job.sandboxes.start(self._spec)
        for path, text in self._files.items():
            await self._sandbox.write(path, text.encode())
        visible = {name: value for name, value in self._task.items() if name not in self._hidden}
        await self._sandbox.write(TASK, json.dumps(visible, indent=1).encode())

    async def run(self, agent: Agent) -> None:
        """Run the program.

        Raises SandboxError if it cannot be started, or does not end in time.
        """
        assert self._sandbox is not None, "init comes first"
        sandbox, endpoint = self._sandbox, await agent.endpoint(unreadable=self._unreadable)
        async with sandbox.tunnel(endpoint.url) as url:
            access = {
                "OPENAI_BASE_URL": url,
                "OPENAI_API_BASE": url,
                "OPENAI_API_KEY": endpoint.token,
                "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": endpoint.token,
                "CODEX_API_KEY": endpoint.token,
            }
            env = {**access, **self._env}
            result = await sandbox.exec(self._command, env=env, timeout_s=self._timeout_s)
        self._outcome = Outcome(
            task=self._task,
            rc=result.rc,
            **_texts(result),
            outputs=await self._read_outputs(sandbox),
            run=self._run_submitted if self._is_submitted else _no_submission,
        )
        if result.timed_out:
            raise SandboxError(f"the program did not end within timeout_s, {self._timeout_s:g} s")
        if self._is_submitted:
            self._snapshot = await sandbox.snapshot(only=self._submission, at=SUBMITTED)
            self._forget = weakref.finalize(self, forget, self._snapshot)

    async def eval(self) -> Score:
        """Return the reward. Raises RewardError for a scoring command that fails or
        prints no number.
        """
        assert self._outcome is not None, "run comes first"
        try:
            if self._function is None:
                return Score(reward=await self._run_score(self._outcome))
            score = self._function(self._outcome)
            score = await score if inspect.isawaitable(score) else score
            return score if isinstance(score, Score) else Score(reward=score)
        finally:
            if self._forget is not None:
                await asyncio.to_thread(self._forget)

    def final_result(self) -> dict[str, Any]:
        """Return the exit status and the end of the output of the program and of the
        scoring command, and why files of `outputs` could not be read.
        """
        outcome = self._outcome
        if outcome is None:
            return {}
        return {
            "rc": outcome.rc,
            "stdout": outcome.stdout[-TAIL:],
            "stderr": outcome.stderr[-TAIL:],
            "outputs": {path: text[-TAIL:] for path, text in outcome.outputs.items()},
            "score": self._score_output,
            **({"unread": self._unread} if self._unread else {}),
        }

    async def _run_score(self, outcome: Outcome) -> float:
        result = await self._run_beside_submission(
            list(self._score), outcome.as_json(), self._score_files, SCORE_S
        )
        output = _texts(result)
        self._score_output = (output["stdout"] + output["stderr"])[-TAIL:]
        if result.rc or result.timed_out:
            how = (
                f"took more than {SCORE_S:g} s"
                if result.timed_out
                else f"ended with status {result.rc}"
            )
            raise RewardError(f"the scoring command {how}: {self._score_output[-400:]}")
        last = output["stdout"].strip().rpartition("\n")[2]
        reward = decimal(last.strip())
        if reward is None:
            raise RewardError(
                "the scoring command's last line must be a number in ASCII digits, "
                f"got {last[:100]!r}"
            )
        return reward

    async def _run_submitted(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Ran:
        """Implements `RunsSubmission`."""
        result = await self._run_beside_submission(
            list(command), stdin.encode(), files or {}, timeout_s
        )
        return Ran(rc=result.rc, timed_out=result.timed_out, **_texts(result))

    async def _run_beside_submission(
        self, command: list[str], stdin: bytes, files: Mapping[str, str], timeout_s: float
    ) -> ExecResult:
        assert self._sandboxes is not None, "init comes first"
        assert self._snapshot is not None, "run took one"
        sandbox = await self._sandboxes.branch(self._snapshot)
        try:
            for path, text in files.items():
                await sandbox.write(path, text.encode())
            submitted = posixpath.normpath(
                f"{sandbox.workdir}/{posixpath.relpath(SUBMITTED, self._spec.workdir)}"
            )
            env = {**self._env, SUBMISSION: submitted}
            return await sandbox.exec(command, stdin=stdin, env=env, timeout_s=timeout_s)
        finally:
            await sandbox.stop(grace_s=0.0)

    async def _read_outputs(self, sandbox: Sandbox) -> dict[str, str]:
        outputs: dict[str, str] = {}
        left = OUTPUTS_BYTES
        for path in self._outputs:
            try:
                data = await sandbox.read(path, limit=left)
                left -= len(data)
                outputs[path] = plain(data.decode(errors="replace"))
            except SandboxLostError:
                raise
            except SandboxError as error:  # the score decides what a missing file means
                self._unread[path] = str(error)
        return outputs


def _image_of(task: Mapping[str, Any], field: str) -> str:
    """Return the image that a task names. Raises ConfigError."""
    image = task[field]
    try:
        if not isinstance(image, str):
            raise ValueError(f"image must be text, got {image!r:.100}")
        return SandboxSpec(image=image).image
    except ValueError as error:
        raise ConfigError(f"options.image_field: {field} of a task: {error}") from error


def _texts(result: ExecResult) -> dict[str, str]:
    return {
        name: plain(getattr(result, name).decode(errors="replace")) for name in ("stdout", "stderr")
    }


def _typed(name: str, value: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options.{name}: {error}: {value!r:.100}") from error


def _function(reference: str) -> Any:
    function = load(reference, what="options.score")
    if not callable(function):
        raise ConfigError(
            f"options.score must be a function or a command, {reference} is a "
            f"{type(function).__name__}"
        )
    return function
