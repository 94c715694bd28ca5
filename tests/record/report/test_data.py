"""A damaged run is still reported: unreadable parts are left out."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rollweave.record.report.data import read_run
from rollweave.record.report.page import write_report
from rollweave.record.rundir import RunDir
from tests.support.synthetic_run import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "made-up", steps=3)


@pytest.mark.variants
@pytest.mark.parametrize(
    "rubbish",
    [
        *(b"", b"{", b"3\n[1]\nnull\n", b"\xff\xfe["),
        *(b'{"kind": "new"}\n{"ph": "X"}\n{"ph": "M"}\n', b"[" * 200_000),
    ],
)
@pytest.mark.parametrize("name", ["metrics", "summary", "trace", "config"])
def test_damaged_file_is_left_out(run: RunDir, name: str, rubbish: bytes) -> None:
    path: Path = getattr(run, name)
    path.write_bytes(rubbish)
    assert write_report(run).exists()


def test_good_lines_around_bad_ones_count(run: RunDir) -> None:
    run.metrics.write_bytes(
        b'[1]\n{"kind": "step"}\n' + run.metrics.read_bytes() + b'{"kind": "step", "st'
    )
    assert [line["step"] for line in read_run(run).steps] == [0, 1, 2]


def test_totals_are_those_of_the_summary(run: RunDir) -> None:
    """This holds even if the lines add up to less, because a killed controller had done
    more than its last line has.
    """
    summary = json.loads(run.summary.read_text())
    summary["inherent_staleness"] = {"0": 7, "3": 2}
    summary["stop_reasons"] = {"finished": 9}
    run.summary.write_text(json.dumps(summary))
    data = read_run(run)
    assert data.inherent_staleness() == Counter({0: 7, 3: 2})
    assert data.stop_reasons() == Counter({"finished": 9})
    assert data.idle("trainer") == summary["idle"]["trainer"]


def test_totals_without_a_summary_include_lost_steps(run: RunDir) -> None:
    run.summary.unlink()
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    (again,) = [line for line in lines if b'"step": 2' in line and b'"kind": "step"' in line]
    before = read_run(run)
    run.metrics.write_bytes(b"".join([*lines, again]))
    after, line = read_run(run), json.loads(again)
    assert after.staleness() == before.staleness(), "the second step 2 is the one that counts"
    for age, count in line["inherent_staleness"].items():
        assert after.inherent_staleness()[int(age)] == before.inherent_staleness()[int(age)] + count
    for reason, count in line["stop_reasons"].items():
        assert after.stop_reasons()[reason] == before.stop_reasons()[reason] + count
    assert sum(after.stop_reasons().values()) > sum(before.stop_reasons().values())
