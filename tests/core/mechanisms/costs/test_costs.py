"""Costs follow what the engines measured, and nothing where degrees cannot be
compared.
"""

import itertools
from typing import Any

import msgspec
import pytest

from rollweave.core.core import Core
from rollweave.core.mechanisms.costs import rates as costs
from rollweave.core.mechanisms.costs.rates import Use, costs_of, turn_costs_of
from rollweave.core.mechanisms.lengths.work import rate
from rollweave.core.mechanisms.placement import assignment
from rollweave.core.mechanisms.placement.assignment import Partition
from rollweave.core.policy.turn_times import FIRST_TURNS, TurnTime, TurnTimes
from rollweave.core.run import Run
from rollweave.core.state import OnEngine, Trajectory, Turn
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.events import StepTime
from tests.support.core import config, restart_controller
from tests.support.random_world import World
from tests.support.states import E0, E1, TAIL, fleet, members, profile, running
from tests.support.variants import mostly_extended

WORKS = [(40, 400), (20, 100), (10, 50)]
KINDS = {1: ("", 1), 2: ("", 2)}


def test_groups_cost_what_their_degrees_measured() -> None:
    run = fleet(1, lengths=TAIL)
    groups = costs.groups_of(run, WORKS, KINDS)
    for degree in (1, 2):
        measured = rate(profile(degree, gain=1.9), slots=16, kv_tokens=10**6)
        assert groups.seconds(degree, 0, 3) == measured.seconds(longest=40, tokens=70, occupied=550)


def test_degrees_cost_the_same_if_one_is_unmeasured() -> None:
    run = fleet(1, lengths=TAIL)
    del run.state.mechanisms["costs"].measured[""][2]
    groups = costs.groups_of(run, WORKS, KINDS)
    same = rate(costs.UNMEASURED, slots=16, kv_tokens=550)
    for degree in (1, 2):
        assert groups.seconds(degree, 0, 3) == same.seconds(longest=40, tokens=70, occupied=550)


def test_an_engine_without_a_profile_has_a_rate_and_no_measurement() -> None:
    run = fleet(1, lengths=TAIL)
    engine = next(iter(run.state.engines.values()))
    engine.abilities.max_slots, engine.abilities.kv_tokens = 0, 0
    before = dict(run.state.mechanisms["costs"].measured[""])
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == rate(profile(1, gain=1.9), slots=1, kv_tokens=1)
    assert run.state.mechanisms["costs"].measured[""] == before
    run.state.mechanisms["costs"].measured = {}
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == rate(costs.UNMEASURED, slots=1, kv_tokens=1)
    costs.joined(run, engine, (StepTime(batch=1, seconds=3.0),))
    known = costs.rate_of(run, engine)
    engine.seat.degree = 2
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == known, "no engine of degree 2 is measured"
    assert run.state.mechanisms["costs"].measured[""][1].rate == costs.rate_of(run, engine)
    assert run.state.mechanisms["costs"].measured[""][1].slots == 1


def test_engines_of_different_hardware_are_measured_apart() -> None:
    """Both have degree 1. The one of the faster pool gets the longest trajectory and
    more of the others, whichever joined last.
    """
    for last in (E0, E1):
        run = running(40, 30, 20, 10, 10, 10, 10)
        engines = run.state.engines
        engines[E0].seat.pool, engines[E1].seat.pool = "compute", "bandwidth"
        for engine_id in sorted((E0, E1), key=lambda one: one == last):
            engine = engines[engine_id]
            engine.abilities.max_slots, engine.abilities.kv_tokens = 16, 10**6
            costs.joined(run, engine, profile(1 if engine_id == E0 else 4, gain=2))
        assert run.state.mechanisms["costs"].measured["bandwidth"][1].rate == costs.rate_of(
            run, engines[E1]
        )
        assert run.state.mechanisms["costs"].measured["compute"][1].rate == costs.rate_of(
            run, engines[E0]
        )
        places = [assignment.engine_of_rank(run, one) for one in members(run)]
        assert places[0] == E1
        assert places.count(E1) > places.count(E0) > 0
        assert costs.numbers_of(run, engines.values()) == {("bandwidth", 1): 2, ("compute", 1): 1}


