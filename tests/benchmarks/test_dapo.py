"""Variants that fill DAPO's batches on a virtual clock: all have the same prompts, and
use none twice.
"""

import itertools
import math

import pytest

from benchmarks.dapo.bench import GROUPS, SLOTS, TRAIN_S, VARIANTS, groups, in_rounds
from benchmarks.dapo.live import live_figures

STEPS = 6


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_on_informative_groups_of_the_same_prompts(name: str) -> None:
    run = VARIANTS[name](3, STEPS)
    known = set(itertools.islice(groups(3), STEPS * 10 * SLOTS))
    assert len(run.used) == len(set(run.used)) == STEPS * GROUPS
    assert all(group.informative and group in known for group in run.used)
    assert run.worked >= math.fsum(group.work() for group in run.used)
    assert run.seconds == pytest.approx(run.waited + STEPS * TRAIN_S)


def test_rounds_take_as_long_as_their_slowest_groups() -> None:
    drawn, seconds, informative = groups(1), 0.0, 0
    while informative < GROUPS:
        batch = [next(drawn) for _ in range(SLOTS)]
        seconds += max(max(group.times) for group in batch)
        informative += sum(group.informative for group in batch)
    assert in_rounds(SLOTS)(1, 1).seconds == pytest.approx(seconds + TRAIN_S)


def test_each_part_of_the_policy_reduces_waiting() -> None:
    waits = [
        VARIANTS[name](2, STEPS).waited
        for name in ("rounds", "rounds_oversampled", "early", "carried")
    ]
    assert waits == sorted(waits, reverse=True)


@pytest.mark.slow
def test_the_live_half_measures_every_variant() -> None:
    figures = live_figures(quick=True, progress=lambda _: None)
    names = {"rounds", "rounds_oversampled", "early", "carried", "carried_4"}
    assert set(figures) == {
        f"live_{what}_{name}" for what in ("step_s", "speedup") for name in names
    }
    assert all(isinstance(value, float) and value > 0 for value in figures.values())
