"""The example that drives one training step by hand."""

import runpy
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.schema.config.root import RunConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_step.py"


def test_the_example_trains_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    order = ["DrawTask", "StartInit", "StartTurn", "StartEval", "TrainStep", "PublishWeights"]
    places = [printed.rindex(name) for name in order]
    assert places == sorted(places)
    assert "started=2, trained=2" in printed


def test_the_example_uses_no_mechanism() -> None:
    config = runpy.run_path(str(EXAMPLE))["CONFIG"]
    core = Core(RunConfig.model_validate(config))
    assert core._run.mechanisms == ()
    assert core.state.mechanisms == {}


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
