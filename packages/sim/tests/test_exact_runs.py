"""Small runs under faults, of every kind, to the millisecond and the token. A row shows
what a cost, a rule of an engine or a default changes in the simulated world: if the
change is meant, take the digest that the failure prints.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rollweave.record.journal import RunJournal
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave_sim import faults

DECIMALS = re.compile(rb"(\.\d{5})\d+")
"""Digits in which libraries of mathematics may differ."""

ROWS: dict[int, str] = {}


def recorded(seed: int, patch: pytest.MonkeyPatch) -> tuple[faults.Report, str]:
    """Run a seed of the fault search; return its report, and the digest of its events
    with their times.
    """
    total = hashlib.blake2b(digest_size=4)

    class Noted(RunJournal):
        def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
            line: Any = msgspec.json.encode([now, type(event).__name__, event])
            total.update(DECIMALS.sub(rb"\1", line))
            super().append(now, event, commands)

    patch.setattr(faults, "RunJournal", Noted)
    return faults.search(seed), total.hexdigest()


@pytest.mark.parametrize("seed", ROWS)
def test_a_seed_always_runs_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    report, digest = recorded(seed, monkeypatch)
    assert (report.violation, report.error) == ("", "")
    assert f"{report.events} {sum(report.faults.values())} {digest}" == ROWS[seed]