def test_hosts_without_a_pool_of_the_engine_tell_hardware_apart_by_their_pools() -> None:
    run = running(1)
    host = run.state.hosts.up[0]
    run.state.hosts.up[0] = msgspec.structs.replace(host, pools=("H20", "all"))
    engine = run.state.engines[E0]
    assert costs.kind_of(run, engine) == ("H20+all", 1)
    engine.seat.pool = "H20"
    assert costs.kind_of(run, engine) == ("H20", 1)


def test_another_rate_changes_the_seconds_of_the_same_work() -> None:
    run = running(50, engine=E0)
    engine = run.state.engines[E0]
    before = assignment.work_s(run, engine)
    costs.joined(run, engine, (StepTime(batch=1, seconds=100.0),))
    assert assignment.work_s(run, engine) > 10 * before


def test_recent_lengths_are_of_all_domains() -> None:
    run = fleet(1, lengths=[3, 5])
    run.state.mechanisms["lengths"].domains["b"] = type(
        run.state.mechanisms["lengths"].domains["a"]
    )(lengths=[7])
    assert costs.recent_lengths(run) == [3, 5, 7]


def test_only_the_shortest_context_prices_a_table() -> None:
    points = [StepTime(batch=b, context=c, seconds=1.0) for b, c in [(1, 64), (4, 64), (1, 4096)]]
    assert costs._shortest(points) == points[:2]
    with pytest.raises(ValueError, match="min"):
        costs._shortest([])


UNMEASURED_SEEDS = (0, 5, 10)
"""Seeds of worlds whose engines measure nothing."""


