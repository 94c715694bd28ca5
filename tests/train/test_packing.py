"""Every target appears once, only attention's grid is padded, and micro-batches stay
within their bounds.
"""

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from rollweave.train.packing import Example, pack, split_micro_batches
from tests.support.properties import examples


@st.composite
def example_lists(draw: st.DrawFn) -> list[Example]:
    drawn = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(2, 9) | st.integers(50, 200))
        targets = draw(st.sets(st.integers(1, length - 1), min_size=1))
        drawn.append(
            Example(
                tokens=torch.arange(length) + 1000 * len(drawn),
                targets=torch.tensor(sorted(targets)),
            )
        )
    return drawn


@settings(max_examples=examples(80))
@given(listed=example_lists())
def test_labels_follow_their_inputs(listed: list[Example]) -> None:
    packed = pack(listed)
    expected = [
        (int(e.tokens[t - 1]), int(e.tokens[t])) for e in listed for t in e.targets.tolist()
    ]
    assert (
        list(zip(packed.tokens[packed.predicting].tolist(), packed.labels.tolist(), strict=True))
        == expected
    )
    inputs = [int(e.targets[-1]) for e in listed]
    assert len(packed.tokens) == sum(inputs)
    assert packed.longest == max(inputs)


@settings(max_examples=examples(80))
@given(listed=example_lists())
def test_grids_map_rows_there_and_back(listed: list[Example]) -> None:
    packed = pack(listed)
    for grid, rows in (
        (packed.keys, torch.arange(len(packed.tokens))),
        (packed.queries, packed.predicting),
    ):
        assert torch.equal(grid.rows[grid.flat], rows)
        assert grid.dense == (len(grid.flat) == grid.positions.numel())
        sequence = torch.arange(grid.positions.numel())[grid.flat] // grid.positions.shape[1]
        starts = torch.tensor([0, *(int(e.targets[-1]) for e in listed[:-1])]).cumsum(0)
        assert torch.equal(grid.positions.flatten()[grid.flat] + starts[sequence], rows)


@settings(max_examples=examples(100))
@given(lengths=st.lists(st.integers(1, 60), max_size=30), max_tokens=st.integers(1, 100))
def test_micro_batches_stay_within_their_bounds(lengths: list[int], max_tokens: int) -> None:
    batches = split_micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        chosen = [lengths[index] for index in batch]
        assert sum(chosen) <= max_tokens or len(chosen) == 1
        assert 2 * sum(chosen) >= max(chosen) * len(chosen)
    for batch, following in itertools.pairwise(batches):
        joined = [lengths[index] for index in (*batch, following[0])]
        assert joined == sorted(joined)
        padded = 2 * sum(joined) < max(joined) * len(joined)
        assert sum(joined) > max_tokens or padded, "no micro-batch is closed early"


def test_micro_batches_are_filled_to_their_bounds() -> None:
    assert split_micro_batches([2, 3], max_tokens=5) == [[0, 1]]
    assert split_micro_batches([2, 3], max_tokens=4) == [[0], [1]]
    assert split_micro_batches([1, 1, 4], max_tokens=9) == [[0, 1, 2]], "half is padding"
    assert split_micro_batches([1, 1, 5], max_tokens=9) == [[0, 1], [2]]


def test_a_packed_batch_moves_to_a_device_as_a_whole() -> None:
    listed = [Example(torch.arange(length), torch.tensor([1, length - 1])) for length in (4, 9)]
    packed = pack(listed)
    assert packed.to(torch.device("cpu")) is packed
    moved = packed.to(torch.device("meta"))
    assert moved.longest == packed.longest
    for before, after in [
        (packed, moved),
        (packed.keys, moved.keys),
        (packed.queries, moved.queries),
    ]:
        for name in before.__slots__:
            value = getattr(before, name)
            if isinstance(value, torch.Tensor):
                assert getattr(after, name).device.type == "meta"
                assert getattr(after, name).shape == value.shape
    assert (moved.keys.dense, moved.queries.dense) == (packed.keys.dense, packed.queries.dense)
