"""The messages of members and the sender, beside the requests of relays
(`weights/transport`).
"""

from typing import TypeVar

from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.weights.tcp import Channel
from rollweave.weights.transport import FetchError, KeepAlive, Raw, RawRanges, Refused, Request

T = TypeVar("T")


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


class JoinServer(TaggedStruct, frozen=True, kw_only=True):
    """Send a version to an inference server of so many `ranks`, tensor by tensor."""

    publication_id: int
    digest: str
    member: bytes
    ranks: int


class Begun(TaggedStruct, frozen=True, kw_only=True):
    """The trainer sends to the server. With `unique_id`, NCCL's, it does so in a new
    group, which the server must join.
    """

    unique_id: bytes


class Sent(TaggedStruct, frozen=True, kw_only=True):
    """The server has received all bytes."""


OfGroup = Join | Gathered | Alone | JoinServer | Begun | Sent
decode = decoder_of(OfGroup | Request | Raw | RawRanges | KeepAlive | Refused)


async def next_answer(channel: Channel, *kinds: type[T]) -> T:
    """Return the trainer's next message but keep-alives. Raises FetchError unless it is
    of one of these kinds.
    """
    while True:
        message, _ = await channel.receive()
        if isinstance(message, kinds):
            return message
        if isinstance(message, Refused):
            raise FetchError(message.reason, f"the trainer refused: {message.error}")
        if not isinstance(message, KeepAlive):
            raise FetchError("broken", f"the trainer sent {type(message).__name__}")
