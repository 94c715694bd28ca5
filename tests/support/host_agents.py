"""Agents of hosts, as processes of a test; fixtures that start them and end them
all.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.harness import free_port
from rollweave.schema.hosts import Programs
from tests.support.fake_runs import FAKES
from tests.support.forking import Forked

ROOT = Path(__file__).parents[2]

SECRET = "a secret of the tests"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET)


class Agents:
    """Agents of the test's hosts, by name."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        *names: str,
        resource: str | None = None,
        user_code: bool = True,
        programs: Programs = FAKES,
    ) -> None:
        modules = msgspec.structs.asdict(programs)
        main = f"from tests.support.agent_main import main; main(**{modules!r})"
        for name in names:
            self.processes[name] = Forked(
                [
                    *(sys.executable, "-c", main),
                    *("host", "--join", f"127.0.0.1:{self.port}", "--name", name),
                    *("--join-s", "60", *(["--user-code"] if user_code else [])),
                    *(["--resource", resource] if resource is not None else []),
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def statuses(self) -> dict[str, int]:
        """Wait for all agents, and return their exit statuses."""
        return {name: process.wait(60) for name, process in self.processes.items()}


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = Agents(free_port())
    try:
        yield running
    finally:
        for process in running.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
