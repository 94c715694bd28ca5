"""The number of rollout workers that changes with the attempts that want a place."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms.cluster import scaling
from rollweave.core.mechanisms.cluster.workers import Peak, needed, observe
from rollweave.core.state import WorkerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.hosts import HostSlot
from rollweave.schema.work import StopReason, Task
from tests.support.core import MODES, config, run_accounted_for
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

NEEDS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=40
)  # (seconds since the one before, workers needed)


def greatest(history: list[tuple[float, int]], *, now: float, window_s: float) -> int:
    """Return the greatest need within the window, by a walk over the whole history."""
    ends = [at for at, _ in history[1:]] + [now]
    return max(need for (_, need), end in zip(history, ends, strict=True) if end >= now - window_s)


@given(steps=NEEDS, window_s=st.integers(0, 60))
def test_the_first_peak_is_the_greatest_need_of_the_window(
    steps: list[tuple[int, int]], window_s: int
) -> None:
    peaks: list[Peak] = []
    history: list[tuple[float, int]] = []
    now = 0.0
    for wait, need in steps:
        now += wait
        history.append((now, need))
        peaks = observe(peaks, need, now=now, window_s=window_s)
        assert peaks[0].workers == greatest(history, now=now, window_s=window_s)
        assert peaks[-1] == Peak(workers=need, until=now)
        counts = [peak.workers for peak in peaks]
        assert counts == sorted(set(counts), reverse=True), "as many as there are counts"


@settings(max_examples=examples(200))
@given(steps=NEEDS, window_s=st.integers(1, 60))
def test_the_number_never_flaps(steps: list[tuple[int, int]], window_s: int) -> None:
    """It is never below the need, and after it has grown it does not shrink for a whole
    window.
    """
    peaks: list[Peak] = []
    now, before, grown_at = 0.0, 0, -1e9
    for wait, need in steps:
        now += wait
        peaks = observe(peaks, need, now=now, window_s=window_s)
        number = peaks[0].workers
        assert number >= need
        if number > before:
            grown_at = now
        elif number < before:
            assert now - grown_at >= window_s
        before = number


@given(
    attempts=st.integers(0, 100),
    workers=st.integers(1, 12),
    at_once=st.integers(1, 60),
)
def test_as_few_workers_as_have_places_for_all_attempts(
    attempts: int, workers: int, at_once: int
) -> None:
    number = needed(attempts, workers=workers, at_once=at_once)
    share = next(share for share in range(1, 61) if share * workers >= at_once)
    fits = [one for one in range(workers + 1) if one * share >= attempts]
    assert number == min(fits, default=workers)


def test_a_gap_between_two_bursts_ends_no_worker() -> None:
    peaks: list[Peak] = []
    numbers = []
    for now, need in [(0.0, 4), (10.0, 0), (39.0, 0), (39.5, 3), (45.0, 0), (69.4, 0), (75.1, 0)]:
        peaks = observe(peaks, need, now=now, window_s=30.0)
        numbers.append(peaks[0].workers)
    assert numbers == [4, 4, 4, 4, 3, 3, 0]


READY, STOPPED = WorkerStatus.READY, WorkerStatus.STOPPED
STARTING, RETIRING = WorkerStatus.STARTING, WorkerStatus.RETIRING
HOSTS = tuple(HostSlot(number=number, cpus=2) for number in range(2))


class Run:
    """A core whose engine serves; three workers have two places each, and none of them
    is there. A step takes one group of two members.
    """

    def __init__(self, **workers: Any) -> None:
        self.core = Core(
            config(
                "sync",
                engines={"count": 1},
                rollout={"groups_per_step": 1, "group_size": 2, "max_running": 6},
                workers={"count": {"minimum": 0, "maximum": 3, **workers}},
            )
        )
        self.now = 0.0
        self.drawing: list[c.DrawTask] = []
        self.commands = self.send(
            e.RunStarted(engines=(e.EngineSlot(id=EngineId("e0")),), hosts=HOSTS),
            e.EngineJoined(engine_id=EngineId("e0"), epoch=0, max_slots=9, kv_total_tokens=900),
            e.TrainerReady(epoch=0, step=0),
            e.WeightsPublished(epoch=0, version=0, publication_id=0),
            e.WeightsLoaded(engine_id=EngineId("e0"), epoch=0, version=0, publication_id=0),
        )

    @property
    def statuses(self) -> list[WorkerStatus]:
        return [worker.status for worker in self.core.state.workers.values()]

    def send(self, *events: e.Event) -> list[c.Command]:
        commands: list[c.Command] = []
        for event in events:
            self.now += 0.01
            made = self.core.handle(self.now, event)
            self.core.check()
            self.drawing += of(made, c.DrawTask)
            commands += made
        return commands

    def draw(self, count: int = 99) -> list[c.Command]:
        """Draw that many of the requested tasks."""
        chosen, self.drawing = self.drawing[:count], self.drawing[count:]
        tasks = [Task(id="t", env=one.name, seed=1) for one in chosen]  # type: ignore[arg-type]
        return self.send(
            *(
                e.GroupSubmitted(group_id=one.group_id, task=task)
                for one, task in zip(chosen, tasks, strict=True)
            )
        )

    def join(self, *names: str) -> list[c.Command]:
        workers = self.core.state.workers
        return self.send(
            *(e.WorkerJoined(worker_id=name, epoch=workers[name].epoch) for name in names)
        )

    def lose(self, name: str) -> list[c.Command]:
        epoch = self.core.state.workers[name].epoch
        return self.send(e.WorkerLost(worker_id=name, epoch=epoch, error="killed"))

    def wait(self, seconds: float) -> list[c.Command]:
        """Let time pass, with a check of the deadlines at the end."""
        self.now += seconds
        return self.send(e.TimerFired())

    def end(self, *attempts: c.StartInit) -> list[c.Command]:
        """The attempts are rolled out and scored, which ends their group."""
        commands: list[c.Command] = []
        for one in attempts:
            key = {"trajectory_id": one.trajectory_id, "attempt": one.attempt}
            commands += self.send(
                e.EnvReady(**key),
                e.TrajectoryEnded(**key, stop_reason=StopReason.FINISHED, turns=1, tokens=4),
                e.RewardReady(**key, reward=float(one.member), success=True),
            )
        return commands

    def attempts(self, worker: str) -> list[TrajectoryId]:
        return [*self.core.state.workers[worker].attempts]


def grown() -> tuple[Run, list[c.StartInit]]:
    """A run with a worker that has a group's attempts."""
    run = Run()
    run.draw(1)
    inits = of(run.join("w0"), c.StartInit)
    return run, inits


