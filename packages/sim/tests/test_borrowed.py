"""Runs that borrow serving engines in a simulation: what they gain, what users see, and
when an engine is given back.
"""

from pathlib import Path
from typing import Any

import pytest

from rollweave.core.core import Core
from rollweave.core.state import Engine
from rollweave.record.journal import RunJournal
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim import command_simulate, serving
from rollweave_sim.faults import NullObserver
from rollweave_sim.lender import ACTIVATION_S
from rollweave_sim.run import Outcome, simulate
from rollweave_sim.serving import ServingCluster
from rollweave_sim.world import World

from .borrowing import Watch, config, lenders


def run(config: RunConfig, **serving: Any) -> Outcome:
    outcome = simulate(config, serving=lenders(**serving))
    assert not outcome.summary.error
    return outcome


def test_borrowed_engines_make_rollouts_faster_within_the_limits_of_users() -> None:
    alone, lent = run(config(most=0)), run(config())
    assert lent.steps[0]["at"] < 0.8 * alone.steps[0]["at"]
    assert lent.serving is not None
    assert lent.serving.late_first == lent.serving.late_tokens == 0.0
    assert lent.serving.lent_share > 0.05


def test_users_are_spread_over_engines_that_are_equally_idle() -> None:
    world = World(config(most=0), observer=NullObserver(), serving=lenders(rate=1.0))
    world.run()
    assert isinstance(world.lending, ServingCluster)
    engines = world.lending.lenders.values()
    busy = [one.serving_s for one in engines if one.phase == "decode"]
    assert len(busy) == 3
    assert max(busy) < 1.5 * min(busy)


def test_a_way_of_sharing_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SHARING", dict.fromkeys(serving.OWN, ServingCluster))
    monkeypatch.setattr(serving, "entry_points", lambda group: ())
    file = lenders(sharing="spot", model=None, prefill=0, rate=None)
    with pytest.raises(ConfigError, match="needs the package rollweave-papers"):
        World(config(), observer=NullObserver(), serving=file)


def test_a_recalled_engine_is_given_back_at_once_and_its_turns_continue() -> None:
    watch = Watch()
    world = World(config(), observer=NullObserver(), journal=watch, serving=lenders())
    world.each_event = world.core.check
    world.start()
    serving = world.lending
    assert serving is not None
    while True:
        world.step()
        state = world.core.state
        busy = [one for one in state.engines.values() if one.lender and one.active]
        if len(busy) >= 2:
            break
    held = busy[0]
    turns = {
        (name, state.trajectories[name].attempt, state.trajectories[name].open_turn.number)
        for name in held.active
    }
    serving.recalled.add(held.lender)
    serving.report()
    world.step()
    assert held.id not in world.core.state.engines
    while world.over is None:
        world.step()
    assert world.over == ""
    done = {
        (event.trajectory_id, event.attempt, event.turn)
        for _, event, _ in watch.log
        if isinstance(event, e.TurnDone)
    }
    assert turns <= done, "the same attempts continue elsewhere"
    again = [
        one
        for one in watch.commands(c.StartTurn)
        if (one.trajectory_id, one.attempt, one.turn) in turns and one.dispatch
    ]
    assert again
    assert all(one.resume for one in again), "with the tokens that they have"
    later = watch.commands(c.StartEngine)
    assert all(one.lender != held.lender for one in later if one.engine_id > held.id)


@pytest.mark.parametrize("policies", [(), ("earliest",)])
def test_a_run_goes_on_while_borrowed_engines_are_its_only_ones(policies: tuple[str, ...]) -> None:
    """Its own engine is lost, and then those that stood in for it are recalled."""
    world = World(config(changes=policies), observer=NullObserver(), serving=lenders())
    world.each_event = world.core.check
    world.start()
    serving, state = world.lending, world.core.state
    assert serving is not None

    def borrowed() -> list[Engine]:
        return [one for one in state.engines.values() if one.lender and one.active]

    while state.publication.version < 1:
        world.step()
    own = next(one for one in state.engines.values() if not one.lender)
    world.fleet.lose(own.id, "killed")
    while not borrowed():
        assert world.over is None
        world.step()
    assert own.version < 0, "the next step begins before it is back"
    for one in state.engines.values():
        if one.lender:
            serving.recalled.add(one.lender)
    serving.report()
    while world.over is None:
        assert world.clock.now < 3600.0, "the run hangs"
        world.step()
    assert world.over == ""


