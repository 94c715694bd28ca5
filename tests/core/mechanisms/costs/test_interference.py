"""Cost tables: what they refuse, the monotone fit against its formula, and simulated
groups against a token-by-token one.
"""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.papers.benchmarks.placement.whole_lists import simulated_s
from rollweave.core.mechanisms.costs.interference import (
    FILLINGS,
    CostTable,
    step_times,
    tabulate,
)
from rollweave.schema.events import StepTime
from tests.support.properties import examples


def affine(
    batches: Sequence[int], *, fixed: float = 10.0, each: float = 0.5
) -> tuple[StepTime, ...]:
    return tuple(StepTime(batch=batch, seconds=fixed + each * batch) for batch in batches)


SAMPLES = st.lists(
    st.builds(StepTime, batch=st.integers(1, 12), seconds=st.floats(0.5, 5.0)),
    min_size=2,
    max_size=10,
).filter(lambda some: len({one.batch for one in some}) > 1)


def test_a_table_gives_seconds_by_degree_and_size() -> None:
    table = CostTable({2: [0.5, 0.5, 0.75], 1: [1.0, 1.5, 2.0]})
    assert table.degrees == (1, 2)
    assert table.largest == 3
    assert table.at(2, 3) == 0.75
    assert table.at(1, 1) == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({}, "at least one degree, got none"),
        ({0: [1.0]}, "degree must be at least 1, got 0"),
        ({1: []}, r"seconds\[1\] must have at least one group size"),
        ({1: [[1.0, 2.0]]}, r"seconds\[1\] must have at least one group size, got shape"),
        ({1: [1.0, 0.0]}, r"seconds\[1\] must be finite and positive, got 0.0 for group size 2"),
        ({1: [math.nan]}, r"seconds\[1\] must be finite and positive, got nan"),
        ({2: [1.0, math.inf]}, r"seconds\[2\] must be finite and positive, got inf"),
        (
            {1: [1.0, 3.0, 2.0]},
            r"seconds\[1\] must not fall as the group grows, got 2.0 after 3.0 for group size 3",
        ),
        ({1: [1.0], 2: [1.0, 2.0]}, "same group size for every degree"),
    ],
)
def test_a_table_that_means_nothing_is_refused(seconds: dict[int, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CostTable(seconds)


@pytest.mark.parametrize(
    ("degree", "size", "words"),
    [(4, 1, "degree must be one of"), (1, 0, "size must be"), (1, 3, "size must")],
)
def test_nothing_is_read_outside_a_table(degree: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CostTable({1: [1.0, 2.0]}).at(degree, size)


@given(SAMPLES)
def test_the_monotone_fit_is_the_nearest_one(measured: list[StepTime]) -> None:
    """The fit at a measured batch is the greatest over starts before it of the least
    over ends after it of the mean between (min-max).
    """
    batches = sorted({one.batch for one in measured})
    values = {batch: [one.seconds for one in measured if one.batch == batch] for batch in batches}
    fitted = step_times(measured, largest=batches[-1])

    def mean(first: int, last: int) -> float:
        return float(
            np.mean([value for batch in batches[first : last + 1] for value in values[batch]])
        )

    for index, batch in enumerate(batches):
        nearest = max(
            min(mean(first, last) for last in range(index, len(batches)))
            for first in range(index + 1)
        )
        assert fitted[batch - 1] == pytest.approx(nearest)


@given(SAMPLES, st.integers(1, 40))
def test_step_times_never_fall(measured: list[StepTime], largest: int) -> None:
    fitted = step_times(measured, largest=largest)
    assert len(fitted) == largest
    assert (np.diff(fitted) >= -1e-12).all()


def test_step_times_extrapolate_linearly() -> None:
    fitted = step_times(affine([2, 4, 16]), largest=40)
    assert fitted[1:] == pytest.approx(10 + 0.5 * np.arange(2, 41))
    assert fitted[0] == fitted[1]


def test_beyond_the_largest_batch_the_slope_is_that_of_the_upper_half() -> None:
    measured = [StepTime(batch=b, seconds=s) for b, s in [(1, 1.0), (5, 2.0), (7, 3.0), (9, 10.0)]]
    assert step_times(measured, largest=12)[8:].tolist() == [10.0, 12.0, 14.0, 16.0]


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ([], "two different batches"),
        (
            [StepTime(batch=2, seconds=1.0), StepTime(batch=2, seconds=1.5)],
            "two different batches to reach a batch of 4",
        ),
        ([StepTime(batch=0, seconds=1.0)], "batches of at least 1"),
        ([StepTime(batch=1, seconds=0.0)], "finite positive seconds"),
        ([StepTime(batch=1, seconds=math.inf)], "finite positive seconds"),
        ([StepTime(batch=1, seconds=-1.0)], "finite positive seconds"),
    ],
)
def test_a_profile_that_means_nothing_is_refused(measured: list[StepTime], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step_times(measured, largest=4)


def test_one_batch_is_enough_for_an_engine_of_one_slot() -> None:
    assert step_times([StepTime(batch=1, seconds=2.0)], largest=1).tolist() == [2.0]


def token_by_token(lengths: Sequence[int], step_s: Sequence[float]) -> float:
    """A group on a worker of len(step_s) slots: each step every member of the batch
    gains a token.
    """
    waiting, running, total = sorted(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < len(step_s):
            running.append(waiting.pop())
        total += step_s[len(running) - 1]
        running = [left - 1 for left in running if left > 1]
    return total


@given(
    st.lists(st.lists(st.integers(1, 15), max_size=9), min_size=1, max_size=3), st.integers(1, 5)
)
def test_a_simulated_placement_is_that_of_every_token(groups: list[list[int]], slots: int) -> None:
    measured = [
        StepTime(batch=batch, seconds=second)
        for batch, second in enumerate([1.0, 1.5, 1.5, 3.0, 3.5], start=1)
    ]
    slow = max(token_by_token(group, [one.seconds for one in measured[:slots]]) for group in groups)
    assert simulated_s(
        [(1, group) for group in groups], profile={1: measured}, slots={1: slots}
    ) == pytest.approx(slow)


@pytest.mark.parametrize("sample", ["runs", "spread"])
def test_equal_lengths_cost_the_step_of_their_batch_and_then_queue(sample: str) -> None:
    table = tabulate(
        {1: affine([1, 4, 8])}, lengths=[100] * 40, slots={1: 8}, largest=32, sample=sample
    )  # type: ignore[arg-type]
    assert [table.at(1, size) for size in (1, 3, 8)] == pytest.approx([10.5, 11.5, 14.0])
    assert table.at(1, 16) == pytest.approx(2 * 14.0, rel=0.02)
    assert table.at(1, 32) == pytest.approx(4 * 14.0, rel=0.02)


def test_company_that_ends_soon_costs_little_in_a_spread_and_much_in_a_run() -> None:
    """One in ten is long: an even sample's short members leave soon, but a placement
    puts the long ones together.
    """
    lengths = [1000] * 10 + [10] * 90
    spread = tabulate(
        {1: affine([1, 64])}, lengths=lengths, slots={1: 64}, largest=100, sample="spread"
    )
    runs = tabulate({1: affine([1, 64])}, lengths=lengths, slots={1: 64}, largest=100)
    together = simulated_s([(1, [1000] * 10)], profile={1: affine([1, 64])}, slots={1: 64}) / 1000
    assert spread.at(1, 10) < 0.85 * together
    assert runs.at(1, 10) == pytest.approx(together, rel=0.02)


@settings(max_examples=examples(40))
@given(
    st.lists(st.floats(1.0, 1e4), min_size=1, max_size=60),
    SAMPLES,
    st.integers(1, 20),
    st.integers(1, 200),
    st.sampled_from(["runs", "spread"]),
)
def test_tables_from_any_measurement_are_tables(
    lengths: list[float], measured: list[StepTime], slots: int, largest: int, sample: str
) -> None:
    table = tabulate(
        {1: measured}, lengths=lengths, slots={1: slots}, largest=largest, sample=sample
    )  # type: ignore[arg-type]
    assert table.largest == largest
    assert table.at(1, 1) == pytest.approx(step_times(measured, largest=1 if slots == 1 else 2)[0])


@settings(max_examples=examples(40))
@given(st.integers(1, 8), st.floats(0.0, 2.0), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_long_queues_are_nearly_those_of_every_member(
    slots: int, sigma: float, extra: int, seed: int
) -> None:
    """Beyond FILLINGS members a slot, the table levels the queue; here by the longest
    run, all of `lengths`.
    """
    size = FILLINGS * slots + extra
    lengths = np.random.default_rng(seed).lognormal(5.0, sigma, size=size).tolist()
    table = tabulate({1: affine([1, 8])}, lengths=lengths, slots={1: slots}, largest=size)
    followed = simulated_s([(1, lengths)], profile={1: affine([1, 8])}, slots={1: slots}) / max(
        lengths
    )
    before = max(table.at(1, smaller) for smaller in range(1, size))
    assert table.at(1, size) == pytest.approx(max(followed, before), rel=0.5 / FILLINGS)


def test_a_group_of_more_than_all_trajectories_takes_each_several_times() -> None:
    profile = {1: affine([1, 4])}
    table = tabulate(profile, lengths=[4, 8], slots={1: 4}, largest=4)
    twice = simulated_s([(1, [8, 8, 4, 4])], profile=profile, slots={1: 4})
    assert table.at(1, 4) == pytest.approx(twice / 8)


def test_the_smallest_table_has_one_size() -> None:
    table = tabulate({1: affine([1, 4])}, lengths=[4, 8], slots={1: 4}, largest=1)
    assert (table.largest, table.at(1, 1)) == (1, 10.5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"largest": 0}, "largest must be at least 1, got 0"),
        ({"lengths": []}, "lengths must have at least one trajectory"),
        ({"lengths": [3.0, 0.0]}, "lengths must be finite and positive, got 0.0 at index 1"),
        ({"slots": {2: 4}}, "slots must be at least 1 for every degree, got 0 for degree 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changed: dict[str, object], words: str) -> None:
    good: dict[str, object] = {"lengths": [3.0, 5.0], "slots": {1: 4}, "largest": 3}
    with pytest.raises(ValueError, match=words):
        tabulate({1: affine([1, 4])}, **(good | changed))  # type: ignore[arg-type]


def test_a_degree_without_a_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="degree must be one of the profile's"):
        simulated_s([(2, [1.0])], profile={1: affine([1, 4])}, slots={1: 4, 2: 4})


def test_interpolated_times_are_near_simulated_ones() -> None:
    lengths = np.random.default_rng(0).lognormal(8.0, 1.0, size=1000)
    profile = {1: affine([1, 8, 64])}
    table = tabulate(
        profile, lengths=lengths.tolist(), slots={1: 64}, largest=1000, sample="spread"
    )
    ordered = np.sort(lengths)[::-1]
    greatest = 0.0
    for size in range(1, 1001):
        members = ordered[((np.arange(size) + 0.5) * (1000 / size)).astype(int)]
        greatest = max(
            greatest,
            simulated_s([(1, members.tolist())], profile=profile, slots={1: 64}) / members[0],
        )
        assert table.at(1, size) == pytest.approx(greatest, rel=0.05)
