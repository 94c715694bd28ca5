"""Deltas reproduce every bit; truncated, damaged, forged or misplaced ones raise an
error and write nothing.
"""

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema.errors import DeltaError
from rollweave.schema.weights import TensorMeta
from rollweave.weights import delta
from rollweave.weights.delta import (
    BLOCK_BYTES,
    HEAD_BYTES,
    ITEMSIZES,
    apply,
    encode,
    plan,
)
from rollweave.weights.delta_body import DENSE, RAW, SPARSE, UNCHANGED, WHOLE
from tests.support.properties import examples
from tests.weights.slow_delta import slow_apply

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = {1: None, 2: np.float16, 4: np.float32, 8: np.float64}


def weights(rng: np.random.Generator, count: int, itemsize: int) -> Array:
    """Draw elements like those of a weight: normal floats, or any byte."""
    kind = FLOATS[itemsize]
    if kind is None:
        return rng.integers(0, 256, count, dtype=np.uint8)
    return rng.normal(0, 0.02, count).astype(kind).view(f"<u{itemsize}")


def changed(rng: np.random.Generator, base: Array, density: float, *, steps: int) -> Array:
    """Change some elements by up to `steps` integers, or to any value if `steps` is
    0.
    """
    new = base.copy()
    where = np.flatnonzero(rng.random(len(base)) < density)
    if steps:
        new[where] += rng.integers(-steps, steps, len(where), endpoint=True).astype(base.dtype)
    else:
        new[where] = np.frombuffer(rng.bytes(len(where) * base.itemsize), base.dtype)
    return new


def applied(block: bytes, base: Array) -> bytes:
    out = bytearray(base.nbytes)
    apply(block, base, out, itemsize=base.itemsize)
    return bytes(out)


def meta(name: str, count: int, itemsize: int, offset: int) -> TensorMeta:
    dtype = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}[itemsize]
    return TensorMeta(
        name=name, dtype=dtype, shape=(count,), offset=offset, nbytes=count * itemsize
    )


