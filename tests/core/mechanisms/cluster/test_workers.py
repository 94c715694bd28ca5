"""Rollout workers: which one gets an attempt, and what follows from the loss of one."""

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms.cluster.workers import worker_for
from rollweave.core.policy.retry import MAX_WORLDS_LOST
from rollweave.core.state import Stage, WorkerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.hosts import HostSlot
from rollweave.schema.work import BLAME_OF, Blame, Purpose, StopReason, Task
from tests.support.core import MODES, config, run_accounted_for
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

HOSTS = tuple(HostSlot(number=number, cpus=2) for number in range(2))


class Run:
    """A core whose engine serves, with a worker on each of two hosts."""

    def __init__(
        self,
        *,
        hosts: tuple[HostSlot, ...] = HOSTS,
        restarts: int = 3,
        slots: tuple[int, ...] = (0, 1),
        **sections: Any,
    ) -> None:
        """`slots` are the hosts of the workers."""
        self.core = Core(
            config(
                engines={"count": 1},
                watchdog={"restarts": restarts},
                **{"workers": {"count": 2}, **sections},
            )
        )
        self.now = 0.0
        places = tuple(e.WorkerSlot(id=f"w{one}", host=host) for one, host in enumerate(slots))
        self.commands = self.send(
            e.RunStarted(engines=(e.EngineSlot(id=EngineId("e0")),), hosts=hosts, workers=places),
            e.EngineJoined(engine_id=EngineId("e0"), epoch=0, max_slots=9, kv_total_tokens=900),
            e.TrainerReady(epoch=0, step=0),
            e.WeightsPublished(epoch=0, version=0, publication_id=0),
            e.WeightsLoaded(engine_id=EngineId("e0"), epoch=0, version=0, publication_id=0),
        )

    def send(self, *events: e.Event) -> list[c.Command]:
        commands: list[c.Command] = []
        for event in events:
            self.now += 0.01
            commands += self.core.handle(self.now, event)
            self.core.check()
            for command in commands:
                if isinstance(command, c.DrawTask):
                    commands.remove(command)
                    task = Task(id="t", env=command.name, seed=1)  # type: ignore[arg-type]
                    commands += self.send(e.GroupSubmitted(group_id=command.group_id, task=task))
        return commands

    def joined(self, worker: str, epoch: int = 0) -> list[c.StartInit]:
        return inits(self.send(e.WorkerJoined(worker_id=worker, epoch=epoch)))

    def lose(
        self, worker: str, epoch: int = 0, *, recorded: tuple[TrajectoryId, ...] = ()
    ) -> list[c.Command]:
        return self.send(
            e.WorkerLost(worker_id=worker, epoch=epoch, error="killed", recorded=recorded)
        )

    def ready(self, trajectory: str, attempt: int = 0) -> None:
        self.send(e.EnvReady(trajectory_id=TrajectoryId(trajectory), attempt=attempt))


def inits(commands: list[c.Command]) -> list[c.StartInit]:
    return of(commands, c.StartInit)


def restarts(commands: list[c.Command]) -> list[c.RestartWorker]:
    return of(commands, c.RestartWorker)


def test_attempts_go_to_the_worker_with_the_fewest() -> None:
    run = Run()
    assert inits(run.commands) == []  # no worker is ready
    first = run.joined("w0")
    assert [command.worker for command in first] == ["w0"] * 4  # its share
    second = run.joined("w1")
    assert [command.worker for command in second] == ["w1"] * 2
    ended = e.TrajectoryEnded(
        trajectory_id=first[0].trajectory_id, attempt=0, stop_reason=StopReason.ENV_ERROR
    )
    (again,) = inits(run.send(ended))
    assert again.worker == "w1"


@given(
    loads=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5)),
    awaited=st.integers(0, 3),
    at_once=st.integers(1, 20),
)
def test_the_first_with_the_fewest_is_chosen_unless_it_has_its_share(
    loads: dict[str, int], awaited: int, at_once: int
) -> None:
    chosen = worker_for(loads, awaited=awaited, at_once=at_once)
    fewest = [name for name in loads if all(loads[name] <= other for other in loads.values())]
    if chosen is not None:
        assert chosen == fewest[0]
    elif fewest:
        assert awaited
        assert loads[fewest[0]] * (len(loads) + awaited) >= at_once


