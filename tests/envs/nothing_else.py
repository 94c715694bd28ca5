"""A module whose contents errors name: they leave out what it imports or hides."""

from pathlib import Path

PLACE = Path()


def first() -> None:
    """Be a function of this module."""


class Second:
    """A class of this module."""


def _hidden() -> None:
    """Be private."""
