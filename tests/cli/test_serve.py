"""What a trained run is served as."""

from pathlib import Path

import pytest

from rollweave.cli.serve import of_run, serve
from rollweave.codec.config import dumps
from rollweave.schema.errors import ConfigError
from tests.report.synthetic import config_of


def trained(tmp_path: Path) -> str:
    """A run's directory, as far as serving it looks."""
    run = tmp_path / "run"
    export = run / "checkpoints" / "step-000007" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (run / "config.toml").write_text(dumps(config_of(run)))
    return str(run)


def test_a_service_has_a_directory_of_its_own_beside_the_runs(tmp_path: Path) -> None:
    run = trained(tmp_path)
    config = of_run(run, [])
    assert (config.run.dir, config.run.name) == (str(tmp_path), "run-service")
    assert (config.model.path or "").endswith("hf")


def test_a_run_is_served_under_another_name_where_one_is_given(tmp_path: Path) -> None:
    assert of_run(trained(tmp_path), ["run.name=second"]).run.name == "second"


def test_a_run_that_is_not_there_is_called_a_run() -> None:
    with pytest.raises(ConfigError, match="RUN must be a run directory"):
        serve(Path("runs/nowhere"), [], inproc=False)