@given(count=st.integers(1, 6), at_once=st.integers(1, 40))
def test_shares_are_enough_for_all_attempts(count: int, at_once: int) -> None:
    """Whatever the order in which workers become ready, all attempts are given away
    once all of them are.
    """
    loads: dict[str, int] = {}
    for number in range(count):
        loads[f"w{number}"] = 0
        while sum(loads.values()) < at_once:
            chosen = worker_for(loads, awaited=count - len(loads), at_once=at_once)
            if chosen is None:
                break
            loads[chosen] += 1
    assert sum(loads.values()) == at_once
    assert max(loads.values()) <= -(-at_once // count)


def test_the_attempts_of_a_lost_worker_start_again_on_the_other() -> None:
    run = Run()
    first = run.joined("w0")
    run.joined("w1")
    assert len(first) == 4
    assert BLAME_OF[StopReason.WORKER_LOST] is Blame.INFRASTRUCTURE
    commands = run.lose("w0")
    assert [(one.worker_id, one.host, one.epoch) for one in restarts(commands)] == [("w0", 0, 1)]
    again = inits(commands)
    assert [one.trajectory_id for one in again] == [one.trajectory_id for one in first]
    assert {command.worker for command in again} == {"w1"}
    assert {command.attempt for command in again} == {1}
    assert run.core.state.counters.stop_reasons == {StopReason.WORKER_LOST: len(first)}


def test_the_open_turn_of_a_lost_worker_is_aborted() -> None:
    run = Run()
    first = run.joined("w0")[0]
    run.ready(first.trajectory_id)
    run.send(
        e.TurnRequested(trajectory_id=first.trajectory_id, attempt=0, turn=0, context_tokens=5)
    )
    (abort,) = of(run.lose("w0"), c.AbortTurn)
    assert abort.trajectory_id == first.trajectory_id


def test_an_attempt_continues_exactly_if_its_turns_are_recorded() -> None:
    """Whatever the core knows of its turns: engines of both sample, and of the first
    the engine was lost before that.
    """
    run = Run()
    first = run.joined("w0")[:2]
    run.joined("w1")
    for one in first:
        run.ready(one.trajectory_id)
        run.send(
            e.TurnRequested(trajectory_id=one.trajectory_id, attempt=0, turn=0, context_tokens=9)
        )
    run.send(e.EngineLost(engine_id=EngineId("e0"), epoch=0, error="killed"))
    run.lose("w0", recorded=(first[0].trajectory_id,))
    commands = run.send(
        e.EngineJoined(engine_id=EngineId("e0"), epoch=1, max_slots=9, kv_total_tokens=900),
        e.WeightsLoaded(engine_id=EngineId("e0"), epoch=1, version=0, publication_id=0),
    )
    again = {one.trajectory_id: one for one in inits(commands) + run.joined("w0", 1)}
    continued = again[first[0].trajectory_id].continues
    assert continued.attempt == 0
    assert again[first[1].trajectory_id].continues is None
    assert run.core.state.counters.continued == 1


def test_an_attempt_that_waits_for_its_reward_is_lost_with_its_worker() -> None:
    run = Run(rollout={"without": ["reward_overlap"]})
    first = run.joined("w0")[0]
    run.ready(first.trajectory_id)
    state = run.core.state
    run.send(
        e.TrajectoryEnded(
            trajectory_id=first.trajectory_id, attempt=0, stop_reason=StopReason.FINISHED
        )
    )
    assert state.trajectories[first.trajectory_id].stage is Stage.EVAL_QUEUED
    run.lose("w0")
    again = state.trajectories[first.trajectory_id]
    assert (again.stage, again.attempt, again.past.worlds_lost) == (Stage.QUEUED, 1, 0)


def test_an_attempt_that_loses_many_workers_is_given_up() -> None:
    run = Run(restarts=1000)
    run.lose("w1")  # so that all attempts are with the other one
    first = run.joined("w0")[0]
    for epoch in range(MAX_WORLDS_LOST):
        run.lose("w0", epoch)
        run.joined("w0", epoch + 1)
    assert first.trajectory_id not in run.core.state.trajectories
    assert run.core.state.counters.watchdog["suspects"] >= 1


def test_a_worker_that_keeps_failing_is_given_up_and_the_last_one_ends_the_run() -> None:
    run = Run(restarts=2)
    for epoch in range(3):
        run.lose("w0", epoch)
    assert run.core.state.workers["w0"].status is WorkerStatus.FAILED
    assert run.joined("w0", 2) == [], "news of a worker that was given up"
    assert run.core.state.workers["w0"].status is WorkerStatus.FAILED
    assert not run.core.finished
    for epoch in range(3):
        run.lose("w1", epoch)
    assert run.core.state.error == "no worker is left; the last one (w1): lost: killed"


def test_a_worker_that_is_not_ready_in_time_is_restarted() -> None:
    run = Run()
    run.joined("w1")
    limit = config().watchdog.start_s
    run.now = limit - 1
    assert restarts(run.send(e.TimerFired())) == []
    run.now = limit + 1
    (restart,) = restarts(run.send(e.TimerFired()))
    assert (restart.worker_id, restart.epoch) == ("w0", 1)


def test_a_worker_that_has_worked_since_is_forgiven() -> None:
    run = Run(restarts=1)
    for epoch in range(5):
        first = run.joined("w0", epoch)[0]
        run.ready(first.trajectory_id, first.attempt)
        run.lose("w0", epoch)
    assert run.core.state.workers["w0"].status is WorkerStatus.STARTING


def test_the_workers_of_a_lost_host_start_elsewhere_without_suspicion() -> None:
    run = Run()
    first = run.joined("w1")
    commands = run.send(e.HostLost(host=1, error="silent"))
    assert [(one.worker_id, one.host, one.epoch) for one in restarts(commands)] == [("w1", 0, 1)]
    trajectory = run.core.state.trajectories[first[0].trajectory_id]
    assert (trajectory.attempt, trajectory.past.worlds_lost) == (1, 0)
    assert run.lose("w1") == []  # of the former epoch, too late


def test_a_worker_without_a_host_waits_for_one() -> None:
    pooled = (HOSTS[0], HostSlot(number=1, cpus=2, pools=("cpus",)))
    run = Run(
        hosts=pooled,
        cluster={"address": "a:1", "hosts": 2},
        pools={"cpus": {"resource": "cpus"}},
        workers={"count": 2, "pool": "cpus"},
    )
    run.joined("w1")
    commands = run.send(e.HostLost(host=1, error="silent"))
    assert restarts(commands) == []
    assert run.core.state.workers["w1"].status is WorkerStatus.UNPLACED
    joined = run.send(e.HostJoined(host=HostSlot(number=2, pools=("cpus",))))
    assert [(one.worker_id, one.host) for one in restarts(joined)] == [("w1", 2)]


def test_workers_return_to_a_host_that_joins_one_after_the_other() -> None:
    """Both were on a host that is lost, and stand on the other one. Each moves once its
    attempts are over; new ones go to the other meanwhile.
    """
    far = HostSlot(number=1, cpus=2, pools=("cpus",))
    run = Run(
        hosts=(HOSTS[0], far),
        cluster={"address": "a:1", "hosts": 2},
        pools={"cpus": {"resource": "cpus", "fallback": ["any"]}, "any": {"resource": "any"}},
        workers={"count": 2, "pool": "cpus"},
        slots=(1, 1),
    )
    workers = run.core.state.workers
    run.send(e.HostJoined(host=HostSlot(number=2, pools=("any",))))
    commands = run.send(e.HostLost(host=1, error="silent"))
    assert [(one.worker_id, one.host) for one in restarts(commands)] == [("w0", 2), ("w1", 2)]
    attempts = [*run.joined("w0", 1), *run.joined("w1", 1)]
    assert {one.worker for one in attempts} == {"w0"}
    joined = run.send(e.HostJoined(host=HostSlot(number=3, cpus=2, pools=("cpus",))))
    assert restarts(joined) == [], "it has attempts"
    assert [one.status for one in workers.values()] == [WorkerStatus.DRAINING, WorkerStatus.READY]
    moved: list[c.Command] = []
    for attempt in attempts:
        if attempt.worker == "w0":
            ended = e.TrajectoryEnded(
                trajectory_id=attempt.trajectory_id, attempt=0, stop_reason=StopReason.ENV_ERROR
            )
            moved += run.send(ended)
    assert {one.worker for one in inits(moved)} == {"w1"}
    assert [(one.worker_id, one.host, one.epoch) for one in restarts(moved)] == [("w0", 3, 2)]
    assert workers["w1"].status is WorkerStatus.READY, "w0 is not ready yet"
    assert not workers["w0"].displaced, "it is where it belongs"
    run.joined("w0", 2)
    assert workers["w1"].status is WorkerStatus.DRAINING
    run.lose("w1", 1)
    assert (workers["w1"].host, workers["w1"].epoch) == (2, 2), "where it was"
    run.send(e.HostLost(host=3, error="silent"))
    run.joined("w0", 3)
    run.joined("w1", 2)
    assert [one.status for one in workers.values()] == [WorkerStatus.READY] * 2


def test_workers_that_are_not_ready_are_waited_for() -> None:
    run = Run(
        hosts=(HostSlot(number=0, name="a"), HostSlot(number=1, name="b", pools=("cpus",))),
        cluster={"address": "a:1", "hosts": 2},
        pools={"cpus": {"resource": "cpus"}},
        workers={"count": 2, "pool": "cpus"},
    )

    def lines() -> list[str]:
        waiting = run.core.waits({})
        return [f"{wait.component}: {wait.what}" for wait in waiting if "worker" in wait.component]

    assert lines() == ["worker w0 on host a: starting", "worker w1 on host b: starting"]
    run.joined("w0")
    run.send(e.HostLost(host=1, error="silent"))
    assert lines() == ["worker w1: no host has a place for it"]


@settings(max_examples=examples(60))
@example(  # the last host is lost
    seed=1, mode="one_step", count=1, failure=0.03, hang=0.0, hosts=True, lost=True
)
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([*MODES, "decoupled"]),
    count=st.integers(1, 3),
    failure=st.sampled_from([0.0, 0.03]),
    hang=st.sampled_from([0.0, 0.01]),
    hosts=st.booleans(),
    lost=st.booleans(),
)
def test_any_run_whose_workers_are_lost_ends_accounted_for(
    seed: int, mode: str, count: int, failure: float, hang: float, hosts: bool, lost: bool
) -> None:
    """The core's invariants hold after every event; its replay gives the same
    commands.
    """
    run_config = config(
        mode,
        eval={"every": 2},
        engines={"count": 2},
        weights={"relays": 2} if hosts else {},
        workers={"count": count},
        watchdog={"restarts": 1000},
    )
    world = World(run_config, seed, failure=failure, hang=hang)
    world.losing_workers = 0.02
    world.changing_hosts = 0.02 if hosts else 0.0
    run_accounted_for(world, lost=lost)


def test_the_random_runs_do_move_workers_back() -> None:
    world = World(
        config(steps=8, engines={"count": 3}, weights={"relays": 3}, workers={"count": 3}), seed=1
    )
    world.changing_hosts = 0.02
    world.run()
    commands = [one for commands in world.commands for one in commands]
    assert sum("it moves" in one.reason for one in restarts(commands)) > 2


def test_the_random_runs_do_lose_workers() -> None:
    """Otherwise the test above would show nothing."""
    world = World(config(steps=8, eval={"every": 1}, workers={"count": 2}), seed=1)
    world.losing_workers = 0.02
    world.run()
    assert world.records.continued.keys() == {Purpose.TRAIN, Purpose.EVAL}
    counters = world.core.state.counters
    assert counters.watchdog["worker_restarted"] > 2
    assert counters.stop_reasons[StopReason.WORKER_LOST] > 2
