"""Processes of a run that share the cores of a machine: how much they slow each other
down, in a simulation, and what they would have taken alone, from a journal.
"""

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import JournalReader, RunJournal
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.clock import Clock
from rollweave_sim.cores import slowdown
from rollweave_sim.engine import Request, SimEngine
from rollweave_sim.faults import MAX_EVENTS, STORM_S, Chaos
from rollweave_sim.rerun import LENGTH, MeasuredTrainer
from rollweave_sim.run import SimMetrics
from rollweave_sim.scenarios import scenario, serving_of
from rollweave_sim.timings import Reader, read_timings
from rollweave_sim.trainer import SimTrainer
from rollweave_sim.trial import try_out
from rollweave_sim.world import World
from tests.support.core import config as core_config
from tests.support.recorded_runs import COSTS, Steps
from tests.support.simulation import Linear


@pytest.mark.parametrize(
    ("computing", "cores", "expected"),
    [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 1.0), (3, 2, 1.5), (6, 2, 3.0), (9, 0, 1.0)],
)
def test_more_processes_than_cores_slow_each_other_down(
    computing: int, cores: int, expected: float
) -> None:
    assert slowdown(computing, cores) == expected


def spoken(kind: type[Any], **fields: Any) -> Any:
    """Return a command or event of which only these fields are read."""
    return Mock(spec=kind, **fields)


class Watched:
    """A reader, and the commands and events by which it learns of one engine."""

    def __init__(self, *, cores: int, warm: int = 0) -> None:
        self.reader = Reader(cores=cores, warm=warm)
        self.tell(0.0, e.TrajectoryEnded, trajectory_id="t", tokens=10)

    def tell(self, now: float, kind: type[Any], **fields: Any) -> None:
        self.reader.on_event(now, spoken(kind, **fields))

    def begin(self, now: float, name: str, *, engine: str = "e0", context: int = 100) -> None:
        self.tell(now, e.TurnRequested, trajectory_id=name, context_tokens=context)
        start = {"trajectory_id": name, "engine_id": EngineId(engine), "dispatch": 0}
        self.reader.on_command(now, spoken(c.StartTurn, prefill=False, **start))

    def end(self, now: float, name: str, *, output: int, queue_s: float = 0.0) -> None:
        fields = {"output_tokens": output, "cached_tokens": 0, "queue_s": queue_s}
        self.tell(now, e.TurnDone, trajectory_id=name, replayed=False, **fields)

    def train(self, since: float, until: float, *, step: int = 0) -> None:
        groups = (spoken(c.GroupRef, trajectory_ids=("t",)),)
        self.reader.on_command(since, spoken(c.TrainStep, step=step, groups=groups))
        self.tell(until, e.StepTrained)


@pytest.mark.parametrize(("cores", "turn_s", "train_s"), [(0, 10, 4), (1, 8, 2), (2, 10, 4)])
def test_work_is_measured_without_what_shared_cores_cost(
    cores: int, turn_s: float, train_s: float
) -> None:
    """A turn from 0 s to 10 s, and a training step from 4 s to 8 s."""
    watched = Watched(cores=cores)
    watched.begin(0.0, "a")
    watched.train(4.0, 8.0)
    watched.end(10.0, "a", output=5)
    timings = watched.reader.finish()
    (turn,) = timings.turns.turns
    assert (turn.seconds, timings.trained, timings.cores) == (turn_s, [(10, train_s)], cores)
    assert timings.worked.seconds == turn_s


def test_a_suspended_engine_takes_no_core() -> None:
    watched, e0 = Watched(cores=1), EngineId("e0")
    watched.begin(0.0, "a")
    watched.reader.on_command(2.0, spoken(c.SuspendEngine, engine_id=e0))
    watched.train(2.0, 6.0)
    watched.reader.on_command(6.0, spoken(c.ResumeEngine, engine_id=e0))
    watched.train(6.0, 10.0)
    assert watched.reader.finish().trained == [(10, 4.0), (10, 2.0)]


def test_an_engine_computes_with_as_many_threads_as_its_degree() -> None:
    watched = Watched(cores=2)
    watched.tell(0.0, e.RunStarted, engines=(e.EngineSlot(id=EngineId("e0"), degree=3),))
    watched.begin(0.0, "a")
    watched.train(0.0, 8.0)
    assert watched.reader.finish().trained == [(10, 4.0)]


