"""Weights on the way from the trainer to the engines, and the words between the
controller and the relays that pass them on.

A relay is a process, one a machine, that keeps versions in shared memory for the
engines there (Laminar §4). It takes each version from the trainer, or from another
relay that has it or is still taking it itself: so a chain is a broadcast in a pipeline,
and repairing one is to name another source.
"""

from typing import Literal

from rollweave.schema.base import Struct, TaggedStruct


class TensorMeta(Struct, frozen=True, kw_only=True):
    """One tensor at bytes `[offset, offset + nbytes)` of the payload.

    `dtype` is torch's name without the prefix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightManifest(Struct, frozen=True, kw_only=True):
    """A published weight version. `version` counts training steps; `weights_id` is
    never reused, and tags KV and caches.

    `location` is a path that any process on the host can open; `digest` is the xxh3-128
    of the payload, in hex.
    """

    version: int
    weights_id: int
    location: str
    tensors: tuple[TensorMeta, ...]
    nbytes: int
    digest: str


# Relays.

TransportName = Literal["tcp", "mooncake", "nixl"]


class RelayAddress(Struct, frozen=True, kw_only=True):
    """Where a relay, or the trainer, gives versions away.

    Who connects must show the secret.
    """

    host: str
    port: int
    secret: bytes


class RelaySpec(Struct, frozen=True, kw_only=True):
    """How to start a relay. `host` is the address that it listens on."""

    id: str
    host: str = "127.0.0.1"
    transport: TransportName = "tcp"


class Take(TaggedStruct, frozen=True, kw_only=True):
    """Get a version, from `source`, or (None) from this host's memory at
    `manifest.location`, where the trainer has put it.

    With `base_id` only what has changed since that version travels. A version that is
    being taken goes on from another source where it stood. Versions not in `keep`, nor
    this one, are let go. Answered by `Taken` or `TakeFailed`. What comes from this
    host's memory is passed on in pieces of about `chunk_bytes`; other relays keep the
    cut of their source.
    """

    manifest: WeightManifest
    base_id: int | None = None
    source: RelayAddress | None = None
    keep: tuple[int, ...] = ()
    chunk_bytes: int = 32 * 2**20


class StopRelay(TaggedStruct, frozen=True, kw_only=True):
    pass


RelayCommand = Take | StopRelay


class RelayReady(TaggedStruct, frozen=True, kw_only=True):
    address: RelayAddress


class Taken(TaggedStruct, frozen=True, kw_only=True):
    """The version is here, whole and verified: `manifest.location` is this relay's
    memory. `nbytes` have travelled.
    """

    manifest: WeightManifest
    nbytes: int
    seconds: float


class Stalled(TaggedStruct, frozen=True, kw_only=True):
    """Said again and again while nothing comes from the source of a `Take`, which goes
    on. No answer: another may be better.
    """

    weights_id: int
    source: RelayAddress


class TakeFailed(TaggedStruct, frozen=True, kw_only=True):
    """The version has not come; those that were here are untouched.

    Reasons: `source` is gone, silent or does not have it; the `base` is not here, or is
    not what the change was made from: ask for the whole; what came is `broken`; there
    is no `room` in memory.
    """

    weights_id: int
    reason: Literal["source", "base", "broken", "room"]
    error: str


BEAT_S = 0.2
"""Seconds between two beats of a relay."""


class RelayBeat(TaggedStruct, frozen=True, kw_only=True):
    """Sent every BEAT_S, so that a relay that hangs is told from one that works."""


RelayReply = RelayReady | Taken | Stalled | TakeFailed | RelayBeat
