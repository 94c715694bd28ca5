"""Runs are found by name, and only run directories are deleted."""

import re
from pathlib import Path

import pytest

from rollweave.cli.runs import clear, exported_checkpoint, find_run
from rollweave.record.rundir import RunDir
from rollweave.schema.errors import ConfigError
from tests.support.synthetic_run import config_of, write_run


def test_finds_a_run_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "lake", steps=1)
    assert find_run("lake").path == Path("runs/lake")
    assert find_run(str(tmp_path / "runs" / "lake")).path == tmp_path / "runs" / "lake"
    with pytest.raises(ConfigError, match=r"got 'lane' \(did you mean lake\?\)"):
        find_run("lane")


def test_fresh_deletes_a_run_and_keeps_its_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", steps=1)
    clear(config_of(run.path))
    assert [entry.name for entry in run.path.iterdir()] == ["lock"]
    with RunDir.claim(config_of(run.path), resume=False):
        pass  # a new run may begin here


def test_fresh_deletes_only_run_directories(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="must be a run directory to be deleted"):
        clear(config_of(tmp_path / "home"))
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_fresh_does_not_delete_a_running_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "busy", steps=1)
    with (
        RunDir.claim(config_of(run.path), resume=True),
        pytest.raises(ConfigError, match="in use by another controller"),
    ):
        clear(config_of(run.path))
    assert run.metrics.exists()


def test_fresh_without_a_run_does_nothing(tmp_path: Path) -> None:
    clear(config_of(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


class TestCheckpoints:
    """Resolution of `--checkpoint`."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunDir:
        run = write_run(tmp_path / "run", steps=1)
        for step, exported in ((5, True), (10, True), (12, False)):
            directory = run.checkpoints / f"step-{step:06d}"
            (directory / "hf").mkdir(parents=True)
            if exported:
                (directory / "hf" / "config.json").touch()
        return run

    def test_last_is_the_newest_with_an_export(self, run: RunDir) -> None:
        assert exported_checkpoint(run, "last") == (10, run.checkpoints / "step-000010" / "hf")

    def test_without_a_choice_it_is_best_or_else_last(self, run: RunDir) -> None:
        assert exported_checkpoint(run, None)[0] == 10
        (run.path / "best").symlink_to("checkpoints/step-000005")
        assert exported_checkpoint(run, None)[0] == 5
        assert exported_checkpoint(run, "best")[0] == 5

    @pytest.mark.parametrize(
        ("every", "why"),
        [
            ("0", ", because eval.every is 0"),
            ("5", ", because no evaluation has chosen one"),
            ('"five"', ""),
        ],
    )
    def test_refuses_a_best_that_no_evaluation_chose(
        self, run: RunDir, every: str, why: str
    ) -> None:
        config = run.config.read_text()
        assert config.count("\nevery = ") == 1
        run.config.write_text(re.sub(r"\nevery = .*", f"\nevery = {every}", config))
        with pytest.raises(ConfigError) as refusal:
            exported_checkpoint(run, "best")
        assert str(refusal.value) == (
            f"--checkpoint best: run has none{why}; its checkpoints are 5, 10"
        )

    def test_refuses_a_best_that_is_not_a_link(self, run: RunDir) -> None:
        (run.path / "best").touch()
        with pytest.raises(ConfigError, match="best must be a link to a checkpoint"):
            exported_checkpoint(run, "best")

    def test_finds_a_step(self, run: RunDir) -> None:
        assert exported_checkpoint(run, "5")[0] == 5

    @pytest.mark.parametrize(
        ("which", "message"),
        [("12", "one of 5, 10"), ("7", "got 7"), ("newest", "best, last or a step")],
    )
    def test_refuses_wrong_checkpoints(self, run: RunDir, which: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            exported_checkpoint(run, which)
