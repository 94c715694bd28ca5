"""What can be said of the user's values and exceptions, whatever their classes do when
they are asked.

Invariant: nothing here raises, because the attributes and methods of a foreign object
are foreign code as well.
"""

import asyncio
import traceback
from typing import Any

from rollweave.schema.errors import RollweaveError
from rollweave.schema.text import shortened, valid

_NAME = type.__dict__["__name__"]
"""The name that Python keeps of a class; a metaclass may define another `__name__`."""


def type_name(value: Any) -> str:
    """Return the name of the value's class."""
    return str(_NAME.__get__(type(value)))


def text_of(error: BaseException) -> str:
    """Return what the exception says, in valid text of limited length."""
    try:
        return shortened("".join(str(error)))
    except BaseException:
        return "(its text cannot be shown)"


def what_happened(method: str, error: BaseException) -> str:
    """Return the error and the last place in the code that it came from."""
    text = text_of(error)
    # `isinstance` asks the exception's `__class__`, too
    if issubclass(type(error), RollweaveError):
        return f"{method}: {text}"
    return valid(f"{method} raised {type_name(error)}: {text}{_place(error)}")


def _place(error: BaseException) -> str:
    try:
        frames = traceback.extract_tb(error.__traceback__)
        return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    except BaseException:
        return ""


def running_task() -> asyncio.Task[Any] | None:
    """Return the task that runs now, if one does.

    A GeneratorExit that arrives while the task of the coroutine runs was raised by the
    code that it awaits. When Python closes a coroutine, its task does not run.
    """
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
