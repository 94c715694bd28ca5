"""Laminar's experiments: weight transfer along a chain, Table 2, shares that keep the
load.
"""

import pytest

from rollweave.schema.config.rollout import ModeName
from rollweave_papers import laminar, laminar_weights
from rollweave_papers.laminar import efficiency
from rollweave_papers.laminar_runs import (
    SCALES,
    SYSTEMS,
    Point,
    Sliced,
    config_of,
    placement,
    repacking,
    share_of,
    staleness_shares,
)
from rollweave_papers.laminar_weights import best_chain_s, broadcast, chain_s, repair_s
from rollweave_papers.running import EXPERIMENTS
from rollweave_sim.cost import EngineCost, TrainerCost
from rollweave_sim.hardware import Link, gpu, link, model
from rollweave_sim.run import SimMetrics
from rollweave_sim.training import Passes
from rollweave_sim.world import World


def test_a_simulated_broadcast_takes_the_time_of_the_closed_form() -> None:
    """A relay begins when the one before it does, and ends at least a chunk after
    it.
    """
    size = model("qwen2.5-72b").weight_bytes
    for relays in (1, 7, 31):
        seconds, _ = broadcast("72b", relays=relays)
        assert seconds == pytest.approx(chain_s(size, relays + 1), rel=0.1)


def test_the_published_bounds_on_the_broadcast_hold() -> None:
    rows = {row.row: row for row in EXPERIMENTS["laminar-fig19"].rows(True)}
    assert rows["72B to 31 relays"].ratio == 1.0
    repair = rows["repair of the chain, once a loss is known"]
    assert repair.ratio == 1.0
    assert repair.ours is not None
    assert repair.ours >= repair_s(model("qwen2.5-72b").weight_bytes, 32)
    constant = rows["31 relays over one relay"].ours
    assert constant is not None
    assert 1.0 < constant < 1.1


def test_time_of_a_broadcast_to_two_machines() -> None:
    """A link of 8 x 400 Gb/s, 80 % of it, and 5 µs for each of 299 chunks of 32 MiB."""
    size = 10**10
    assert chain_s(size, 2) == pytest.approx(size / (0.8 * 8 * 50e9) + 299 * 5e-6)
    assert best_chain_s(size, 2) == pytest.approx(size / (0.8 * 8 * 50e9) + 5e-6)


@pytest.mark.slow
def test_waits_are_at_least_the_best_case() -> None:
    """An engine waits only for its own load, at least over PCIe alone, and the trainer
    for the master.
    """
    rows = {row.row: row.ours for row in laminar_weights.fig14(True)}
    for size, tp in (("32b", 4), ("72b", 8)):
        best, mean = (
            rows[f"wait saved, {case}, {size}, over a global broadcast"]
            for case in ("best case", "average")
        )
        assert best is not None
        assert mean is not None
        assert mean <= best
        cost = Sliced(shape=model(f"qwen2.5-{size}"), gpus=512, share=1)
        at_once = best_chain_s(model(f"qwen2.5-{size}").weight_bytes, 64)
        alone = cost.beside_s(engines=1, tp=tp)
        # a suspended engine first ends its running step
        assert best == pytest.approx(100 * (1 - alone / at_once), abs=15)
        assert best <= 100 * (1 - alone / at_once) + 1e-9
        assert rows[f"actor stall, {size}"] == pytest.approx(cost.publish_s())


def test_scaling_uses_the_end_points_alone() -> None:
    points = [
        Point(
            gpus=gpus, tokens_per_s=speed, step_s=1.0, share=1, engines_busy=0.5, trainer_busy=0.5
        )
        for gpus, speed in ((16, 10.0), (64, 100.0), (256, 80.0))
    ]
    assert efficiency(points) == pytest.approx(50.0)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", list(SCALES))
def test_placements_use_full_engines_and_fit(system: str, name: str) -> None:
    for gpus in SCALES[name]:
        training, rollout, tp = placement(name, system, gpus)
        assert (
            (training, rollout) == (gpus, gpus) if system == "verl" else training + rollout == gpus
        )
        assert rollout % tp == 0
        shape = model(f"qwen2.5-{name.lower()}")
        EngineCost(gpu=gpu("h800"), model=shape, tp=tp)
        TrainerCost(gpu=gpu("h800"), model=shape, gpus=training, link=link("rdma"))


def test_the_largest_placement_is_that_of_the_paper() -> None:
    assert placement("72B", "Laminar", 1024) == (768, 256, 8)
    assert placement("7B", "Laminar", 256) == (192, 64, 1)
    assert placement("7B", "one-step", 256) == (40, 216, 2)
    assert placement("7B", "Laminar", 256, placed="one-step") == (40, 216, 1)


