"""The body of a delta block: encodes the elements of one array relative to another
array.

Invariants: `decode` reproduces what was given to `encode`, for every bit pattern, or
raises `DeltaError`; it allocates at most a small multiple of the array's size, whatever
sizes the input claims. The forms are documented in `weights/delta`, where the format is
frozen.

A float is treated as an integer such that adjacent floats are adjacent integers: a
small change is then a small number, whatever the exponent. Positions dominate the cost:
with 1 % of the elements changed, a position has 8.1 bits of entropy, while the change
itself costs about 1.8 bits. Under the same learning rate small elements change more
often than large ones, because their floats lie closer together. Separating small and
large elements by the base, which both sides have, makes both cheaper (`smaller`).
"""

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from rollweave.schema.errors import DeltaError

Array = np.ndarray[Any, np.dtype[Any]]

FORMS = ("unchanged", "sparse", "dense", "whole", "raw")
UNCHANGED, SPARSE, DENSE, WHOLE, RAW = range(len(FORMS))

PLANE = struct.Struct("<II")
CHANGES = struct.Struct("<IB")
BYTE = struct.Struct("<B")

SHARES = (1 / 16, 1 / 128, 1 / 1024)
"""Shares of the elements that are treated as small.

Determined by experiment: more or other shares gain less than 2 %.
"""

SAMPLE_SIZE = 4096
"""Number of elements sampled to find the small elements: four times the inverse of the
smallest share.
"""

MIN_CHANGES = 1000
"""Minimum changes of a block for which separating small elements pays for the headers.
"""

WIDE_GAP = 512
"""Mean gap from which gaps take two bytes: beyond it, escapes in one byte cost more
than a second plane.
"""

PIECE_ELEMENTS = 1 << 18
"""Number of elements processed in one step where the whole array is not needed."""

MIN_PLANE_BYTES = 64
"""Minimum bytes of a plane to compress: for fewer, the headers cost more than is
gained.
"""

WINDOW_LOG = 17
"""Size of zstd's window, as a power of two: its largest block.

Planes hardly repeat: nearly all of the gain is in its Huffman codes.
"""

_local = threading.local()
"""Per-thread state: zstd's contexts, which must not be shared, and the array in which
blocks are assembled.
"""


def encode(old: Array, new: Array, *, smaller: bool) -> tuple[int, bytes]:
    """Encode `new` relative to `old`, both unsigned integers: return the shortest
    applicable form, and its body.
    """
    positions = _changed(old, new)
    if len(positions) == 0:
        return UNCHANGED, b""
    candidates: list[tuple[int, bytes]] = []
    if 2 * len(positions) <= len(new):
        candidates.append((SPARSE, _encode_sparse(old, new, positions, smaller=smaller)))
        if 4 * len(candidates[0][1]) <= new.nbytes:
            return candidates[0]
    candidates.append((DENSE, _pack_integers(differences_of(old, new))))
    if 2 * len(candidates[-1][1]) > new.nbytes:
        candidates += [(WHOLE, _pack_integers(new)), (RAW, new.tobytes())]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def decode(form: int, body: memoryview, old: Array) -> Array:
    """Decode the new elements, which are valid until this thread decodes again; `old`
    itself if nothing changed. Raises DeltaError.
    """
    reader = _Reader(body)
    if form == UNCHANGED:
        new = old
    elif form == SPARSE:
        new = _decode_sparse(reader, old)
    elif form == RAW:
        new = np.frombuffer(reader.take(old.nbytes), old.dtype)
    elif form in (DENSE, WHOLE):
        new = _unpack_integers(reader, old.dtype, most=len(old))
        if len(new) != len(old):
            raise DeltaError(f"delta block: {len(new)} elements, not {len(old)}")
        if form == DENSE:
            new = _add(old, new)
    else:
        raise DeltaError(f"delta block: form {form} is unknown")
    reader.end()
    return new


# Elements.


def _positions_where(count: int, test: Callable[[slice], Array]) -> Array:
    """Return the positions below `count` at which `test` is true.

    Works in pieces, because large temporary arrays would be paged in again at every
    call.
    """
    pieces = range(0, count, PIECE_ELEMENTS)
    return np.concatenate(
        [
            np.empty(0, np.intp),
            *(_nonzero(test(slice(at, at + PIECE_ELEMENTS))) + at for at in pieces),
        ]
    )


def _nonzero(mask: Array) -> Array:
    """Return the same as `np.flatnonzero`, for booleans. Tests words of eight booleans
    first, which is several times faster when few are set.
    """
    if 10 * np.count_nonzero(mask) > len(mask):
        return np.flatnonzero(mask)
    multiple = len(mask) & ~7
    words = mask[:multiple].view(np.uint64)
    nonzero = np.flatnonzero(words != 0)
    within = np.flatnonzero(words.take(nonzero).view(np.bool_))
    positions: Array = (nonzero.take(within >> 3) << 3) | (within & 7)
    return (
        positions
        if multiple == len(mask)
        else np.append(positions, np.flatnonzero(mask[multiple:]) + multiple)
    )


