"""Output and exit codes of the command line: results go to standard output, everything
else to standard error.

Invariants: wrong input gives one line for each problem and exit code 2, never a
traceback; any other failure gives one line and exit code 1; a command that the user
stopped exits with 130.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

from rollweave.cli.interrupt import exit_on_interrupt, raise_on_interrupt
from rollweave.io.boot import INTERRUPTED, import_from_working_directory
from rollweave.io.reading import named
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.text import visible

FAILED, WRONG_INPUT = 1, 2
"""Exit codes, in addition to INTERRUPTED."""

PIPED_WIDTH = 140
"""Columns of output that does not go to a terminal: enough for tables in files."""


def check_writable(option: str, path: Path) -> None:
    """Raise ConfigError unless `path`, the value of `option`, is a file that may be
    written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} must name a file, got the directory {path}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"{option} must name a file in a directory that can be written to, got {path}"
        )


class PipeConsole(Console):
    """A console that survives a closed pipe: a run continues without its reader, and
    `rollweave trace … | head` ends without an error. No terminal acts on the printed
    text: control characters, which may come from an agent, an engine or another host,
    are made visible.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, with visible text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """Discard all further output."""
        self.quiet = True
        # otherwise Python reports at exit that it could not flush
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _prepare_streams() -> None:
    """Open standard output and error if the caller closed them, and print `?` for
    characters that their encoding lacks.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the program ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_prepare_streams()
out = PipeConsole(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
err = PipeConsole(stderr=True, highlight=False)


def print_error(text: str) -> None:
    """Print each line of `text` as one error."""
    for line in str(text).splitlines() or ["failed without a message"]:
        err.print(f"[red]error:[/] {escape(line)}", soft_wrap=True)


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """Turn the exception of a command into printed errors and an exit code."""
    import_from_working_directory()
    try:
        raise_on_interrupt()
        yield
    except ConfigError as error:
        print_error(str(error))
        raise typer.Exit(WRONG_INPUT) from error
    except RollweaveError as error:
        print_error(str(error))
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        # a second Ctrl-C must not print a traceback while the interpreter exits
        exit_on_interrupt()
        err.print("[yellow]interrupted[/]")
        raise typer.Exit(INTERRUPTED) from error
    except OSError as error:  # for example, from a full disk or a file that may not be read
        print_error(named(error))
        raise typer.Exit(FAILED) from error
