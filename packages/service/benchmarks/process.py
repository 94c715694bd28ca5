"""A rollout service as a process: `python -m packages.service.benchmarks.process
CONFIG`.

It runs the service that `rollweave serve` starts, with the sandboxes of `bash_env` open
around it. The first line of its output is its address. It ends as soon as its standard
input does.
"""

import asyncio
import sys
import threading
from collections.abc import Callable

from packages.service.benchmarks.bash_env import SANDBOXES
from rollweave.io.http.listening import Access
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import load
from rollweave_service import launch
from rollweave_service.engines import backend_factory
from rollweave_service.service import Service


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


async def _sandboxes() -> None:
    """Keep the sandboxes open until the event loop ends, which cancels this task."""
    async with SANDBOXES.opened():
        await asyncio.Event().wait()


def main() -> None:
    """Serve the configuration that the first argument names."""
    config = load(sys.argv[1], [])
    held: list[asyncio.Task[None]] = []

    def observe(_: Service) -> None:
        held.append(asyncio.get_running_loop().create_task(_sandboxes(), name="sandboxes"))

    launch.serve(
        config,
        observer=_Observer(),
        make_backend=backend_factory(config),
        on_service=observe,
        access=Access(port=0, no_token=True),
        registered=True,
    )


if __name__ == "__main__":
    main()
