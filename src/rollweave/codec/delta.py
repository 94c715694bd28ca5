"""Bit-exact deltas between two versions of weights, block by block. Pure bytes: an element is an unsigned integer.

    encode(base, new, itemsize=2) -> block       apply(block, base, out, itemsize=2)
    encode_tensors(tensors, base, new) -> blocks of a whole payload, in its order: the stream is their concatenation
    Applier(tensors, base, out).feed(chunk)      takes the stream, cut anywhere

Invariants: `apply` gives the bytes that `encode` was shown, whatever they mean (NaN payloads, -0.0, denormals); it writes to
`out` only what it has verified, so `out` may be `base`; anything else raises `DeltaError` and has written nothing.

DRAFT: the wire format changes until this line is gone; the API stands.
"""

import itertools
import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rollweave.codec.delta_streams import Array, Reader, pack, pack_positions, unpack, unpack_positions
from rollweave.schema.errors import DeltaError
from rollweave.schema.weights import TensorMeta

Buffer = bytes | bytearray | memoryview | Any

FORMAT = 1
HEAD = struct.Struct("<BBBxIIQQ")
"""Format, mode, itemsize, bytes of the body, bytes of the result, xxh3-64 of the base and of the result."""
CHECK = struct.Struct("<Q")
"""After the head: xxh3-64 of the head and the body."""
HEAD_BYTES = HEAD.size + CHECK.size

UNCHANGED, SPARSE, DENSE, RAW = range(4)

BLOCK_BYTES = 1 << 20
ITEMSIZES = (1, 2, 4, 8)


class Span(NamedTuple):
    """Bytes `[start, stop)` of a payload that are one block, of elements of `itemsize` bytes."""

    start: int
    stop: int
    itemsize: int


