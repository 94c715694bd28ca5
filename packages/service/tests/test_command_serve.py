"""`rollweave serve` for a trained run, and its error lines."""

import asyncio
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packages.service.tests.rollout_service import service_config
from rollweave.cli.main import app
from rollweave.schema.config.loading import dumps, load, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_service.command_serve import serve, service_of_run
from rollweave_service.world import ServiceWorld
from tests.support.synthetic_run import config_of


def trained(tmp_path: Path) -> str:
    """Write those parts of a run's directory that serving reads; return its path."""
    run = tmp_path / "run"
    export = run / "checkpoints" / "step-000007" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (run / "config.toml").write_text(dumps(config_of(run)))
    return str(run)


def test_the_service_directory_is_beside_the_runs(tmp_path: Path) -> None:
    run = trained(tmp_path)
    config = service_of_run(run, [])
    assert (config.run.dir, config.run.name) == (str(tmp_path), "run-service")
    assert (config.model.path or "").endswith("hf")


def test_run_name_overrides_the_name_of_the_service(tmp_path: Path) -> None:
    assert service_of_run(trained(tmp_path), ["run.name=second"]).run.name == "second"


def test_a_service_of_a_run_without_its_pairwise_judges_can_be_resumed(tmp_path: Path) -> None:
    run = trained(tmp_path)
    file = Path(run) / "config.toml"
    config = load(file)
    url, judge = "http://h:1/v1", {"model": "m", "rubric": "x"}
    first, *others = config.tasks
    sections = {
        "tasks": [
            {**first.model_dump(exclude_unset=True), "env_weight": 0.5},
            *({**one.model_dump(exclude_unset=True), "env_weight": 0.5} for one in others),
        ],
        "rewards": [
            {"name": "duel", "url": url, "judge": {**judge, "pairwise": True}},
            {"name": "grade", "tasks": [others[0].name], "url": url, "judge": judge},
        ],
    }
    changed = RunConfig.model_validate({**config.model_dump(exclude_unset=True), **sections})
    file.write_text(dumps(changed))
    service = service_of_run(run, [])
    assert [reward.name for reward in service.rewards] == ["grade"]
    assert [task.env_weight for task in service.tasks] == [1.0, 0.5]
    assert loads(dumps(service)) == service


def test_reports_a_missing_run() -> None:
    with pytest.raises(ConfigError, match="RUN must be a run directory"):
        serve(Path("runs/nowhere"), [], inproc=False)


def test_a_port_in_use_prints_one_line_and_leaves_no_directory(tmp_path: Path) -> None:
    config = service_config(tmp_path)
    file = tmp_path / "service.toml"
    file.write_text(dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(file), "--port", str(port)])
    line = (
        f"--host and --port must be a free address of this machine, got 127.0.0.1:{port}: "
        "address already in use"
    )
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (Path(config.run.dir) / config.run.name).exists()


HOST = ("--host", "192.0.2.1", "--port", "0", "--token-env", "TOKEN")


def test_reports_an_address_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(dumps(service_config(tmp_path)))
    monkeypatch.setenv("TOKEN", "secret")
    result = CliRunner().invoke(app, ["serve", str(file), *HOST])
    assert result.exit_code == 2
    assert "got 192.0.2.1:0: cannot assign requested address" in result.stderr


@pytest.mark.parametrize(
    "error", [GeneratorExit(), SystemExit(0), asyncio.CancelledError(), LookupError("lost")]
)
def test_a_failed_world_prints_one_line_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr(ServiceWorld, "run", fails)
    file = tmp_path / "service.toml"
    file.write_text(dumps(service_config(tmp_path)))
    result = CliRunner().invoke(app, ["serve", str(file), "--port", "0", "--no-token"])
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert (
        f"a failure that Rollweave did not foresee: the service raised {type(error).__name__}"
        in line
    )
    assert "Traceback" not in result.stderr
