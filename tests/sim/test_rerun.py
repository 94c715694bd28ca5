"""What a run measured predicts it in other modes and with other numbers of engines."""

from pathlib import Path

import pytest

from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import dumps
from rollweave.schema.errors import ConfigError
from rollweave.sim.candidates import Candidate, Prediction
from rollweave.sim.measured import MeasuredEngine, read_timings
from rollweave.sim.rerun import LENGTH, Reruns
from rollweave.sim.trial import run_trial, try_out
from tests.support.recorded_runs import COSTS, recorded_run, recorded_settings
from tests.support.simulation import Linear


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_run(tmp_path_factory.mktemp("recorded"))


@pytest.mark.extended
def test_an_engine_is_measured_by_its_turns(path: Path) -> None:
    timings = read_timings(path / "journal.bin", recorded_settings())
    engine, real = MeasuredEngine(timings, kv_tokens=99), Linear(1 << 20)
    assert engine.kv_tokens == 99
    for decode in (4, 8):  # such as the run had
        amounts = {"decode": decode, "decode_context": decode * 2000, "steps": 20}
        assert engine.decode_s(**amounts) == pytest.approx(real.decode_s(**amounts), rel=0.2)


def choice(table: Reruns, mode: str, count: int) -> Candidate:
    return next(
        one
        for one in table.everything
        if (one.pacing.mode.value, one.split.engines[0].count) == (mode, count)
        and one.pacing.alpha <= 1
    )


def predict(table: Reruns, one: Candidate) -> Prediction:
    prediction = run_trial(table.trial(one, LENGTH), table.work)
    assert isinstance(prediction, Prediction), prediction
    return prediction


@pytest.mark.extended
@pytest.mark.parametrize(("mode", "count"), [("sync", 1), ("one_step", 1)])
def test_predictions_hold_against_the_costs_that_the_run_had(
    path: Path, mode: str, count: int
) -> None:
    """The reference: the candidate with the costs of the recorded run themselves."""
    table = Reruns(path)
    chosen = choice(table, mode, count)
    truth = try_out(table.rearranged(chosen), LENGTH, work=table.work, costs=COSTS)
    assert predict(table, chosen).step_s == pytest.approx(truth.step_s, rel=0.25)


def test_the_recorded_configuration_is_predicted_as_it_was(path: Path) -> None:
    table = Reruns(path)
    assert table.itself in table.everything
    assert table.step_s is not None
    assert predict(table, table.itself).step_s == pytest.approx(table.step_s, rel=0.25)


def test_a_run_whose_engines_take_turns_with_the_trainer_is_refused(tmp_path: Path) -> None:
    text = dumps(recorded_settings()).replace("colocated = false", "colocated = true")
    RunDir(tmp_path).config.write_text(text.replace('mode = "bounded"', 'mode = "sync"'))
    with pytest.raises(ConfigError, match=r"must have trainer\.colocated false"):
        Reruns(tmp_path)
