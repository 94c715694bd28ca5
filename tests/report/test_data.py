"""A run that was damaged is still reported: what cannot be read is left out."""

from pathlib import Path

import pytest

from rollweave.record.rundir import RunDir
from rollweave.report.data import read_run
from rollweave.report.page import write_report
from tests.report.synthetic import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "made-up", steps=3)


@pytest.mark.parametrize(
    "rubbish", [b"", b"{", b"3\n[1]\nnull\n", b"\xff\xfe[", b'{"kind": "new"}\n{"ph": "X"}\n{"ph": "M"}\n']
)
@pytest.mark.parametrize("name", ["metrics", "summary", "trace", "config"])
def test_a_damaged_file_leaves_its_part_out(run: RunDir, name: str, rubbish: bytes) -> None:
    path: Path = getattr(run, name)
    path.write_bytes(rubbish)
    assert write_report(run).exists()


def test_good_lines_around_bad_ones_count(run: RunDir) -> None:
    run.metrics.write_bytes(b"[1]\n" + run.metrics.read_bytes() + b'{"kind": "step", "st')
    assert [line["step"] for line in read_run(run).steps] == [0, 1, 2]