def test_engines_on_gpus_share_no_cores() -> None:
    watched = Watched(cores=1)
    watched.tell(0.0, e.RunStarted, engines=(e.EngineSlot(id=EngineId("e0"), devices=(0,)),))
    watched.begin(0.0, "a")
    watched.train(0.0, 8.0)
    timings = watched.reader.finish()
    assert (timings.trained, timings.cores) == ([(10, 8.0)], 0)


def test_prompts_count_for_the_turns_that_wait_for_them() -> None:
    """Three turns begin together, and their prompts are computed before any of them
    decodes; the prompt of a fourth one holds up those that still decode then.
    """
    watched = Watched(cores=0)
    for name, context in (("a", 100), ("b", 200), ("c", 300)):
        watched.begin(0.0, name, context=context)
    watched.end(4.0, "a", output=10)
    watched.begin(5.0, "d", context=400)
    watched.end(6.0, "b", output=10, queue_s=0.1)
    watched.end(8.0, "d", output=10)
    watched.end(9.0, "c", output=10, queue_s=0.1)
    turns = watched.reader.finish().turns.turns
    assert [turn.prompt_tokens for turn in turns] == [600, 1000, 400, 1000]


def test_an_engines_time_is_divided_among_its_turns() -> None:
    """The shares of all turns sum up to the time in which the engine has a turn."""
    draw, watched = random.Random(3), Watched(cores=0)
    times = sorted(draw.uniform(0.0, 100.0) for _ in range(60))
    opened: list[str] = []
    busy = since = 0.0
    for number, now in enumerate(times):
        busy += (now - since) * bool(opened)
        since = now
        if opened and draw.random() < 0.5:
            watched.end(now, opened.pop(draw.randrange(len(opened))), output=4)
        else:
            opened.append(f"t{number}")
            watched.begin(now, opened[-1])
    for name in opened:
        watched.end(101.0, name, output=4)
    busy += 101.0 - since if opened else 0.0
    assert watched.reader.finish().worked.seconds == pytest.approx(busy)


@pytest.mark.parametrize(("steps", "expected"), [(5, [2.0, 3.0, 4.0]), (4, [0.0, 1.0, 2.0, 3.0])])
def test_the_beginning_of_a_run_is_left_out_if_enough_follows(
    steps: int, expected: list[float]
) -> None:
    watched = Watched(cores=0, warm=2)
    for step in range(steps):
        watched.train(10.0 * step, 10.0 * step + step, step=step)
    assert [seconds for _, seconds in watched.reader.finish().trained] == expected


class Trainer:
    """A simulated trainer whose steps take 10 s of work, and when it reported them."""

    def __init__(self) -> None:
        self.clock, self.trained = Clock(), list[float]()
        self.process = SimTrainer(
            clock=self.clock,
            post=self._post,
            cost=Steps(fixed=10.0),
            scored={},
            trace=None,
            critic=False,
        )
        self.process.start()
        self.clock.step()

    def _post(self, event: e.Event) -> None:
        if isinstance(event, e.StepTrained):
            self.trained.append(self.clock.now)

    def train(self) -> None:
        self.process.train(c.TrainStep(step=0, part=0, parts=1, groups=()))


@given(
    changes=st.lists(
        st.tuples(st.floats(0.1, 5.0), st.sampled_from([1.0, 1.5, 2.0, 4.0])), max_size=6
    )
)
def test_a_training_step_takes_its_work_at_the_pace_of_each_moment(
    changes: list[tuple[float, float]],
) -> None:
    trainer, left, now, pace = Trainer(), 10.0, 0.0, 1.0
    trainer.train()
    for after, factor in changes:
        if after / pace >= left:
            break
        left, now, pace = left - after / pace, now + after, factor
        trainer.clock.at(now, lambda factor=factor: trainer.process.slow_down(factor))  # type: ignore[misc]
        trainer.clock.step()
    while trainer.clock.step():
        pass
    assert trainer.trained == [pytest.approx(now + left * pace)]
    assert trainer.process.computing == 0


