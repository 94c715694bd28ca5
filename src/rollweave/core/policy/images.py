"""Decide where rollout workers get the images of their sandboxes, and when they try
again (RollArt §8).

The tiers are: the host's own cache, the hosts of the run that have the image, the
mirror, and a build. One worker at a time gets an image from outside; the others fetch
it from the hosts that have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollweave.schema.images import AskImage, GrantImage, HoldImage, ImagePeer, MissImage

ROUNDS = 5
"""Maximum number of times that all sources of an image are tried before the attempt
that needs it fails.
"""

FIRST_PAUSE_S = 1.0
"""Mean seconds before the second try; each further pause is twice as long."""

LONGEST_PAUSE_S = 30.0
"""Maximum mean seconds of a pause."""


def pause_s(failures: int, chance: float) -> float | None:
    """Return the seconds to wait after `failures` rounds without the image; None to
    give up.

    `chance`, from 0 to 1, changes the pause by up to a half, so that hosts that failed
    together do not return together. Raises ValueError for a count below 1.
    """
    if failures < 1:
        raise ValueError(f"failures must be at least 1, got {failures}")
    if failures >= ROUNDS:
        return None
    return min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S) * (0.5 + chance)


@dataclass(slots=True)
class _Image:
    digest: str = ""
    holders: dict[str, ImagePeer | None] = field(default_factory=dict)
    """Workers whose host has the image, and where they serve it."""
    fetches: dict[str, int] = field(default_factory=dict)
    """Number of workers that were sent to each holder."""
    origin: str = ""
    """The worker that gets the image from outside; "" if no worker does."""
    waiting: list[str] = field(default_factory=list)
    """Workers that wait until there is a source."""


Grants = list[tuple[str, GrantImage]]
"""Workers, and the answers that they receive."""


class ImageDirectory:
    """The images that the workers of a run have and need, by key.

    Invariants: an image has at most one origin; a worker that asks is answered as soon
    as there is a holder or no origin.
    """

    def __init__(self) -> None:
        self._images: dict[str, _Image] = {}

    def on_asked(self, worker: str, message: AskImage) -> Grants:
        """Answer a worker that needs an image, or let it wait."""
        image = self._images.setdefault(message.key, _Image())
        image.holders.pop(worker, None)
        if image.origin == worker:
            image.origin = ""
        if worker not in image.waiting:
            image.waiting.append(worker)
        if message.alone and not image.origin:
            return [self._make_origin(message.key, image, worker)]
        return list(self._answers(message.key, image))

    def on_held(self, worker: str, message: HoldImage) -> Grants:
        """Let the workers that wait fetch the image from its new holder."""
        image = self._images.setdefault(message.key, _Image())
        if image.digest != message.digest:  # built anew, with other bytes
            image.digest, image.holders = message.digest, {}
        image.holders[worker] = message.peer
        if image.origin == worker:
            image.origin = ""
        return list(self._answers(message.key, image))

    def on_missed(self, worker: str, message: MissImage) -> Grants:
        """Let another worker try, if this one was the origin."""
        image = self._images.get(message.key)
        if image is None or image.origin != worker:
            return []
        image.origin = ""
        return list(self._answers(message.key, image))

    def on_lost(self, worker: str) -> Grants:
        """Forget a worker that is gone."""
        grants: Grants = []
        for key, image in self._images.items():
            image.holders.pop(worker, None)
            if worker in image.waiting:
                image.waiting.remove(worker)
            if image.origin == worker:
                image.origin = ""
            grants += self._answers(key, image)
        return grants

    def _answers(self, key: str, image: _Image) -> Iterator[tuple[str, GrantImage]]:
        """Answer all waiting workers if there is a peer; else make a waiting worker the
        origin, if there is no origin.
        """
        if any(image.holders.values()):
            while image.waiting:
                worker = image.waiting.pop(0)
                yield worker, self._from_peers(key, image)
        elif image.waiting and not image.origin:
            yield self._make_origin(key, image, image.waiting[0])

    def _make_origin(self, key: str, image: _Image, worker: str) -> tuple[str, GrantImage]:
        image.waiting.remove(worker)
        image.origin = worker
        peers = tuple(peer for peer in image.holders.values() if peer is not None)
        return worker, GrantImage(key=key, digest=image.digest, peers=peers, origin=True)

    def _from_peers(self, key: str, image: _Image) -> GrantImage:
        """Return the holders, with the holders that serve the fewest workers first."""
        serving = {name: peer for name, peer in image.holders.items() if peer is not None}
        names = sorted(serving, key=lambda name: (image.fetches.get(name, 0), name))
        image.fetches[names[0]] = image.fetches.get(names[0], 0) + 1
        return GrantImage(
            key=key, digest=image.digest, peers=tuple(serving[name] for name in names)
        )
