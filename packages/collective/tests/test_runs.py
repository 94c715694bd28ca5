"""A run whose engines receive weights by a group with its trainer."""

from pathlib import Path
from typing import Any

import pytest

from rollweave.runtime.launch import train
from rollweave_collective.group import Group
from tests.support.real_runs import lake, lines


@pytest.mark.slow
def test_engines_sample_from_what_was_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer computes the log-probs of their tokens under its own weights."""
    group = {"weights": {"transport": "collective"}, "engines": {"count": 2}}
    config = lake(tmp_path, run={"steps": 4}, algorithm={"entropy": 0.1}, **group)
    right, sizes = Group.broadcast, list[int]()

    def counted(group: Group, payload: Any, *done: Any) -> None:
        right(group, payload, *done)
        sizes.append(group.size)

    monkeypatch.setattr(Group, "broadcast", counted)
    summary = train(config, inproc=True)
    assert (summary.error, summary.steps) == ("", 4)
    gaps = [line["trainer"]["logprob_gap_max"] for line in lines(config, "step")]
    assert max(gap for gap in gaps if gap is not None) < 1e-4
    assert sizes.count(3) >= 3 * 3  # three ranks, at three versions after the first
    assert not [line for line in lines(config, "warning") if "TCP" in line["message"]]


@pytest.mark.slow
def test_a_run_says_once_for_each_version_what_went_by_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(group: Group, payload: Any, *done: Any) -> None:
        group.close()
        raise RuntimeError("the network is down\nmore lines")

    monkeypatch.setattr(Group, "broadcast", broken)
    config = lake(
        tmp_path,
        run={"steps": 4},
        weights={"transport": "collective"},
        engines={"count": 2},
        algorithm={"entropy": 0.1},
    )
    summary = train(config, inproc=True)
    assert (summary.error, summary.steps) == ("", 4)
    said = [line["message"] for line in lines(config, "warning") if "TCP" in line["message"]]
    assert said
    assert len(set(said)) == len(said)
    assert all(text.endswith("since its broadcast failed: the network is down") for text in said)
