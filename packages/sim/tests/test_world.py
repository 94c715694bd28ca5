"""The simulated world is deterministic per seed; modes keep their bounds; accounts
balance.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.core import Core
from rollweave.record.journal import Replay, RunJournal
from rollweave.record.report.page import write_report
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.cost import EngineCosts
from rollweave_sim.faults import NullObserver
from rollweave_sim.fleet import kv_room
from rollweave_sim.run import Outcome, directory_of, simulate
from rollweave_sim.world import World, costs_of, workloads_of
from tests.support.properties import checked_every
from tests.support.simulation import config
from tests.support.variants import mostly_extended, mostly_slow

MODES = ("sync", "one_step", "stream", "partial", "bounded")


def test_the_same_seed_gives_the_same_journal_to_the_byte(tmp_path: Path) -> None:
    journals = []
    for index, seed in enumerate((1, 1, 2)):
        run_config = config(tmp_path / str(index), seed=seed)
        with directory_of(run_config) as run:
            simulate(run_config, run=run)
        journals.append(run.journal.read_bytes())
        assert json.loads(run.identity.read_text())["kind"] == "simulation"
    assert journals[0] == journals[1] != journals[2]


def test_engines_take_the_slots_of_their_own_profile(tmp_path: Path) -> None:
    """As few sequences as decode nearly as fast as more would (ROSE App. A)."""
    values = config(tmp_path).model_dump()
    groups = [
        {"max_slots": slots, "count": 1, "degree": degree}
        for slots, degree in (("profiled", 1), ("profiled", 2), (7, 1))
    ]
    run_config = RunConfig.model_validate({**values, "engines": groups})
    world = World(run_config, observer=NullObserver())
    world.run()
    engines = world.core.state.engines.values()
    costs, _ = costs_of(run_config)
    expected = []
    for group in run_config.engines[:2]:
        cost = costs["", group.degree]

        def rate(count: int, cost: EngineCosts = cost) -> float:
            context = count * 8192  # half of tasks.max_tokens
            return count / cost.decode_s(decode=count, decode_context=context, steps=1)

        most = min(256, kv_room(cost, group) // 8192)
        best = max(rate(count) for count in range(1, most + 1))
        expected.append(next(count for count in range(1, most + 1) if rate(count) >= 0.95 * best))
    assert [engine.abilities.max_slots for engine in engines] == [*expected, 7]
    assert expected[0] < expected[1], "more memory holds more sequences"


@pytest.mark.variants
@pytest.mark.parametrize("mode", mostly_extended(MODES, {"sync", "partial", "bounded"}))
def test_modes_keep_their_bounds(mode: str, tmp_path: Path) -> None:
    outcome = simulate(config(tmp_path, mode=mode))
    assert outcome.summary.error == ""
    ended = (outcome.events, round(outcome.summary.wall_s, 3))
    assert mode != "sync" or ended == (5452, 395.565)
    assert outcome.summary.steps == 4
    assert outcome.summary.staleness_max == {"sync": 0}.get(mode, 1)
    assert (outcome.summary.account.balanced, outcome.summary.account.in_flight) == (True, 0)
    assert outcome.summary.eval_episodes == {"webshop": 8}
    assert sum(outcome.idle("engines").values()) == pytest.approx(1.0)
    assert sum(outcome.idle("trainer").values()) == pytest.approx(1.0)
    assert len(outcome.step_s) == 3


@pytest.mark.variants
@pytest.mark.parametrize("mode", ["bounded", "decoupled"])
def test_groups_are_compared_in_no_time(mode: str, tmp_path: Path) -> None:
    judge = {"model": "m", "rubric": "x", "pairwise": True}
    duel = {"name": "duel", "url": "http://judge/v1", "judge": judge}
    plain = config(tmp_path, mode=mode)
    rewarded = {**plain.model_dump(mode="json"), "rewards": [duel]}
    compared = simulate(RunConfig.model_validate(rewarded))
    assert (compared.summary.error, compared.summary.account.balanced) == ("", True)
    assert compared.summary.account.trained == simulate(plain).summary.account.trained


@pytest.mark.extended
def test_decoupled_engines_run_the_longest_trajectories_first(tmp_path: Path) -> None:
    run_config = config(tmp_path, mode="decoupled", scheduling="trajectory")
    with directory_of(run_config) as run:
        outcome = simulate(run_config, run=run)
        replay = Replay(run.journal, run_config)
        started = [
            command
            for _, _, commands in replay
            for command in commands
            if isinstance(command, c.StartTurn)
        ]
    assert (outcome.summary.error, outcome.summary.account.balanced) == ("", True)
    assert len({command.rank for command in started}) > 3, "turns have ranks by length"


def test_a_start_may_take_longer_than_a_step_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is lost starts once again, though that takes 800 s."""
    monkeypatch.setattr("rollweave_sim.fleet.RESTART_S", 800.0)
    run_config = config(tmp_path, mode="sync")
    assert run_config.watchdog.train_s < 800.0
    with RunJournal(tmp_path / "journal.bin") as journal:
        world = World(run_config, observer=NullObserver(), journal=journal)
        world.start()
        while not any(engine.active for engine in world.core.state.engines.values()):
            world.step()
        for engine in list(world.core.state.engines):
            world.fleet.lose(engine, "killed")
        while world.over is None:
            world.step()
    assert world.over == ""
    counted = world.core.state.counters.watchdog
    assert counted["engine_restarted"] == len(world.core.state.engines)
    assert world.core.account().balanced


