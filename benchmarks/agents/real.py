"""Bench `agents --real`: agent programs as they are installed, in the recording
gateway, against the APIs of `rollweave engine`, and in a sandbox.

A model whose answers are written down calls the program's own shell tool twice, with
thoughts before each call, and then answers. Every request is checked afterwards: a
field whose absence changes nothing must be one that by its nature has no effect, or be
recorded as ignored.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from benchmarks.agents.installed import (
    MODEL,
    PROGRAMS,
    Installed,
    default_folder,
    filled,
    stage,
)
from benchmarks.agents.installed import install as installed
from benchmarks.agents.scripted import chat_codec
from benchmarks.agents.silent import silent_fields
from benchmarks.contract import Figure, Result
from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.serving_metrics import ServingMetrics
from rollweave.envs.handlers.base import Endpoint, Job
from rollweave.envs.handlers.program import Program
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.gateway.front import ServingFront
from rollweave.rollout.gateway.server import Gateway, SessionRecording
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    TokenDelta,
    VersionSpan,
)
from rollweave.schema.work import SequenceCause, Task, Unreadable

WAYS: Final = ("gateway", "engine", "sandbox")
RUN_S: Final = 300.0
"""Maximum seconds of one program."""

CONTEXT: Final = 1_000_000
"""Tokens of the scripted model's context: its tokens are bytes."""

SHELLS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Bash": {"command": "{}", "description": "write"},
    "exec_command": {"cmd": "{}"},
    "shell_command": {"command": "{}"},
    "shell": {"command": ["bash", "-lc", "{}"]},
    "run_shell_command": {"command": "{}", "is_background": False},
    "terminal": {"command": "{}"},
    "execute_bash": {"command": "{}"},
    "bash": {"command": "{}", "description": "write"},
}
"""Name of a program's shell tool → the arguments of a call of it."""

TASK: Final = "Write 5 to out.txt, and print the file."
COMMAND: Final = "echo 5 > out.txt; cat out.txt"
LAST: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command by which mini-swe-agent ends."""

PASSED: Final = ("Authorization", "Content-Type", "X-Api-Key")
"""Headers that reach the server."""

PROBES: Final = (404, 405, 426)
"""Statuses of optional routes, which programs try and do without: a list of models in a
vendor's own form, a WebSocket.
"""


class Answers:
    """`generate` of a gateway or an engine."""

    def __init__(self, program: Installed) -> None:
        self._program, self.turns = program, 0

    def text(self, prompt: str) -> str:
        """Return the answer to a prompt: two calls of the shell tool, then a text."""
        declared = re.findall(r'"name": "([A-Za-z0-9_.-]+)"', prompt)
        shell = next((name for name in SHELLS if name in declared), "")
        done = prompt.count("<tool_response>")
        if not shell:
            said = prompt.count("<|im_start|>assistant") - 1
            says = self._program.says or ("Write a five",)
            return says[min(said, len(says) - 1)]
        if done > 1 and self._program.name != "mini-swe-agent":
            return "<think>\nThe file is there.\n</think>\n\nThe answer is 5."
        command = COMMAND if done < 2 else LAST
        arguments = json.dumps(SHELLS[shell]).replace("{}", command)
        call = f'{{"name": "{shell}", "arguments": {arguments}}}'
        return f"<think>\nStep {done + 1}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"

    async def __call__(
        self,
        session: str,
        tokens: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
        **_: Any,
    ) -> GenerateResult:
        self.turns += 1
        codec = chat_codec()
        text = self.text(codec.decode(tokens))
        if sampling.constraint is not None:
            text = '{"title": "Five"}'
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        turn = codec.encode_literal(text[: min(ends)]) if ends else codec.encode_turn(text)
        sampled = turn[: sampling.max_tokens]
        span = (VersionSpan(start=0, end=len(sampled), version=0),)
        logprobs = (-0.5,) * len(sampled)
        if on_tokens is not None:
            half = max(1, len(sampled) // 2)
            on_tokens(
                TokenDelta(
                    id=session,
                    start=0,
                    tokens=sampled[:half],
                    logprobs=logprobs[:half],
                    versions=(VersionSpan(start=0, end=half, version=0),),
                )
            )
            await asyncio.sleep(0)
        return GenerateResult(
            id=session,
            tokens=sampled,
            logprobs=logprobs,
            versions=span,
            finish=FinishReason.STOP,
        )


@dataclass
class Seen:
    """The record of a program's requests: each request with its path, body, status and
    error, and the fields that the server said it ignored.
    """

    requests: list[tuple[str, bytes, int, str]] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    server: str = ""

    @property
    def refused(self) -> list[str]:
        """The requests that were refused."""
        return [
            f"{status} {path}: {error:.300}"
            for path, body, status, error in self.requests
            if status >= 400 and (body or status not in PROBES)
        ]

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Send a request on to the server, and its answer back."""
        body = await request.read()
        headers = {name: request.headers[name] for name in PASSED if name in request.headers}
        url = self.server + request.path_qs
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, url, data=body, headers=headers) as answer,
        ):
            error = await answer.text() if answer.status >= 400 else ""
            self.requests.append((request.path, body, answer.status, error))
            named = answer.headers.get("X-Rollweave-Ignored", "")
            self.ignored |= {each for each in named.split(", ") if each}
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            if error:
                await response.write(error.encode())
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    @contextlib.asynccontextmanager
    async def between(self, server: str) -> AsyncIterator[str]:
        """Stand between a program and a server at this URL; yield the program's."""
        self.server = server
        app = web.Application(client_max_size=1 << 27)
        app.router.add_route("*", "/{path:.*}", self.pass_on)
        async with listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=1.0) as url:
            yield url


