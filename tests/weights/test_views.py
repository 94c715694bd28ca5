"""A stored tensor and its parameter have the same elements, in full and in the rows of
a shard.
"""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.errors import WeightsError
from rollweave.weights.views import StoredTensors, View, contiguous_strides
from tests.support.properties import examples

SIZES = st.lists(st.integers(1, 4), max_size=3)


@settings(max_examples=examples(600))
@given(
    shape=SIZES,
    size=SIZES,
    first=st.sampled_from(["row", "row", "row", 0, 1, 2]),
    steps=st.lists(st.integers(0, 4), min_size=2, max_size=2),
    offset=st.integers(0, 20),
    cut=st.integers(0, 4),
)
def test_the_parts_of_shards_are_the_tensor(
    shape: list[int], size: list[int], first: int | str, steps: list[int], offset: int, cut: int
) -> None:
    row, count = math.prod(shape[1:]), size[0] if size else 1
    stride = [row if first == "row" else int(first), *steps][: len(size)]
    full = torch.arange(7 + math.prod(shape))[7:].view(shape)
    moves = itertools.product(*map(range, size))
    places = [sum(map(math.prod, zip(move, stride, strict=True))) for move in moves]
    if max(places) >= full.numel():
        return
    offset %= full.numel() - max(places)
    places = [offset + place for place in places]
    view = View(parameter="w", offset=offset, size=tuple(size), stride=tuple(stride))
    expected = full.reshape(-1)[places].reshape(size)
    assert torch.equal(view.of(full), expected)
    whole = view.part(shape, slice(0, shape[0] if shape else 1))
    assert (whole.rows, whole.offset) == (slice(0, count), offset)
    if not shape:
        return
    cut = min(cut, shape[0])
    inner = len(places) // count
    rows = [{place // row for place in places[n * inner : (n + 1) * inner]} for n in range(count)]
    try:
        parts = [view.part(shape, slice(*edges)) for edges in ((0, cut), (cut, shape[0]))]
    except WeightsError:
        assert len(set.union(*rows)) > 1, "one row is in one shard"
        assert stride[0] != row or max(map(len, rows)) > 1
        return
    assert sorted(n for part in parts for n in range(count)[part.rows]) == [*range(count)]
    for part, shard in zip(parts, (full[:cut], full[cut:]), strict=True):
        own = part.of(view, shard)
        assert own.shape[:1] == ((part.rows.stop - part.rows.start,) if size else ())
        if size or part.rows == slice(0, 1):
            assert torch.equal(own, expected[part.rows] if size else expected)


def test_the_error_names_the_shapes() -> None:
    with pytest.raises(WeightsError, match=r"of shape \(3, 2\) cannot be .* rows of w, \(3, 2\)"):
        View(parameter="w", offset=1, size=(3, 2), stride=(2, 1)).part((3, 2), slice(0, 1))


def test_only_all_parameters_under_their_names_are_identical() -> None:
    for shape in ((), (3,), (2, 3, 4)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()
    own = View(parameter="w", offset=0, size=(2, 3), stride=(3, 1))
    stored = StoredTensors.identical({"w": [2, 3], "v": [1]})
    assert (stored.views["w"], stored.is_identical) == (own, True)
    for name, offset, stride in (("v", 0, (3, 1)), ("w", 1, (3, 1)), ("w", 0, (1, 2))):
        other = View(parameter=name, offset=offset, size=(2, 3), stride=stride)
        assert not StoredTensors(views=stored.views | {"w": other}).is_identical
    constant = StoredTensors(views=stored.views, constants={"c": "buffer"})
    assert not constant.is_identical
    assert constant.of({"w"}) == StoredTensors(views={"w": own}, constants={"c": "buffer"})