class Recorder(World):
    """A world that remembers the contexts of the turns on each engine, and computes
    from them alone what each finished turn teaches.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.at = 0.0
        self.past: list[tuple[float, float, dict[str, list[int]]]] = []
        self.computed: list[tuple[float, str, int]] = []  # time, engine, tokens of the prompt
        self.expected: list[TurnTime] = []

    def feed(self, event: e.Event) -> None:
        state = self.core.state
        on_engines = {
            str(engine.id): [
                state.trajectories[name].open_turn.context_tokens for name in engine.active
            ]
            for engine in state.engines.values()
        }
        self.past.append((self.at, self.now, on_engines))
        self.at = self.now
        if isinstance(event, e.TurnDone):
            self.note(event)
        super().feed(event)

    def note(self, event: e.TurnDone) -> None:
        state = self.core.state
        trajectory = state.trajectories.get(event.trajectory_id)
        if trajectory is None or trajectory.attempt != event.attempt or trajectory.turn is None:
            return
        turn = trajectory.turn
        if not isinstance(turn.place, OnEngine):
            return
        if (turn.number, turn.dispatch) != (event.turn, event.dispatch):
            return
        engine = state.engines[turn.place.engine]
        self.computed.append((self.now, engine.id, turn.context_tokens))
        if turn.dispatch or turn.since < engine.since:
            return
        elapsed, turn_s, context_s = self.now - turn.since, 0.0, 0.0
        for start, end, on_engines in self.past:
            seconds = max(0.0, end - max(start, turn.since))
            turn_s += seconds * len(on_engines.get(engine.id, ()))
            context_s += seconds * sum(on_engines.get(engine.id, ()))
        prompts = [
            tokens for at, name, tokens in self.computed if name == engine.id and at > turn.since
        ]
        self.expected.append(
            TurnTime(
                seconds=elapsed,
                output_tokens=event.output_tokens,
                prompt_tokens=sum(prompts),
                batch=min(turn_s / elapsed, engine.abilities.max_slots),
                context=context_s / turn_s + event.output_tokens / 2,
            )
        )


@pytest.mark.parametrize("seed", mostly_extended(UNMEASURED_SEEDS, {0}))
@pytest.mark.parametrize("mode", ["bounded", "decoupled"])
def test_every_turn_teaches_what_happened_during_it(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, add = list[TurnTime](), TurnTimes.add

    def added(times: TurnTimes, turn: TurnTime, **options: Any) -> bool:
        learned.append(turn)
        return add(times, turn, **options)

    monkeypatch.setattr(TurnTimes, "add", added)
    world = Recorder(
        config(mode, rollout={"scheduling": "trajectory"}), seed=seed, failure=0.03, restless=0.02
    )
    world.run()
    assert len(learned) > 2 * FIRST_TURNS
    for prices, wanted in zip(learned, world.expected, strict=True):
        for name in TurnTime.__struct_fields__:
            assert getattr(prices, name) == pytest.approx(getattr(wanted, name)), name


def test_what_was_learned_is_a_function_of_the_events() -> None:
    """It is also one in a run whose controller was lost, and from a snapshot in its
    middle.
    """
    run_config = config(rollout={"scheduling": "trajectory"})
    world = World(run_config, seed=UNMEASURED_SEEDS[1], failure=0.03)
    world.start()
    while world.core.state.trainer.step < 1:
        world.step()
    restart_controller(world)
    world.run_on()
    replayed = Core(run_config)
    for place, (now, event) in enumerate(world.journal):
        if place == len(world.journal) // 2:
            replayed = Core.restore(replayed.snapshot(), run_config)
        replayed.handle(now, event)
    state = replayed.state
    assert state.mechanisms["costs"].measured[""][1].prompt_s is not None
    assert state.mechanisms["costs"].turn_times == world.core.state.mechanisms["costs"].turn_times
    assert state.mechanisms["costs"].measured == world.core.state.mechanisms["costs"].measured
    assert replayed.snapshot() == world.core.snapshot()


def test_engines_that_measure_themselves_learn_nothing() -> None:
    world = World(config(rollout={"scheduling": "trajectory"}), seed=1)
    world.run()
    assert not world.core.state.mechanisms["costs"].turn_times
    assert world.core.state.mechanisms["costs"].measured[""][1].prompt_s is None


def test_nothing_is_learned_where_no_policy_compares_engines() -> None:
    world = World(config(), seed=UNMEASURED_SEEDS[1])
    world.run()
    assert "costs" not in world.core.state.mechanisms


def test_the_first_estimate_reprices_the_kind_and_clears_the_partition() -> None:
    run = running(40, engine=E0)
    engines = run.state.engines
    unknown = costs.rate_of(run, engines[E0])
    assert unknown == rate(costs.UNMEASURED, slots=4, kv_tokens=100)
    run.state.mechanisms["placement"].partitions = {"": Partition()}
    for number in range(FIRST_TURNS):
        assert costs.rate_of(run, engines[E1]) == unknown
        done(run, E0, number)
    assert not run.state.mechanisms["placement"].partitions
    measured = run.state.mechanisms["costs"].measured[""][1]
    assert costs.rate_of(run, engines[E0]) == costs.rate_of(run, engines[E1]) == measured.rate
    # ten tokens in 20 s, one sequence at a time
    assert measured.rate.fixed_s + measured.rate.sequence_s == pytest.approx(2.0, rel=0.1)
    run.state.mechanisms["placement"].partitions = {"": Partition()}
    for number in range(FIRST_TURNS):
        done(run, E0, FIRST_TURNS + number)
    assert run.state.mechanisms["placement"].partitions, "the estimate is the same"


def done(run: Run, engine_id: EngineId, number: int, *, seconds: float = 20.0) -> None:
    """Let an engine sample ten tokens alone."""
    engine = run.state.engines[engine_id]
    since = 100.0 * (number + 1)
    turn = Turn(number=number, context_tokens=0, since=since)
    trajectory = Trajectory(id=TrajectoryId("g9.0"), group_id=GroupId("g9"), member=0)
    costs.begin_attempt(run, trajectory)
    before = costs_of(run, engine).use
    turn_costs_of(run, trajectory).use_before = before
    costs_of(run, engine).use = Use(
        at=since + seconds,
        turn_s=before.turn_s + seconds,
        context_s=before.context_s,
        prompt_tokens=before.prompt_tokens,
    )
    run.now = since + seconds
    event = e.TurnDone(
        trajectory_id=TrajectoryId("g9.0"),
        attempt=0,
        turn=number,
        dispatch=0,
        output_tokens=10,
        cached_tokens=0,
        version=0,
    )
    costs.learn_turn(run, trajectory, turn, engine, event)


def test_until_then_an_engine_is_assumed_to_cost_what_others_do() -> None:
    """Else its work would be counted in other units than theirs."""
    run = running(40, 30, 20, 10)
    engines = run.state.engines
    engines[E0].seat.pool, engines[E1].seat.pool = "own", "server"
    costs.joined(run, engines[E0], profile(1, gain=2))
    assert costs.rate_of(run, engines[E1]) == costs.rate_of(run, engines[E0])
    assert costs.measured_of(run, engines[E1]) is None
    for number in range(FIRST_TURNS):
        done(run, E1, number, seconds=200.0)
    assert costs.rate_of(run, engines[E1]).fixed_s > 5 * costs.rate_of(run, engines[E0]).fixed_s
    one = next(iter(run.state.trajectories.values()))
    assert assignment.engine_of_rank(run, one) == E0, "the longest is with the faster one"


def test_servers_are_a_class_of_their_own() -> None:
    """Embedded engines beside them, on the same hardware, have other costs."""
    run = running(40)
    (group,) = run.config.engines
    server = group.model_copy(update={"kind": "vllm", "python": "/opt/vllm/bin/python"})
    run.config = run.config.model_copy(update={"engines": (group, server)})
    engines = run.state.engines
    engines[E1].seat.group = 1
    assert costs.kind_of(run, engines[E0]) == ("", 1)
    assert costs.kind_of(run, engines[E1]) == ("/vllm", 1)


def test_a_registered_engine_is_a_kind_by_itself_until_it_leaves() -> None:
    core = Core(config(rollout={"scheduling": "trajectory"}))
    core.handle(0.0, e.RunStarted(engines=(), serving=True))
    run = core._run
    names = [EngineId("x0"), EngineId("x1")]
    for name in names:
        core.handle(0.0, e.EngineRegistered(engine=e.EngineSlot(id=name)))
        joined = e.EngineJoined(
            engine_id=name, epoch=0, max_slots=4, kv_total_tokens=100, version=0, preempts=False
        )
        core.handle(0.0, joined)
    for number, (name, seconds) in enumerate(itertools.product(names, [20.0] * FIRST_TURNS)):
        done(run, name, number, seconds=seconds * (1 + 4 * (name == names[1])))
    slow, fast = (costs.rate_of(run, core.state.engines[name]) for name in reversed(names))
    assert slow.fixed_s == pytest.approx(5 * fast.fixed_s, rel=0.1)
    core.handle(9e9, e.EngineWithdrawn(engine_id=names[0], drain=True))
    assert (
        list(core.state.mechanisms["costs"].measured)
        == list(core.state.mechanisms["costs"].turn_times)
        == [names[1]]
    )


def test_prices_that_differ_at_one_batch_size_clear_the_partition() -> None:
    former = (e.StepTime(batch=1, seconds=1.0), e.StepTime(batch=4, seconds=2.0))
    other = (e.StepTime(batch=1, seconds=1.0), e.StepTime(batch=4, seconds=4.0))
    assert costs._differ(former, other)
    assert costs._differ(former, former[:1])
    assert not costs._differ(former, former)
