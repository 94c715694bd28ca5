"""A rollout service as a process: `python -m benchmarks.service.process CONFIG
[--sandboxes]`.

It runs the service that `rollweave serve` starts, with the sandboxes of `bash_env` open
around it. The first line of its output is its address. It ends as soon as its standard
input does. `Child` runs this process, and others with the same protocol, for a bench.
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

from benchmarks.service.bash_env import SANDBOXES
from rollweave.io.http.access import Access
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import dumps, load
from rollweave.schema.config.root import RunConfig
from rollweave.service import launch
from rollweave.service.backends import backend_factory
from rollweave.service.service import Service

END_S = 30.0
"""Maximum seconds for a child to end after its input has: a service stops its sandboxes
and writes its state.
"""


class Child:
    """A process that prints one line when it is ready.

    It begins and ends with the context, and ends with this process.
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
    def line(self) -> str:
        """Wait for the process's line and return it. Several processes may start
        concurrently.

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
    """Start a service of this configuration; its line is its address."""
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
        """Do nothing: no caller needs it."""


def _end_with_input(stop: Callable[[bool], None]) -> None:
    sys.stdin.buffer.read()
    stop(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--sandboxes", action="store_true")
    options = parser.parse_args(arguments)
    held: list[asyncio.Task[None]] = []

    def observe(_: Service) -> None:
        if options.sandboxes:
            held.append(asyncio.get_running_loop().create_task(_sandboxes(), name="sandboxes"))

    config = load(options.config, [])
    launch.serve(
        config,
        observer=_Observer(),
        make_backend=backend_factory(config),
        on_service=observe,
        access=Access(port=0, no_token=True),
    )


async def _sandboxes() -> None:
    """Keep the sandboxes open until the event loop ends, which cancels this task and
    waits for it.
    """
    async with SANDBOXES.opened():
        await asyncio.Event().wait()


if __name__ == "__main__":
    main()
