"""vLLM as a peer of the engine bench: its server as a child process on the loopback,
asked with tokens, answering with tokens.

vLLM has requirements of its own, so it lives in an environment of its own:
`ROLLWEAVE_VLLM_PYTHON` names the interpreter. Invariants: whatever cannot be measured
is a `PeerError` whose text is the reason; a server is never waited for without a limit;
it and its children are killed and reaped when we leave it, however we leave it, and
gone with us if we are killed (`subprocess_guard.py`).
"""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from benchmarks.engine import subprocess_guard
from rollweave.io.child import log_tail
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import GenerateRequest

VARIABLE = "ROLLWEAVE_VLLM_PYTHON"
MISSING = (
    f"vLLM is not installed here, and {VARIABLE} does not name the interpreter of an environment "
    "that has it"
)

START_S = 600.0
"""Limit to a server's start: about 25 s on a quiet machine, 200 s on a loaded one where
it compiles.
"""

ANSWER_S = 600.0
"""Limit to one answer; a hung server then raises instead of hanging the bench."""

POLL_S = 0.2
"""Between two questions whether the server is ready, which takes tens of seconds."""

TAIL_LINES = 6
"""Lines of the server's output that a reason quotes."""

HOST = "127.0.0.1"
MODULE = "vllm.entrypoints.openai.api_server"
OPTIONS = ("--enable-scale-out", "--skip-tokenizer-init", "--distributed-executor-backend", "uni")
"""Tokens only, and the model in the engine's own process: for small models on a CPU
twice as fast as the default.
"""

EAGER = "--enforce-eager"
"""Starts sooner; compiled, the default, is about a third faster on the tiny model, and
needs a C++ compiler.
"""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""One thread, as every other engine has, left to the system to place; nothing is sent
to or fetched from anywhere.

Without `VLLM_ENABLE_V1_MULTIPROCESSING=0` the option `uni` is overruled on a CPU.
"""


class PeerError(RollweaveError):
    """The peer cannot be measured. The message is the reason."""


def interpreter() -> str | None:
    """The interpreter that has vLLM: what the environment names, else our own if vLLM
    is there, else None.
    """
    return os.environ.get(VARIABLE) or (sys.executable if find_spec("vllm") is not None else None)


class VllmServer:
    """One server for one model, as a context.

    It starts on entry and is ready tens of seconds later: see `wait_ready`.
    """

    def __init__(
        self,
        python: str,
        model: str,
        *,
        kv_bytes: int,
        eager: bool,
        scratch: Path,
        concurrency: int,
    ) -> None:
        """`scratch` is a directory for its log and what it would cache.

        At most `concurrency` requests are sent at a time.
        """
        self._python, self._model, self._kv_bytes, self.eager = python, model, kv_bytes, eager
        self._scratch, self._log = scratch, scratch / "vllm.log"
        self._senders = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm-peer")

    def __enter__(self) -> Self:
        """Start, without waiting. Raises PeerError where there is no such program."""
        program = shutil.which(self._python)
        if program is None:
            raise PeerError(f"{self._python!r} is not a program that can be run")
        self._place = _place()
        self.port = int(self._place.getsockname()[1])
        command = [
            os.path.abspath(program),
            "-I",
            subprocess_guard.__file__,
            "-m",
            MODULE,
            *self._options(),
        ]
        # Another interpreter has nothing to do with our module path; what it compiles
        # and its sockets' files are thrown away.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"TMPDIR": str(self._scratch)} | (
            {} if self.eager else {"VLLM_CACHE_ROOT": str(self._scratch / "cache")}
        )
        with self._log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._scratch,
                    env=inherited | ENVIRONMENT | own,
                    start_new_session=True,
                )
            except OSError as error:
                self._place.close()
                raise PeerError(f"{self._python!r} cannot be run: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the server and what it started, reap it, and let the requests under way
        fail.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard kills the rest
        self._process.wait()
        self._senders.shutdown()
        self._place.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, limit_s: float = START_S) -> str:
        """Wait until the server answers; its version.

        Raises PeerError where it ends or is not ready in time.
        """
        until = time.monotonic() + limit_s
        while not self._healthy(timeout_s=max(POLL_S, until - time.monotonic())):
            if time.monotonic() >= until:
                raise self._failed(f"was not ready in {limit_s:g} s")
            try:
                status = self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise self._failed(f"ended with exit status {status} before it was ready")
        return str(self._json("GET", "/version", timeout_s=ANSWER_S)["version"])

    def _healthy(self, *, timeout_s: float) -> bool:
        try:
            return self._ask("GET", "/health", timeout_s=timeout_s)[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def generate(self, requests: Sequence[GenerateRequest]) -> None:
        """Have all requests continued at once, to their full length.

        Raises PeerError where one is not.
        """
        list(self._senders.map(self._continue, requests))

    def _continue(self, request: GenerateRequest) -> None:
        """No seed, since seeded rows are sampled one by one there, and no log-probs:
        the peer is spared both.
        """
        wanted = request.sampling.max_tokens
        sampling = {
            "temperature": request.sampling.temperature,
            "max_tokens": wanted,
            "ignore_eos": True,
        }
        body = json.dumps(
            {"token_ids": request.tokens, "sampling_params": sampling, "stream": False}
        )
        got = len(
            self._json("POST", "/inference/v1/generate", body, timeout_s=ANSWER_S)["choices"][0][
                "token_ids"
            ]
        )
        if got != wanted:
            raise self._failed(f"gave {got} tokens instead of {wanted}")

    def _json(self, method: str, path: str, body: str | None = None, *, timeout_s: float) -> Any:
        try:
            status, answer = self._ask(method, path, body, timeout_s=timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(f"did not answer {path}: {type(error).__name__}: {error}") from error
        if status != http.client.OK:
            raise self._failed(
                f"answered {path} with status {status}: {answer[:200].decode(errors='replace')}"
            )
        return json.loads(answer)

    def _ask(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of one answer. Raises OSError or HTTPException."""
        with contextlib.closing(
            http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        ) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def _failed(self, what: str) -> PeerError:
        tail = "\n".join(log_tail(self._log).splitlines()[-TAIL_LINES:])
        return PeerError(
            f"the server {what}; its last words:\n{tail}"
            if tail
            else f"the server {what}, without a word"
        )

    def _options(self) -> list[str]:
        # Blocks of 32 tokens are the smallest that its attention takes; 128, the
        # default, would waste half of a short context.
        sizes = [
            "--dtype",
            "float32",
            "--kv-cache-memory-bytes",
            str(self._kv_bytes),
            "--block-size",
            "32",
        ]
        return [
            "--model",
            self._model,
            "--host",
            HOST,
            "--port",
            str(self.port),
            *options(self.eager),
            *sizes,
        ]


def options(eager: bool) -> list[str]:
    return [*OPTIONS, *([EAGER] if eager else [])]


def conditions_of(version: str, *, eager: bool) -> dict[str, Any]:
    """How the servers ran."""
    return {
        "version": version,
        "compiled": not eager,
        "options": options(eager),
        "environment": ENVIRONMENT,
    }


def _place() -> socket.socket:
    """A free port, held until the server comes, tens of seconds later: who asks for any
    port does not get it.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server's has this too
    place.bind((HOST, 0))
    return place
