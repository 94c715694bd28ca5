"""The bench `gpu` returns every figure on the CPU, or the reason for a missing one."""

import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import cases
from benchmarks.gpu.bench import measure
from benchmarks.gpu.cases import TINY
from benchmarks.gpu.subject import DECODE, KV, SHARED, TRAIN, Subject
from rollweave.schema.errors import EngineError
from rollweave.weights.checkpoint import read_shape, read_sizes

torch.set_num_threads(1)

FIGURES = {f"{name}_tiny" for name in (*DECODE, *KV, *TRAIN, *SHARED)}


@pytest.mark.extended
def test_every_figure_is_positive() -> None:
    reported: list[str] = []
    result = measure([TINY], device="cpu", progress=reported.append)
    assert set(result.figures) == FIGURES
    assert all(isinstance(value, float | int) and value > 0 for value in result.figures.values())
    assert result.figures["weights_bytes_tiny"] == 328_576
    assert result.conditions["device"] == "cpu: there is no CUDA device"
    assert len(reported) == 5


@pytest.mark.extended
def test_a_part_that_fails_costs_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("out of cheese")

    for name in ("decode", "train", "shared"):
        monkeypatch.setattr(Subject, name, fail)
    result = measure([TINY], device="cpu", progress=lambda _: None)
    assert set(result.figures) == FIGURES
    missing = {name for name, value in result.figures.items() if value is None}
    assert missing == {f"{name}_tiny" for name in (*DECODE, *TRAIN, *SHARED)}
    assert missing <= set(result.conditions)
    assert result.conditions["train_step_s_tiny"] == "EngineError: out of cheese"


def test_a_checkpoint_has_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SHARD_BYTES", 1 << 16)
    cases.write_checkpoint(tmp_path / "model", TINY, "cpu")
    shape = read_shape(tmp_path / "model")
    shape.check(read_sizes(tmp_path / "model"))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2


def test_the_script_runs_every_part_within_its_time(tmp_path: Path) -> None:
    """A part that hangs is ended, one that fails is named, and the others run."""
    script = Path(cases.__file__).parents[1] / "gpu.sh"
    checkout = tmp_path / "checkout"
    (checkout / "benchmarks").mkdir(parents=True)
    (checkout / "benchmarks" / "gpu.sh").write_text(script.read_text())
    fake = checkout / "python"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *doctor*) exit 1;; *pytest*) exec sleep 60;; esac\n'
        """echo '{"bench": "gpu"}'\n"""
    )
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh"],
        cwd=checkout,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "OUT": "out", "TESTS_S": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "doctor: failed with 1" in done.stdout
    assert "tests: ended after 1 s" in done.stdout
    assert "bench: ok" in done.stdout
    assert (checkout / "out" / "bench.json").read_text() == '{"bench": "gpu"}\n'
