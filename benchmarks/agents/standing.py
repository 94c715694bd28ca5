"""The two ends between which an agent program stands: a model whose answers are written
down, and a record of the requests on their way to it.
"""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from aiohttp import web

from benchmarks.agents.installed import Installed
from benchmarks.agents.scripted import chat_codec, say
from rollweave.engine.clients.base import OnTokens
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.gateway.server import SessionRecording
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.work import SequenceCause

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
            says = self._program.says or ("Write a five",)
            return next((text for text in says if text not in prompt), says[-1])
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
        text = self.text(chat_codec().decode(tokens))
        if sampling.constraint is not None:
            text = '{"title": "Five"}'
        return await say(session, text, sampling, on_tokens)


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


def split_without_reason(recording: SessionRecording, seen: Seen) -> list[str]:
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
