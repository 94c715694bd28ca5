"""A checkpoint is there wholly or not at all, and the newest snapshot wins."""

import os
from pathlib import Path

import pytest

from rollweave.live.checkpoints import Checkpoints, CoreSnapshot


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints")


def snapshot(step: int, segment: int) -> CoreSnapshot:
    return CoreSnapshot(step=step, segment=segment, at=1.0, state=b"core")


def save(checkpoints: Checkpoints, step: int, segment: int, content: str = "weights") -> None:
    checkpoints.saving_path(step).mkdir()
    (checkpoints.saving_path(step) / "model").write_text(content)
    checkpoints.complete(step, snapshot(step, segment))


def test_complete_names_the_whole(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 1)
    assert checkpoints.steps() == [5]
    assert sorted(path.name for path in checkpoints.path(5).iterdir()) == ["core.msgpack", "model"]
    assert checkpoints.newest_snapshot() == snapshot(5, 1)


def test_the_newest_snapshot_is_that_of_the_last_segment_not_of_the_highest_step(checkpoints: Checkpoints) -> None:
    save(checkpoints, 10, 1)
    save(checkpoints, 5, 2)  # the trainer was lost and went back
    assert checkpoints.newest_snapshot() == snapshot(5, 2)


def test_saving_a_step_again_replaces_it(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 1, "old")
    save(checkpoints, 5, 2, "new")
    assert (checkpoints.path(5) / "model").read_text() == "new"
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000005"]


def test_a_failure_leaves_the_former_one(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 1, "old")
    checkpoints.saving_path(5).mkdir()
    (checkpoints.saving_path(5) / "core.msgpack").mkdir()  # cannot be written as a file
    with pytest.raises(OSError, match="core"):
        checkpoints.complete(5, snapshot(5, 2))
    assert (checkpoints.path(5) / "model").read_text() == "old"
    assert not checkpoints.saving_path(5).exists()


def test_prune_keeps_what_is_named(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 4):
        save(checkpoints, step, step)
    checkpoints.prune([2, 4, 99])
    assert checkpoints.steps() == [2, 4]


def test_best_is_a_link_that_moves(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, 1, "one")
    save(checkpoints, 2, 2, "two")
    best = checkpoints.directory.parent / "best"
    checkpoints.mark_best(1)
    assert (best / "model").read_text() == "one"
    checkpoints.mark_best(2)
    assert (best / "model").read_text() == "two"
    assert os.readlink(best) == "checkpoints/step-000002"  # the run directory may be moved


def test_recovery_finishes_a_replacement_and_clears_what_is_unfinished(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, 1, "old")
    checkpoints.path(5).rename(checkpoints.directory / "former-000005")  # killed between the two renames
    checkpoints.saving_path(7).mkdir()
    checkpoints.recover()
    assert checkpoints.steps() == [5]
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000005"]
