"""What relays, stores and those who take from them say to each other over a channel,
and why a take fails.
"""

from collections.abc import Collection
from typing import Literal

from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest

FailureReason = Literal["source", "base", "broken", "room"]
"""As in `TakeFailed`."""

Range = tuple[int, int]
"""Bytes `[start, stop)` of a payload."""


class FetchError(WeightsError):
    """A version, or a part of it, has not come; whoever wanted it has what it had."""

    def __init__(self, reason: FailureReason, error: str) -> None:
        super().__init__(error)
        self.reason: FailureReason = reason


class Base(TaggedStruct, frozen=True, kw_only=True):
    """A version that a change is made from, by what it is as well: two trainers may
    have used one id.
    """

    weights_id: int
    digest: str


class Request(TaggedStruct, frozen=True, kw_only=True):
    """To a relay or a store: give me these `ranges` of a version, in order, as they
    come to be there.

    With `base` pieces may come as changes since that version; without one, or where
    there are none, they come as they are. With `confirm` the last word is `Whole`, said
    once the giver has verified the version.
    """

    weights_id: int
    digest: str
    nbytes: int
    ranges: tuple[Range, ...]
    base: Base | None = None
    confirm: bool = False


class Push(TaggedStruct, frozen=True, kw_only=True):
    """To a store: I shall send these `ranges` of a version, some perhaps as changes
    since `base`. Answered by `Wanted`.
    """

    manifest: WeightManifest
    ranges: tuple[Range, ...]
    base: Base | None = None


class Missing(TaggedStruct, frozen=True, kw_only=True):
    """What of a push is not here yet."""

    ranges: tuple[Range, ...]


class Raw(TaggedStruct, frozen=True, kw_only=True):
    """With a body: bytes `[start, stop)` of the payload."""

    start: int
    stop: int


class RawRanges(TaggedStruct, frozen=True, kw_only=True):
    """With a body: these `ranges` of the payload, one after the other.

    They are short, and not worth a message each.
    """

    ranges: tuple[Range, ...]


class Delta(TaggedStruct, frozen=True, kw_only=True):
    """With a body: weights/delta's blocks, of `sizes` bytes, of bytes `[start, stop)`
    of the payload.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]


class KeepAlive(TaggedStruct, frozen=True, kw_only=True):
    """There is nothing to send yet."""


class Complete(TaggedStruct, frozen=True, kw_only=True):
    """The version is there, whole and verified; or, to a store: this is the end of a
    push.
    """


class Refused(TaggedStruct, frozen=True, kw_only=True):
    """There will be nothing. The last word of whoever says it."""

    reason: FailureReason
    error: str


decode_message = decoder_of(
    Request | Push | Missing | Raw | RawRanges | Delta | KeepAlive | Complete | Refused
)
Message = Request | Push | Missing | Raw | RawRanges | Delta | KeepAlive | Complete | Refused


def within(ranges: Collection[Range], nbytes: int) -> bool:
    """Whether `ranges` are bytes of a payload of `nbytes`."""
    return all(0 <= start < stop <= nbytes for start, stop in ranges)