def plan(tensors: Sequence[TensorMeta], nbytes: int, *, block_bytes: int = BLOCK_BYTES) -> tuple[Span, ...]:
    """The blocks of a payload of `nbytes`, in its order: they cover every byte once, the padding between tensors included.

    Neighbours of one element size share blocks, so that small tensors cost little. Raises DeltaError for tensors that overlap
    or reach beyond the payload.
    """
    runs: list[Span] = []
    for meta in sorted((meta for meta in tensors if meta.nbytes), key=lambda meta: meta.offset):
        itemsize = math.gcd(8, meta.nbytes // math.prod(meta.shape))
        start, end = meta.offset, runs[-1].stop if runs else 0
        if start < end or start + meta.nbytes > nbytes:
            raise DeltaError(f"tensor {meta.name}: overlaps another one, or the payload's end at {nbytes}")
        if runs and runs[-1].itemsize == itemsize and (start - end) % itemsize == 0:
            runs[-1] = runs[-1]._replace(stop=start + meta.nbytes)
            continue
        if start > end:
            runs.append(Span(end, start, 1))
        runs.append(Span(start, start + meta.nbytes, itemsize))
    end = runs[-1].stop if runs else 0
    if end < nbytes:
        runs.append(Span(end, nbytes, 1))
    return tuple(
        Span(start, min(start + block_bytes, run.stop), run.itemsize)
        for run in runs
        for start in range(run.start, run.stop, block_bytes)
    )


def encode(base: Buffer, new: Buffer, *, itemsize: int) -> bytes:
    """One block: what makes `new` out of `base`, which are of one size. Raises ValueError."""
    old_bytes, new_bytes = memoryview(base).cast("B"), memoryview(new).cast("B")
    _check_sizes(len(old_bytes), len(new_bytes), itemsize)
    dtype = np.dtype(f"<u{itemsize}")
    old, fresh = np.frombuffer(old_bytes, dtype), np.frombuffer(new_bytes, dtype)
    mode, body = _encode(old, fresh)
    head = HEAD.pack(
        FORMAT,
        mode,
        itemsize,
        len(body),
        len(new_bytes),
        xxhash.xxh3_64_intdigest(old_bytes),
        xxhash.xxh3_64_intdigest(new_bytes),
    )
    return head + CHECK.pack(xxhash.xxh3_64_intdigest(head + body)) + body


def apply(block: Buffer, base: Buffer, out: bytearray | memoryview | Any, *, itemsize: int) -> None:
    """Write to `out` what `block` makes out of `base`; `out` may be `base`. Raises DeltaError, and has written nothing."""
    data, old_bytes, target = memoryview(block).cast("B"), memoryview(base).cast("B"), memoryview(out).cast("B")
    mode, size, nbytes, base_hash, hash_ = _head(data, itemsize=itemsize)
    if size != len(data):
        raise DeltaError(f"delta block: {len(data)} bytes, its head says {size}")
    if len(old_bytes) != nbytes or len(target) != nbytes:
        raise DeltaError(f"delta block: for {nbytes} bytes, not for {len(old_bytes)} into {len(target)}")
    body = data[HEAD_BYTES:]
    digest = xxhash.xxh3_64(data[: HEAD.size])
    digest.update(body)
    if digest.intdigest() != CHECK.unpack_from(data, HEAD.size)[0]:
        raise DeltaError("delta block: damaged on the way")
    if xxhash.xxh3_64_intdigest(old_bytes) != base_hash:
        raise DeltaError("delta block: made from another base")
    fresh = _decode(mode, body, np.frombuffer(old_bytes, np.dtype(f"<u{itemsize}")))
    result = memoryview(fresh).cast("B")
    if xxhash.xxh3_64_intdigest(result) != hash_:
        raise DeltaError("delta block: does not give what it says")
    target[:] = result


def encode_tensors(
    tensors: Sequence[TensorMeta], base: Buffer, new: Buffer, *, first: int = 0, threads: int = 1
) -> Iterator[bytes]:
    """The blocks of `plan` from number `first` on, which make payload `new` out of payload `base`."""
    old, fresh = memoryview(base).cast("B"), memoryview(new).cast("B")
    spans = plan(tensors, len(fresh))[first:]

    def one(span: Span) -> bytes:
        return encode(old[span.start : span.stop], fresh[span.start : span.stop], itemsize=span.itemsize)

    if threads == 1:
        yield from map(one, spans)
        return
    with ThreadPoolExecutor(threads) as pool:
        rest, waiting = iter(spans), deque[Future[bytes]]()
        waiting.extend(pool.submit(one, span) for span in itertools.islice(rest, 2 * threads))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(one, span) for span in itertools.islice(rest, 1))


class Applier:
    """Turns a stream of blocks into a payload, as the stream comes. After a DeltaError it takes nothing more."""

    def __init__(
        self, tensors: Sequence[TensorMeta], base: Buffer, out: bytearray | memoryview | Any, *, first: int = 0
    ) -> None:
        """`out` may be `base`. `first` is the number of the first block to come."""
        self._base, self._out = memoryview(base).cast("B"), memoryview(out).cast("B")
        self._spans = plan(tensors, len(self._out))
        self._pending = bytearray()
        self.done = first
        """Blocks that stand in `out`, those before `first` included."""

    def feed(self, chunk: Buffer) -> int:
        """Take the next bytes of the stream; returns how many blocks stand in `out` now. Raises DeltaError."""
        self._pending += chunk
        view = memoryview(self._pending)
        start = 0
        try:
            while len(view) - start >= HEAD_BYTES:
                if self.done == len(self._spans):
                    raise DeltaError("delta: more bytes than the version has")
                span = self._spans[self.done]
                _, size, nbytes, _, _ = _head(view[start:], itemsize=span.itemsize)
                if nbytes != span.stop - span.start:
                    raise DeltaError(f"delta block {self.done}: for {nbytes} bytes, not for {span.stop - span.start}")
                if len(view) - start < size:
                    break
                part = slice(span.start, span.stop)
                apply(view[start : start + size], self._base[part], self._out[part], itemsize=span.itemsize)
                start += size
                self.done += 1
        finally:
            view.release()
        del self._pending[:start]
        return self.done

    def finish(self) -> None:
        """Raises DeltaError unless the stream was whole."""
        if self.done < len(self._spans) or self._pending:
            raise DeltaError(f"delta: torn after {self.done} of {len(self._spans)} blocks")


