"""How the command line speaks: results on standard output, everything else on standard
error, and exit codes.

Invariants: a wrong input is one line per problem and exit code 2, never a traceback; a
failure of ours is one line and exit code 1; what the user stopped ends with 130.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import typer
from rich.console import Console
from rich.markup import escape

from rollweave.cli.interrupt import INTERRUPTED, begun, quiet
from rollweave.io.process_setup import import_from_working_directory
from rollweave.schema.errors import ConfigError, RollweaveError

FAILED, WRONG_INPUT = 1, 2
"""Exit codes, beside INTERRUPTED."""

PIPED_WIDTH = 140
"""Columns where nobody's terminal says how many there are: tables in files should not
be cut.
"""


class Voice(Console):
    """A console whose reader may leave: a run goes on without it, and `rollweave trace
    … | head` has said enough.
    """

    def on_broken_pipe(self) -> None:
        """Say no more."""
        self.quiet = True
        # or Python complains at its end about what it could not flush
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _fit() -> None:
    """Make standard output and error fit for us: there where the caller closed them,
    and `?` for letters they do not have.
    """
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the program lives)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_fit()
out = Voice(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
err = Voice(stderr=True, highlight=False)


def error_lines(text: str) -> None:
    """Print an error, each of its lines as a problem of its own."""
    for line in str(text).splitlines() or ["failed without a word"]:
        err.print(f"[red]error:[/] {escape(line)}", soft_wrap=True)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn what a command raises into error lines and an exit code."""
    import_from_working_directory()
    try:
        begun()
        yield
    except ConfigError as error:
        error_lines(str(error))
        raise typer.Exit(WRONG_INPUT) from error
    except RollweaveError as error:
        error_lines(str(error))
        raise typer.Exit(FAILED) from error
    except KeyboardInterrupt as error:
        # all is over: once more must not be heard in the middle of the interpreter's
        # own end
        quiet()
        err.print("[yellow]interrupted[/]")
        raise typer.Exit(INTERRUPTED) from error
    except OSError as error:  # a disk that is full, a file that may not be read
        error_lines(str(error))
        raise typer.Exit(FAILED) from error
