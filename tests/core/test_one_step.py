"""The example that drives one training step by hand."""

import runpy
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.core.kernel import Kernel
from rollweave.schema.config.root import RunConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_step.py"


def test_the_example_trains_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    order = ["DrawTask", "StartInit", "StartTurn", "StartEval", "TrainStep", "PublishWeights"]
    places = [printed.rindex(name) for name in order]
    assert places == sorted(places)
    assert "started=2, trained=2" in printed


def test_the_kernel_trains_the_step_without_any_mechanism() -> None:
    """The core has only the mechanisms of every run, and the kernel answers as it."""
    example = runpy.run_path(str(EXAMPLE))
    config = RunConfig.model_validate(example["CONFIG"])
    core, kernel = Core(config), Kernel(config)
    assert kernel._run.mechanisms == ()
    assert [one.name for one in core._run.mechanisms] == ["membership", "suspects"]
    assert core.state.mechanisms == {}
    events = list(example["BEGINNING"])
    for event in events:  # which grows
        commands = core.handle(0.0, event)
        assert kernel.handle(0.0, event) == commands
        events += [reply for command in commands for reply in example["answer"](command)]
    assert kernel.finished


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
