"""Deltas give back every bit, and refuse everything else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.codec.delta import ITEMSIZES, apply, encode


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ITEMSIZES), st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2**32))
def test_any_change_comes_out(itemsize: int, count: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = rng.bytes(count * itemsize)
    new = np.frombuffer(base, np.uint8).copy()
    changed = rng.random(len(new)) < density**3
    new[changed] = rng.integers(0, 256, changed.sum())
    block = encode(base, new, itemsize=itemsize)
    out = bytearray(len(base))
    apply(block, base, out, itemsize=itemsize)
    assert out == new.tobytes()


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="one size"):
        encode(bytes(4), bytes(6), itemsize=2)
