"""A rollout service as a process of its own: `python -m benchmarks.service.process
CONFIG [--sandboxes]`.

The service that `rollweave serve` starts, around which the sandboxes of `bash_env` are
open. The first line of its output is its address; it ends at once when its standard
input does. `Child` is how a bench holds it, and other processes that behave so.
"""

import argparse
import asyncio
import contextlib
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.service.bash_env import BOXES
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import dumps, load
from rollweave.schema.config.root import RunConfig
from rollweave.service import launch
from rollweave.service.backends import backend_factory
from rollweave.service.service import Service

END_S = 30.0
"""For a child to end after its input has: a service stops its sandboxes and writes what
it knows.
"""


class Child:
    """A process that says one line when it is ready.

    It begins and ends with the context, and ends with us.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module, self._arguments = module, arguments

    def __enter__(self) -> "Child":
        command = [sys.executable, "-m", self._module, *self._arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    @functools.cached_property
    def said(self) -> str:
        """Its line. Waits for it, so that several may start at once.

        Raises RuntimeError where it ends without one.
        """
        assert self._process.stdout is not None, "the output is a pipe"
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with {self._process.wait(END_S)} before it was ready"
            )
        return line

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


@contextlib.contextmanager
def started(config: RunConfig, *, sandboxes: bool = False) -> Iterator[Child]:
    """A service of this configuration; its address is what it `said`."""
    directory = Path(config.run.dir)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "given.toml"
    file.write_text(dumps(config))
    with Child(
        "benchmarks.service.process", str(file), *(["--sandboxes"] if sandboxes else [])
    ) as child:
        yield child


class _Observer:
    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        print(address, flush=True)
        threading.Thread(target=_end_with_input, args=(stop,), daemon=True).start()

    def on_warning(self, command: Warn) -> None:
        print(f"{command.component}: {command.message}", file=sys.stderr, flush=True)

    def on_stopping(self, drain: bool) -> None:
        """Nobody asks."""


def _end_with_input(stop: Callable[[bool], None]) -> None:
    sys.stdin.buffer.read()
    stop(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--sandboxes", action="store_true")
    asked = parser.parse_args(arguments)
    held: list[asyncio.Task[None]] = []

    def observe(_: Service) -> None:
        if asked.sandboxes:
            held.append(asyncio.get_running_loop().create_task(_sandboxes(), name="sandboxes"))

    config = load(asked.config, [])
    launch.serve(
        config,
        observer=_Observer(),
        make_backend=backend_factory(config),
        on_service=observe,
        no_token=True,
    )


async def _sandboxes() -> None:
    """Open until the loop ends, which cancels this and waits for it."""
    async with BOXES.opened():
        await asyncio.Event().wait()


if __name__ == "__main__":
    main()
