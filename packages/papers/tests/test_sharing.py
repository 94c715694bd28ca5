"""ROSE's baselines: ways of sharing a simulated engine, and engines without users that
a simulated run borrows, serverless ones with a lease and spot instances.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from packages.sim.tests.borrowing import Watch, config, lenders
from packages.sim.tests.simulated_lender import Rig, every_turn_ends
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave.schema.errors import ConfigError
from rollweave_papers import sharing
from rollweave_papers.sharing import (
    DOWN_S,
    KEPT_S,
    RELOAD_S,
    START_S,
    UP_S,
    EarliestDue,
    FixedHalves,
    OnDemand,
    OneModel,
    TakingTurns,
    available,
)
from rollweave_sim.clock import Clock
from rollweave_sim.lender import Lender
from rollweave_sim.lending import REPORT_S
from rollweave_sim.run import SimMetrics, simulate
from rollweave_sim.world import World

HEADER = "TIMESTAMP,Engines\n"


def on_demand(sharing: str, **serving: Any) -> ServingFile:
    """Return four engines without users."""
    return lenders(sharing=sharing, **{"model": None, "prefill": 0, "rate": None, **serving})


def longer(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": 12})})


class Reports:
    """What the engines report, by the time of it."""

    def __init__(self, serving: ServingFile) -> None:
        self.clock = Clock()
        self.engines = OnDemand(config(), serving, clock=self.clock, post=self.note)
        self.there: list[tuple[float, int]] = []
        self.engines.start()

    def note(self, event: e.Event) -> None:
        assert isinstance(event, e.LendersReported)
        self.there.append((self.clock.now, sum(not one.recalled for one in event.lenders)))

    def until(self, seconds: float) -> None:
        while self.clock.now < seconds:
            assert self.clock.step()

    def at(self, seconds: float) -> int:
        return [there for at, there in self.there if at <= seconds][-1]


def test_a_trace_says_how_many_spot_instances_there_are(tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text(f"{HEADER}100,3\n160,0\n225,9\n300,1\n")
    assert available(trace) == [(0, 3), (60, 0), (125, 9), (200, 1)]
    reports = Reports(on_demand("spot", trace=str(trace)))
    reports.until(400)
    assert [reports.at(second) for second in (0, 59, 60, 124, 125, 199, 200, 390)] == [
        *(3, 3, 0, 0, 4, 4, 1, 1)
    ]


@pytest.mark.extended
def test_drawn_spot_instances_are_there_for_their_share_of_the_time() -> None:
    reports = Reports(on_demand("spot", engines=60))
    reports.until(40 * UP_S)
    counts = [there for _, there in reports.there]
    assert sum(counts) / len(counts) / 60 == pytest.approx(UP_S / (UP_S + DOWN_S), rel=0.05)
    assert len(set(counts)) > 10


@pytest.mark.extended
def test_all_serverless_engines_end_with_their_lease_and_others_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease_s = 120.0
    monkeypatch.setattr(sharing, "LEASE_S", lease_s)
    watch, metrics = Watch(), SimMetrics()
    world = World(
        longer(config()), observer=metrics, journal=watch, serving=on_demand("serverless")
    )
    metrics.watch(world)
    world.each_event = world.core.check
    world.start()
    while world.over is None:
        world.step()
    assert world.over == ""
    started = [
        now
        for now, _, commands in watch.log
        for one in commands
        if isinstance(one, c.StartEngine) and one.lender
    ]
    assert len(started) >= 8, "the run outlasts a lease"
    assert started[:4] == [0.0] * 4
    assert all(now % lease_s <= REPORT_S for now in started), "at once, once it is reported"
    joined = [now for now, event, _ in watch.log if isinstance(event, e.EngineJoined) and now]
    assert joined[0] == START_S
    lines = [line for line in metrics.lines if line["kind"] == "step"]
    assert not any(line["retried"] or line["dropped"] for line in lines), "no attempt is lost"


@pytest.mark.extended
def test_a_run_with_spot_instances_is_faster_than_without() -> None:
    alone, spot = (
        simulate(longer(config(most=0))),
        simulate(longer(config()), serving=on_demand("spot")),
    )
    assert not spot.summary.error
    assert spot.serving is None, "there are no users"
    assert spot.summary.wall_s < 0.9 * alone.summary.wall_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "5,-1\n", ":2: Engines must be a number of at least 0, got '-1'"),
        (HEADER + "5,1\n4,1\n", ":3: TIMESTAMP must not be earlier than in the line before"),
        ("TIMESTAMP,GPUs\n5,1\n", " must have the columns TIMESTAMP, Engines, got TIMESTAMP, GPUs"),
    ],
)
def test_a_bad_trace_of_spot_instances_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError) as raised:
        available(trace)
    assert str(raised.value).startswith(f"{trace}{message}")


@pytest.mark.parametrize("kind", [TakingTurns, FixedHalves, EarliestDue, OneModel])
@pytest.mark.parametrize("seed", range(6))
def test_every_turn_is_answered_aborted_or_given_back(kind: type[Lender], seed: int) -> None:
    every_turn_ends(Rig(kind), random.Random(f"{kind.__name__}/{seed}"))


def test_an_engine_that_holds_one_model_at_a_time_loads_the_other() -> None:
    """Rollouts come once users were away for long enough, and go when they return."""
    rig = Rig(OneModel)
    first = rig.user(0.0, 40, 10)
    rig.until(1.0)
    assert not rig.rollout(1.0, "t0"), "it holds the serving model"
    served_at = rig.last[first]
    rig.until(served_at + KEPT_S + RELOAD_S - 0.1)
    assert not rig.lender.takes
    rig.until(served_at + KEPT_S + RELOAD_S + 0.1)
    assert rig.lender.takes
    assert rig.rollout(100.0, "t1", output=700)
    second = rig.user(101.0, 40, 10)
    rig.until(101.5)
    assert not rig.lender.takes
    rig.until(1000.0)
    assert rig.returned.keys() == {"t1"}
    assert rig.returned["t1"] > 0
    assert RELOAD_S <= rig.first[second] - 101.0 <= RELOAD_S + 5.0
    assert rig.lender.takes, "users are away again"


def test_an_engine_that_is_woken_serves_again() -> None:
    rig = Rig(OneModel)
    rig.until(KEPT_S + RELOAD_S)
    assert isinstance(rig.lender, OneModel)
    assert rig.lender.holds_rollouts
    rig.lender.wake(rig.now)
    rig.until(rig.now + RELOAD_S)
    assert rig.lender.holds_serving
    user = rig.user(rig.now, 40, 1)
    rig.until(rig.now + 10.0)
    assert rig.first[user] - user.arrived < 5.0


def test_without_admission_users_wait_longer() -> None:
    lent = simulate(config(), serving=lenders())
    spatial = simulate(config(), serving=lenders(sharing="multiplexing"))
    assert lent.serving is not None
    assert spatial.serving is not None
    assert spatial.serving.requests > 0
    assert lent.serving.late_first <= spatial.serving.late_first