class _Engine:
    """The part of an engine's server that `ServingFront` uses."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self.metrics, self.model = answers, ServingMetrics(), "model"

    def has_room(self, count: int) -> bool:
        return count > 0

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None, *, report_s: float
    ) -> GenerateResult:
        del report_s
        return await self._answers(request.id, request.tokens, request.sampling, on_tokens)


@dataclass
class Outcome:
    """The outcome of one program in one way. `why_not` says why it was not run."""

    why_not: str = ""
    turns: int = 0
    refused: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    sequences: list[str] = field(default_factory=list)
    failed: str = ""

    def conditions(self) -> dict[str, Any]:
        """Return what is known, without what is empty."""
        return {name: value for name, value in self.__dict__.items() if value}


async def run(program: Installed, way: str, folder: Path) -> Outcome:
    """Run an installed program in one way."""
    answers, seen, outcome = Answers(program), Seen(), Outcome()
    if way == "engine":
        async with _engine(answers) as (url, key), seen.between(url) as shown:
            await _on_host(program, folder, shown + "/v1", key, outcome)
    else:
        gateway = Gateway(chat_codec(), answers, model="scripted")
        limits = SessionLimits(context=CONTEXT, turn_tokens=CONTEXT, tokens=CONTEXT, turn_s=RUN_S)
        access = gateway.open("s", limits=limits)
        served = listening(gateway.app(), "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=1.0)
        async with served as url, seen.between(url) as shown:
            if way == "gateway":
                await _on_host(program, folder, shown + access.path, access.token, outcome)
            else:
                await _in_sandbox(program, folder, shown + access.path, access.token, outcome)
        recording = gateway.close("s")
        outcome.sequences = [str(sequence.origin) for sequence in recording.sequences]
        outcome.split = _split(recording, seen)
        outcome.ignored = [str(one) for one in recording.ignored]
    outcome.turns, outcome.refused = answers.turns, seen.refused
    outcome.ignored = outcome.ignored or sorted(seen.ignored)
    outcome.silent = silent_fields(seen)
    if not outcome.why_not and not outcome.turns:
        outcome.failed = outcome.failed or "it asked for no turn"
    return outcome


@contextlib.asynccontextmanager
async def _engine(answers: Answers) -> AsyncIterator[tuple[str, str]]:
    """Serve the APIs of `rollweave engine`; yield the URL and the key."""
    app = web.Application()
    front = ServingFront(_Engine(answers), chat_codec(), context=CONTEXT)  # type: ignore[arg-type]
    front.add_to(app)
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=1.0) as url:
        yield url, "key"


def _access(url: str, key: str) -> dict[str, str]:
    """Return the values of placeholders."""
    root = url.removesuffix("/v1")
    return {"url": url, "root": root, "key": key, "model": MODEL, "task": TASK}


async def _on_host(program: Installed, folder: Path, url: str, key: str, outcome: Outcome) -> None:
    """Run the program in a folder of its own, which also has its temporary files, with
    the variables that it has in a sandbox.
    """
    values = _access(url, key)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        work = Path(home) / "work"
        work.mkdir()
        (work / "notes.txt").write_text("5\n")
        env = {
            "PATH": f"{folder / 'npm' / 'node_modules' / '.bin'}:{os.environ['PATH']}",
            "HOME": home,
            "TMPDIR": home,
            "PWD": str(work),
            "LANG": "C.UTF-8",
            **variables(url, key),
            **program.variables(values),
        }
        process = await asyncio.create_subprocess_exec(
            *program.command(folder, values),
            env=env,
            cwd=work,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=(output := Path(home) / "output").open("wb"),
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(RUN_S):
                await process.wait()
        except TimeoutError:
            outcome.failed = f"it did not end within {RUN_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode and not outcome.failed:
            text = output.read_bytes().decode(errors="replace")
            outcome.failed = f"status {process.returncode}: {text[-300:]}"


def variables(url: str, key: str) -> dict[str, str]:
    """Return the variables that the handler `program` sets."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "CODEX_API_KEY": key,
    }


