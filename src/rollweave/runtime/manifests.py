"""Locate weights for engines: in the trainer's memory or, with relays, in the memory of
the relay on the engine's machine (Laminar §4).

Invariant: a manifest is listed while its weights are in memory, as far as reported. An
engine refuses weights that vanished without a report.
"""

from collections.abc import Collection

from rollweave.core.membership import machine_of
from rollweave.schema.base import EngineId
from rollweave.schema.weights import WeightManifest


class Manifests:
    """The manifests of the trainer and of each machine's relay; 0 machines stand for no
    relays.
    """

    def __init__(self, machines: int = 0) -> None:
        self._trainer: dict[int, WeightManifest] = {}
        self._relays: list[dict[int, WeightManifest]] = [{} for _ in range(machines)]

    def published(self, manifest: WeightManifest, keep: Collection[int]) -> None:
        """Record that the trainer has these weights in memory and, of its others, those
        in `keep`.
        """
        self._trainer = {
            weights_id: other for weights_id, other in self._trainer.items() if weights_id in keep
        }
        self._trainer[manifest.weights_id] = manifest

    def of_trainer(self, weights_id: int) -> WeightManifest | None:
        """Return the manifest of weights in the trainer's memory."""
        return self._trainer.get(weights_id)

    def anywhere(self, weights_id: int) -> WeightManifest | None:
        """Return a manifest from any place: places differ in the location only."""
        places = (self._trainer, *self._relays)
        return next((place[weights_id] for place in places if weights_id in place), None)

    def add(self, machine: int, manifest: WeightManifest) -> None:
        """Record that a machine's relay has these weights in memory."""
        self._relays[machine][manifest.weights_id] = manifest

    def keep(self, machine: int, weights_ids: Collection[int]) -> None:
        """Record that a machine's relay drops all other weights."""
        self._relays[machine] = {
            weights_id: manifest
            for weights_id, manifest in self._relays[machine].items()
            if weights_id in weights_ids
        }

    def of_engine(self, engine_id: EngineId, weights_id: int) -> WeightManifest | None:
        """Return the manifest that this engine reads; None if it cannot get these
        weights.
        """
        machine = machine_of(engine_id, len(self._relays))
        place = self._trainer if machine is None else self._relays[machine]
        return place.get(weights_id)
