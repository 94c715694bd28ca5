"""Simulated colocated runs that lose a host, judged by the referee of both worlds."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.hardware import GPUS_PER_MACHINE
from rollweave_sim.run import SimMetrics
from rollweave_sim.world import World
from tests.support.properties import checked_every
from tests.support.referee import Referee
from tests.support.simulation import config

HOSTS = 3


def in_turn(
    directory: Path, *, engines: int = HOSTS * GPUS_PER_MACHINE, ranks: int = 8
) -> RunConfig:
    plain = config(directory, mode="sync").model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        {
            **plain,
            "run": {**plain["run"], "steps": 6},
            "cluster": {"address": "127.0.0.1:0", "hosts": HOSTS},
            "trainer": {"colocated": True, "ranks": ranks},
            "engines": {**plain["engines"], "count": engines},
        }
    )


class Judged(World):
    """A simulated world whose events a referee judges, and after each of which the
    processes on each GPU are counted; the core is checked after `checked_every` events.
    """

    def __init__(self, run_config: RunConfig) -> None:
        metrics = SimMetrics()
        super().__init__(run_config, observer=metrics, journal=self)
        metrics.watch(self)
        self.referee, self.seen = Referee(), Counter[str]()
        self.each_event = self.check
        self.start()

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.referee.watch([(now, event, list(commands))])
        self.seen.update(type(command).__name__ for command in commands)

    def check(self) -> None:
        if self.events % checked_every() == 0:
            self.core.check()
        state = self.core.state
        engines = Counter(
            (engine.seat.host, gpu)
            for engine in state.engines.values()
            for gpu in engine.seat.devices
        )
        assert max(engines.values(), default=1) == 1, "two engines share a GPU"
        assert len({(rank.host, rank.devices) for rank in state.hosts.ranks}) == len(
            state.hosts.ranks
        ), "two ranks share a GPU"

    def until_step(self, step: int) -> None:
        while self.core.state.trainer.step < step and self.over is None:
            self.step()

    def until_training(self) -> None:
        """Run until the trainer works on a step, with the memory of all GPUs."""
        trained = self.seen["TrainStep"]
        while self.seen["TrainStep"] == trained:
            self.step()

    def finish(self) -> str:
        while self.over is None:
            self.step()
        self.core.check()
        account = self.core.account()
        assert (account.balanced, account.in_flight) == (True, 0)
        return self.over

    def hosts_of_ranks(self) -> set[int]:
        return {rank.host for rank in self.core.state.hosts.ranks}

    def hosts_of_engines(self) -> Counter[int]:
        return Counter(engine.seat.host for engine in self.core.state.engines.values())


@pytest.mark.parametrize(
    ("lost", "in_a_step"),
    [
        pytest.param(lost, at, marks=[pytest.mark.slow] if (lost, at) != (0, True) else [])
        for lost in (0, 1)
        for at in (True, False)
    ],
)
def test_a_lost_host_is_made_up_for(lost: int, in_a_step: bool, tmp_path: Path) -> None:
    """Its ranks start beside the engines of another host, and its engines on the next
    one that joins.
    """
    world = Judged(in_turn(tmp_path))
    world.until_step(1)
    if in_a_step:
        world.until_training()
    assert world.hosts_of_ranks() == {0}
    assert world.hosts_of_engines() == dict.fromkeys(range(HOSTS), GPUS_PER_MACHINE)
    assert world.lose_host(lost, "no power") is not None
    world.until_step(3)
    assert world.hosts_of_ranks() == {1 if lost == 0 else 0}
    assert world.hosts_of_engines() == dict.fromkeys({0, 1, 2} - {lost}, GPUS_PER_MACHINE)
    assert world.seen["RestartTrainer"] == (lost == 0)
    world.join_host("")
    world.until_step(5)
    assert world.hosts_of_engines() == dict.fromkeys({0, 1, 2, 3} - {lost}, GPUS_PER_MACHINE)
    assert world.finish() == ""
    assert world.core.state.trainer.step == 6


@pytest.mark.extended
def test_a_trainer_on_all_gpus_waits_for_a_host(tmp_path: Path) -> None:
    world = Judged(in_turn(tmp_path, ranks=HOSTS * GPUS_PER_MACHINE))
    world.until_step(1)
    world.lose_host(2, "no power")
    while not world.core.state.trainer.unplaced:
        world.step()
    world.join_host("")
    world.until_step(3)
    assert world.hosts_of_ranks() == {*world.hosts_of_engines()} == {0, 1, 3}
    assert world.finish() == ""


def test_a_trainer_on_all_gpus_does_not_wait_for_ever(tmp_path: Path) -> None:
    world = Judged(in_turn(tmp_path, ranks=HOSTS * GPUS_PER_MACHINE))
    world.until_step(1)
    world.lose_host(2, "no power")
    assert world.finish().startswith("no host has room for the trainer, and none has joined")


@pytest.mark.parametrize(
    ("engines", "ranks", "error"),
    [
        (25, 8, r"cluster\.hosts must have 8 GPUs for its engines .* got 3"),
        (24, 25, r"trainer\.ranks must be at most the number of GPUs \(24\)"),
    ],
)
def test_a_simulated_gpu_has_one_of_each(
    engines: int, ranks: int, error: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=error):
        Judged(in_turn(tmp_path, engines=engines, ranks=ranks))
