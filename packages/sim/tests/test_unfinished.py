"""Interrupted turns in the simulated world: resumption, losses with an engine, and
reports to the core.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId, TrajectoryId
from rollweave.schema.commands import Command
from rollweave.schema.config.engines import BLOCK_TOKENS, EngineConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import TURN_REPORT_INTERVAL_S, Event
from rollweave.schema.serving import PROGRESS_S
from rollweave.schema.work import Limits, Purpose, Task
from rollweave_sim.clock import Clock
from rollweave_sim.cost import TrainerCost
from rollweave_sim.engine import SimEngine
from rollweave_sim.faults import NullObserver
from rollweave_sim.fleet import SimFleet
from rollweave_sim.hardware import gpu, link, model
from rollweave_sim.kv import Request
from rollweave_sim.relays import SimRelays
from rollweave_sim.rollouts import Rollouts
from rollweave_sim.workload import Plan, TurnPlan
from rollweave_sim.world import World
from tests.support.referee import Referee
from tests.support.simulation import Linear, config

TURN, PROMPT = 1200, 40


class Movable(Linear):
    """The KV of a token takes a tenth of a millisecond to transfer."""

    def move_s(self, tokens: int) -> float:
        return 1e-4 * tokens


COST = Movable(kv_tokens=10_000)


class Long:
    """Attempts of one turn."""

    def __init__(self, tokens: int = TURN) -> None:
        self.tokens = tokens

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        turn = TurnPlan(output_tokens=self.tokens, observation_tokens=7, env_s=0.5)
        return Plan(
            prompt_tokens=PROMPT,
            init_s=0.1,
            turns=(turn,),
            reward_s=0.1,
            reward=1.0,
            success=bool(member % 2),
        )


class Stage:
    """One attempt before its first turn, and engines; a step takes tens of
    milliseconds.
    """

    def __init__(self, *, keep_partial_turns: bool = True, engines: int = 2) -> None:
        self.clock, self.events = Clock(), list[tuple[float, Event]]()
        settings = EngineConfig(max_slots=4)
        trainer = TrainerCost(gpu=gpu("h800"), model=model("qwen3-8b"), gpus=8, link=link("rdma"))
        self.fleet = SimFleet(
            clock=self.clock,
            post=self.post,
            costs={("", 1): COST},
            pool_of=lambda _: "",
            trainer=trainer,
            relays=SimRelays(clock=self.clock, post=self.post, cost=trainer, hosts=0, trace=None),
            settings=lambda _: settings,
            prefix_cache=True,
            trace=None,
        )
        self.rollouts = Rollouts(
            clock=self.clock,
            post=self.post,
            fleet=self.fleet,
            work={"long": Long()},
            seed=0,
            trace=None,
            keep_partial_turns=keep_partial_turns,
        )
        self.fleet.start([e.EngineSlot(id=EngineId(f"e{n}")) for n in range(engines)])
        limits = Limits(max_turns=4, max_tokens=8000, max_turn_tokens=TURN)
        task = Task(id=TaskId("t"), env="long", seed=0, tag="long", limits=limits)
        start: dict[str, Any] = {"trajectory_id": "g0.0", "attempt": 0, "group_id": "g0"}
        start |= {"member": 0, "task": task, "purpose": Purpose.TRAIN, "initiated_version": 0}
        self.rollouts.start_init(c.StartInit(**start))
        self.until(1.0)
        self.rollouts.start_run(c.StartRun(trajectory_id=TrajectoryId("g0.0"), attempt=0))

    def post(self, event: Event) -> None:
        self.events.append((self.clock.now, event))

    def until(self, when: float) -> None:
        """Run until that time."""
        self.clock.at(when, lambda: None)
        while self.clock.now < when:
            self.fleet.settle()
            assert self.clock.step()
        self.fleet.settle()

    def start(self, engine: str, dispatch: int, *, resume: bool = False) -> None:
        self.rollouts.start_turn(
            c.StartTurn(
                trajectory_id=TrajectoryId("g0.0"),
                attempt=0,
                turn=0,
                engine_id=EngineId(engine),
                rank=0.0,
                dispatch=dispatch,
                resume=resume,
            )
        )

    def abort(self, engine: str, dispatch: int) -> None:
        self.rollouts.abort_turn(
            c.AbortTurn(
                trajectory_id=TrajectoryId("g0.0"),
                attempt=0,
                turn=0,
                engine_id=EngineId(engine),
                dispatch=dispatch,
            )
        )

    def done(self) -> tuple[float, e.TurnDone]:
        """Return the end of the turn and its event."""
        while not (
            turns_done := [
                (at, event) for at, event in self.events if isinstance(event, e.TurnDone)
            ]
        ):
            self.fleet.settle()
            assert self.clock.step()
        return turns_done[0]

    def reports(self) -> list[tuple[float, int, int]]:
        """Return the progress that the core received: time, dispatch, tokens."""
        reported = [
            (at, event.turns) for at, event in self.events if isinstance(event, e.TurnsProgressed)
        ]
        assert all(len(turns) == 1 for _, turns in reported)
        return [(at, turns[0].dispatch, turns[0].output_tokens) for at, turns in reported]


def undisturbed_s() -> float:
    """Return the seconds of the uninterrupted turn."""
    stage = Stage()
    stage.start("e0", 0)
    return stage.done()[0] - 1.0


def sampled_by(seconds: float) -> int:
    """Return the tokens of it sampled after that time."""
    engine = SimEngine(
        cost=COST, slots=4, chunk_tokens=512, block_tokens=BLOCK_TOKENS, prefix_cache=True
    )
    engine.add(0.0, Request(key="a", context_tokens=PROMPT, output_tokens=TURN))
    aborted = engine.abort(seconds, "a")
    assert aborted is not None
    return aborted


def test_a_moved_turn_resumes_and_recomputes_its_prompt() -> None:
    stage, full_s = Stage(), undisturbed_s()
    stage.start("e0", 0)
    stage.until(1.0 + full_s / 2)
    stage.abort("e0", 0)
    stage.start("e1", 1, resume=True)
    at, done = stage.done()
    assert (done.output_tokens, done.dispatch, done.cached_tokens) == (TURN, 1, 0)
    engine = stage.fleet.nodes[EngineId("e1")].engine
    assert engine is not None
    again = engine.prefill_tokens
    assert PROMPT + TURN * 0.4 < again < PROMPT + TURN * 0.6  # half of the turn was sampled
    assert engine.tokens == TURN - (again - PROMPT)
    prefill_s = at - 1.0 - full_s
    assert 0 < prefill_s < 0.1 * full_s


def test_a_turn_moved_with_its_kv_recomputes_nothing() -> None:
    stage, full_s = Stage(), undisturbed_s()
    stage.start("e0", 0)
    stage.until(1.0 + full_s / 2)
    stage.abort("e0", 0)
    attempt = {"trajectory_id": TrajectoryId("g0.0"), "attempt": 0}
    stage.rollouts.migrate(
        c.Migrate(number=0, source=EngineId("e0"), target=EngineId("e1"), **attempt)
    )
    stage.until(stage.clock.now + 1.0)
    (moved,) = [event for _, event in stage.events if isinstance(event, e.MigrationDone)]
    with_kv = PROMPT + sampled_by(full_s / 2) - 1  # the last token has none
    assert moved.moved_tokens == with_kv - with_kv % BLOCK_TOKENS
    stage.start("e1", 1, resume=True)
    at, done = stage.done()
    assert at - 1.0 - full_s < 1.0 + 0.1
    assert (done.output_tokens, done.cached_tokens) == (TURN, PROMPT)


def test_a_turn_resumed_on_the_same_engine_hits_its_kv() -> None:
    stage, full_s = Stage(), undisturbed_s()
    stage.start("e0", 0)
    stage.until(1.0 + full_s / 2)
    stage.abort("e0", 0)
    stage.start("e0", 1, resume=True)
    at, done = stage.done()
    assert at - 1.0 - full_s < 0.1  # the last block, and the step that it was stopped in
    assert done.cached_tokens == PROMPT  # of the prompt; sampled tokens are not in it


@pytest.mark.parametrize(("keep_partial_turns", "resume"), [(True, False), (False, True)])
def test_a_restarted_turn_takes_its_full_time(keep_partial_turns: bool, resume: bool) -> None:
    stage, full_s = Stage(keep_partial_turns=keep_partial_turns), undisturbed_s()
    stage.start("e0", 0)
    stage.until(1.0 + full_s / 2)
    stage.abort("e0", 0)
    stage.start("e1", 1, resume=resume)
    assert stage.done()[0] == pytest.approx(1.0 + 1.5 * full_s)
    assert stage.done()[1].output_tokens == TURN


@pytest.mark.parametrize("unreported_s", [0.01, 0.25, 0.49])
def test_a_lost_engine_loses_the_tokens_since_its_last_report(unreported_s: float) -> None:
    stage, full_s = Stage(), undisturbed_s()
    lost_at = 5.0 + unreported_s
    stage.start("e0", 0)
    stage.until(lost_at)
    stage.fleet.lose(EngineId("e0"), "killed")
    stage.start("e1", 1, resume=True)
    at, done = stage.done()
    assert done.output_tokens == TURN
    again_s = at - 1.0 - full_s  # tokens sampled twice, and the prompt
    assert unreported_s - 0.02 < again_s < unreported_s + 0.1 * full_s


def test_a_repeatedly_lost_turn_loses_one_report_interval_each_time() -> None:
    stage, full_s = Stage(engines=100), undisturbed_s()
    losses = 0
    while True:
        stage.start(f"e{losses}", losses, resume=True)
        stage.until(stage.clock.now + 3.3)
        if any(isinstance(event, e.TurnDone) for _, event in stage.events):
            break
        stage.fleet.lose(EngineId(f"e{losses}"), "killed")
        losses += 1
    at, done = stage.done()
    assert (done.output_tokens, done.dispatch) == (TURN, losses)
    assert 5 < losses < (at - 1.0) / 3.3
    length = PROMPT + TURN
    prefill_s = COST.step_s(
        prefill_tokens=length, prefill_context=length**2 // 2, decode=0, decode_context=0
    )
    assert at - 1.0 - full_s < losses * (PROGRESS_S + prefill_s)


def test_the_core_receives_progress_while_an_engine_generates() -> None:
    stage, full_s = Stage(), undisturbed_s()
    assert full_s > 5 * TURN_REPORT_INTERVAL_S
    stage.start("e0", 0)
    half = 1.0 + full_s / 2
    stage.until(half)
    stage.abort("e0", 0)
    first = stage.reports()
    stage.start("e1", 1, resume=True)
    end, _ = stage.done()
    reports = stage.reports()
    assert [at for at, _, _ in reports if at <= half] == pytest.approx(
        [1.0 + TURN_REPORT_INTERVAL_S * n for n in range(2, len(first) + 2)]
    )
    assert {number for _, number, _ in reports} == {0, 1}
    tokens = [count for _, _, count in reports]
    assert tokens == sorted(tokens)
    assert max(tokens) < TURN
    for at, number, count in first:
        assert number == 0
        assert sampled_by(at - 1.0 - PROGRESS_S) - 3 <= count <= sampled_by(at - 1.0)
    stage.until(end + 3 * TURN_REPORT_INTERVAL_S)
    assert stage.reports() == reports


def test_progress_is_reported_only_of_kept_turns_on_an_engine() -> None:
    stage = Stage(keep_partial_turns=False)
    stage.start("e0", 0)
    stage.done()
    assert stage.reports() == []
    stage = Stage()
    stage.start("e0", 0)
    stage.until(4.0)
    stage.fleet.silence(EngineId("e0"))
    before = len(stage.reports())
    stage.until(20.0)
    assert len(stage.reports()) == before


# Entire runs.

RUN_TURN = 4000
"""Tokens of a turn: enough that many engines are killed in the middle of one."""


class Resuming(World):
    """A run in which every repeated turn is resumed, as if all engines had the same
    weights; in `sync` they have.
    """

    def __init__(self, run_config: RunConfig, *, resume: bool, kill_s: float) -> None:
        super().__init__(
            run_config,
            observer=NullObserver(),
            work={"webshop": Long(RUN_TURN)},
            keep_partial_turns=True,
        )
        execute, self.referee = self.effects.execute, Referee()
        self.turns = self.lost = self.resumed = 0

        def resuming(command: Command) -> None:
            if isinstance(command, c.StartTurn) and resume and command.dispatch:
                command = msgspec.structs.replace(command, resume=True)
                self.resumed += 1
            execute(command)

        self.effects.execute = resuming  # type: ignore[method-assign]
        self._journal = self  # checks its events
        self.kill_s = kill_s
        self.clock.after(kill_s, self.kill)

    def append(self, now: float, event: Event, commands: Any) -> None:
        """Record an event as a journal."""
        self.referee.watch([(now, event, list(commands))])
        if isinstance(event, e.TurnDone):
            assert event.output_tokens == RUN_TURN
            self.turns += 1

    def kill(self) -> None:
        """Kill the next running engine."""
        if self.over is not None:
            return
        up = sorted(node.id for node in self.fleet.nodes.values() if node.engine is not None)
        if len(up) > 1:
            self.fleet.lose(up[self.lost % len(up)], "killed")
            self.lost += 1
        self.clock.after(self.kill_s, self.kill)


def test_a_run_with_dying_engines_keeps_the_contract_and_loses_less_time() -> None:
    run_config = config(Path("unused"), mode="sync", retries=1000)
    data = run_config.model_dump() | {"engines": [{"count": 8, "max_slots": 16}]}
    data["watchdog"] = {**data["watchdog"], "restarts": 1000}
    ends = {}
    for resume in (False, True):
        world = Resuming(RunConfig.model_validate(data), resume=resume, kill_s=14.0)
        core = world.run()
        assert core.state.error == ""
        assert core.state.trainer.step == 4
        # resumed tokens are counted once
        assert core.state.counters.output_tokens == world.turns * RUN_TURN
        assert "TurnsProgressed" in world.referee.seen
        assert world.lost > 10
        assert (world.resumed > 20) is resume
        ends[resume] = world.clock.now
    assert ends[True] < 0.7 * ends[False]