def test_a_lost_trainer_does_not_compute() -> None:
    trainer = Trainer()
    trainer.train()
    assert trainer.process.computing == 1
    trainer.process.drop()
    assert trainer.process.computing == 0
    trainer.process.slow_down(2.0)
    assert not trainer.clock.step()


def test_an_engine_is_slowed_down_from_its_next_step_on() -> None:
    def ended(slow_at: float | None) -> float:
        engine = SimEngine(
            cost=Linear(1 << 20), slots=4, chunk_tokens=512, block_tokens=16, prefix_cache=True
        )
        request = Request(key="a", context_tokens=16, output_tokens=101)
        engine.add(0.0, request)
        if slow_at is not None:
            engine.slow_down(slow_at, 2.0)
        while not (done := engine.advance(engine.next_at() or 0.0)):
            pass
        return done[0].at

    whole, half = ended(None), ended(None) / 2
    step_s = whole / 101
    assert ended(0.0) == pytest.approx(2 * whole)
    assert ended(half) == pytest.approx(1.5 * whole, abs=2 * step_s)


def settings(mode: str, engines: int) -> RunConfig:
    return core_config(
        mode,
        steps=14,
        tasks=[{"env": "frozenlake", "max_turns": 20, "step_s": 600.0}],
        watchdog={"turn_s": 3600.0},
        rollout={"groups_per_step": 2, "group_size": 4, "max_running": 16},
        engines={"count": engines, "max_slots": 16, "kv_tokens": 1 << 20},
        eval={"final_episodes": 0},
        run={"checkpoint_every": 0},
        sim={"model": "qwen3-8b"},
    )


@pytest.mark.parametrize("cores", [1, 2])
def test_the_costs_of_a_run_are_read_whatever_cores_it_shared(tmp_path: Path, cores: int) -> None:
    """Reading a journal is the inverse of simulating: what a step costs alone is found
    from a run of two engines that had few cores.
    """
    config, metrics = settings("bounded", 2), SimMetrics()
    with RunJournal(tmp_path / "journal.bin") as journal:
        world = World(config, observer=metrics, journal=journal, costs=COSTS, cores=cores)
        metrics.watch(world)
        assert world.run().state.error == ""
    timings = read_timings(tmp_path / "journal.bin", config, cores=cores, warm=2)
    tokens = round(sum(tokens for tokens, _ in timings.trained) / len(timings.trained))
    truth = COSTS[1].step_s(tokens=tokens, context=0)
    measured = MeasuredTrainer(timings).step_s(tokens=tokens, context=0)
    assert measured == pytest.approx(truth, rel=0.05)
    naive = read_timings(tmp_path / "journal.bin", config, warm=2)
    assert MeasuredTrainer(naive).step_s(tokens=tokens, context=0) > 1.2 * truth


def test_fewer_cores_take_more_time() -> None:
    seconds = [
        try_out(settings("bounded", 2), LENGTH, costs=COSTS, cores=cores).step_s
        for cores in (0, 3, 2, 1)
    ]
    assert seconds[0] == seconds[1], "three processes have a core each"
    assert seconds[1] < seconds[2] < seconds[3]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(12))
def test_no_time_is_negative_whatever_fails_in_a_run(tmp_path: Path, seed: int) -> None:
    config, path = scenario(seed), tmp_path / "journal.bin"
    serving = serving_of(seed) if config.loans is not None else None
    core = Core(config, rules=rules_of(config))
    limits = {"storm_s": STORM_S, "max_events": MAX_EVENTS}
    chaos = Chaos(config, serving, seed, path, core=core, **limits)
    chaos.run()
    chaos.close()
    if JournalReader(path).snapshot() is not None:
        with pytest.raises(ConfigError, match="must be the journal of a whole run"):
            read_timings(path, config)
        return
    timings = read_timings(path, config, cores=seed % 3)
    of_trainer = [seconds for _, seconds in timings.trained] + timings.published + timings.copied
    of_engines = [turn.seconds for turn in timings.turns.turns] + timings.loaded + timings.swapped
    assert min([*of_trainer, *of_engines, timings.worked.seconds], default=0.0) >= 0.0
    assert all(turn.prompt_tokens >= 0 for turn in timings.turns.turns)
