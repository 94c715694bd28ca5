"""The messages that relays exchange over a channel (`weights/tcp`), some with a body of
weights, the reasons why a fetch fails, and the interface of libraries that carry
bodies.
"""

from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import xxhash

from rollweave.io.extras import announced
from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest

if TYPE_CHECKING:
    import torch

GROUP_DISTRIBUTION = "rollweave-collective"
"""The distribution in this repository that announces the ends of a group."""

FailureReason = Literal["source", "base", "broken", "room"]
"""See `schema/weights.VersionFailed`."""

Range = tuple[int, int]
"""Bytes `[start, stop)` of a payload."""


class FetchError(WeightsError):
    """A version, or a part of it, could not be fetched; the caller's versions are
    unaffected.
    """

    def __init__(self, reason: FailureReason, error: str) -> None:
        super().__init__(error)
        self.reason: FailureReason = reason


class Base(TaggedStruct, frozen=True, kw_only=True):
    """The version that a delta is made from. The digest is part of its identity,
    because two trainers may have used one id.
    """

    publication_id: int
    digest: str


class Request(TaggedStruct, frozen=True, kw_only=True):
    """Request `ranges` of a version from a relay, in order, as they become available.

    With `base`, pieces may come as deltas against that version; without it, or where
    there is no delta, they come as raw bytes.
    """

    publication_id: int
    digest: str
    nbytes: int
    ranges: tuple[Range, ...]
    base: Base | None = None


class Raw(TaggedStruct, frozen=True, kw_only=True):
    """The body is bytes `[start, stop)` of the payload."""

    start: int
    stop: int


class RawRanges(TaggedStruct, frozen=True, kw_only=True):
    """Several `ranges` of the payload, whose bytes follow each other in the body.

    Each range is too short to be worth its own message.
    """

    ranges: tuple[Range, ...]


class Delta(TaggedStruct, frozen=True, kw_only=True):
    """The body is bytes `[start, stop)` of the payload as blocks of weights/delta,
    which have `sizes` bytes.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]


class KeepAlive(TaggedStruct, frozen=True, kw_only=True):
    """There is nothing to send yet."""


class Refused(TaggedStruct, frozen=True, kw_only=True):
    """The request has failed. This is the last message of its sender."""

    reason: FailureReason
    error: str


Message = Request | Raw | RawRanges | Delta | KeepAlive | Refused

decode_message = decoder_of(Message)


def within(ranges: Collection[Range], nbytes: int) -> bool:
    """Return whether `ranges` are bytes of a payload of `nbytes`."""
    return all(0 <= start < stop <= nbytes for start, stop in ranges)


Allocate = Callable[[Message, int], memoryview]
"""Called with a message and the number of bytes of its body; returns memory for the
body.

Raises FetchError to refuse the body.
"""


class Body(NamedTuple):
    """Bytes to send: `data`, or the bytes of file `fd` from `offset` on. `checksum` is
    the xxh3-64 of the bytes.
    """

    nbytes: int
    checksum: int
    data: memoryview | None = None
    fd: int = -1
    offset: int = 0

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> "Body":
        return cls(len(data), xxhash.xxh3_64_intdigest(data), memoryview(data))

    @classmethod
    def of_file(cls, fd: int, start: int, stop: int, *, checksum: int) -> "Body":
        """Return the bytes `[start, stop)` of a file that does not change."""
        return cls(stop - start, checksum, None, fd, start)


class VersionSender(Protocol):
    """The trainer's end of the group that `weights.transport = "collective"` names,
    made from the address of this host on which it listens and the trainer's device.

    No call waits for an engine. A distribution announces it, and the engines' end.
    """

    def keep(self, needed: Collection[int]) -> None:
        """Give up all versions but those with these publication ids."""

    def offer(self, manifest: WeightManifest) -> WeightManifest:
        """Send a version, which is in this host's memory, to the engines that want it.
        Return its manifest for engines. Raises WeightsError.
        """

    def doubts(self) -> tuple[str, ...]:
        """Return what has failed since the last call: a line for each version."""

    def close(self) -> None:
        """End at once."""


class VersionReceiver(Protocol):
    """The end of one engine, made from its device. Its method may be called in any
    thread.
    """

    def read(self, manifest: WeightManifest) -> "dict[str, torch.Tensor]":
        """Return the tensors of a version, verified, on the device or on the CPU.
        Raises WeightsError.
        """


GroupCall = Callable[[dict[str, Any]], Awaitable[None]]


class ServerReceiver(Protocol):
    """The end of an inference server with so many ranks, which receives tensors by its
    own code: by vLLM's `NCCLWeightTransferEngine`.
    """

    async def bring(
        self, manifest: WeightManifest, *, begin: GroupCall, receive: GroupCall
    ) -> None:
        """Have the server receive a version: by `receive`, and at first `begin`, with
        the information that its engine takes. Raises WeightsError, after which the
        server's weights may be any.
        """


def group_end(name: Literal["sender", "member", "server"]) -> Any:
    """Return the class of an end of the group. Raises ConfigError if no distribution
    announces it.
    """
    return announced(
        "rollweave.weight_groups",
        name,
        field="weights.transport",
        distribution=GROUP_DISTRIBUTION,
        needing="weights.transport collective",
    )


class Carrier(Protocol):
    """Transfers bodies outside the socket, for example by RDMA. Its calls block, so
    they run in threads.
    """

    def register(self, body: memoryview) -> bytes:
        """Let a peer read `body`; return the token by which the peer finds it."""

    def unregister(self, token: bytes) -> None:
        """Stop letting peers read a registered body."""

    def read(self, token: bytes, into: memoryview) -> None:
        """Read a body that a peer registered. Raises FetchError (source)."""
