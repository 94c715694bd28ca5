"""On-policy distillation has a teacher that `rollweave engine` serves: its log-probs
are stored, the student comes nearer to it, and a teacher that cannot teach is refused.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rollweave.cli import main as cli
from rollweave.envs.frozenlake import FrozenLake
from rollweave.record.store import TrajectoryReader
from rollweave.rollout import teacher as teachers
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ScratchModel
from rollweave.schema.work import Purpose
from rollweave.train.scratch import build_checkpoint
from tests.support import real_runs
from tests.support.tiny_models import oracle_logprobs

pytestmark = pytest.mark.slow

EXACT = 1e-4


def checkpoint(directory: Path, words: Sequence[str] | None = None) -> Path:
    """Write a teacher with the vocabulary of the lake, or of these words."""
    options: dict[str, Any] = {"maps": "fixed"}
    build_checkpoint(
        directory,
        scratch=ScratchModel(hidden=32, layers=1),
        context=512,
        words=FrozenLake.words(options) if words is None else words,
        seed=77,
    )
    return directory


@contextlib.contextmanager
def served(model: Path, token_file: Path) -> Iterator[str]:
    """Serve a checkpoint, and yield its address."""
    command = [sys.executable, "-m", "rollweave.cli.main", "engine", str(model), "--port", "0"]
    command += ["--token-file", str(token_file), "--kv-tokens", "8192", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" at ")[1].split(",")[0]
        finally:
            process.kill()


def taught(directory: Path, url: str, **sections: Any) -> RunConfig:
    return real_runs.lake(
        directory,
        algorithm={"advantage": "distill"},
        teacher={"url": url},
        trainer={"lr": 1e-2},
        **sections,
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_student_learns_from_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    from transformers import AutoModelForCausalLM

    model, token = checkpoint(tmp_path / "teacher"), tmp_path / "token"
    with served(model, token) as url:
        monkeypatch.setenv("ROLLWEAVE_TEACHER_TOKEN", token.read_text().strip())
        config = taught(tmp_path, url, run={"steps": 12}, workers={"count": workers})
        real_runs.check_totals(config, real_runs.run_to_end(config))
    kl = [line["trainer"]["kl_teacher"] for line in real_runs.lines(config, "step")]
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3])
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reader = TrajectoryReader(real_runs.run_dir(config) / "trajectories")
    compared = 0
    for entry in reader.entries:
        for sequence in reader.load(entry).sequences:
            if entry.purpose is not Purpose.TRAIN or not sequence.teacher:
                assert not sequence.teacher
                continue
            compared += 1
            rows = oracle_logprobs(teacher, sequence.tokens)
            for at, sampled in enumerate(sequence.output_mask()):
                want = rows[at - 1, sequence.tokens[at]].item() if sampled else 0.0
                assert sequence.teacher[at] == pytest.approx(want, abs=EXACT)
    assert compared >= 12 * real_runs.GROUPS * real_runs.MEMBERS


def test_a_teacher_with_another_vocabulary_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"other{number}" for number in range(40)]
    model, token = checkpoint(tmp_path / "teacher", words), tmp_path / "token"
    with served(model, token) as url:
        monkeypatch.setenv("ROLLWEAVE_TEACHER_TOKEN", token.read_text().strip())
        with real_runs.living(taught(tmp_path, url)) as life:
            assert life.end() == 2
            (error,) = life.errors
    assert error.startswith("error: teacher: ")
    assert "must have the student's vocabulary" in error or "status 400" in error
    assert not (tmp_path / "lake").exists()


def test_a_teacher_that_is_lost_ends_attempts_and_then_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, token = checkpoint(tmp_path / "teacher"), tmp_path / "token"
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(served(model, token))
        monkeypatch.setenv("ROLLWEAVE_TEACHER_TOKEN", token.read_text().strip())
        config = taught(tmp_path, url, run={"steps": 1000}, rollout={"retries": 0})
        with real_runs.living(config, program=__name__) as life:  # whose teacher must answer sooner
            life.until(lambda core: core.state.trainer.step >= 1, "a step")
            stack.close()
            assert life.end() == 1
            (error,) = life.errors
    assert f"teacher {url} gave no log-probs within 1 s" in error
    reader = TrajectoryReader(real_runs.run_dir(config) / "trajectories")
    failed = [
        trajectory
        for entry in reader.entries
        if (trajectory := reader.load(entry)).stop_reason == "teacher_error"
    ]
    assert failed
    assert {(each.blame, each.reward) for each in failed} == {("infrastructure", None)}


if __name__ == "__main__":
    teachers.TEACHER_S = 1.0
    cli.app()
