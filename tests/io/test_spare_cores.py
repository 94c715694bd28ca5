"""A process takes the cores that nobody uses, and gives them back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.io import spare_cores
from rollweave.io.spare_cores import IDLE, PERIOD_S, WAITED, SpareCores, Usage, usable_cores, usage


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Usage | None]]:
    """What Linux counts, one value for each reading, on four cores."""
    values: list[Usage | None] = [Usage(0.0, 0.0, 0.0)]
    monkeypatch.setattr(spare_cores, "usage", lambda: values[-1])
    monkeypatch.setattr(spare_cores, "usable_cores", lambda: 4)
    return values


def after(values: list[Usage | None], *, idle: float = 0.0, waited: float = 0.0) -> None:
    """A second passes, of which these shares are idle, and waited for."""
    last = values[-1]
    assert last is not None
    values.append(Usage(last.at + 1.0, last.idle_s + idle, last.waited_s + waited))


def test_a_thread_more_is_taken_for_each_second_in_which_a_core_idles(
    counted: list[Usage | None],
) -> None:
    cores = SpareCores()
    found = []
    for _ in range(5):
        after(counted, idle=1.0)
        found.append(cores.follow())
    assert found == [2, 3, 4, 4, 4], "no more than there are cores"


def test_a_thread_is_given_back_while_others_have_the_cores(counted: list[Usage | None]) -> None:
    cores = SpareCores(2)
    after(counted, idle=2.0)
    assert cores.follow() == 3
    after(counted, idle=2.0, waited=1.1 * WAITED)
    assert cores.follow() == 2
    after(counted, waited=1.0)
    assert cores.follow() == 2, "its own stay"


@pytest.mark.parametrize(("idle", "waited"), [(0.99 * IDLE, 0.0), (0.0, 0.99 * WAITED)])
def test_little_changes_nothing(counted: list[Usage | None], idle: float, waited: float) -> None:
    cores = SpareCores()
    after(counted, idle=1.0)
    assert cores.follow() == 2
    after(counted, idle=idle, waited=waited)
    assert cores.follow() == 2


def test_what_is_asked_too_often_is_counted_together(counted: list[Usage | None]) -> None:
    cores = SpareCores()
    counted.append(Usage(0.9 * PERIOD_S, 0.9 * PERIOD_S, 0.0))
    assert cores.follow() == 1
    counted.append(Usage(1.1 * PERIOD_S, 1.1 * PERIOD_S, 0.0))
    assert cores.follow() == 2


def test_without_counts_its_own_threads_stay(counted: list[Usage | None]) -> None:
    counted.append(None)
    cores = SpareCores(3)
    counted.append(Usage(9.0, 9.0, 0.0))
    assert cores.follow() == 3


def test_linux_counts() -> None:
    first = usage()
    assert first is not None
    second = usage()
    assert second is not None
    assert second.at >= first.at
    assert second.idle_s >= first.idle_s
    assert second.waited_s >= first.waited_s


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000\n", 8), ("250000 100000\n", 2), ("1000 100000\n", 1)]
)
def test_a_container_may_use_its_quota(
    text: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert usable_cores() == expected
