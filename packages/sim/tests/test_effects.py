"""The simulated world's table of commands."""

from typing import Any, get_args

from rollweave.schema.commands import Command
from rollweave_sim.effects import Effects


class Part:
    """Stands for any part of the world."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_every_command_has_one_handler() -> None:
    parts = ("rollouts", "fleet", "trainer", "relays", "workers", "predictor", "limits")
    world: Any = dict.fromkeys(("clock", "post", "observer", "finish", *parts), Part())
    effects = Effects(**world)
    assert effects.handlers.keys() == set(get_args(Command))
