"""Locate weights for engines: in the trainer's memory or, with relays, in the memory of
the relay on the engine's host (Laminar §4).

Invariant: a manifest is listed while its weights are in memory, as far as reported. An
engine refuses weights that vanished without a report.
"""

from collections.abc import Collection, Sequence

from rollweave.schema.weights import WeightManifest


class Manifests:
    """The manifests of the trainer and, if there are relays (`relayed`), of each host's
    relay.
    """

    def __init__(self, *, relayed: bool = False) -> None:
        self._relayed = relayed
        self._trainer: dict[int, WeightManifest] = {}
        self._part_hosts: dict[int, tuple[int, ...]] = {}
        self._relays: dict[int, dict[int, WeightManifest]] = {}

    def published(
        self, manifest: WeightManifest, keep: Collection[int], part_hosts: Sequence[int] = ()
    ) -> None:
        """Record that the trainer has these weights in memory and, of its others, those
        in `keep`. If they are in parts, each is on one of `part_hosts`.
        """
        self._part_hosts[manifest.publication_id] = tuple(part_hosts)
        self._trainer = {
            publication_id: other
            for publication_id, other in self._trainer.items()
            if publication_id in keep
        }
        self._trainer[manifest.publication_id] = manifest
        self._part_hosts = {held: self._part_hosts[held] for held in self._trainer}

    def part_hosts(self, publication_id: int) -> tuple[int, ...]:
        """Return the host of each part of weights in the trainer's memory; empty if
        they are not in parts.
        """
        return self._part_hosts.get(publication_id, ())

    def of_trainer(self, publication_id: int) -> WeightManifest | None:
        """Return the manifest of weights in the trainer's memory."""
        return self._trainer.get(publication_id)

    def anywhere(self, publication_id: int) -> WeightManifest | None:
        """Return a manifest from any place: places differ in the location only."""
        places = (self._trainer, *self._relays.values())
        return next((place[publication_id] for place in places if publication_id in place), None)

    def add(self, host: int, manifest: WeightManifest) -> None:
        """Record that a host's relay has these weights in memory."""
        self._relays.setdefault(host, {})[manifest.publication_id] = manifest

    def keep(self, host: int, publication_ids: Collection[int]) -> None:
        """Record that a host's relay keeps only these of its weights."""
        self._relays[host] = {
            publication_id: manifest
            for publication_id, manifest in self._relays.get(host, {}).items()
            if publication_id in publication_ids
        }

    def on_host(self, host: int, publication_id: int) -> WeightManifest | None:
        """Return the manifest that an engine of this host reads; None if it cannot get
        these weights.
        """
        place = self._relays.get(host, {}) if self._relayed else self._trainer
        return place.get(publication_id)
