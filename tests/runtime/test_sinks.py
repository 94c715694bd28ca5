"""The optional mirrors of the metrics, each with its real package if it is
installed.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollweave.runtime.metrics import Trackio, WandB, missing_sinks, open_sinks
from rollweave.schema.errors import ConfigError


def test_a_missing_sink_is_named(tmp_path: Path) -> None:
    assert missing_sinks(["json", "no_such_package"]) == ["no_such_package"]
    with pytest.raises(ConfigError, match=r"pip install .*\[no_such_package\]'"):
        open_sinks(["no_such_package"], tmp_path, {})
    assert open_sinks([], tmp_path, {}) == []


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.skipif(missing_sinks(["tensorboard"]) != [], reason="tensorboard is not installed")
def test_tensorboard_can_read_the_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], tmp_path, {})
    sink.write(1, {"reward/lake": 0.5})
    sink.write(2, {"reward/lake": 0.75})
    sink.close()
    scalars = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/lake")
    assert [(event.step, event.value) for event in scalars] == [(1, 0.5), (2, 0.75)]


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.skipif(missing_sinks(["wandb"]) != [], reason="wandb is not installed")
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = open_sinks(["wandb"], tmp_path, {"run": {"name": "lake"}})
    sink.write(1, {"reward/lake": 0.5})
    sink.close()
    assert list(tmp_path.rglob("*.wandb"))


class Recorder:
    """Stands for the module of wandb or trackio, and records its calls."""

    def __init__(self) -> None:
        self.started: list[dict[str, object]] = []
        self.logged: list[dict[str, object]] = []
        self.axes: list[str] = []
        self.finished = 0

    def init(self, **options: object) -> "Recorder":
        self.started.append(options)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes.append(step_metric)

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        self.logged.append(dict(values) if step is None else {**values, "step": step})

    def finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    module = Recorder()
    for step in (1, 2):
        sink = WandB(module, tmp_path, {"seed": step})
        sink.write(step, {"reward": 0.5})
        sink.close()
    first, second = module.started
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    expected = [{"reward": 0.5, "training_step": 1}, {"reward": 0.5, "training_step": 2}]
    assert module.logged == expected
    assert (module.finished, set(module.axes)) == (2, {"training_step"})


def test_a_resumed_run_continues_its_trackio_run(tmp_path: Path) -> None:
    module, (one, other) = Recorder(), (tmp_path / "a" / "lake", tmp_path / "b" / "lake")
    for step, directory in enumerate((one, one, other)):
        directory.mkdir(parents=True, exist_ok=True)
        sink = Trackio(module, directory, {"seed": step})
        sink.write(step, {"reward": 0.5})
        sink.close()
    first, second, third = (started["name"] for started in module.started)
    assert first == second != third
    assert all(str(name).startswith("lake-") for name in (first, third))
    assert {started["resume"] for started in module.started} == {"allow"}
    assert module.logged == [{"reward": 0.5, "step": step} for step in range(3)]
    assert module.finished == 3


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.skipif(missing_sinks(["trackio"]) != [], reason="trackio is not installed")
def test_trackio_has_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    import trackio

    run_dir = tmp_path / "lake"
    run_dir.mkdir()
    (sink,) = open_sinks(["trackio"], run_dir, {"run": {"name": "lake"}})
    sink.write(1, {"reward/lake": 0.5})
    sink.write(2, {"reward/lake": 0.75})
    sink.close()
    (run,) = trackio.Api().runs("rollweave")
    assert run.name.startswith("lake-")
    assert list(tmp_path.rglob("*.db"))
