"""Small runs under faults, of every kind, to the microsecond and the token. A row shows
what a cost, a rule of an engine or a default changes in the simulated world: if the
change is meant, take the row that the failure prints.
"""

import hashlib
import re

import msgspec
import pytest

from rollweave.record.journal import RunJournal
from rollweave_sim import faults

DECIMALS = re.compile(rb"(\.\d{5})\d+")
"""Numbers beyond the digits in which libraries of mathematics agree."""

ROWS = (
    *("0 698 34 c10ef624", "12 589 0 6d9e5042", "19 726 0 b786d28f", "21 1415 18 cd4db46b"),
    *("22 1451 79 95e6fa5d", "25 1989 123 f3335f13", "38 479 7 6a561552", "53 1577 36 7de344ea"),
    *("54 363 8 c9e2d913", "58 1876 51 26f44dcf"),
)
"""Seed of the fault search, number of events, number of faults, and the digest of all
events with their times.
"""


@pytest.mark.parametrize("row", ROWS)
def test_a_seed_always_runs_the_same(row, monkeypatch):
    total = hashlib.blake2b(digest_size=4)

    class Noted(RunJournal):
        def append(self, now, event, commands):
            line = msgspec.json.encode([now, type(event).__name__, event])
            total.update(DECIMALS.sub(rb"\1", line))
            super().append(now, event, commands)

    monkeypatch.setattr(faults, "RunJournal", Noted)
    report = faults.search(int(row.split()[0]))
    assert (report.violation, report.error) == ("", "")
    faulty = sum(report.faults.values())
    assert f"{report.seed} {report.events} {faulty} {total.hexdigest()}" == row
