"""The messages that relays, stores and their clients exchange over a channel, and the
reasons why a fetch fails.
"""

from collections.abc import Collection
from typing import Literal

from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest

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

    weights_id: int
    digest: str


class Request(TaggedStruct, frozen=True, kw_only=True):
    """Request `ranges` of a version from a relay or a store, in order, as they become
    available.

    With `base`, pieces may come as deltas against that version; without it, or where
    there is no delta, they come as raw bytes. With `confirm`, the last message is
    `Complete`, sent once the server has verified the version.
    """

    weights_id: int
    digest: str
    nbytes: int
    ranges: tuple[Range, ...]
    base: Base | None = None
    confirm: bool = False


class Push(TaggedStruct, frozen=True, kw_only=True):
    """Announce to a store that these `ranges` of a version will be sent, some perhaps
    as deltas against `base`. Answered by `Missing`.
    """

    manifest: WeightManifest
    ranges: tuple[Range, ...]
    base: Base | None = None


class Missing(TaggedStruct, frozen=True, kw_only=True):
    """The ranges of a push that the store does not have yet."""

    ranges: tuple[Range, ...]


class Raw(TaggedStruct, frozen=True, kw_only=True):
    """Bytes `[start, stop)` of the payload, which are the body."""

    start: int
    stop: int


class RawRanges(TaggedStruct, frozen=True, kw_only=True):
    """Several `ranges` of the payload, whose bytes follow each other in the body.

    The ranges are too short to be worth a message each.
    """

    ranges: tuple[Range, ...]


class Delta(TaggedStruct, frozen=True, kw_only=True):
    """Bytes `[start, stop)` of the payload as blocks of weights/delta. The blocks, of
    `sizes` bytes, are the body.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]


class KeepAlive(TaggedStruct, frozen=True, kw_only=True):
    """There is nothing to send yet."""


class Complete(TaggedStruct, frozen=True, kw_only=True):
    """The version is complete and verified. Sent to a store, it marks the end of a
    push.
    """


class Refused(TaggedStruct, frozen=True, kw_only=True):
    """The request or push has failed. This is the last message of its sender."""

    reason: FailureReason
    error: str


decode_message = decoder_of(
    Request | Push | Missing | Raw | RawRanges | Delta | KeepAlive | Complete | Refused
)
Message = Request | Push | Missing | Raw | RawRanges | Delta | KeepAlive | Complete | Refused


def within(ranges: Collection[Range], nbytes: int) -> bool:
    """Return whether `ranges` are bytes of a payload of `nbytes`."""
    return all(0 <= start < stop <= nbytes for start, stop in ranges)
