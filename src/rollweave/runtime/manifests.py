"""Where an engine finds weights: in the trainer's memory, or with relays in that of its
own machine's (Laminar §4).

Invariant: what is offered is there, as far as anybody has said; what is gone
unannounced an engine refuses by itself.
"""

from collections.abc import Collection

from rollweave.schema.base import EngineId
from rollweave.schema.weights import WeightManifest


class Manifests:
    """`machines`: engine number k is on machine k modulo these; 0: there are no relays."""

    def __init__(self, machines: int = 0) -> None:
        self._trainers: dict[int, WeightManifest] = {}
        self._held: list[dict[int, WeightManifest]] = [{} for _ in range(machines)]

    def published(self, manifest: WeightManifest, keep: Collection[int]) -> None:
        """The trainer has this one in its memory, and of the others those in `keep`."""
        self._trainers = {known: found for known, found in self._trainers.items() if known in keep}
        self._trainers[manifest.weights_id] = manifest

    def of_trainer(self, weights_id: int) -> WeightManifest | None:
        """In the trainer's memory."""
        return self._trainers.get(weights_id)

    def anywhere(self, weights_id: int) -> WeightManifest | None:
        """Wherever they are: all but the location is the same everywhere."""
        places = (self._trainers, *self._held)
        return next((place[weights_id] for place in places if weights_id in place), None)

    def hold(self, machine: int, manifest: WeightManifest) -> None:
        """A relay has these weights in its memory."""
        self._held[machine][manifest.weights_id] = manifest

    def keep(self, machine: int, weights_ids: Collection[int]) -> None:
        """A relay lets go of all others."""
        self._held[machine] = {
            known: found for known, found in self._held[machine].items() if known in weights_ids
        }

    def of_engine(self, engine_id: EngineId, weights_id: int) -> WeightManifest | None:
        """Where this engine reads these weights; None where it cannot have them."""
        if not self._held:
            return self._trainers.get(weights_id)
        return self._held[int(engine_id.removeprefix("e")) % len(self._held)].get(weights_id)