def test_a_task_that_a_worker_has_to_draw_starts_the_first_one() -> None:
    run = Run()
    assert of(run.commands, c.DrawTask)
    assert [one.worker_id for one in of(run.commands, c.RestartWorker)] == ["w0"]
    assert run.statuses == [STARTING, STOPPED, STOPPED]
    assert run.core.state.mechanisms["cluster"].scaling.starts == 1


def test_there_is_no_worker_until_an_engine_serves() -> None:
    core = Core(config(workers={"count": {"minimum": 0, "maximum": 3}}))
    started = e.RunStarted(engines=(e.EngineSlot(id=EngineId("e0")),), hosts=HOSTS)
    assert of(core.handle(0.0, started), c.RestartWorker) == []
    core.check()


def test_a_worker_takes_its_share_while_others_could_start() -> None:
    run, inits = grown()
    assert [one.worker for one in inits] == ["w0", "w0"]
    assert run.statuses == [READY, STOPPED, STOPPED]


def test_an_idle_worker_stops_after_the_window_and_not_before() -> None:
    run, inits = grown()
    run.end(*inits)
    assert of(run.wait(59.0), c.RemoveWorker) == []
    assert run.statuses[0] is READY
    (removed,) = of(run.wait(2.0), c.RemoveWorker)
    assert removed.worker_id == "w0"
    assert run.statuses == [STOPPED] * 3


