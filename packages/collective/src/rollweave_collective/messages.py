"""What members and the sender say to each other, beside the requests of relays
(`weights/transport`).
"""

from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.weights.transport import KeepAlive, Raw, RawRanges, Refused, Request


class Join(TaggedStruct, frozen=True, kw_only=True):
    """Take part in the broadcast of a version.

    `member` identifies the engine; `group` is the number of the group that it is in, 0
    without one; `on_gpu` says whether it receives in the memory of a GPU.
    """

    publication_id: int
    digest: str
    member: bytes
    group: int
    on_gpu: bool


class Gathered(TaggedStruct, frozen=True, kw_only=True):
    """The broadcast begins, in the group of this number. Unless the engine is in it, it
    joins as `rank` of `size`; the ranks meet at the address `store`.
    """

    group: int
    rank: int
    size: int
    store: str
    on_gpu: bool


class Alone(TaggedStruct, frozen=True, kw_only=True):
    """There is no broadcast of this version for this engine, which is to request it."""


decode = decoder_of(Join | Gathered | Alone | Request | Raw | RawRanges | KeepAlive | Refused)
