"""Bench `agents --real`: agent programs as they are installed, in the recording
gateway, against the APIs of `rollweave engine`, and in a sandbox.

A model whose answers are written down calls the program's own shell tool twice, with
thoughts before each call, and then answers. Every request is checked afterwards: a
field whose absence changes nothing must be one that by its nature has no effect, or be
recorded as ignored.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

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
from benchmarks.agents.standing import TASK, Answers, Seen, split_without_reason
from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress
from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.serving_metrics import ServingMetrics
from rollweave.envs.handlers.base import Endpoint, Job
from rollweave.envs.handlers.program import Program
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.gateway.front import ServingFront
from rollweave.rollout.gateway.server import Gateway
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import (
    GenerateRequest,
    GenerateResult,
)
from rollweave.schema.work import Task, Unreadable

WAYS: Final = ("gateway", "engine", "sandbox")
RUN_S: Final = 300.0
"""Maximum seconds of one program."""

CONTEXT: Final = 1_000_000
"""Tokens of the scripted model's context: its tokens are bytes."""


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
        outcome.split = split_without_reason(recording, seen)
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


async def _on_host(program: Installed, folder: Path, url: str, key: str, outcome: Outcome) -> None:
    """Run the program in a folder of its own, which also has its temporary files, with
    the variables that it has in a sandbox.
    """
    root = url.removesuffix("/v1")
    values = {"url": url, "root": root, "key": key, "model": MODEL, "task": TASK}
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
        output = Path(home) / "output"
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *program.command(folder, values),
                env=env,
                cwd=work,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
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
            command = [*stage(program, folder, Path(staged)), *program.words(names)]
            words = " ".join(f'"{word.replace(chr(34), chr(92) + chr(34))}"' for word in command)
            given = dict(zip(program.env, filled(program.env.values(), names), strict=True))
            exports = [f"export {name}={_quoted(value)}" for name, value in given.items()]
            files = {"run.sh": "\n".join([*exports, words]), "notes.txt": "5\n"}
            handler = Program(
                command=["sh", "run.sh"],
                score=["echo", "0"],
                files=files,
                folder=staged,
                timeout_s=RUN_S,
                limits={"processes": 512},
            )
            task = Task(id="real", env="program", seed=0)  # type: ignore[arg-type]
            await handler.init(Job(task=task, seed=0, sandboxes=boxes))
            await handler.run(_Agent(url, key))  # type: ignore[arg-type]
            result = handler.final_result()
            if result["rc"]:
                said = result["stdout"] + result["stderr"]
                outcome.failed = f"status {result['rc']}: {said[-300:]}"
        except (RollweaveError, OSError, ValueError) as error:
            outcome.why_not = f"{type(error).__name__}: {error}"
        finally:
            if handler is not None:
                await handler.close()
            await boxes.close()


def _quoted(value: str) -> str:
    """Quote a value for a shell that replaces variables in it."""
    return '"' + value.replace('"', '\\"') + '"'


QUICK: Final = ("claude-code", "codex")
"""Programs that `--quick` runs, in the gateway only."""


def bench_real(
    folder: Path | None,
    *,
    quick: bool,
    install: bool,
    progress: Progress,
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
