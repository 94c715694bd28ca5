"""The table of commands: each command has one handler, which gets the command."""

import typing
from collections.abc import Callable
from typing import Any

import pytest

from rollweave.runtime.pump import Effects
from rollweave.schema import commands as c


def handlers(handle: Callable[[Any], None], *without: Any) -> dict[Any, Callable[[Any], None]]:
    return {kind: handle for kind in typing.get_args(c.Command) if kind not in without}


def test_a_command_goes_to_its_handler() -> None:
    got: list[object] = []
    effects = Effects(handlers(got.append, c.Warn), never=(c.Warn,))
    effects.execute(command := c.SetTimer(at=1.0))
    assert got == [command]
    with pytest.raises(AssertionError, match="executes no Warn"):
        effects.execute(c.Warn(component="", message=""))


def test_a_world_without_a_handler_for_a_command_is_refused() -> None:
    with pytest.raises(AssertionError, match="without a handler: Deliver"):
        Effects(handlers(print, c.Deliver))