def test_a_worker_is_kept_for_as_long_as_a_start_takes() -> None:
    run = Run()
    run.draw(1)
    run.now += 80.0  # its start
    inits = of(run.join("w0"), c.StartInit)
    run.end(*inits)
    assert of(run.wait(79.0), c.RemoveWorker) == []
    assert of(run.wait(2.0), c.RemoveWorker)


class Crowd(Run):
    """A step takes three groups: a run whose three workers are needed."""

    def __init__(self) -> None:
        self.core = Core(
            config(
                "sync",
                engines={"count": 1},
                rollout={"groups_per_step": 3, "group_size": 2, "max_running": 6},
                workers={"count": {"minimum": 1, "maximum": 3}},
            )
        )
        self.now, self.drawing = 0.0, []
        self.send(
            e.RunStarted(
                engines=(e.EngineSlot(id=EngineId("e0")),),
                hosts=HOSTS,
                workers=(e.WorkerSlot(id="w0", host=0),),
            ),
            e.EngineJoined(engine_id=EngineId("e0"), epoch=0, max_slots=9, kv_total_tokens=900),
            e.TrainerReady(epoch=0, step=0),
            e.WeightsPublished(epoch=0, version=0, publication_id=0),
            e.WeightsLoaded(engine_id=EngineId("e0"), epoch=0, version=0, publication_id=0),
        )
        self.draw()
        self.inits = {name: list(of(self.join(name), c.StartInit)) for name in ("w0", "w1", "w2")}


def test_all_workers_start_at_once_when_all_are_needed() -> None:
    run = Crowd()
    assert run.statuses == [READY] * 3
    assert {name: len(inits) for name, inits in run.inits.items()} == {"w0": 2, "w1": 2, "w2": 2}


def test_a_worker_that_retires_ends_no_attempt_and_is_used_again() -> None:
    run = Crowd()
    for name in ("w0", "w1", "w2"):
        run.end(run.inits[name][0])
    assert of(run.wait(61.0), c.RemoveWorker) == []
    assert run.statuses == [READY, READY, RETIRING], "three attempts need two workers"
    (kept,) = run.attempts("w2")
    key = {"trajectory_id": run.inits["w2"][1].trajectory_id, "attempt": 0}
    assert kept == key["trajectory_id"]
    first = run.inits["w0"][1]
    again = run.send(
        e.TrajectoryEnded(
            trajectory_id=first.trajectory_id, attempt=0, stop_reason=StopReason.ENV_ERROR
        )
    )
    assert {one.worker for one in of(again, c.StartInit)} == {"w0"}, "none goes to w2"
    run.send(e.EnvReady(**key))
    run.send(e.TrajectoryEnded(**key, stop_reason=StopReason.FINISHED, turns=1, tokens=4))
    assert run.statuses[2] is RETIRING, "it will score the attempt"
    (removed,) = of(run.send(e.RewardReady(**key, reward=0.0, success=True)), c.RemoveWorker)
    assert removed.worker_id == "w2"


def test_a_worker_that_retires_is_used_again_if_it_is_needed() -> None:
    run = Crowd()
    for name in ("w0", "w1", "w2"):
        run.end(run.inits[name][0])
    run.wait(61.0)
    assert run.statuses == [READY, READY, RETIRING]
    epoch = run.core.state.workers["w2"].epoch
    lost = run.lose("w1")  # it starts again; without it, nothing else is needed
    assert run.statuses == [READY, STARTING, RETIRING]
    assert [one.worker for one in of(lost, c.StartInit)] == ["w0"]
    for _ in range(4):
        run.lose("w1")
    assert run.statuses == [READY, WorkerStatus.FAILED, READY], "instead of the one given up"
    assert run.core.state.workers["w2"].epoch == epoch