def _changed(old: Array, new: Array) -> Array:
    return _positions_where(len(old), lambda part: old[part] != new[part])


def _positions_below(bits: Array, limit: int) -> Array:
    return _positions_where(len(bits), lambda part: _magnitude(bits[part]) < limit)


def differences_of(old: Array, new: Array) -> Array:
    """Return distances, counted in floats modulo the number of floats, in zigzag order:
    0 is no change, 1 one float down, 2 one up, 3 two down, …
    """
    difference = (_ordered(new) - _ordered(old)).view(f"<i{old.itemsize}")
    return ((difference << 1) ^ (difference >> (8 * old.itemsize - 1))).view(old.dtype)


def _add(old: Array, differences: Array) -> Array:
    """Invert `differences_of`: return `new`."""
    one = differences.dtype.type(1)
    return _ordered(_ordered(old) + ((differences >> one) ^ -(differences & one)))


def _ordered(bits: Array) -> Array:
    """Convert sign and magnitude to two's complement, and back: a bijection that maps
    adjacent floats to adjacent integers.
    """
    signed = bits.view(f"<i{bits.itemsize}")
    ordered: Array = (
        signed ^ ((signed >> (8 * bits.itemsize - 1)) & np.iinfo(signed.dtype).max)
    ).view(bits.dtype)
    return ordered


def _magnitude(bits: Array) -> Array:
    """Return the elements without their signs, doubled."""
    doubled: Array = bits << bits.dtype.type(1)
    return doubled


def _scratch(like: Array) -> Array:
    """Return an array of this thread that is reused: a new one would be paged in each
    time.
    """
    if not hasattr(_local, "scratch") or len(_local.scratch) < like.nbytes:
        _local.scratch = np.empty(like.nbytes, np.uint8)
    scratch: Array = _local.scratch[: like.nbytes].view(like.dtype)
    return scratch


# Sparse: changed elements only, first the elements with a large base, then the small
# ones.


def _encode_sparse(old: Array, new: Array, positions: Array, *, smaller: bool) -> bytes:
    limits = _limits(old, positions) if smaller else []
    body = [struct.pack(f"<B{len(limits)}Q", len(limits), *limits)]
    for limit in limits:
        large = positions.take(np.flatnonzero(_magnitude(old.take(positions)) >= limit))
        body.append(
            _pack_changes(large, differences_of(old.take(large), new.take(large)), among=len(old))
        )
        small = _positions_below(old, limit)
        old, new = old.take(small), new.take(small)
        positions = _changed(old, new)
    body.append(
        _pack_changes(
            positions, differences_of(old.take(positions), new.take(positions)), among=len(old)
        )
    )
    return b"".join(body)


