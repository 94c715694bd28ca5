"""What a run measured predicts it in other modes and with other numbers of engines. Its
times are those between its commands and their answers; a fitted line has no negative
price.
"""

from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rollweave.core.policy.turn_times import Prices
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.candidates import Candidate, Prediction
from rollweave_sim.faults import NullObserver
from rollweave_sim.rerun import (
    LENGTH,
    MeasuredEngine,
    MeasuredTrainer,
    Reruns,
    fit_line,
)
from rollweave_sim.timings import Reader, Timings, read_timings
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
    with RunJournal(path) as journal:
        world = World(config, observer=NullObserver(), journal=journal, costs=PRICED)
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
    trainer = MeasuredTrainer(timings)
    assert trainer.step_s(tokens=1000, context=7) == pytest.approx(3.0)
    assert (trainer.publish_s(), trainer.load_s(engines=9, tp=1)) == pytest.approx((0.5, 0.125))


def test_a_run_that_trained_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have trained a step"):
        MeasuredTrainer(Timings())
    assert MeasuredTrainer(Timings(trained=[(10, 1.0)])).checkpoint_s() == 0.0


def test_a_journal_that_was_compacted_is_refused(tmp_path: Path) -> None:
    config = simulated()
    world = World(config, observer=NullObserver(), costs=PRICED)
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
    reader, now = Reader(), 0.0
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
    turns = reader.finish().turns
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


def spoken(kind: type[Any], **fields: Any) -> Any:
    """Return a command or event of which only these fields are read."""
    return Mock(spec=kind, **fields)


def test_a_turn_is_measured_beside_the_others_of_its_engine() -> None:
    """One turn lasts from 2 s to 12 s; another one joins it at 4 s, waits for 1 s, and
    ends at 8 s.
    """
    reader, e0 = Reader(), EngineId("e0")

    def begin(now: float, name: str, context: int) -> None:
        asked = spoken(e.TurnRequested, trajectory_id=name, context_tokens=context)
        reader.on_event(now, asked)
        start = {"trajectory_id": name, "engine_id": e0, "dispatch": 0, "prefill": False}
        reader.on_command(now, spoken(c.StartTurn, **start))

    def end(now: float, name: str, *, output: int, cached: int, queue_s: float = 0.0) -> None:
        fields = {"output_tokens": output, "cached_tokens": cached, "queue_s": queue_s}
        done = spoken(e.TurnDone, trajectory_id=name, replayed=False, **fields)
        reader.on_event(now, done)

    begin(2.0, "a", 100)
    begin(4.0, "b", 300)
    end(8.0, "b", output=20, cached=250, queue_s=1.0)
    end(12.0, "a", output=0, cached=0)
    b, a = sorted(reader.finish().turns.turns, key=lambda turn: turn.seconds)
    assert (b.seconds, b.output_tokens, b.prompt_tokens) == (3.0, 20, 50)
    assert (b.batch, b.context) == (2.0, (4 * 100 + 4 * 300) / 8 + 10)
    assert (a.seconds, a.output_tokens, a.prompt_tokens) == (10.0, 1, 150)
    assert (a.batch, a.context) == (1.4, (10 * 100 + 4 * 300) / 14)


@pytest.mark.parametrize("ending", ["cancel", "abort", "fail", "withdraw", "lose", "load"])
def test_a_turn_that_did_not_end_by_itself_is_left_out(ending: str) -> None:
    reader, e0, name = Reader(), EngineId("e0"), TrajectoryId("a")
    start = {"trajectory_id": name, "engine_id": e0, "dispatch": 0, "prefill": False}
    reader.on_command(1.0, spoken(c.StartTurn, **start))
    match ending:
        case "cancel":
            reader.on_command(2.0, spoken(c.CancelTrajectory, trajectory_id=name))
        case "abort":
            reader.on_command(2.0, spoken(c.AbortTurn, trajectory_id=name))
        case "fail":
            reader.on_event(2.0, spoken(e.TurnFailed, trajectory_id=name))
        case "withdraw":
            reader.on_event(2.0, spoken(e.TurnWithdrawn, trajectory_id=name))
        case "lose":
            reader.on_event(2.0, spoken(e.EngineLost, engine_id=e0))
        case "load":
            reader.on_command(2.0, spoken(c.ResumeEngine, engine_id=e0))
    fields = {"output_tokens": 5, "cached_tokens": 0, "queue_s": 0.0, "replayed": False}
    reader.on_event(3.0, spoken(e.TurnDone, trajectory_id=name, **fields))
    assert reader.finish().turns.count == 0
    assert reader._engine(e0).turns == {}