@pytest.mark.parametrize(
    ("engines", "most", "share"), [(8, 8, 8), (12, 8, 4), (108, 16, 4), (5, 8, 1), (64, 16, 16)]
)
def test_a_share_divides_the_engines(engines: int, most: int, share: int) -> None:
    assert share_of(engines, most) == share


def test_a_share_keeps_the_load_of_engines_and_trainer() -> None:
    full, part = (
        config_of("dapo-math", "32B", "Laminar", 256, share=share, steps=3) for share in (1, 8)
    )
    assert (
        full.rollout.groups_per_step / full.engines[0].count
        == part.rollout.groups_per_step / part.engines[0].count
    )
    assert (
        full.rollout.max_running / full.engines[0].count
        == part.rollout.max_running / part.engines[0].count
    )
    shape = model("qwen2.5-32b")
    plain = TrainerCost(gpu=gpu("h800"), model=shape, gpus=128, link=link("rdma"))
    sliced = Sliced(shape=shape, gpus=128, share=8)
    assert sliced.step_s(tokens=1000, context=500_000) == plain.step_s(
        tokens=8000, context=4_000_000
    )
    assert sliced.load_s(engines=2, tp=4) == plain.load_s(engines=16, tp=4)
    local: Link = link("pcie")
    assert sliced.load_s(engines=1, tp=4, over=local) == plain.load_s(engines=8, tp=4, over=local)


def test_updates_cost_more_than_one() -> None:
    one, many = (
        Sliced(shape=model("qwen2.5-7b"), gpus=16, share=1, passes=Passes(updates=updates))
        for updates in (1, 16)
    )
    fixed = one.step_s(tokens=0, context=0)
    assert fixed > 0
    assert many.step_s(tokens=1000, context=1000) == pytest.approx(
        one.step_s(tokens=1000, context=1000) + 15 * fixed
    )


@pytest.mark.slow
def test_a_lost_machine_recovers() -> None:
    (row,) = EXPERIMENTS["laminar-fig16"].rows(True)
    assert row.ours is not None
    assert 60 < row.ours < 120  # the start of an engine, and its weights
    assert row.published == 252


def test_an_engine_beside_a_relay_waits_for_those_of_its_machine_alone() -> None:
    shape = model("qwen2.5-32b")
    part = Sliced(shape=shape, gpus=128, share=8)
    plain = TrainerCost(gpu=gpu("h800"), model=shape, gpus=128, link=link("rdma"))
    assert part.beside_s(engines=2, tp=4) == plain.load_s(engines=2, tp=4, over=link("pcie"))
    assert part.lag_s() == 8 * plain.lag_s(), "each relay stands for those of eight parts"


def test_laminar_has_a_relay_on_each_machine_and_sends_whole_weights() -> None:
    config = config_of("dapo-math", "32B", "Laminar", 128, share=1, steps=1)
    world = World(config, observer=SimMetrics())
    assert (world.hosts.relays, len(world.slots)) == (8, 16)
    assert {slot.host for slot in world.slots} == set(range(8))
    assert "deltas" in config.ablation.without
    other = config_of("dapo-math", "32B", "AReaL", 128, share=1, steps=1)
    assert World(other, observer=SimMetrics()).hosts.relays == 0


def test_laminar_is_the_mode_decoupled_with_its_concurrency() -> None:
    config = config_of(
        "dapo-math", "7B", "Laminar", 64, share=4, steps=3, concurrency=256, repack=False
    )
    assert config.rollout.mode is ModeName.DECOUPLED
    assert config.rollout.max_running == 6 * 256
    assert config.ablation.without == ("deltas", "repack")
    assert config.engines[0].count == 24 // 4


@pytest.mark.slow
def test_inherent_staleness_counts_trajectories_ended_in_the_window() -> None:
    shares = staleness_shares(256, quick=True)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares) >= 0
    assert max(shares) < 20


@pytest.mark.slow
def test_engines_are_freed_by_repack_alone() -> None:
    with_it, without = (repacking(repack=repack, quick=True) for repack in (True, False))
    assert with_it.released > 0
    assert without.released == 0
    assert 0 < without.kv_used < 1


@pytest.mark.slow
def test_every_row_has_a_figure_or_names_the_missing_part() -> None:
    rows = [row for experiment in laminar.EXPERIMENTS for row in experiment.rows(True)]
    for row in rows:
        if row.ours is None:
            assert row.note.startswith("missing: ")
    assert {row.experiment for row in rows} == {
        experiment.name for experiment in laminar.EXPERIMENTS
    }