def _limits(old: Array, positions: Array) -> list[int]:
    """Return decreasing magnitudes below which elements are small; empty if small
    elements hardly change more often than others.
    """
    if len(positions) < MIN_CHANGES:
        return []
    sample = np.sort(_magnitude(old[:: -(-len(old) // SAMPLE_SIZE)]))
    limits = [int(sample[int(share * len(sample))]) for share in SHARES]
    often = np.count_nonzero(_magnitude(old.take(positions)) < limits[0])
    return limits if often > 2 * SHARES[0] * len(positions) else []


def _decode_sparse(reader: "_Reader", old: Array) -> Array:
    (count,) = reader.fields(BYTE)
    if count > len(SHARES):
        raise DeltaError(f"delta block: claims {count} limits")
    limits = reader.fields(struct.Struct(f"<{count}Q"))
    new, among = _scratch(old), old
    np.copyto(new, old)
    where: Array | None = None  # positions of `among` in all elements
    for limit in (*limits, None):
        positions, differences = _unpack_changes(reader, old.dtype, among=len(among))
        fresh = _add(among.take(positions), differences)
        new[positions if where is None else where.take(positions)] = fresh
        if limit is not None:
            small = _positions_below(among, limit)
            among, where = among.take(small), small if where is None else where.take(small)
    return new


def _pack_changes(positions: Array, differences: Array, *, among: int) -> bytes:
    """Pack changes at ascending positions below `among`; no difference is 0."""
    width = 1 if among < WIDE_GAP * len(positions) else 2
    head = CHANGES.pack(len(positions), width)
    return (
        head
        + _pack_integers(_gaps(positions, width))
        + _pack_steps(differences - differences.dtype.type(1))
    )


def _unpack_changes(reader: "_Reader", dtype: np.dtype[Any], *, among: int) -> tuple[Array, Array]:
    count, width = reader.fields(CHANGES)
    if count > among or width not in (1, 2):
        raise DeltaError(
            f"delta block: claims {count} changes among {among}, with gaps of {width} bytes"
        )
    longest = 256**width - 1
    gaps = _unpack_integers(reader, np.dtype(f"<u{width}"), most=count + among // longest)
    ends = gaps != longest
    positions = np.cumsum(gaps + ends, dtype=np.intp).take(np.flatnonzero(ends)) - 1
    if len(positions) != count or (count and positions[-1] >= among):
        raise DeltaError(
            f"delta block: {len(positions)} positions, not the {count} below {among} that it claims"
        )
    return positions, _unpack_steps(reader, dtype, count=count) + dtype.type(1)


def _gaps(positions: Array, width: int) -> Array:
    """Return the number of elements between each position and the one before it, in
    `width` bytes.

    The largest number is not a gap, but is added to the next number.
    """
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    longest = 256**width - 1
    if gaps.max(initial=0) < longest:
        return gaps.astype(f"<u{width}")
    long = gaps // longest
    symbols = np.full(len(gaps) + int(long.sum()), longest, dtype=f"<u{width}")
    symbols[np.cumsum(long + 1) - 1] = gaps - longest * long
    return symbols


def _pack_steps(steps: Array) -> bytes:
    """Pack differences less 1: 0 and 1 are one step down and up, 2 and 3 two steps, …
    Each byte holds four symbols of two bits, the sign and whether more follows. The
    remainders of long steps follow the symbols. A Huffman code spends whole bits per
    byte, so coding four symbols together loses little.
    """
    more = np.flatnonzero(steps > 1)
    symbols = np.zeros(-(-len(steps) // 4) * 4, dtype=np.uint8)
    symbols[: len(steps)] = (steps & 1).astype(np.uint8)
    symbols[more] |= 2
    four = symbols.view("<u4")
    return _pack_plane(
        (four | four >> 6 | four >> 12 | four >> 18).astype(np.uint8)
    ) + _pack_integers((steps.take(more) >> 1) - 1)


def _unpack_steps(reader: "_Reader", dtype: np.dtype[Any], *, count: int) -> Array:
    packed = reader.plane(most=-(-count // 4))
    if 4 * len(packed) < count:
        raise DeltaError(f"delta block: {len(packed)} bytes are not {count} steps")
    symbols = SYMBOLS_OF_BYTE.take(packed).view(np.uint8)[:count]
    steps: Array = (symbols & 1).astype(dtype)
    more = np.flatnonzero(symbols & 2)
    rest = _unpack_integers(reader, dtype, most=len(more))
    if len(rest) != len(more):
        raise DeltaError(f"delta block: {len(rest)} lengths of {len(more)} long steps")
    steps[more] |= (rest + dtype.type(1)) << dtype.type(1)
    return steps


SYMBOLS_OF_BYTE = (
    (np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3))
    .view("<u4")
    .reshape(-1)
)
"""The four symbols of each byte, one per byte."""


# Planes.


class _Reader:
    """Reads what was packed into a body, in order."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes. Raises DeltaError."""
        if len(self._body) < nbytes:
            raise DeltaError(f"delta block: claims {nbytes} bytes where it has {len(self._body)}")
        taken, self._body = self._body[:nbytes], self._body[nbytes:]
        return taken

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next fields. Raises DeltaError."""
        return layout.unpack(self.take(layout.size))

    def plane(self, *, most: int) -> Array:
        """Return the next plane, of at most `most` bytes. Raises DeltaError."""
        nbytes, stored = self.fields(PLANE)
        data = self.take(stored)
        if nbytes > most or stored > nbytes:
            raise DeltaError(
                f"delta block: a plane claims {nbytes} bytes, of at most {most}, in {stored}"
            )
        if stored == nbytes:
            return np.frombuffer(data, np.uint8)
        try:
            if zstandard.frame_content_size(data) != nbytes:
                raise DeltaError(
                    f"delta block: a plane does not hold the {nbytes} bytes that it claims"
                )
            return np.frombuffer(_decompressor().decompress(data), np.uint8)
        except zstandard.ZstdError as error:
            raise DeltaError(f"delta block: {error}") from error

    def end(self) -> None:
        """Raise DeltaError if bytes are left."""
        if self._body:
            raise DeltaError(f"delta block: {len(self._body)} trailing bytes")


def _pack_plane(plane: Array) -> bytes:
    """Pack bytes, compressed with zstd if that is smaller."""
    data = plane.tobytes()
    if len(data) >= MIN_PLANE_BYTES:
        packed: bytes = _compressor().compress(data)
        if len(packed) < len(data):
            return PLANE.pack(len(data), len(packed)) + packed
    return PLANE.pack(len(data), len(data)) + data


def _pack_integers(values: Array) -> bytes:
    """Pack one plane per byte of the integers, the least significant first."""
    columns = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return b"".join(_pack_plane(columns[:, place]) for place in range(values.itemsize))


def _unpack_integers(reader: _Reader, dtype: np.dtype[Any], *, most: int) -> Array:
    """Unpack at most `most` integers. Raises DeltaError."""
    planes = [reader.plane(most=most) for _ in range(dtype.itemsize)]
    columns = np.empty((len(planes[0]), dtype.itemsize), dtype=np.uint8)
    for place, plane in enumerate(planes):
        if len(plane) != len(columns):
            raise DeltaError(
                f"delta block: planes of {len(columns)} and {len(plane)} bytes do "
                "not belong together"
            )
        columns[:, place] = plane
    return columns.view(dtype).reshape(-1)


def _compressor() -> Any:
    if not hasattr(_local, "compressor"):
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=WINDOW_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return _local.compressor


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
    return _local.decompressor