def test_each_time_is_that_from_a_command_to_its_answer() -> None:
    reader, e0, e1 = Reader(), EngineId("e0"), EngineId("e1")
    for name, tokens in (("a", 30), ("b", 12), ("c", 9)):
        ended = spoken(e.TrajectoryEnded, trajectory_id=name, tokens=tokens)
        reader.on_event(0.0, ended)
    groups = (spoken(c.GroupRef, trajectory_ids=("a", "b")),)
    reader.on_command(1.0, spoken(c.TrainStep, step=0, groups=groups))
    reader.on_command(2.0, spoken(c.PublishWeights))
    reader.on_command(3.0, spoken(c.SaveCheckpoint))
    reader.on_command(4.0, spoken(c.StageWeights, engine_id=e0))
    reader.on_event(10.0, spoken(e.StepTrained))
    reader.on_event(12.0, spoken(e.WeightsPublished))
    reader.on_event(14.0, spoken(e.CheckpointCopied))
    reader.on_event(17.0, spoken(e.CheckpointSaved))
    reader.on_event(20.0, spoken(e.WeightsStaged, engine_id=e0, publication_id=7))
    for engine in (e0, e1):
        reader.on_command(21.0, spoken(c.LoadWeights, engine_id=engine))
        reader.on_event(24.0, spoken(e.WeightsLoaded, engine_id=engine, publication_id=7))
    timings = reader.finish()
    assert (timings.trained, timings.published) == ([(42, 9.0)], [10.0])
    assert (timings.copied, timings.saved) == ([11.0], [14.0])
    assert (timings.loaded, timings.swapped) == ([16.0, 3.0], [3.0])
    trainer = MeasuredTrainer(timings)
    assert (trainer.load_s(engines=3, tp=2), trainer.beside_s(engines=3, tp=2)) == (9.5, 9.5)
    assert (trainer.hop_s(share=0.5), trainer.lag_s(), trainer.copy_s()) == (4.75, 0.0, 11.0)
    assert (trainer.swap_s(engines=3, tp=2), trainer.publish_s()) == (3.0, 10.0)
    assert (trainer.checkpoint_s(), trainer.saved_s(engines=3)) == (3.0, 42.0)


def test_a_measured_engine_has_the_prices_of_its_turns() -> None:
    engine = MeasuredEngine.__new__(MeasuredEngine)
    engine.prices = Prices(fixed_s=0.5, prompt_s=0.25, sequence_s=0.125, context_s=0.0625)
    step = {"prefill_tokens": 8, "prefill_context": 99, "decode": 4, "decode_context": 16}
    assert engine.step_s(**step) == 0.5 + 2.0 + 0.5 + 1.0
    assert engine.move_s(12) == 3.0
    alone = {"prefill_tokens": 0, "prefill_context": 0, "decode": 4}
    steps = [engine.step_s(**alone, decode_context=16 + 4 * number) for number in range(3)]
    assert engine.decode_s(decode=4, decode_context=16, steps=3) == pytest.approx(sum(steps))
    assert engine.decode_s(decode=0, decode_context=0, steps=2) == 1.0


def test_a_run_is_compared_with_fewer_engines_and_other_modes() -> None:
    table, config = Reruns.__new__(Reruns), simulated()
    (engines,) = config.engines
    table.config = config.model_copy(
        update={"engines": (engines.model_copy(update={"count": 6, "degree": 2}),)}
    )
    (group,) = table.itself.split.engines
    assert (group.count, group.degree, table.itself.split.trainer) == (6, 2, config.trainer.ranks)
    assert (table.itself.pacing.mode.value, table.itself.pacing.alpha) == ("bounded", 1)
    found = table._candidates()
    assert found == sorted(found)
    assert {one.split.engines[0].count for one in found} == {1, 2, 4, 6}
    assert table.itself in found
    other = next(one for one in found if one.pacing.mode.value == "sync")
    made = table.rearranged(other)
    assert (made.rollout.mode.value, made.rollout.alpha) == ("sync", None)
    assert (made.engines[0].count, made.engines[0].degree) == (other.split.engines[0].count, 2)
    assert (made.eval.final_episodes, table.rearranged(table.itself).rollout.alpha) == (0, 1)
