"""Engines receive weights while they serve, and each reports one result."""

from pathlib import Path

from rollweave.runtime.supervisors.engines import Manifests
from rollweave.schema.commands import StageWeights
from rollweave.schema.errors import EngineLostError, WeightsError
from rollweave.schema.events import EngineJoined, EngineSlot, StagingFailed, WeightsStaged
from rollweave.schema.serving import Ready
from rollweave.schema.weights import WeightManifest
from tests.support.migration import A, B, staged
from tests.support.pipelines import OneWordEngine


class Receiving(OneWordEngine):
    """Refuses version 2, and is lost at version 3."""

    async def ready(self) -> Ready:
        return Ready(version=-1, kv_total_tokens=1000, max_slots=8, max_context=1000, stages=True)

    async def stage(self, weights: WeightManifest) -> None:
        if weights.version == 2:
            raise WeightsError("torn")
        if weights.version == 3:
            raise EngineLostError("gone")


def make(slot: EngineSlot, epoch: int) -> Receiving:
    return Receiving()


async def test_what_an_engine_receives_is_reported_once(tmp_path: Path) -> None:
    manifests = Manifests()
    for number in (1, 2, 3):
        manifest = WeightManifest(
            version=number, publication_id=number, location="", tensors=(), nbytes=0, digest=""
        )
        manifests.published(manifest, keep=(1, 2))
    async with staged(make, tmp_path, manifests=manifests) as stage:
        assert all(joined.stages for joined in await stage.until(EngineJoined, 2))
        for number in (1, 2, 3, 9):
            stage.engines.stage(StageWeights(engine_id=A, version=number, publication_id=number))
        stage.engines.stage(StageWeights(engine_id=B, version=1, publication_id=1))
        failed = await stage.until(StagingFailed, 2)
        expected = {2: "torn", 9: "weights 9 are no longer available"}
        assert {event.publication_id: event.error for event in failed} == expected
        done = await stage.until(WeightsStaged, 2)
        wanted = {(A, 0, 1), (B, 0, 1)}
        assert {(event.engine_id, event.epoch, event.publication_id) for event in done} == wanted
        assert "v1" in {span["name"] for span in stage.spans()}
