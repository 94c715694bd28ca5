"""What a run measured predicts it in other modes and with other numbers of engines. Its
times are those between its commands and their answers; a fitted line has no negative
price.
"""

from pathlib import Path
from typing import Any, cast

import pytest

from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.candidates import Candidate, Prediction
from rollweave_sim.rerun import (
    LENGTH,
    MeasuredEngine,
    MeasuredTrainer,
    Reruns,
    Timings,
    _Reader,
    fit_line,
    read_timings,
)
from rollweave_sim.run import SimMetrics
from rollweave_sim.trial import run_trial, try_out
from rollweave_sim.world import Costs, World
from tests.support.core import config as core_config
from tests.support.recorded_runs import COSTS, Steps, recorded_run, recorded_settings
from tests.support.simulation import Linear


class Flat:
    """An engine whose steps take a quarter of a second."""

    kv_tokens = 1 << 20

    def step_s(self, **_: int) -> float:
        return 0.25

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        return 0.25 * steps


PRICED: Costs = (
    {("", 1): cast(Any, Flat())},
    Steps(fixed=2.0, publish=0.5, load=0.125, swap=0.0625, copy=1.0, write=3.0),
)


def simulated() -> RunConfig:
    config = core_config(
        "bounded", steps=5, tasks=[{"env": "frozenlake"}], eval={"final_episodes": 0}
    )
    return RunConfig.model_validate(config.model_dump() | {"sim": {"model": "qwen3-8b"}})


def simulate(config: RunConfig, path: Path) -> World:
    metrics = SimMetrics()
    with RunJournal(path) as journal:
        world = World(config, observer=metrics, journal=journal, costs=PRICED)
        metrics.watch(world)
        world.run()
    return world


def test_timings_of_a_run_are_read_from_its_journal(tmp_path: Path) -> None:
    config = simulated()
    simulate(config, tmp_path / "journal.bin")
    timings = read_timings(tmp_path / "journal.bin", config)
    assert len(timings.trained) == 5
    assert [seconds for _, seconds in timings.trained] == pytest.approx(
        [2.0 + 0.001 * tokens for tokens, _ in timings.trained]
    )
    assert min(tokens for tokens, _ in timings.trained) > 0
    assert timings.published == pytest.approx([0.5] * len(timings.published))
    assert timings.loaded == pytest.approx([0.125] * len(timings.loaded))
    assert timings.saved == pytest.approx([4.0] * len(timings.saved))
    assert timings.published
    assert timings.loaded


def test_a_trainer_is_measured_from_a_run(tmp_path: Path) -> None:
    config = simulated()
    simulate(config, tmp_path / "journal.bin")
    trainer = MeasuredTrainer(read_timings(tmp_path / "journal.bin", config))
    assert trainer.step_s(tokens=1000, context=7) == pytest.approx(3.0)
    assert (trainer.publish_s(), trainer.load_s(engines=9, tp=1)) == pytest.approx((0.5, 0.125))


def test_a_run_that_trained_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have trained a step"):
        MeasuredTrainer(Timings())
    assert MeasuredTrainer(Timings(trained=[(10, 1.0)])).checkpoint_s() == 0.0


def test_a_journal_that_was_compacted_is_refused(tmp_path: Path) -> None:
    config = simulated()
    world = World(config, observer=SimMetrics(), costs=PRICED)
    world.start()
    for _ in range(20):
        world.step()
    with RunJournal(tmp_path / "journal.bin") as journal:
        journal.rotate(world.core.snapshot())
        world._journal = journal
        world.step()
        while not journal.size:
            world.step()
        for _ in range(20):
            world.step()
    with pytest.raises(ConfigError, match="must be the journal of a whole run"):
        read_timings(tmp_path / "journal.bin", config)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, 1.0), (10, 2.0), (20, 3.0)], (1.0, 0.1)),
        ([(10, 2.0), (10, 4.0)], (3.0, 0.0)),  # one length: the slope is unknown
        ([(10, 4.0), (20, 2.0)], (3.0, 0.0)),  # more tokens never cost less
        ([(10, 1.0), (20, 4.0)], (0.0, 0.18)),  # nor is a time negative
    ],
)
def test_a_line_has_no_negative_price(
    points: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    assert fit_line(points) == pytest.approx(expected)


def test_a_turn_that_another_engine_has_begun_is_left_out() -> None:
    """Its tokens are not all of the engine that ends it, so that it would seem to have
    sampled them in no time. A turn whose prompt another one has computed counts.
    """
    e0, e1 = EngineId("e0"), EngineId("e1")
    reader, now = _Reader(), 0.0
    for name, begins in {
        "whole": [(e0, False)],
        "moved": [(e0, False), (e1, False)],
        "split": [(e1, True), (e0, False)],
        "split and moved": [(e1, True), (e0, False), (e1, False)],
        "whole again": [(e1, False)],
    }.items():
        key = {"trajectory_id": TrajectoryId(name[:5]), "attempt": 0, "turn": 0}
        reader.on_event(now, e.TurnRequested(**key, context_tokens=10))
        for dispatch, (engine, prefill) in enumerate(begins):
            now += 1.0
            start = c.StartTurn(
                **key, engine_id=engine, rank=0.0, dispatch=dispatch, prefill=prefill
            )
            reader.on_command(now, start)
        now += 4.0
        done = e.TurnDone(**key, dispatch=dispatch, output_tokens=40, cached_tokens=0, version=0)
        reader.on_event(now, done)
    turns = reader.timings.turns
    assert turns.count == 3
    assert {turn.seconds for turn in turns.turns} == {4.0}


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


@pytest.mark.extended
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
