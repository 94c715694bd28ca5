"""Turns that end their engines: whole simulated runs, whose invariants are checked
after every event, and single decisions.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core import dispatching, engines, watchdog
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.suspects import (
    MOST_EXCUSED,
    acquit,
    engine_for_suspect,
    excuses,
    may_isolate,
)
from rollweave.core.policy.routing import EngineLoad
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, OnEngine, Suspicion
from rollweave.record.journal import Replay, RunJournal
from rollweave.record.summary import summarize
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId, GroupId, TaskId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import BLAME_OF, TRAINABLE, Blame, StopReason, Task
from rollweave_sim.faults import NullObserver
from rollweave_sim.world import World
from tests.support.kinds import of
from tests.support.states import E0, E1, members, running


class HostileWorld(World):
    """A world in which some trajectories end every engine that runs one of their turns
    for `kill_s` seconds. `hostile` says which, by index of the task and member.
    """

    def __init__(self, config: RunConfig, hostile: Any, *, kill_s: float, journal: Any = None):
        super().__init__(config, observer=NullObserver(), journal=journal)
        self.hostile, self.kill_s = hostile, kill_s
        self.kills: Counter[str] = Counter()
        self.blamed: dict[str, bool] = {}
        self.removed: list[c.RemoveEngine] = []
        self.each_event = self.core.check
        execute = self.effects.execute

        def hooked(command: c.Command) -> None:
            execute(command)
            if isinstance(command, c.StartTurn) and self.is_hostile(command.trajectory_id):
                self.clock.after(self.kill_s, lambda: self._kill(command))
            if isinstance(command, c.CancelTrajectory) and command.error:
                name = command.trajectory_id
                self.blamed[name] = self.is_hostile(name)
            if isinstance(command, c.RemoveEngine):
                self.removed.append(command)

        self.effects.execute = hooked  # type: ignore[method-assign]

    def is_hostile(self, trajectory_id: str) -> bool:
        trajectory = self.core.state.trajectories.get(trajectory_id)  # type: ignore[call-overload]
        if trajectory is None:
            return False
        group = self.core.state.groups[trajectory.group_id]
        return bool(self.hostile(group.index, trajectory.member))

    def _kill(self, command: c.StartTurn) -> None:
        trajectory = self.core.state.trajectories.get(command.trajectory_id)
        turn = None if trajectory is None else trajectory.turn
        if (
            turn is not None
            and turn.dispatch == command.dispatch
            and isinstance(turn.place, OnEngine)
            and turn.place.engine == command.engine_id
        ):
            self.kills[command.trajectory_id] += 1
            self.fleet.lose(command.engine_id, "killed")


def config(**changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "run": {"name": "hostile", "steps": 3},
        "sim": {"model": "qwen3-8b", "gpu": "h800"},
        "trainer": {"ranks": 8},
        "tasks": [
            {"env": "frozenlake", "max_turns": 6, "max_tokens": 4096, "max_turn_tokens": 512}
        ],
        "rollout": {
            "mode": "sync",
            "groups_per_step": 3,
            "group_size": 4,
            "max_running": 32,
        },
        "engines": {"count": 3, "max_slots": 8, "kv_tokens": 65536},
        "watchdog": {"turn_s": 120.0, "train_s": 900.0, "restarts": 0},
        "eval": {"every": 0, "episodes": 1, "final_episodes": 0},
    }
    for name, value in changes.items():
        data[name] = data.get(name, {}) | value
    return RunConfig.model_validate(data)


def one(index: int, member: int) -> bool:
    return (index, member) == (1, 2)


def several(index: int, member: int) -> bool:
    return index % 3 == 1 and member < 2


SINGLE = {"engines": {"count": 1}}
RANKED = {"rollout": {"mode": "bounded", "scheduling": "trajectory"}}


@pytest.mark.parametrize(
    ("hostile", "changes", "kill_s"),
    [
        (one, {}, 0.05),
        (several, SINGLE, 0.0),
        (one, {"rollout": {"mode": "decoupled"}}, 0.05),
        pytest.param(one, SINGLE, 0.05, marks=pytest.mark.extended),
        pytest.param(several, {}, 0.0, marks=pytest.mark.extended),
        pytest.param(several, {}, 0.05, marks=pytest.mark.extended),
        pytest.param(several, RANKED, 0.05, marks=pytest.mark.extended),
    ],
)
def test_a_turn_that_ends_its_engines_ends_after_the_second(
    hostile: Any, changes: dict[str, Any], kill_s: float, tmp_path: Path
) -> None:
    """No engine is removed for it, though none may be restarted for its own failures;
    and no other turn is blamed.
    """
    settings = config(**changes)
    journal = RunJournal(tmp_path / "journal")
    world = HostileWorld(settings, hostile, kill_s=kill_s, journal=journal)
    world.run()
    journal.close()
    assert world.over == ""
    assert world.removed == []
    counters = world.core.state.counters
    assert world.kills, "a hostile trajectory ran"
    assert max(world.kills.values()) <= 2
    assert counters.stop_reasons[StopReason.ENGINES_LOST] == len(world.blamed)
    assert all(world.blamed.values()), "only hostile ones are blamed"
    assert all(name in world.blamed for name, count in world.kills.items() if count == 2)
    summarize(world.core, evaluation=None, wall_s=world.clock.now)  # raises if unbalanced
    replay = Replay(tmp_path / "journal", settings)
    assert replay.finish().snapshot() == world.core.snapshot()
    assert replay.differing == 0


def test_the_reason_blames_the_agent_and_is_never_trained_on() -> None:
    assert BLAME_OF[StopReason.ENGINES_LOST] is Blame.AGENT
    assert StopReason.ENGINES_LOST not in TRAINABLE


def two_turns(*, status: EngineStatus = EngineStatus.SERVING) -> Run:
    """A run in which engine 0 has the turns of two members; the second is the newer."""
    run = running(5, 5)
    for engine in run.state.engines.values():
        engine.status, engine.version, engine.publication_id = EngineStatus.SERVING, 3, 5
    run.fleet_changed()
    group = run.state.groups[GroupId("g9")]
    group.task = Task(id=TaskId("t"), env="a", seed=0)
    for number, trajectory in enumerate(members(run)):
        turn = trajectory.open_turn
        turn.place = OnEngine(engine=E0, given=number + 1)
        group.members.append(trajectory.id)
        run.state.pools.run[trajectory.id] = None
        run.fleet.occupy(run.state.engines[E0], trajectory.id, turn)
    run.state.engines[E0].status = status
    run.fleet_changed()
    run.out = []
    return run


def suspects_of(run: Run) -> list[str]:
    return [
        trajectory.id
        for trajectory in members(run)
        if trajectory.turn is not None and trajectory.turn.suspicion is not None
    ]


def test_the_newest_turn_runs_first_and_alone() -> None:
    run = two_turns()
    engines.restart(run, run.state.engines[E0], "lost: killed", lost=True)
    older, newer = members(run)
    assert list(run.state.turns.suspects) == [newer.id, older.id]
    assert run.state.engines[E0].failures.doubted == {0: 2}
    dispatching.dispatch(run)
    other = run.state.engines[E1]
    assert (list(other.active), other.failures.isolates) == ([newer.id], newer.id)
    assert not other.open
    assert list(run.state.turns.suspects) == [older.id]


def test_the_loss_counts_as_the_engine_s_own_once_all_have_an_answer() -> None:
    run = two_turns()
    engine = run.state.engines[E0]
    engines.restart(run, engine, "lost: killed", lost=True)
    for trajectory in reversed(members(run)):
        assert engine.failures.restarts == 0
        acquit(run, trajectory, trajectory.open_turn)
    assert (engine.failures.restarts, engine.failures.doubted) == (1, {})


@pytest.mark.parametrize("why", ["loading", "borrowed", "its host is gone"])
def test_turns_are_no_suspects_where_they_cannot_be_to_blame(why: str) -> None:
    run = two_turns(status=EngineStatus.LOADING if why == "loading" else EngineStatus.SERVING)
    engine = run.state.engines[E0]
    if why == "borrowed":
        engine.lender = "serving"
    if why == "its host is gone":
        membership.displace(run, engine, "the host is lost")
    else:
        engines.restart(run, engine, "lost: killed", lost=True)
    assert suspects_of(run) == []
    assert len(run.state.turns.queue) == 2


def test_a_turn_that_timed_out_before_its_engine_was_restarted_is_a_suspect() -> None:
    """The engine has answered nothing since: it may hang because of that turn."""
    run = two_turns()
    engine, (older, newer) = run.state.engines[E0], members(run)
    run.now = 1e6
    watchdog.check_deadlines(run)
    assert engine.epoch == 1, "two turns in a row have no answer"
    assert set(suspects_of(run)) == {older.id, newer.id}
    assert engine.failures.unanswered == {}


def test_a_suspect_that_timed_out_again_is_to_blame() -> None:
    run = two_turns()
    older, _ = members(run)
    older.open_turn.suspicion = Suspicion(engine=E1, epoch=3)
    run.now = 1e6
    watchdog.check_deadlines(run)
    assert older.turn is None
    (cancelled,) = of(run.out, c.CancelTrajectory)
    assert (cancelled.trajectory_id, cancelled.reason) == (older.id, StopReason.ENGINES_LOST)
    assert cancelled.error == (
        f"turn 0 of {older.id}/0, at task t of a, is given up: engines e1 and e0 were lost while "
        "they had it"
    )
    assert run.state.engines[E0].failures.excused == 1


def test_a_single_engine_that_never_finishes_a_turn_is_removed_in_the_end() -> None:
    run = two_turns()
    engine = run.state.engines[E0]
    engine.failures.excused, engine.failures.restarts = MOST_EXCUSED, run.config.watchdog.restarts
    members(run)[0].open_turn.suspicion = Suspicion(engine=E0, epoch=0)
    engines.restart(run, engine, "lost: killed", lost=True)
    engines.restart(run, engine, "lost: killed", lost=True)
    assert E0 not in run.state.engines


IDS = st.sets(st.sampled_from([EngineId(f"e{at}") for at in range(5)]))


@st.composite
def loads(draw: st.DrawFn) -> list[EngineLoad]:
    return [
        EngineLoad(
            id=name,
            active=draw(st.integers(0, 3)),
            slots=draw(st.integers(1, 3)),
            tokens=draw(st.integers(0, 3)),
            borrowed=draw(st.booleans()),
        )
        for name in sorted(draw(IDS))
    ]


@given(engines=loads(), avoid=IDS, isolating=IDS)
def test_a_suspect_goes_where_it_harms_least(
    engines: list[EngineLoad], avoid: set[EngineId], isolating: set[EngineId]
) -> None:
    """That is an engine that was not lost with it, if there is one, and one that serves
    no users, though others may have fewer turns.
    """
    chosen = engine_for_suspect(engines, avoid=avoid, isolating=isolating)
    kind = [one for one in engines if not one.borrowed] or engines
    kind = [one for one in kind if one.id not in avoid] or kind
    free = [one for one in kind if one.id not in isolating]
    assert (chosen is None) is not bool(free)
    if chosen is not None:
        (taken,) = [one for one in free if one.id == chosen]
        assert all((taken.active, taken.tokens) <= (one.active, one.tokens) for one in free)


def test_few_engines_run_suspects_and_one_always_may() -> None:
    most = {
        engines: max(
            count + 1 for count in range(9) if may_isolate(isolating=count, engines=engines)
        )
        for engines in (0, 1, 2, 4, 7, 8, 16)
    }
    assert most == {0: 1, 1: 1, 2: 1, 4: 1, 7: 1, 8: 2, 16: 4}


def test_an_engine_that_only_its_own_turns_blame_is_at_fault_in_the_end() -> None:
    assert excuses(elsewhere=True, excused=10**6)
    assert [excuses(elsewhere=False, excused=count) for count in (0, MOST_EXCUSED - 1)] == [
        True
    ] * 2
    assert not excuses(elsewhere=False, excused=MOST_EXCUSED)
