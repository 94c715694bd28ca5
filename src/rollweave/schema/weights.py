"""Weight versions in transit from the trainer to the engines, and the messages between
the controller and the relays that distribute them.

A relay is a process, one per machine, that keeps versions in shared memory for the
engines there (Laminar §4). It fetches each version from the trainer, or from another
relay that has the version or is still receiving it. A chain of relays is therefore a
pipelined broadcast, and a broken chain is repaired by naming another source.
"""

from typing import Literal

from rollweave.schema.base import Struct, TaggedStruct

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number of each format of weights, KV and activations."""


class TensorMeta(Struct, frozen=True, kw_only=True):
    """Describes one tensor at bytes `[offset, offset + nbytes)` of the payload.

    `dtype` is torch's name without the prefix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightPart(Struct, frozen=True, kw_only=True):
    """The bytes of a version that the trainer's ranks on one host have published there.

    `rank` is the first of these ranks; `location` is a file of the version's size that
    any process on the host can open, with nothing but `ranges` in it; `digest` is the
    xxh3-128 of the ranges in order, in hex.
    """

    rank: int
    location: str
    ranges: tuple[tuple[int, int], ...]
    digest: str


class RelayAddress(Struct, frozen=True, kw_only=True):
    """The address at which a relay, or the trainer, serves versions.

    A client must present the secret to connect.
    """

    host: str
    port: int
    secret: bytes


class WeightManifest(Struct, frozen=True, kw_only=True):
    """Describes a published weight version. `version` counts training steps;
    `publication_id` is never reused and tags KV and caches.

    `location` is a path that any process on the host can open; `digest` is the xxh3-128
    of the payload, in hex. A version that ranks on several hosts have published is
    divided into `parts`, which together have every byte: its digest is computed from
    the digests of the parts, and it has a location once a relay has put it together.
    With a `sender`, engines receive it there, by a group.
    """

    version: int
    publication_id: int
    location: str
    tensors: tuple[TensorMeta, ...]
    nbytes: int
    digest: str
    parts: tuple[WeightPart, ...] = ()
    sender: RelayAddress | None = None


# Relays.

TransportName = Literal["tcp", "mooncake", "nixl", "collective"]
"""All but `collective`, with which there are no relays, carry weights between relays.
"""


class RelaySpec(Struct, frozen=True, kw_only=True):
    """Describes how to start a relay. `host` is the address that it listens on."""

    id: str
    host: str = "127.0.0.1"
    transport: TransportName = "tcp"


class PartSource(Struct, frozen=True, kw_only=True):
    """The source of `WeightManifest.parts[part]` for a relay: another relay, or this
    host's memory if `source` is None.
    """

    part: int
    source: RelayAddress | None = None


class FetchVersion(TaggedStruct, frozen=True, kw_only=True):
    """Fetch a version from `source` or, if `source` is None, from this host's memory at
    `manifest.location`, where the trainer put it.

    If the version is in parts, `parts` are the parts that do not come from `source`:
    each relay reads the parts of its own host, and the relay that puts the version
    together fetches the parts of all other hosts, which serve them (`ServePart`). A
    relay serves a part as soon as it has the part.

    With `base_id`, only the changes since that version are transferred. A partly
    received version resumes from another source where it stopped. Versions other than
    this version and `keep` are evicted. Answered by `VersionFetched` or
    `VersionFailed`. A version from this host's memory is passed on in pieces of about
    `chunk_bytes`; other relays keep the pieces of their source.
    """

    manifest: WeightManifest
    base_id: int | None = None
    source: RelayAddress | None = None
    parts: tuple[PartSource, ...] = ()
    keep: tuple[int, ...] = ()
    chunk_bytes: int = 32 * 2**20


class ServePart(TaggedStruct, frozen=True, kw_only=True):
    """Serve `manifest.parts[part]` from this host's memory, until a part of another
    version takes its place. No answer is owed.
    """

    manifest: WeightManifest
    part: int


class StopRelay(TaggedStruct, frozen=True, kw_only=True):
    pass


RelayCommand = FetchVersion | ServePart | StopRelay


class RelayReady(TaggedStruct, frozen=True, kw_only=True):
    address: RelayAddress


class VersionFetched(TaggedStruct, frozen=True, kw_only=True):
    """The version is complete and verified. `manifest.location` is this relay's memory.
    `nbytes` were transferred.
    """

    manifest: WeightManifest
    nbytes: int
    seconds: float


class VersionStalled(TaggedStruct, frozen=True, kw_only=True):
    """Sent repeatedly while nothing arrives from the source of a `FetchVersion`, which
    continues. It is not an answer: another source may be better.
    """

    publication_id: int
    source: RelayAddress


class VersionFailed(TaggedStruct, frozen=True, kw_only=True):
    """The version could not be fetched; stored versions are unaffected.

    Reasons: the `source` is gone, silent or does not have the version; the `base` is
    not stored here or does not match the delta, so that the full version must be
    fetched; the received data is `broken`; or there is no `room` in memory.
    """

    publication_id: int
    reason: Literal["source", "base", "broken", "room"]
    error: str


FetchReply = VersionFetched | VersionFailed


HEARTBEAT_S = 0.2
"""Seconds between two heartbeats of a relay."""


class RelayHeartbeat(TaggedStruct, frozen=True, kw_only=True):
    """Sent every `HEARTBEAT_S` seconds, so that a hung relay can be distinguished from
    a working relay. `received` of `whole` bytes have arrived of the version that it
    fetches; both are 0 if it fetches no version.
    """

    received: int = 0
    whole: int = 0


RelayReply = RelayReady | VersionFetched | VersionStalled | VersionFailed | RelayHeartbeat
