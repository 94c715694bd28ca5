"""Reads parts of a version from a relay as the parts become available there.

Invariants: no byte is received twice, and no byte that was not requested; a relay that
sends anything else, or refuses, causes a FetchError. The bytes are not verified here:
the caller compares the digest of the whole version.
"""

from collections.abc import Callable, Sequence

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.memory import Ranges
from rollweave.weights.protocol import FetchError, Message, Range, Raw, RawRanges, Refused, Request
from rollweave.weights.transport import Channel, Transport


async def pull(
    transport: Transport,
    address: RelayAddress,
    manifest: WeightManifest,
    ranges: Sequence[Range],
    into: Callable[[int, int], memoryview],
    *,
    on_piece: Callable[[int, int], None],
    on_channel: Callable[[Channel], None] = lambda channel: None,
) -> None:
    """Read `ranges` of a version into memory from `into`.

    `on_piece` is called with every range that was read, and `on_channel` once the relay
    is connected. Raises FetchError.
    """
    channel = await transport.connect(address)
    on_channel(channel)
    together = memoryview(b"")

    def allocate(message: Message, count: int) -> memoryview:
        nonlocal together
        if isinstance(message, RawRanges) and count == _check_ranges(message.ranges, missing):
            together = memoryview(bytearray(count))
            return together[:]
        if (
            not isinstance(message, Raw)
            or count != message.stop - message.start
            or missing.missing(message.start, message.stop)
        ):
            raise FetchError("broken", f"{count} bytes do not fit {message}")
        return into(message.start, message.stop)

    missing = Ranges()
    for part in ranges:
        missing.add(*part)
    try:
        await channel.send(
            Request(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                ranges=tuple(part for part in ranges if part[0] < part[1]),
            )
        )
        while list(missing):
            message, _ = await channel.receive(allocate)
            if isinstance(message, Refused):
                raise FetchError(message.reason, f"the relay refused: {message.error}")
            if isinstance(message, Raw):
                missing.remove(message.start, message.stop)
                on_piece(message.start, message.stop)
            elif isinstance(message, RawRanges):
                at = 0
                for low, high in message.ranges:
                    into(low, high)[:] = together[at : at + high - low]
                    missing.remove(low, high)
                    on_piece(low, high)
                    at += high - low
    finally:
        channel.close()


def _check_ranges(ranges: Sequence[Range], missing: Ranges) -> int:
    """Return the number of bytes in the ranges of one message. Raises FetchError
    (broken) if the ranges are not in order, or are not or no longer wanted.
    """
    end = 0
    for start, stop in ranges:
        if not end <= start < stop or missing.missing(start, stop):
            raise FetchError(
                "broken", f"bytes {start} to {stop} are not wanted, or were sent twice"
            )
        end = stop
    return sum(stop - start for start, stop in ranges)
