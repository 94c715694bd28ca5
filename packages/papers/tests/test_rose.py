"""ROSE's transfers of weights between clusters, in simulated runs, and what borrowed
engines cost.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave_papers.cluster import rollout_s, steps_of
from rollweave_papers.rose import (
    BUCKET_BYTES,
    BUCKET_S,
    FROZENLAKE,
    SENDER_GPUS,
    TwoClusters,
    transfer_s,
)
from rollweave_papers.rose_elastic import Borrowing, resource_fixed, without_borrowing
from rollweave_papers.rose_serving import SIZES
from rollweave_sim.cost import APPLY_BYTES_PER_S
from rollweave_sim.hardware import link, model
from rollweave_sim.relays import DELTA_SHARE
from rollweave_sim.world import costs_of


@pytest.mark.slow
def test_a_transfer_takes_the_time_of_the_link_of_buckets_or_of_the_codec() -> None:
    """It begins with a copy into the memory of the trainer's machine, and ends with the
    load from the memory of an engine's machine.
    """
    shape = model("qwen3-8b")
    crossing_s = shape.weight_bytes / (0.8 * 1e9 / 8)
    whole, sparse = (transfer_s("8B", bits_per_s=1e9, sparse=one) for one in (False, True))
    assert whole == pytest.approx(crossing_s, rel=0.02)
    codec_s = shape.weight_bytes / APPLY_BYTES_PER_S
    assert DELTA_SHARE * crossing_s < codec_s < sparse < codec_s + 2
    fast = transfer_s("8B", bits_per_s=200e9, sparse=False)
    buckets = math.ceil(shape.weight_bytes / SENDER_GPUS / BUCKET_BYTES)
    assert fast == pytest.approx(buckets * BUCKET_S, abs=0.5)


def test_relays_of_another_cluster_are_reached_over_the_link_between() -> None:
    shape = model("qwen3-8b")
    between = TwoClusters(shape=shape, bits_per_s=200e9)
    other = TwoClusters(shape=shape, bits_per_s=2e9)
    assert other.hop_s(share=0.5) == pytest.approx(100 * between.hop_s(share=0.5), rel=0.01)
    assert other.hop_s(share=1.0) == pytest.approx(2 * other.hop_s(share=0.5), rel=0.01)
    assert between.hop_s(share=1.0) > 4 * between.hop_s(share=0.5), "buckets take longer"
    assert between.publish_s() == other.publish_s(), "that is a copy within a machine"
    assert between.publish_s() < shape.weight_bytes / link("pcie").bytes_per_s
    assert SENDER_GPUS == 16


def test_borrowed_gpus_get_weights_over_ethernet_and_a_chain_of_relays() -> None:
    setup = FROZENLAKE.but(rollout_gpus=24, link="ethernet", relayed=True)
    config = setup.config(steps=1)
    slower = costs_of(config)[1]
    faster = costs_of(FROZENLAKE.config(steps=1))[1]
    assert slower.publish_s() > faster.publish_s()
    assert [(group.pool, group.count) for group in config.engines] == [("h800", 24)]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 6])
def test_the_earliest_finish_is_no_later_than_roses_order_or_pinning(gpus: int) -> None:
    """With fewer and with more slots than trajectories."""
    setup = FROZENLAKE.but(rollout_gpus=gpus, batch=64)
    seconds = {
        name: rollout_s(setup.but(policies=(name,)), steps=2)
        for name in ("earliest", "affinity", "pinned")
    }
    assert seconds["earliest"] < 1.02 * min(seconds.values())
    if gpus == 6:
        assert seconds["affinity"] < seconds["pinned"], "as in the paper"


NOTHING = e.LendersReported(lenders=())


def start(engine: str, *, lender: str = "s0") -> c.StartEngine:
    return c.StartEngine(engine_id=EngineId(engine), degree=1, group=0, lender=lender)


def loaded(engine: str) -> e.WeightsLoaded:
    return e.WeightsLoaded(engine_id=EngineId(engine), epoch=0, version=1, publication_id=1)


def test_what_borrowed_engines_cost_until_they_are_ready() -> None:
    """One that leaves before it is ready was not ready for all of its time."""
    seen = Borrowing()
    for now, event, commands in (
        (0.0, NOTHING, [start("e1"), start("e2"), start("e3", lender="")]),
        (7.0, loaded("e3"), []),
        (60.0, loaded("e1"), []),
        (90.0, loaded("e1"), []),
        (100.0, NOTHING, [c.RemoveEngine(engine_id=EngineId("e2"), reason="recalled")]),
        (
            200.0,
            NOTHING,
            [c.RemoveEngine(engine_id=EngineId("e1"), reason="recalled"), start("e4")],
        ),
    ):
        seen.append(now, event, commands)
    seen.finish(210.0)
    assert seen.loans == 3
    assert seen.starting_s == 60.0 + 100.0 + 10.0
    assert seen.held_s == 200.0 + 100.0 + 10.0


class Placed:
    """The engines on which the turns of each trajectory ran."""

    def __init__(self) -> None:
        self.engines: dict[TrajectoryId, set[EngineId]] = defaultdict(set)

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        for command in commands:
            if isinstance(command, c.StartTurn):
                self.engines[command.trajectory_id].add(command.engine_id)


def test_a_resource_fixed_baseline_keeps_a_trajectory_on_one_engine() -> None:
    """ROSE's order moves nearly all of them, while they are more than slots."""
    setup = SIZES["8B"].but(rollout_gpus=2, slots=2, batch=16)
    share = {}
    for name, one in (("pinned", resource_fixed(setup)), ("affinity", without_borrowing(setup))):
        placed = Placed()
        steps_of(one, steps=1, watch=placed)
        moved = [len(engines) > 1 for engines in placed.engines.values()]
        assert len(moved) == 16
        share[name] = sum(moved) / len(moved)
    assert share["pinned"] == 0
    assert share["affinity"] > 0.5
