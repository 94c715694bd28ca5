"""A vLLM as its operator starts it in order to lend, and the load of its users."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from benchmarks.engine.vllm_server import ENVIRONMENT
from benchmarks.harness import die_with_us, free_port
from benchmarks.soak.run_under_test import children_of
from packages.sim.benchmarks.coserve.load import ANSWER_S, Served
from rollweave.io.child import log_tail
from rollweave.schema.errors import RollweaveError
from rollweave_servers import lending
from rollweave_servers.baton import SCHEDULER
from rollweave_sim.traffic import Arrival

SLOTS, CONTEXT = 16, 1024
KV_BYTES = 192 << 20
START_S = 600.0
POLL_S = 0.2
END_S = 30.0
OPTIONS = (
    *("--enforce-eager", "--distributed-executor-backend", "uni", "--dtype", "float32"),
    *("--block-size", "32", "--kv-cache-memory-bytes", str(KV_BYTES)),
    *("--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT)),
    *("--no-async-scheduling", "--scheduler-cls", SCHEDULER),
)
"""The last two are those of a vLLM that lends."""


class LendingVllm:
    """A vLLM server that lends at `socket`. As a context it is started, and ended."""

    def __init__(self, python: str, model: Path, folder: Path) -> None:
        self._python, self._model, self._folder = python, model, folder
        self.socket = folder / "lend"
        self.log = folder / f"vllm-{secrets.token_hex(4)}.log"

    def __enter__(self) -> Self:
        self.port = free_port()
        own = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROC" not in name}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(self._python, "-m", "vllm.entrypoints.openai.api_server"),
                    *("--model", str(self._model), "--host", "127.0.0.1"),
                    *("--port", str(self.port), *OPTIONS),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={
                    **os.environ,
                    **own,
                    "TORCH_COMPILE_DISABLE": "1",
                    "TMPDIR": str(self._folder),
                    "PYTHONPATH": str(Path(lending.__file__).parent),
                    "ROLLWEAVE_LENDING": str(self.socket),
                },
                start_new_session=True,
                preexec_fn=die_with_us,
            )
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=END_S).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RollweaveError(f"vLLM did not start: {log_tail(self.log)}")
            time.sleep(POLL_S)

    @property
    def url(self) -> str:
        """The address of its users."""
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill all of its processes."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def complete(self, prompt: Sequence[int], output_tokens: int) -> None:
        """Ask for an answer. Raises OSError without one."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            headers={"Content-Type": "application/json"},
            data=json.dumps(_body(str(self._model), prompt, output_tokens)).encode(),
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            response.read()

    async def offer(self, arrivals: Sequence[Arrival], *, vocabulary: int) -> list[Served]:
        """Offer a load, whose requests do not wait for each other."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as session:
            started, tasks = time.monotonic(), []
            for number, arrival in enumerate(arrivals):
                await asyncio.sleep(max(0.0, started + arrival.at - time.monotonic()))
                draw = random.Random(number)
                prompt = [draw.randrange(100, vocabulary) for _ in range(arrival.prompt_tokens)]
                body = _body(str(self._model), prompt, arrival.output_tokens, stream=True)
                tasks.append(asyncio.create_task(_served(session, body, arrival, started)))
            return list(await asyncio.gather(*tasks))


def _body(
    model: str, prompt: Sequence[int], output_tokens: int, *, stream: bool = False
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


async def _served(
    session: aiohttp.ClientSession, body: dict[str, Any], arrival: Arrival, started: float
) -> Served:
    due = started + arrival.at
    late_s, first_s, tokens = time.monotonic() - due, 0.0, 0
    try:
        async with session.post("/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    tokens += 1
                    first_s = first_s or time.monotonic() - due
    except (aiohttp.ClientError, TimeoutError) as error:
        return Served(at=arrival.at, late_s=late_s, error=f"{type(error).__name__}: {error}")
    return Served(
        at=arrival.at,
        late_s=late_s,
        first_s=first_s,
        last_s=time.monotonic() - due,
        tokens=tokens,
    )


PROGRAM = "rollweave.runtime.entrypoints.engine"
"""Program of the process that computes rollouts."""


class Beside:
    """`rollweave engine --beside`, as the operator of a vLLM starts it."""

    def __init__(self, server: LendingVllm, model: Path, folder: Path, *options: str) -> None:
        name = secrets.token_hex(4)
        self.log, token = folder / f"lender-{name}.log", folder / f"{name}.token"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rollweave.cli.main", "engine", str(model)),
                    *("--beside", str(server.socket), "--port", "0"),
                    *("--token-file", str(token), "--kv-tokens", "8192", *options),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=die_with_us,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line:
            raise RollweaveError(f"the lender did not start: {log_tail(self.log)}")
        self._url, self._token = line.split(" at ")[1].split(",")[0], token.read_text().strip()

    def stats(self) -> dict[str, Any]:
        """Return the state of the loan."""
        request = urllib.request.Request(
            f"{self._url}/rollweave/v1/stats", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=END_S) as response:
            lending: dict[str, Any] = json.load(response)["lending"]
        return lending

    def signal(self, number: int) -> None:
        """Send a signal to the process that computes, and to that which started it."""
        for pid in (*children_of(self.process.pid, PROGRAM), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill it."""
        if self.process.returncode is not None:
            return
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
