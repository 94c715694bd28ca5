"""Serving engines and lenders as processes, for tests that kill and stop them."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

WAIT_S = 60.0
"""Maximum seconds to wait for another process."""

HERE = Path(__file__).parent


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class Program:
    """A program of this folder, which answers each line with a line."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / name), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read_line(), "the program must start"

    def read_line(self) -> str:
        """Return the next line of the program."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, value: object) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()

    def ask(self, value: object) -> Any:
        """Send a line, and return the answer."""
        self.send(value)
        return json.loads(self.read_line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
