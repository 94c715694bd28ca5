"""Complete checkpoints are kept by step, incomplete ones removed, and `best`
follows.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollweave.io import disk
from rollweave.io.disk import new_directory
from rollweave.runtime.checkpoints import PRUNED, Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    (tmp_path / "checkpoints").mkdir()
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.path(step).mkdir()
    (checkpoints.path(step) / "model").write_text(str(step))


def test_prune_keeps_the_named_steps(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 10, 4):
        save(checkpoints, step)
    assert checkpoints.steps() == [1, 2, 4, 10]
    checkpoints.prune(10, [2, 4, 99])
    assert checkpoints.steps() == [2, 4, 10]


def test_what_is_pruned_leaves_nothing(checkpoints: Checkpoints) -> None:
    """Also where a killed prune of the same step has left a part."""
    save(checkpoints, 1)
    left = checkpoints.path(1).with_name(f"{checkpoints.path(1).name}{PRUNED}")
    left.mkdir()
    (left / "model").touch()
    checkpoints.prune(2, [])
    assert list(checkpoints.directory.iterdir()) == []


def test_a_late_prune_spares_newer_checkpoints(checkpoints: Checkpoints) -> None:
    """It runs in a thread, beside the trainer, which may have written the next one."""
    for step in (0, 1, 2, 3):
        save(checkpoints, step)
    checkpoints.prune(2, [1])
    assert checkpoints.steps() == [1, 2, 3]


def test_incomplete_checkpoints_do_not_count_and_are_removed(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    (checkpoints.directory / "step-000002.partial-77").mkdir()
    assert checkpoints.steps() == [1]
    checkpoints.prune(1, [])
    checkpoints.clear_unfinished()
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000001"]


def write(path: Path, text: str) -> Iterator[None]:
    """Write a checkpoint as a trainer does, and pause before it is complete."""
    with new_directory(path) as directory:
        (directory / "model").write_text(text)
        yield


def test_a_trainer_that_was_given_up_changes_no_checkpoint(checkpoints: Checkpoints) -> None:
    """Its host was cut off, but sees the directory: it continues to write at any
    time.
    """
    old = write(checkpoints.staged(6, epoch=1), "old")
    next(old)
    new = write(checkpoints.staged(6, epoch=2), "new")
    next(new)
    next(old, None)  # complete, between the begin and the end of the new one
    assert checkpoints.steps() == []
    next(new, None)
    checkpoints.accept(6, epoch=2)
    for _ in write(checkpoints.staged(6, epoch=1), "once more"):
        pass
    for _ in write(checkpoints.staged(8, epoch=1), "a later step"):
        pass
    assert checkpoints.steps() == [6]
    assert (checkpoints.path(6) / "model").read_text() == "new"
    for _ in write(checkpoints.staged(6, epoch=2), "with an export"):
        pass
    checkpoints.accept(6, epoch=2)
    assert (checkpoints.path(6) / "model").read_text() == "with an export"
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000006"]


def test_a_half_removed_checkpoint_does_not_count(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 1)
    save(checkpoints, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", Mock())  # killed in the middle
        checkpoints.prune(2, [])
    assert checkpoints.steps() == [2]
    checkpoints.clear_unfinished()
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000002"]


def test_a_checkpoint_that_was_being_replaced_gets_its_name_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is killed between two renames, on NFS."""
    save(checkpoints, 6)
    for _ in write(checkpoints.staged(6, epoch=1), "with an export"):
        pass
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == checkpoints.staged(6, epoch=1):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_exchange", Mock(return_value=False))
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.accept(6, epoch=1)
    assert checkpoints.steps() == []
    checkpoints.return_replaced()
    checkpoints.clear_unfinished()
    assert (checkpoints.path(6) / "model").read_text() == "6"
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-000006"]


def test_best_is_a_link_that_moves_with_the_run(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    save(checkpoints, 2)
    best = checkpoints.directory.parent / "best"
    for step in (1, 2):
        checkpoints.mark_best(step)
        assert (best / "model").read_text() == str(step)
    assert os.readlink(best) == "checkpoints/step-000002"
    with pytest.raises(FileNotFoundError, match="step-000009"):
        checkpoints.mark_best(9)
    assert (best / "model").read_text() == "2"
