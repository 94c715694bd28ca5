"""Which variants of a test the fast suite runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_extended(variants: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the variants for `pytest.mark.parametrize`, with the mark `extended` on
    those that are not in `fast`.
    """
    return _marked(variants, fast, pytest.mark.extended)


def mostly_slow(variants: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Return the variants for `pytest.mark.parametrize`, with the mark `slow` on those
    that are not in `fast`.
    """
    return _marked(variants, fast, pytest.mark.slow)


def _marked(
    variants: Iterable[Any], fast: Collection[Any], mark: pytest.MarkDecorator
) -> list[Any]:
    return [one if one in fast else pytest.param(one, marks=mark) for one in variants]
