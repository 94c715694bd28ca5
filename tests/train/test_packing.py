"""Every target appears once, only attention's grid is padded, and micro-batches stay
within their bounds.
"""

import itertools
from collections.abc import Iterable

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from rollweave.train.packing import FREE, Example, families, pack, split_micro_batches
from rollweave.train.passes import divide
from tests.support.properties import examples


@st.composite
def example_lists(draw: st.DrawFn) -> list[Example]:
    """Draw sequences, some of which begin with parts of one sequence."""
    drawn = []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.integers(2, 9) | st.integers(50, 200))
        common = draw(st.just(0) | st.integers(0, length))
        targets = draw(st.sets(st.integers(1, length - 1), min_size=1))
        tokens = torch.cat([torch.arange(common), torch.arange(common, length) + 1000 * number])
        drawn.append(Example(tokens=tokens, targets=torch.tensor(sorted(targets))))
    return drawn


def beginnings(sequences: Iterable[torch.Tensor]) -> int:
    """Return the number of different beginnings of the sequences: the rows that are
    computed if each common beginning is computed once.
    """
    return len({tuple(row[:end].tolist()) for row in sequences for end in range(1, len(row) + 1)})


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
    inputs = [e.tokens[: int(e.targets[-1])] for e in listed]
    total, different = sum(map(len, inputs)), beginnings(inputs)
    assert len(packed.tokens) == (different if total - different >= 0.1 * total else total)
    assert packed.longest == max(map(len, inputs))


@settings(max_examples=examples(80))
@given(listed=example_lists())
def test_grids_map_rows_there_and_back(listed: list[Example]) -> None:
    """Each line of a grid reads its sequence, and each row has a cell to be taken
    from.
    """
    packed = pack(listed)
    keys, width = packed.keys, packed.longest
    assert torch.equal(keys.rows[keys.flat], torch.arange(len(packed.tokens)))
    for line, example in enumerate(listed):
        length = int(example.targets[-1])
        read = packed.tokens[keys.rows.view(-1, width)[line, :length]]
        assert torch.equal(read, example.tokens[:length])
        assert keys.positions[line].tolist() == [*range(length), *[0] * (width - length)]
    lengths = [int(example.targets[-1]) for example in listed]
    cells = [line * width + at for line, length in enumerate(lengths) for at in range(length)]
    is_shared = len(packed.tokens) < len(cells)
    assert (keys.cells.tolist() if keys.cells is not None else None) == (
        cells if is_shared else None
    )
    assert keys.dense == (not is_shared and len(cells) == keys.positions.numel())
    queries = packed.queries
    assert torch.equal(queries.rows[queries.flat], packed.predicting)
    places = torch.cat([example.targets - 1 for example in listed])
    assert torch.equal(queries.positions.flatten()[queries.flat], places)
    assert queries.dense == (len(queries.flat) == queries.positions.numel())


def test_routes_that_are_replayed_belong_to_a_sequence() -> None:
    tokens, routes = torch.arange(9), torch.ones(9, 2, 1, dtype=torch.int16)
    plain = Example(tokens, torch.tensor([8]))
    assert len(pack([plain, plain]).tokens) == 8
    packed = pack([Example(tokens, torch.tensor([8]), routes), plain])
    assert len(packed.tokens) == 16
    assert packed.routes is not None
    assert packed.routes.flatten().tolist() == [1] * 16 + [FREE] * 16


def apart(lengths: Iterable[int]) -> list[torch.Tensor]:
    """Return sequences without a common beginning."""
    return [torch.arange(length) + 1000 * number for number, length in enumerate(lengths)]


@settings(max_examples=examples(100))
@given(lengths=st.lists(st.integers(1, 60), max_size=30), max_tokens=st.integers(1, 100))
def test_micro_batches_stay_within_their_bounds(lengths: list[int], max_tokens: int) -> None:
    batches = split_micro_batches(apart(lengths), max_tokens=max_tokens)
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


@settings(max_examples=examples(100))
@given(listed=example_lists(), max_tokens=st.integers(1, 400), share=st.booleans())
def test_common_beginnings_count_once_and_half_for_each_further_sequence(
    listed: list[Example], max_tokens: int, share: bool
) -> None:
    tokens = [example.tokens for example in listed]
    batches = split_micro_batches(tokens, max_tokens=max_tokens, share=share)
    assert sorted(index for batch in batches for index in batch) == list(range(len(listed)))
    for batch in batches:
        chosen = [tokens[index] for index in batch]
        total = sum(map(len, chosen))
        counted = (total + beginnings(chosen)) / 2 if share else total
        assert counted <= max_tokens or len(chosen) == 1
        assert 2 * total >= max(map(len, chosen)) * len(chosen)


def test_micro_batches_are_filled_to_their_bounds() -> None:
    assert split_micro_batches(apart([2, 3]), max_tokens=5) == [[0, 1]]
    assert split_micro_batches(apart([2, 3]), max_tokens=4) == [[0], [1]]
    assert split_micro_batches(apart([1, 1, 4]), max_tokens=9) == [[0, 1, 2]], "half is padding"
    assert split_micro_batches(apart([1, 1, 5]), max_tokens=9) == [[0, 1], [2]]


def test_answers_to_a_prompt_are_computed_together() -> None:
    prompts = [torch.arange(20) + 100 * number for number in range(3)]
    answers = [
        torch.cat([prompt, torch.full((2 + turn,), 900 + turn)])
        for turn in range(3)
        for prompt in prompts
    ]
    alike = [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert split_micro_batches(answers, max_tokens=50) == alike
    assert split_micro_batches(answers, max_tokens=50, share=False) != alike
    assert families(answers) == [(members, 20 + 2 + 3 + 4) for members in alike]
    assert divide(answers, 3, share=True) == alike
    for groups in (answers[::3], answers[::3] + answers[1::3]):
        assert all(divide(groups, 2 * len(groups) // 3, share=True)), "no rank is idle"
    assert families(apart([5, 5])) == [([0], 5), ([1], 5)]
    halves = [torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 5, 6])]
    assert families(halves) == [([0], 4), ([1], 4)], "half of a sequence is too little"


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
