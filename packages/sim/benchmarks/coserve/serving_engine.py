"""A serving engine as its operator starts it: `rollweave engine`, perhaps with
`--lend`.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import transformers

from benchmarks.engine.models import ModelCase, model_of, sizes
from benchmarks.harness import die_with_us, environment
from benchmarks.soak.run_under_test import children_of
from packages.sim.benchmarks.coserve.cores import Cores
from rollweave.schema.errors import RollweaveError

MODEL = ModelCase(
    name="serving",
    config=sizes(
        vocab=4096, hidden=384, layers=4, heads=6, kv_heads=2, head=64, ffn=1152, context=2048
    ),
    prompt=0,
    output=0,
    repeats=0,
)
"""A model whose decode step takes some milliseconds on one core."""

PROGRAM = "packages.sim.benchmarks.coserve.engine_program"
"""Program of an engine, and of its process."""

SLOTS = 32
KV_TOKENS = 3072
"""Size of the KV cache: a burst of serving takes most of it."""

POLL_S = 0.05

END_S = 30.0
"""Maximum seconds for the engine to end, and to answer a request for its state."""


def save_model(directory: Path) -> Path:
    """Write the serving model's checkpoint, with random weights, and return its
    directory.
    """
    transformers.utils.logging.disable_progress_bar()
    model_of(MODEL).save_pretrained(directory)
    return directory


class ServingEngine:
    """A serving engine. As a context it is started, and ended."""

    def __init__(self, model: Path, log: Path, cores: Cores, *options: str) -> None:
        self._log, self._cores = log, cores
        self.token_file = log.with_suffix(".token")
        self._command = [
            *(sys.executable, "-m", PROGRAM, "engine", str(model)),
            *("--port", "0", "--token-file", str(self.token_file), "--threads", "1"),
            *("--slots", str(SLOTS), "--kv-tokens", str(KV_TOKENS), *options),
        ]
        self.url = self.token = ""
        self.engine_pid = 0

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=die_with_us,
                env=environment(OMP_NUM_THREADS="1"),
            )
        assert self.process.stdout is not None
        # before it measures its steps
        while not (children := children_of(self.process.pid, PROGRAM)):
            if self.process.poll() is not None:
                break
            time.sleep(POLL_S)
        for self.engine_pid in children:
            self._cores.give_device(self.engine_pid)
        line = self.process.stdout.readline().decode()
        if not line:
            self.process.wait(END_S)
            self.process.stdout.close()
            raise RollweaveError(f"the serving engine did not start: {self.log.splitlines()[-1]}")
        self.url = line.split(" at ")[1].split(",")[0]
        self.token = self.token_file.read_text().strip()
        self._cores.give_device(self.engine_pid)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def log(self) -> str:
        """The text that the engine has reported."""
        return self._log.read_text(errors="replace")

    def stats(self) -> dict[str, Any]:
        """Return the engine's statistics."""
        return self._asked("/rollweave/v1/stats", None)

    def complete(self, prompt: Sequence[int], *, output_tokens: int) -> list[int]:
        """Return the tokens of an answer, which are always the same.

        Raises OSError if the engine does not answer.
        """
        body = {
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        tokens: list[int] = self._asked("/v1/completions", body)["choices"][0]["token_ids"]
        return tokens

    def _asked(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            self.url + path,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        with urllib.request.urlopen(request, timeout=END_S) as response:
            answer: dict[str, Any] = json.load(response)
        return answer
