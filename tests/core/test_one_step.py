"""The example that drives one training step by hand."""

import runpy
from collections import deque
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.core.kernel import Kernel
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
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
    """The kernel alone answers each event as the core does, which has nothing but the
    mechanisms that every run has.
    """
    example = runpy.run_path(str(EXAMPLE))
    config = RunConfig.model_validate(example["CONFIG"])
    core, kernel = Core(config), Kernel(config)
    assert kernel._run.mechanisms == ()
    assert [one.name for one in core._run.mechanisms] == ["membership", "suspects"]
    assert core.state.mechanisms == {}
    engine = e.EngineSlot(id=EngineId("e0"))
    joined = e.EngineJoined(engine_id=engine.id, epoch=0, max_slots=2, kv_total_tokens=1000)
    events: deque[e.Event] = deque(
        [e.RunStarted(engines=(engine,)), joined, e.TrainerReady(epoch=0, step=0)]
    )
    while events:
        event = events.popleft()
        commands = core.handle(0.0, event)
        assert kernel.handle(0.0, event) == commands
        events += [one for command in commands for one in example["answer"](command)]
    assert core.finished


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 80