def _check_sizes(old: int, new: int, itemsize: int) -> None:
    if itemsize not in ITEMSIZES:
        raise ValueError(f"itemsize must be one of {ITEMSIZES}, got {itemsize}")
    if old != new or new % itemsize or new > BLOCK_BYTES:
        raise ValueError(f"base and new must be of one size up to {BLOCK_BYTES}, a multiple of {itemsize}, got {old} and {new}")


def _head(data: memoryview, *, itemsize: int) -> tuple[int, int, int, int, int]:
    """(mode, bytes of the whole block, bytes of the result, hashes of base and result). Raises DeltaError."""
    if len(data) < HEAD_BYTES:
        raise DeltaError(f"delta block: {len(data)} bytes are no head")
    format_, mode, size, body, nbytes, base_hash, hash_ = HEAD.unpack_from(data)
    if format_ != FORMAT or mode > RAW:
        raise DeltaError(f"delta block: format {format_}, mode {mode} are not known")
    if size != itemsize:
        raise DeltaError(f"delta block: elements of {size} bytes, not of {itemsize}")
    if nbytes > BLOCK_BYTES or nbytes % itemsize or body > nbytes:
        raise DeltaError(f"delta block: claims {body} bytes for {nbytes}")
    return mode, HEAD_BYTES + body, nbytes, base_hash, hash_


def _encode(old: Array, new: Array) -> tuple[int, bytes]:
    positions = np.flatnonzero(old != new)
    if len(positions) == 0:
        return UNCHANGED, b""
    sparse = pack(_difference(old[positions], new[positions])) + pack_positions(positions)
    if 2 * len(sparse) < new.nbytes:
        return SPARSE, sparse
    dense = pack(_difference(old, new))
    mode, body = min((SPARSE, sparse), (DENSE, dense), (RAW, new.tobytes()), key=lambda one: len(one[1]))
    return mode, body


def _decode(mode: int, body: memoryview, old: Array) -> Array:
    if mode == UNCHANGED:
        return old
    if mode == RAW:
        return np.frombuffer(body, old.dtype)
    reader = Reader(body)
    differences = unpack(reader, old.dtype, most=len(old))
    if mode == DENSE:
        if len(differences) != len(old):
            raise DeltaError("delta block: differences are missing")
        new = _add(old, differences)
    else:
        positions = unpack_positions(reader, count=len(differences), below=len(old))
        new = old.copy()
        new[positions] = _add(old[positions], differences)
    reader.end()
    return new


def _difference(old: Array, new: Array) -> Array:
    """How many floats apart, zigzag (0, -1, 1, -2, …): small numbers for small changes of either sign."""
    apart = (_ordered(new) - _ordered(old)).view(f"<i{old.itemsize}")
    return ((apart << 1) ^ (apart >> (8 * old.itemsize - 1))).view(old.dtype)


def _add(old: Array, differences: Array) -> Array:
    """The inverse of `_difference` in its second argument."""
    one = differences.dtype.type(1)
    apart = (differences >> one) ^ -(differences & one)
    return _ordered(_ordered(old) + apart)


def _ordered(bits: Array) -> Array:
    """Sign and magnitude to two's complement and back: neighbouring floats become neighbouring integers, every pattern another."""
    signed = bits.view(f"<i{bits.itemsize}")
    return (signed ^ ((signed >> (8 * bits.itemsize - 1)) & np.iinfo(signed.dtype).max)).view(bits.dtype)
