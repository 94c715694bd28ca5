"""`rollweave ui`: serves a live page over a directory of runs."""

import asyncio
import contextlib
import secrets
from pathlib import Path

from rich.markup import escape

from rollweave.cli.console import out
from rollweave.cli.runs import RUNS
from rollweave.io.http.guard import TOKEN_BYTES, given_token
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.schema.errors import ConfigError
from rollweave_ui.runs import Runs
from rollweave_ui.server import HOST, serving


def ui(directory: Path | None, *, port: int, token_env: str | None) -> None:
    """Serve the page until a signal ends it."""
    path = directory if directory is not None else RUNS if RUNS.is_dir() else Path()
    if not path.is_dir():
        raise ConfigError(f"DIR must be a directory of runs or one run, got {str(path)!r}")
    given = given_token(token_env, no_token=False, host=HOST, named="--token-env")
    token = given or secrets.token_urlsafe(TOKEN_BYTES)
    # only signals end the page, so several signals also end it in order
    with contextlib.suppress(KeyboardInterrupt):
        run_to_the_end(_serve(Runs(path.absolute()), token, port=port, shown=given is None))


async def _serve(runs: Runs, token: str, *, port: int, shown: bool) -> None:
    ended = asyncio.Event()
    with on_ending_signals(ended.set):
        async with serving(runs, token=token, port=port) as address:
            query = token if shown else "TOKEN"
            out.print(f"{address}/?token={escape(query)}", soft_wrap=True)
            out.print("[dim]press Ctrl-C to stop[/]")
            await ended.wait()
