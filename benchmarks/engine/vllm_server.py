"""vLLM as a peer of the engine bench: its server as a child process on the loopback
interface, with tokens in requests and responses.

vLLM has conflicting requirements, so it lives in a separate environment:
`ROLLWEAVE_VLLM_PYTHON` names the interpreter. Invariants: every failure is a
`PeerError` whose text is the reason; every wait for a server has a limit; the server
and its children are killed and reaped when the context ends, and end with this process
if it is killed (`subprocess_guard.py`).
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
"""Maximum seconds until a server is ready: it takes about 25 s on a quiet machine, and
200 s on a loaded one where it compiles.
"""

ANSWER_S = 600.0
"""Maximum seconds for one response; a hung server then raises instead of hanging the
bench.
"""

POLL_S = 0.2
"""Seconds between two checks whether the server is ready, which takes tens of seconds.
"""

TAIL_LINES = 6
"""Number of lines of the server's output that a reason quotes."""

HOST = "127.0.0.1"
MODULE = "vllm.entrypoints.openai.api_server"
OPTIONS = ("--enable-scale-out", "--skip-tokenizer-init", "--distributed-executor-backend", "uni")
"""Options of the server: tokens only, and the model in the engine's own process, which
for small models on a CPU is twice as fast as the default.
"""

EAGER = "--enforce-eager"
"""Option without compilation: the server starts sooner. The default, compiled, is about
a third faster on the tiny model, and needs a C++ compiler.
"""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the server: one thread, as every other engine has, which the system
places; no network access. Without `VLLM_ENABLE_V1_MULTIPROCESSING=0` the option `uni`
is overruled on a CPU.
"""


class PeerError(RollweaveError):
    """The peer cannot be measured. The message is the reason."""


def interpreter() -> str | None:
    """Return the interpreter that has vLLM: the one that the environment names, else
    our own if it has vLLM, else None.
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
        """Prepare a server. `scratch` is a directory for its log and its caches.

        At most `concurrency` requests are sent at a time.
        """
        self._python, self._model, self._kv_bytes, self.eager = python, model, kv_bytes, eager
        self._scratch, self._log = scratch, scratch / "vllm.log"
        self._senders = ThreadPoolExecutor(concurrency, thread_name_prefix="vllm-peer")

    def __enter__(self) -> Self:
        """Start the server, without waiting. Raises PeerError where there is no such
        program.
        """
        program = shutil.which(self._python)
        if program is None:
            raise PeerError(f"{self._python!r} is not a program that can be run")
        self._reserved_port = _reserved_port()
        self.port = int(self._reserved_port.getsockname()[1])
        guarded = [os.path.abspath(program), "-I", subprocess_guard.__file__]
        command = [*guarded, "-m", MODULE, *self._options()]
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
                self._reserved_port.close()
                raise PeerError(f"{self._python!r} cannot be run: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the server and its children, reap it, and let the running requests
        fail.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard kills the rest
        self._process.wait()
        self._senders.shutdown()
        self._reserved_port.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, limit_s: float = START_S) -> str:
        """Wait until the server responds, and return its version.

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
        """Complete all requests concurrently, to their full length.

        Raises PeerError where one fails.
        """
        list(self._senders.map(self._continue, requests))

    def _continue(self, request: GenerateRequest) -> None:
        """Complete one request, without a seed, since vLLM samples seeded rows one by
        one, and without log-probs: the peer is spared both.
        """
        wanted = request.sampling.max_tokens
        sampling = {
            "temperature": request.sampling.temperature,
            "max_tokens": wanted,
            "ignore_eos": True,
        }
        asked = {"token_ids": request.tokens, "sampling_params": sampling, "stream": False}
        answer = self._json("POST", "/inference/v1/generate", json.dumps(asked), timeout_s=ANSWER_S)
        sampled = len(answer["choices"][0]["token_ids"])
        if sampled != wanted:
            raise self._failed(f"gave {sampled} tokens instead of {wanted}")

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
        """Return status and body of one response. Raises OSError or HTTPException."""
        with contextlib.closing(
            http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)
        ) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def _failed(self, what: str) -> PeerError:
        tail = "\n".join(log_tail(self._log).splitlines()[-TAIL_LINES:])
        return PeerError(
            f"the server {what}; its last output:\n{tail}"
            if tail
            else f"the server {what}, without output"
        )

    def _options(self) -> list[str]:
        return [
            *("--model", self._model, "--host", HOST, "--port", str(self.port)),
            *options(self.eager),
            *("--dtype", "float32", "--kv-cache-memory-bytes", str(self._kv_bytes)),
            # Blocks of 32 tokens are the smallest that its attention takes; 128, the
            # default, would waste half of a short context.
            *("--block-size", "32"),
        ]


def options(eager: bool) -> list[str]:
    return [*OPTIONS, *([EAGER] if eager else [])]


def conditions_of(version: str, *, eager: bool) -> dict[str, Any]:
    """Return how the servers ran."""
    return {
        "version": version,
        "compiled": not eager,
        "options": options(eager),
        "environment": ENVIRONMENT,
    }


def _reserved_port() -> socket.socket:
    """Reserve a free port until the server binds it, tens of seconds later: no process
    that requests any port gets it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server's has this too
    reserved.bind((HOST, 0))
    return reserved
