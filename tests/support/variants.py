"""Which variants of a test the fast suite runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(variants: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the variants for `pytest.mark.parametrize`, with the mark `slow` on those
    that are not in `fast`.
    """
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in variants]
