"""The simulated world's table of commands."""

from typing import Any, get_args

from rollweave.schema.commands import Command
from rollweave_sim.effects import Effects


class Part:
    """Stands for any part of the world."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_every_command_has_one_handler() -> None:
    part: Any = Part()
    effects = Effects(
        clock=part,
        post=part,
        rollouts=part,
        fleet=part,
        trainer=part,
        relays=part,
        workers=part,
        predictor=part,
        limits=part,
        observer=part,
        finish=part,
    )
    assert effects.handlers.keys() == set(get_args(Command))