@pytest.mark.extended
@pytest.mark.variants
@pytest.mark.parametrize("mode", mostly_slow([*MODES, "decoupled"], {"partial", "bounded"}))
def test_rollouts_of_a_lost_controller_continue(mode: str, tmp_path: Path) -> None:
    """Lose the controller twice: before the first step, and again before all attempts
    have started again.
    """
    run_config = config(tmp_path, mode=mode, max_running=16)
    with RunJournal(tmp_path / "journal.bin") as journal:
        world = World(run_config, observer=NullObserver(), journal=journal)
        world.start()
        while world.core.state.counters.turns < 60:
            world.step()
        continued = 0
        for _ in range(2):
            world.revive(Core.restore(world.core.snapshot(), run_config), journal)
            (lost,) = [event for event in world.inbox if isinstance(event, e.WorldLost)]
            while world.core.state.counters.continued < continued + len(lost.recorded) // 2:
                world.step()
            continued = world.core.state.counters.continued
        while world.over is None:
            world.step()
            if world.events % checked_every() == 0:
                world.core.check()
        world.core.check()
    assert world.over == ""
    assert continued >= 8
    replay = Replay(tmp_path / "journal.bin", run_config)
    done = [event for _, event, _ in replay if isinstance(event, e.TurnDone)]
    assert sum(event.replayed for event in done) >= 10
    assert world.core.state.counters.turns == sum(not event.replayed for event in done)
    assert (replay.differing, world.core.account().balanced) == (0, True)


@pytest.mark.slow
def test_asynchronous_modes_are_faster_than_sync() -> None:
    """A sanity check, not a result: on one long-tailed workload, `sync` is the slowest
    of all modes.
    """
    step_s = {
        mode: statistics.median(simulate(config(Path("unused"), mode=mode)).step_s)
        for mode in MODES
    }
    assert max(step_s, key=lambda mode: step_s[mode]) == "sync"