class _Agent:
    """The agent of a handler that only gives its address."""

    turns_left = 100

    def __init__(self, url: str, key: str) -> None:
        self._endpoint = Endpoint(url=url, token=key)

    async def endpoint(self, *, unreadable: Unreadable = "ignore") -> Endpoint:
        del unreadable
        return self._endpoint


async def _in_sandbox(
    program: Installed, folder: Path, url: str, key: str, outcome: Outcome
) -> None:
    """Run the program as the handler `program` does."""
    names = {"url": "$OPENAI_BASE_URL", "key": "$OPENAI_API_KEY", "model": MODEL, "task": TASK}
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as staged:
        boxes = Sandboxes()
        handler: Program | None = None
        try:
            command = [*stage(program, folder, Path(staged)), *filled(program.arguments, names)]
            words = " ".join(f'"{word.replace(chr(34), chr(92) + chr(34))}"' for word in command)
            given = dict(zip(program.env, filled(program.env.values(), names), strict=True))
            exports = [f"export {name}={_quoted(value)}" for name, value in given.items()]
            handler = Program(
                command=["sh", "run.sh"],
                score=["echo", "0"],
                files={"run.sh": "\n".join([*exports, words]), "notes.txt": "5\n"},
                folder=staged,
                timeout_s=RUN_S,
                limits={"processes": 512},
            )
            task = Task(id="real", env="program", seed=0)  # type: ignore[arg-type]
            await handler.init(Job(task=task, seed=0, sandboxes=boxes))
            await handler.run(_Agent(url, key))  # type: ignore[arg-type]
            result = handler.final_result()
            if result["rc"]:
                outcome.failed = (
                    f"status {result['rc']}: {(result['stdout'] + result['stderr'])[-300:]}"
                )
        except (RollweaveError, OSError, ValueError) as error:
            outcome.why_not = f"{type(error).__name__}: {error}"
        finally:
            if handler is not None:
                await handler.close()
            await boxes.close()


def _quoted(value: str) -> str:
    """Quote a value for a shell that replaces variables in it."""
    return '"' + value.replace('"', '\\"') + '"'


def _split(recording: SessionRecording, seen: Seen) -> list[str]:
    """Return the sequences that began without a reason that holds: a branch is one
    only if the program has asked the same twice, or went back.
    """
    histories = [_history(body) for _, body, status, _ in seen.requests if body and status < 400]
    went_back = any(
        one == other[: len(one)]
        for place, one in enumerate(histories)
        for other in histories[:place]
    )
    found = []
    for number, sequence in enumerate(recording.sequences):
        cause = None if sequence.origin is None else sequence.origin.cause
        if cause is None or (cause is SequenceCause.FIRST and number):
            found.append(f"sequence {number + 1} has no reason")
        elif cause is SequenceCause.BRANCH and not went_back:
            found.append(f"sequence {number + 1} is no branch")
    return found


def _history(body: bytes) -> list[Any]:
    asked = json.loads(body)
    return list(asked.get("messages") or asked.get("input") or ())


QUICK: Final = ("claude-code", "codex")
"""Programs that `--quick` runs, in the gateway only."""


def bench_real(
    folder: Path | None,
    *,
    quick: bool,
    install: bool,
    progress: Callable[[str], None],
) -> Result:
    """Run the programs that are installed in a folder in each way."""
    home = folder or default_folder()
    outcomes: dict[tuple[str, str], Outcome] = {}
    for program in PROGRAMS:
        why = "--quick leaves it out" if quick and program.name not in QUICK else ""
        why = why or (installed(program, home) if install else program.missing(home))
        for way in WAYS[:1] if quick else WAYS:
            progress(f"{program.name}, {way} …")
            outcomes[program.name, way] = (
                Outcome(why_not=why) if why else asyncio.run(run(program, way, home))
            )
    done = {place: outcome for place, outcome in outcomes.items() if not outcome.why_not}
    ran = {name for name, _ in done}
    figures: dict[str, Figure] = {
        "programs": len(ran),
        "programs_not_run": len(PROGRAMS) - len(ran),
        "runs": len(done),
        "runs_failed": sum(bool(each.failed) for each in done.values()),
        "turns": sum(each.turns for each in done.values()),
        "refused_as_installed": sum(len(each.refused) for each in done.values()),
        "silently_ignored": sum(len(each.silent) for each in done.values()),
        "sequences": sum(len(each.sequences) for each in done.values()),
        "sequences_split_without_reason": sum(len(each.split) for each in done.values()),
    }
    conditions: dict[str, Any] = {"folder": str(home)}
    for (name, way), outcome in outcomes.items():
        said = outcome.why_not or outcome.failed or "; ".join(outcome.sequences) or "answered"
        conditions[f"{name}, {way}"] = f"not run: {said}" if outcome.why_not else said
    conditions["details"] = {
        f"{name}, {way}": outcome.conditions() for (name, way), outcome in done.items()
    }
    return Result(bench="agents", figures=figures, conditions=conditions)
