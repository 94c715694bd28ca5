"""The entropy coding inside a delta block: a sequence of small unsigned integers as byte planes, each plane by zstd or raw.

Invariants: `unpack` gives what `pack` took, or raises `DeltaError`; it allocates no more than its caller's bound on the count,
whatever the bytes claim.
"""

import struct
import threading
from typing import Any

import numpy as np
import zstandard

from rollweave.schema.errors import DeltaError

Array = np.ndarray[Any, np.dtype[Any]]

PLANE = struct.Struct("<II")
"""Of a plane: its bytes decoded, and as they stand here; equal where they are raw."""

LEVEL = 1
"""zstd's. Nearly all of the gain is its Huffman stage: the planes hold hardly any repetition for higher levels to find."""

SMALLEST = 32
"""Bytes of the shortest plane that is compressed; headers eat the gain of shorter ones."""

_local = threading.local()  # zstd contexts may not be shared between threads


def compress(data: bytes) -> bytes:
    """A plane: raw where zstd gains nothing."""
    if len(data) >= SMALLEST:
        if not hasattr(_local, "compressor"):
            _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        packed = _local.compressor.compress(data)
        if len(packed) < len(data):
            return PLANE.pack(len(data), len(packed)) + packed
    return PLANE.pack(len(data), len(data)) + data


class Reader:
    """Takes planes off a body, in order."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def plane(self, *, most: int) -> Array:
        """The next plane's bytes, of which there may be `most`. Raises DeltaError."""
        if len(self._body) < PLANE.size:
            raise DeltaError("delta block: a plane is missing")
        nbytes, stored = PLANE.unpack_from(self._body)
        data, self._body = self._body[PLANE.size : PLANE.size + stored], self._body[PLANE.size + stored :]
        if nbytes > most or stored > nbytes or len(data) < stored:
            raise DeltaError(f"delta block: a plane claims {nbytes} bytes in {stored}, of at most {most} in {len(data)}")
        if stored == nbytes:
            return np.frombuffer(data, dtype=np.uint8)
        try:
            if zstandard.frame_content_size(data) != nbytes:
                raise DeltaError(f"delta block: a plane does not decode to the {nbytes} bytes that it claims")
            if not hasattr(_local, "decompressor"):
                _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            return np.frombuffer(_local.decompressor.decompress(data), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise DeltaError(f"delta block: {error}") from error

    def end(self) -> None:
        """Raises DeltaError where bytes are left."""
        if self._body:
            raise DeltaError(f"delta block: {len(self._body)} bytes too many")


def pack(values: Array) -> bytes:
    """Unsigned integers as byte planes, least significant first."""
    columns = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize)
    return b"".join(compress(columns[:, place].tobytes()) for place in range(values.dtype.itemsize))


def unpack(reader: Reader, dtype: np.dtype[Any], *, most: int) -> Array:
    """What `pack` took, at most `most` integers of `dtype`. Raises DeltaError."""
    planes = [reader.plane(most=most) for _ in range(dtype.itemsize)]
    columns = np.empty((len(planes[0]), dtype.itemsize), dtype=np.uint8)
    for place, plane in enumerate(planes):
        if len(plane) != len(columns):
            raise DeltaError(f"delta block: planes of {len(columns)} and {len(plane)} bytes do not belong together")
        columns[:, place] = plane
    return columns.view(dtype).reshape(-1)


def pack_positions(positions: Array) -> bytes:
    """Rising positions as the gaps between them, in bytes: 255 means that 255 are to be added to the next one."""
    gaps = np.diff(positions, prepend=-1) - 1
    long = gaps // 255
    symbols = np.full(len(gaps) + int(long.sum()), 255, dtype=np.uint8)
    symbols[np.cumsum(long + 1) - 1] = gaps % 255
    return compress(symbols.tobytes())


def unpack_positions(reader: Reader, *, count: int, below: int) -> Array:
    """What `pack_positions` took: `count` positions below `below`. Raises DeltaError."""
    symbols = reader.plane(most=count + below // 255 + 1)
    last = symbols != 255
    positions = np.cumsum(symbols + last, dtype=np.int64)[last] - 1
    if len(positions) != count or (count and positions[-1] >= below):
        raise DeltaError(f"delta block: {len(positions)} positions, not the {count} below {below} that it claims")
    return positions
