"""An engine that hangs is lost even if it has no turn to time out; one that is slow
once, or loads weights, is not.
"""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.runtime.supervisors.engines import Manifests
from rollweave.schema.base import EngineId
from rollweave.schema.commands import LoadWeights
from rollweave.schema.events import EngineLost, EngineSlot, KvReported
from rollweave.schema.serving import Beating, LoadCheckpoint
from rollweave.schema.weights import WeightManifest
from tests.support.migration import A, B, staged
from tests.support.pipelines import OneWordEngine

BEAT = {"reply_s": 0.05, "heartbeat_s": 0.01, "slow_s": 0.1}


class BeatingEngine(OneWordEngine):
    """Engine `a` does not answer the heartbeats in `silent`; `b` answers all."""

    def __init__(self, silent: set[int] | None) -> None:
        super().__init__()
        self.silent = silent
        self.beats = itertools.count()
        self.answered = asyncio.Event()
        self.doing = Beating()

    async def beat(self) -> Beating:
        beat = next(self.beats)
        if self.silent is None or beat in self.silent:
            await asyncio.Event().wait()
        if beat > 8:
            self.answered.set()
        return self.doing

    async def load(self, weights: WeightManifest | LoadCheckpoint) -> None:
        self.silent = None
        await asyncio.Event().wait()


def supervisor_of(
    engines: dict[tuple[EngineId, int], BeatingEngine], silent: set[int]
) -> Callable[[EngineSlot, int], BeatingEngine]:
    def make(slot: EngineSlot, epoch: int) -> BeatingEngine:
        engines[slot.id, epoch] = BeatingEngine(silent if slot.id == A else set())
        return engines[slot.id, epoch]

    return make


async def test_an_engine_that_misses_two_heartbeats_in_a_row_is_lost(tmp_path: Path) -> None:
    engines: dict[tuple[EngineId, int], BeatingEngine] = {}
    async with staged(supervisor_of(engines, {1, 2}), tmp_path, **BEAT) as stage:
        (lost,) = await stage.until(EngineLost)
        assert (lost.engine_id, lost.epoch) == (A, 0)
        assert lost.error == "no answer to 2 heartbeats in a row"
        assert engines[A, 0].lost.done(), "it was killed"
        await engines[B, 0].answered.wait()
        assert len(await stage.until(EngineLost)) == 1


@pytest.mark.parametrize("reports", [True, False])
async def test_the_kv_in_use_is_posted_with_heartbeats_where_it_is_wanted(
    tmp_path: Path, reports: bool
) -> None:
    """An engine that stays idle posts nothing, nor does one that does not know."""
    engines: dict[tuple[EngineId, int], BeatingEngine] = {}
    async with staged(supervisor_of(engines, set()), tmp_path, **BEAT, reports_kv=reports) as stage:
        for used in (None, 0, 48, 0):
            engines[A, 0].doing = Beating(kv_used=used)
            engines[A, 0].beats, engines[A, 0].answered = itertools.count(), asyncio.Event()
            await engines[A, 0].answered.wait()
        events = [event for event in stage.events if isinstance(event, KvReported)]
        assert {(event.engine_id, event.epoch) for event in events} == (
            {(A, 0)} if reports else set()
        )
        seen = [event.used for event in events]
        assert seen == ([48] * (len(seen) - 1) + [0] if reports else [])


async def test_an_engine_that_misses_single_heartbeats_is_not_lost(tmp_path: Path) -> None:
    engines: dict[tuple[EngineId, int], BeatingEngine] = {}
    async with staged(supervisor_of(engines, {0, 2, 4, 6}), tmp_path, **BEAT) as stage:
        await engines[A, 0].answered.wait()
        assert not [event for event in stage.events if isinstance(event, EngineLost)]


async def test_no_heartbeat_is_sent_while_weights_are_loaded(tmp_path: Path) -> None:
    engines: dict[tuple[EngineId, int], BeatingEngine] = {}
    manifests = Manifests()
    manifests.published(
        WeightManifest(version=0, publication_id=0, location="", tensors=(), nbytes=0, digest=""),
        keep=(),
    )
    async with staged(
        supervisor_of(engines, set()), tmp_path, manifests=manifests, **BEAT
    ) as stage:
        stage.engines.load(LoadWeights(engine_id=A, version=0, publication_id=0))
        await engines[B, 0].answered.wait()
        assert not [event for event in stage.events if isinstance(event, EngineLost)]


async def test_an_engine_in_a_long_step_is_slow_and_then_hangs(tmp_path: Path) -> None:
    """It is alive as long as it answers, and is waited for up to a limit."""
    engines: dict[tuple[EngineId, int], BeatingEngine] = {}
    async with staged(supervisor_of(engines, set()), tmp_path, **BEAT) as stage:
        engines[A, 0].doing = Beating(doing="a step of 3 sequences", for_s=0.09)
        await engines[A, 0].answered.wait()
        assert not [event for event in stage.events if isinstance(event, EngineLost)]
        engines[A, 0].doing = Beating(doing="a step of 3 sequences", for_s=0.11)
        (lost,) = await stage.until(EngineLost)
        assert (lost.engine_id, lost.error) == (A, "a step of 3 sequences takes more than 0.1 s")