@pytest.mark.extended
def test_a_run_directory_is_read_like_a_live_one(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    with directory_of(run_config) as run:
        outcome = simulate(run_config, run=run)
        page = write_report(run).read_text()
    assert "webshop" in page
    assert "waiting for environments" in page
    assert '<span class="badge">simulated</span>' in page
    assert "Training reward" not in page
    replay = Replay(run.journal, run_config)
    replay.finish()
    assert (replay.differing, replay.events) == (0, outcome.events)
    assert not (tmp_path / "small").exists()
    with directory_of(run_config) as again:  # a simulation replaces the one before
        assert not again.metrics.exists()


@pytest.mark.parametrize(
    ("sim", "words"),
    [
        ({"gpu": "h900"}, r"^sim\.gpu must be one of"),
        ({"model": "qwen"}, r"^sim\.model must be one of"),
        ({"link": "string"}, r"^sim\.link must be one of"),
        ({"model": "qwen3-8b"}, r"^trainer\.ranks must be at least 2"),
        ({"model": "qwen2.5-72b", "gpu": "a100"}, r"engines\.degree must be at least 2"),
    ],
)
def test_refuses_impossible_settings_before_writing_files(
    sim: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run_config = config(tmp_path, sim=sim, trainer={"ranks": 1})
    with pytest.raises(ConfigError, match=words):
        _ = costs_of(run_config), workloads_of(run_config)
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_keeps_the_files_of_a_running_one(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    with directory_of(run_config) as run:
        with pytest.raises(ConfigError, match="is in use"):
            directory_of(run_config)
        assert run.config.exists()


SHARED = {"colocated": True}


def test_colocated_is_for_sync_and_counts_its_gpus_once() -> None:
    outcome: Outcome = simulate(config(Path("unused"), mode="sync", trainer={**SHARED, "ranks": 3}))
    assert outcome.gpus == 3


def test_refuses_trajectories_that_fit_no_engine(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    task = run_config.tasks[0].model_copy(update={"max_tokens": 1 << 22})
    with pytest.raises(ConfigError, match=r"tasks\.max_tokens must fit the KV cache"):
        costs_of(run_config.model_copy(update={"tasks": (task,)}))


def test_prompts_that_do_not_fit_end_the_run_with_the_reason(tmp_path: Path) -> None:
    line = (
        '{"prompt_tokens": 1000000, "init_s": 1, "turns": [[5, 5, 1]], "reward_s": 1, "reward": 1}'
    )
    (tmp_path / "long.jsonl").write_text(line + "\n")
    outcome = simulate(config(tmp_path, env=str(tmp_path / "long.jsonl")))
    assert "the first prompt (1000000 tokens) leaves no room" in outcome.summary.error
    assert outcome.summary.account.balanced


def test_dynamic_sampling_ends_without_informative_groups(tmp_path: Path) -> None:
    line = '{"prompt_tokens": 10, "init_s": 1, "turns": [[5, 5, 1]], "reward_s": 1, "reward": 1}'
    (tmp_path / "same.jsonl").write_text(line + "\n")
    same = str(tmp_path / "same.jsonl")
    run_config = config(tmp_path, env=same, dynamic_sampling=True, groups_per_step=1)
    outcome = simulate(run_config)
    assert "100 groups in a row had equal rewards" in outcome.summary.error
    assert outcome.summary.account.balanced


@pytest.mark.variants
@pytest.mark.parametrize("mode", ["one_step", "bounded", "decoupled"])
def test_engines_stop_for_the_swap_only(tmp_path: Path, mode: str) -> None:
    """A pull over Ethernet takes longer than one over PCIe from the host's memory."""

    def counted(*without: str) -> dict[str, float]:
        ablation = {"changes": [f"no_{name}" for name in without]}
        return simulate(
            config(tmp_path, mode=mode, sim={"link": "ethernet"}, ablation=ablation)
        ).summary.weights

    staged, stopping = counted(), counted("staging")
    assert staged["staged"] >= 4
    assert staged["stopped_s"] / staged["updates"] < (
        0.9 * stopping["stopped_s"] / stopping["updates"]
    )
    assert staged["transfer_s"] >= stopping["transfer_s"] > 0
    assert (stopping["staged"], stopping["transfer_s"]) == (0, stopping["stopped_s"])


def test_each_event_is_followed_by_the_hook_of_checks(tmp_path: Path) -> None:
    seen: list[float] = []
    world = World(config(tmp_path), observer=NullObserver())
    world.each_event = lambda: seen.append(world.clock.now)
    world.start()
    while world.events < 50:
        world.step()
    assert (len(seen), seen) == (50, sorted(seen))