def test_a_restarted_controller_borrows_again_at_once(tmp_path: Path) -> None:
    run_config = config()
    with RunJournal(tmp_path / "journal.bin") as journal:
        world = World(run_config, observer=NullObserver(), journal=journal, serving=lenders())
        world.start()

        def lent() -> int:
            engines = world.core.state.engines.values()
            return sum(bool(one.lender) and one.abilities.max_slots > 0 for one in engines)

        def until_lent() -> float:
            since = world.clock.now
            while lent() < 4:
                assert world.clock.now < 60.0
                world.step()
            return world.clock.now - since

        until_lent()
        world.revive(Core.restore(world.core.snapshot(), run_config), journal)
        world.step()
        assert not lent(), "they are lost with the controller"
        assert until_lent() == pytest.approx(ACTIVATION_S)


def test_an_engine_whose_lender_is_silent_is_given_back() -> None:
    world = World(config(), observer=NullObserver(), serving=lenders())
    world.start()
    assert world.lending is not None
    while not any(engine.lender for engine in world.core.state.engines.values()):
        world.step()
    world.lending.silent = True
    since = world.clock.now
    while world.over is None and any(one.lender for one in world.core.state.engines.values()):
        world.step()
    assert world.over is None
    assert 30.0 < world.clock.now - since < 60.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-9"}, "the serving engines' model must be one of"),
        (
            {"model": "qwen2.5-72b"},
            "the serving engines' model must leave memory for one trajectory",
        ),
    ],
)
def test_bad_serving_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as raised:
        simulate(config(), serving=lenders(**change))
    assert message in str(raised.value)


SHOWN = """
steps 2 in 1 min 27 s of simulated time, 1,013 events
step time 14.6 s (median)
tokens 314 sampled/s, 3,698 trained/s
engines (1 GPUs) working 26.5%, no work: enough rollouts are under way 46.6%, waiting for stragglers 17.9%, starting 5.3%, waiting for environments 2.0%, loading new weights 1.6%
trainer working 2.2%, waiting for a batch 43.8%, evaluation and end 33.0%, saving a checkpoint 20.9%, publishing weights 0.2%
KV cache 9 tokens
KV in use 0.0% by running turns at the start of a step
staleness 0: 100.0%
weights 10 updates of engines, which stopped for 4.10 s; 4.10 s of transfer into engines
serving 47 requests: P99 493 ms to the first token, 122.9 ms for each further one; late 0.00% and 0.00%
serving engines served 20.7% of the time, computed rollouts 19.5%; 0 turns given back, 0 cuts of memory, 0 stalls
trajectories 32 started = 32 trained + 0 dropped + 0 buffered + 0 cancelled
cost 0.2 GPU-hours on 9 GPUs
"""


def test_a_seed_always_gives_the_same_users_and_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """If a change is meant, take the figures that the failure prints."""
    found = run(config())
    assert found.serving is not None
    assert (found.events, found.summary.tokens, found.serving.requests) == (1013, 27287, 47)
    waits = (*found.serving.ttft_s, *found.serving.tpot_s)
    assert waits == pytest.approx(
        (0.0260768, 0.487895, 0.492776, 0.0072997, 0.0411583, 0.1229224), 1e-5
    )
    shares = (found.serving.serving_share, found.serving.lent_share, found.summary.wall_s)
    assert shares == pytest.approx((0.2067803, 0.1951411, 86.904), 1e-5)
    _, memory = serving._engine(config(), lenders())
    assert (memory.total, memory.kv) == (85899345920.0, 43697990656.0)
    command_simulate.show(found, kv="9 tokens")
    assert capsys.readouterr().out.split() == SHOWN.split()
    figures = command_simulate.figures(found)
    assert [*figures["step_s"], figures["gpu_hours"]] == pytest.approx([14.608, 0.21726])
    assert (figures["staleness"], figures["gpus"], figures["steps"]) == ({0: 32}, 9, 2)