@settings(max_examples=examples(150))
@given(
    itemsize=st.sampled_from(ITEMSIZES),
    count=st.integers(0, 5000),
    density=st.sampled_from([0, 0.001, 0.01, 0.1, 0.4, 0.7, 1]),
    steps=st.sampled_from([0, 1, 3, 100]),
    smaller=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_change_decodes_as_the_format_describes(
    itemsize: int, count: int, density: float, steps: int, smaller: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = weights(rng, count, itemsize)
    new = changed(rng, base, density, steps=steps)
    block = encode(base, new, itemsize=itemsize, smaller=smaller)
    assert applied(block, base) == new.tobytes()
    assert slow_apply(block, base.tobytes()) == new.tobytes()
    assert len(block) <= HEAD_BYTES + new.nbytes
    in_place = bytearray(base.tobytes())
    apply(block, in_place, in_place, itemsize=itemsize)
    assert in_place == new.tobytes()


SPECIAL = [0, 1, 0x7F, 0x80, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x8000, 0x8001]
SPECIAL += [0xBC00, 0xFC00, 0xFC01, 0xFFFF]


def test_every_special_float_becomes_every_other() -> None:
    """Zeros of both signs, denormals, infinities and NaNs of float16 change among
    constant elements, and alone.
    """
    base = np.repeat(np.array(SPECIAL, "<u2"), len(SPECIAL))
    new = np.tile(np.array(SPECIAL, "<u2"), len(SPECIAL))
    still = np.zeros(4096, "<u2")
    for old, fresh in ((base, new), (np.append(base, still), np.append(new, still))):
        block = encode(old, fresh, itemsize=2)
        assert applied(block, old) == fresh.tobytes()
        assert slow_apply(block, old.tobytes()) == fresh.tobytes()


def test_every_pattern_of_a_byte_becomes_every_other() -> None:
    patterns = np.arange(256, dtype=np.uint8)
    base, new = np.repeat(patterns, 256), np.tile(patterns, 256)
    assert applied(encode(base, new, itemsize=1), base) == new.tobytes()
    for old, fresh in ((0x00, 0x80), (0x80, 0x00), (0x7F, 0xFF), (0xFF, 0x7F)):
        few, other = np.full(100, old, np.uint8), np.full(100, old, np.uint8)
        other[50] = fresh
        assert applied(encode(few, other, itemsize=1), few) == other.tobytes()


LAST = 131071


@pytest.mark.parametrize(
    "positions",
    [[0], [254], [255], [256], [65534], [65535], [65536], [0, LAST], [LAST], [510, 65535, 65790]],
)
@pytest.mark.parametrize("itemsize", [1, 8])
def test_encodes_gaps_of_any_length(positions: list[int], itemsize: int) -> None:
    base = np.zeros(LAST + 1, f"<u{itemsize}")
    new = base.copy()
    new[positions] = 1
    block = encode(base, new, itemsize=itemsize)
    assert applied(block, base) == new.tobytes()
    assert slow_apply(block, base.tobytes()) == new.tobytes()


def adam_like(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Return bfloat16 weights before and after steps of equal size, which change about
    one weight in a hundred.
    """
    weight = rng.normal(0, 0.02, count).astype(np.float32)
    moved = weight + rng.choice(np.array([-2e-7, 2e-7], np.float32), count)
    return (weight.view("<u4") >> 16).astype("<u2"), (moved.view("<u4") >> 16).astype("<u2")


def test_chooses_a_form_by_density() -> None:
    rng = np.random.default_rng(0)
    base = weights(rng, 1 << 16, 2)
    expected = {
        UNCHANGED: base,
        SPARSE: changed(rng, base, 0.01, steps=1),
        DENSE: changed(rng, base, 1, steps=8),
        WHOLE: weights(rng, len(base), 2),
        RAW: np.frombuffer(rng.bytes(base.nbytes), "<u2"),
    }
    sizes = []
    for form, new in expected.items():
        block = encode(base, new, itemsize=2)
        assert block[1] == form
        assert applied(block, base) == new.tobytes()
        sizes.append(len(block) - HEAD_BYTES)
    assert sizes[0] == 0
    assert sizes == sorted(sizes)
    assert sizes[-1] == base.nbytes


def test_a_form_is_tried_only_where_it_may_pay() -> None:
    rng, one = np.random.default_rng(0), np.ones(4000, np.uint8)
    base = rng.integers(0, 256, 4000).astype(np.uint8)
    new = base + (rng.random(4000) < 0.45) * rng.integers(1, 8, 4000).astype(np.uint8)
    cases = [(base, new, DENSE), (one[:63], 0 * one[:63], RAW), (one[:64], 0 * one[:64], DENSE)]
    cases += [((base % most), one, form) for most, form in ((12, DENSE), (16, WHOLE))]
    assert [encode(old, new, itemsize=1)[1] for old, new, _ in cases] == [
        form for *_, form in cases
    ]


def test_bytes_per_changed_element_stay_within_bounds() -> None:
    rng = np.random.default_rng(0)
    base, new = adam_like(rng, BLOCK_BYTES // 2)
    changes = np.count_nonzero(base != new)
    assert 0.005 < changes / len(base) < 0.015
    plain, smaller = (encode(base, new, itemsize=2, smaller=how) for how in (False, True))
    assert len(plain) < 1.3 * changes
    assert len(smaller) < 1.05 * changes
    assert applied(plain, base) == applied(smaller, base) == new.tobytes()


FROZEN_SPARSE = (
    "010102002b00000080000000b3e41f1355027cabac525b42e51d1d3f9c482670c97675cd508be68c00020000000102000000020000000303"
    "010000000100000006010000000100000006010000000100000000"
)
FROZEN_DENSE = (
    "010204006c000000e02e00004363720a56fa5ac01553422e028806d327214ee390d60515b6bdef1bb80b00001300000028b52ffd60b80a4d"
    "00001002020100b3f30116b80b00001300000028b52ffd60b80a4d00001000000100b3f30116b80b00001300000028b52ffd60b80a4d0000"
    "1000000100b3f30116b80b00001300000028b52ffd60b80a4d00001000000100b3f30116"
)


def test_the_format_is_frozen() -> None:
    """The blocks were written when the format was frozen."""
    base = np.arange(64, dtype="<u2")
    new = base.copy()
    new[[3, 7]] = 0x8004, 8
    assert applied(bytes.fromhex(FROZEN_SPARSE), base) == new.tobytes()
    wide = np.arange(0, 2 * 3000, 2, dtype="<u4")
    assert applied(bytes.fromhex(FROZEN_DENSE), wide) == (wide + 1).tobytes()


def test_refuses_sizes_that_differ() -> None:
    with pytest.raises(ValueError, match="one size up to"):
        encode(bytes(4), bytes(6), itemsize=2)
    with pytest.raises(ValueError, match="a multiple of 4"):
        encode(bytes(6), bytes(6), itemsize=4)
    with pytest.raises(ValueError, match="itemsize must be one of"):
        encode(bytes(6), bytes(6), itemsize=3)
    with pytest.raises(ValueError, match="one size up to"):
        encode(bytes(BLOCK_BYTES + 2), bytes(BLOCK_BYTES + 2), itemsize=2)


# Refusals.


def refused(
    block: bytes, base: Array, match: str, *, itemsize: int = 2, out_bytes: int | None = None
) -> None:
    out = bytearray(b"\xaa" * (base.nbytes if out_bytes is None else out_bytes))
    with pytest.raises(DeltaError, match=match):
        apply(block, base, out, itemsize=itemsize)
    assert set(out) <= {0xAA}


def samples() -> list[tuple[Array, bytes]]:
    """Return a block of every form, small enough to damage every bit."""
    rng = np.random.default_rng(1)
    base = weights(rng, 300, 2)
    news = [
        base,
        changed(rng, base, 0.05, steps=2),
        changed(rng, base, 1, steps=4),
        np.zeros(300, "<u2"),
        np.frombuffer(rng.bytes(600), "<u2"),
    ]
    return [(base, encode(base, new, itemsize=2)) for new in news]


def test_detects_any_flipped_bit() -> None:
    for base, block in samples():
        for bit in range(8 * len(block)):
            damaged = bytearray(block)
            damaged[bit // 8] ^= 1 << bit % 8
            refused(bytes(damaged), base, "delta block")


def test_detects_any_truncation() -> None:
    for base, block in samples():
        for size in range(len(block)):
            refused(block[:size], base, "delta block")
        refused(block + b"\0", base, "its head claims")


def test_detects_another_base() -> None:
    for base, block in samples():
        other = base.copy()
        other[-1] ^= 1
        refused(block, other, "another base")
        refused(block, base[:-1], "made for 600 bytes")
        refused(block, base, "made for 600 bytes", out_bytes=602)
        refused(block, base, "elements of 2 bytes, not of 4", itemsize=4)


def sealed(
    block: bytes, *, body: bytes | None = None, nbytes: int | None = None, form: int | None = None
) -> bytes:
    """Return the block with another body, and with matching checksums."""
    fields = list(delta.HEAD.unpack_from(block))
    body = block[HEAD_BYTES:] if body is None else body
    fields[1] = fields[1] if form is None else form
    fields[3], fields[7] = len(body), xxhash.xxh3_64_intdigest(body)
    fields[4] = fields[4] if nbytes is None else nbytes
    head = delta.HEAD.pack(*fields)
    return head + struct.pack("<I", xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF) + body


@settings(max_examples=examples(300))
@given(
    which=st.integers(0, 4),
    form=st.integers(0, 5),
    at=st.integers(0, 10**6),
    bytes_=st.binary(min_size=1, max_size=9),
)
def test_a_forged_body_raises_only_delta_errors(
    which: int, form: int, at: int, bytes_: bytes
) -> None:
    """Any body under matching checksums gives a DeltaError, or the result that the head
    names.
    """
    base, block = samples()[which]
    result = applied(block, base)
    body = block[HEAD_BYTES:]
    at %= len(body) + 1
    forged = sealed(
        block, body=(body[:at] + bytes_ + body[at + len(bytes_) :])[: base.nbytes], form=form
    )
    out = bytearray(base.nbytes)
    try:
        apply(forged, base, out, itemsize=2)
    except DeltaError:
        assert out == bytes(base.nbytes)
    else:
        assert out == result


def plane(claimed: int, data: bytes) -> bytes:
    return struct.pack("<II", claimed, len(data)) + data


HUGE = (1 << 32) - 1


def zeros(count: int, *, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=sized).compress(bytes(count))


CHANGES = struct.pack("<BIB", 0, 2, 1) + plane(2, b"\0\0")  # of two adjacent elements

BOMBS: dict[str, Callable[[], tuple[int, bytes]]] = {
    "a plane of 4 GiB": lambda: (WHOLE, plane(HUGE, b"x")),
    "a frame of 1 GiB": lambda: (WHOLE, plane(300, zeros(1 << 30)[:200])),
    "a whole frame of 4 MiB": lambda: (WHOLE, plane(1 << 22, zeros(1 << 22))),
    "a frame that does not say": lambda: (WHOLE, plane(300, zeros(1 << 26, sized=False)[:200])),
    "changes of 4 GiB": lambda: (SPARSE, struct.pack("<BIB", 0, HUGE, 1)),
    "gaps of 4 GiB": lambda: (SPARSE, struct.pack("<BIB", 0, 3, 1) + plane(HUGE, b"x")),
    "wide gaps": lambda: (SPARSE, struct.pack("<BIB", 0, 3, 8) + plane(3, b"abc")),
    "limits without end": lambda: (SPARSE, b"\xff" * 40),
    "a position beyond the end": lambda: (
        SPARSE,
        struct.pack("<BIB", 0, 2, 1) + plane(3, b"\xff\xff\0"),
    ),
    "planes of two lengths": lambda: (WHOLE, plane(300, bytes(300)) + plane(299, bytes(299))),
    "too few elements": lambda: (WHOLE, 2 * plane(299, bytes(299))),
    "a plane longer than it claims": lambda: (WHOLE, plane(300, bytes(301))),
    "no steps": lambda: (SPARSE, CHANGES + plane(0, b"")),
    "too few long steps": lambda: (SPARSE, CHANGES + plane(1, b"\x0a") + 2 * plane(1, b"\0")),
    "a change too few": lambda: (SPARSE, struct.pack("<BIB", 0, 3, 1) + CHANGES[6:]),
    "a body of another form": lambda: (RAW, b"x" * 10),
    "no such form": lambda: (9, b""),
}


@pytest.mark.parametrize("name", BOMBS)
def test_claims_beyond_the_block_allocate_nothing(name: str) -> None:
    base, block = samples()[1]
    form, body = BOMBS[name]()
    forged = sealed(block, body=body, form=form)
    tracemalloc.start()
    try:
        refused(forged, base, "delta block")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_refuses_a_head_that_claims_too_much() -> None:
    base, block = samples()[1]
    refused(sealed(block, nbytes=BLOCK_BYTES + 2), base, "claims")
    refused(sealed(block, body=bytes(base.nbytes + 1)), base, "claims")
    refused(sealed(block, nbytes=601), base, "claims")


# Payloads.


@st.composite
def layouts(draw: Callable[..., Any]) -> tuple[list[TensorMeta], int]:
    """Draw tensors laid out like those of `weights.publication`, packed closer, or from
    any byte on, some empty; and the payload's size.
    """
    metas, offset = [], 0
    aligned = draw(st.sampled_from([0, 1, 64]))
    for number in range(draw(st.integers(0, 6))):
        itemsize = draw(st.sampled_from(ITEMSIZES))
        count = draw(st.sampled_from([0, 1, 7, 1000, BLOCK_BYTES // itemsize, BLOCK_BYTES + 3]))
        offset += -offset % math.lcm(aligned, itemsize) if aligned else draw(st.integers(0, 3))
        metas.append(meta(f"t{number}", count, itemsize, offset))
        offset += count * itemsize
    return metas, offset + draw(st.sampled_from([0, 5]))


@settings(max_examples=examples(200))
@given(layouts())
def test_a_plan_covers_every_byte_once_and_divides_no_element(
    layout: tuple[list[TensorMeta], int],
) -> None:
    metas, nbytes = layout
    spans = plan(metas, nbytes)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans)][: len(spans)]
    assert (spans[-1].stop if spans else 0) == nbytes
    for span in spans:
        assert 0 < span.stop - span.start <= BLOCK_BYTES
        assert (span.stop - span.start) % span.itemsize == 0
    for tensor in metas:
        for span in spans:
            if (
                tensor.nbytes
                and span.start < tensor.offset + tensor.nbytes
                and tensor.offset < span.stop
            ):
                assert span.itemsize == tensor.nbytes // tensor.shape[0]
                assert (span.start - tensor.offset) % span.itemsize == 0


def test_small_tensors_share_a_block() -> None:
    metas = [meta(f"t{number}", 100, 2, number * 256) for number in range(50)]
    assert plan(metas, 49 * 256 + 200) == (delta.Span(0, 49 * 256 + 200, 2),)
    scalar = TensorMeta(name="s", dtype="float32", shape=(), offset=0, nbytes=4)
    assert plan([scalar], 4) == (delta.Span(0, 4, 4),)
    assert plan([], 0) == ()
    shifted = plan([meta("t0", 1, 4, 0), meta("t1", 1, 4, 6)], 10)
    assert shifted == (delta.Span(0, 4, 4), delta.Span(4, 6, 1), delta.Span(6, 10, 4))


def test_refuses_tensors_that_do_not_fit() -> None:
    with pytest.raises(DeltaError, match="t1: overlaps"):
        plan([meta("t0", 10, 2, 0), meta("t1", 10, 2, 10)], 100)
    for shape, nbytes in (((0,), 4), ((3,), 4), ((-2,), 4), ((), -4)):
        with pytest.raises(DeltaError, match=r"t: .* do not hold shape"):
            plan([TensorMeta(name="t", dtype="float32", shape=shape, offset=0, nbytes=nbytes)], 100)
    with pytest.raises(DeltaError, match="t0: overlaps another one, or the payload's end at 19"):
        plan([meta("t0", 10, 2, 0)], 19)
