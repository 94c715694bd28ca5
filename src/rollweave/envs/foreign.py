"""Descriptions of user values and exceptions that are safe whatever their classes do.

Invariant: nothing here raises, because the attributes and methods of a foreign object
are foreign code as well.
"""

import asyncio
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from rollweave.schema.errors import RollweaveError
from rollweave.schema.failures import raised
from rollweave.schema.text import shortened, valid

_NAME = type.__dict__["__name__"]
"""The descriptor of a class's name; a metaclass may define another `__name__`."""

_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
    "<frozen ",
)
"""Prefixes of files that are not the user's own: files of Python, of installed
packages, and of Rollweave.
"""


MAIN_THREAD = (
    'signals need the main thread of a process: with isolation = "process", environments '
    "and the reward function of env jsonl run there"
)
"""Remedy of code that sets a signal handler or an alarm on another thread."""

_CAUSES = 8
"""Maximum number of an exception's causes that are examined."""


def type_name(value: Any) -> str:
    """Return the name of the value's class."""
    return str(_NAME.__get__(type(value)))


def text_of(error: BaseException) -> str:
    """Return the exception's text, as valid text of limited length."""
    try:
        return shortened("".join(str(error)))
    except BaseException:
        return "(its text cannot be shown)"


def describe_error(method: str, error: BaseException) -> str:
    """Return the error and the place in the code where it was raised: the last line of
    the user's own code, or, without a line of the user's, the last line of any code.
    """
    text = text_of(error)
    if _needs_main_thread(error):
        text = f"{text}; {MAIN_THREAD}"
    # `isinstance` would also consult the exception's `__class__`.
    if issubclass(type(error), RollweaveError):
        return f"{method}: {text}"
    return valid(raised(method, type_name(error), text, _place(error)))


def _needs_main_thread(error: BaseException) -> bool:
    """Return whether `signal.signal` has raised this error or one of the error's
    causes.
    """
    cause: BaseException | None = error
    try:
        for _ in range(_CAUSES):
            if cause is None:
                return False
            if type(cause) is ValueError and str(cause).startswith("signal only works in main"):
                return True
            cause = cause.__cause__ or cause.__context__
    except BaseException:
        pass
    return False


def _place(error: BaseException) -> str:
    try:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
        last = (own or frames)[-1:]
        return "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    except BaseException:
        return ""


def running_task() -> asyncio.Task[Any] | None:
    """Return the task that is running now, if any.

    A GeneratorExit that arrives while the task of the coroutine runs was raised by the
    code that it awaits. When Python closes a coroutine, its task does not run.
    """
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