def test_a_worker_that_is_lost_while_it_retires_is_not_started_again() -> None:
    run = Crowd()
    for name in ("w0", "w1", "w2"):
        run.end(run.inits[name][0])
    run.wait(61.0)
    lost = run.lose("w2")
    assert of(lost, c.RemoveWorker)
    assert of(lost, c.RestartWorker) == []
    (again,) = of(lost, c.StartInit)
    assert (again.worker, again.attempt) == ("w0", 1)
    assert run.statuses == [READY, READY, STOPPED]


def test_a_lost_host_in_the_middle_of_growing_and_of_shrinking() -> None:
    run = Crowd()
    where = {worker.id: worker.host for worker in run.core.state.workers.values()}
    assert set(where.values()) == {0, 1}
    run.send(e.HostLost(host=1, error="silent"))
    assert {worker.host for worker in run.core.state.workers.values()} == {0}
    assert STARTING in run.statuses
    run.core.check()


def test_a_stopped_worker_that_fails_to_start_is_replaced_by_another() -> None:
    run = Run()
    for _ in range(4):
        run.lose("w0")
    assert run.statuses == [WorkerStatus.FAILED, STARTING, STOPPED]
    for name in ("w1", "w2"):
        assert not run.core.state.error
        for _ in range(4):
            run.lose(name)
    assert "no worker is left" in run.core.state.error


@pytest.mark.parametrize("late", [e.WorkerJoined, e.WorkerLost])
def test_news_of_a_stopped_process_are_late(late: type[Any]) -> None:
    run, inits = grown()
    run.end(*inits)
    run.wait(61.0)
    more = {"error": "killed"} if late is e.WorkerLost else {}
    assert of(run.send(late(worker_id="w0", epoch=1, **more)), c.RestartWorker) == []
    assert run.statuses == [STOPPED] * 3


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([*MODES, "decoupled"]),
    count=st.integers(1, 4),
    minimum=st.integers(0, 2),
    idle_s=st.sampled_from([0.0, 2.0, 20.0]),
    failure=st.sampled_from([0.0, 0.03]),
    hang=st.sampled_from([0.0, 0.01]),
    hosts=st.booleans(),
    losing=st.booleans(),
    lost=st.booleans(),
)
def test_any_run_with_a_changing_number_of_workers_ends_accounted_for(
    seed: int,
    mode: str,
    count: int,
    minimum: int,
    idle_s: float,
    failure: float,
    hang: float,
    hosts: bool,
    losing: bool,
    lost: bool,
) -> None:
    """The core's invariants hold after every event; its replay gives the same
    commands; without failures no attempt is lost with its worker.
    """
    run_config = config(
        mode,
        eval={"every": 2},
        engines={"count": 2},
        weights={"relays": 2} if hosts else {},
        workers={"count": {"minimum": min(minimum, count), "maximum": count}},
        watchdog={"restarts": 1000},
    )
    world = World(run_config, seed, failure=failure, hang=hang)
    world.losing_workers = 0.02 if losing else 0.0
    world.changing_hosts = 0.02 if hosts else 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "IDLE_S", idle_s)
        run_accounted_for(world, lost=lost)
    if not (losing or hosts or failure or hang):
        assert StopReason.WORKER_LOST not in world.core.state.counters.stop_reasons


def test_the_random_runs_do_grow_and_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing."""
    monkeypatch.setattr(scaling, "IDLE_S", 0.0)
    world = World(config("sync", steps=6, workers={"count": {"minimum": 0, "maximum": 3}}), seed=1)
    world.run()
    commands = [one for commands in world.commands for one in commands]
    assert len(of(commands, c.RestartWorker)) > 3
    assert len(of(commands, c.RemoveWorker)) > 3
    assert world.core.state.mechanisms["cluster"].scaling.starts == len(
        of(commands, c.RestartWorker)
    )
