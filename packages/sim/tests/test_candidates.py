"""Candidates of `rollweave advise`, and the choice among their predictions."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema.config.rollout import ModeName
from rollweave_sim.candidates import (
    DEGREES,
    MACHINE,
    MOST_SPLITS,
    TRAINERS,
    Candidate,
    EngineGroup,
    Pacing,
    Prediction,
    Split,
    candidates,
    divided,
    limit,
    listed,
    screened,
    splits,
    survivors,
    trainer_counts,
)
from tests.support.properties import examples

SYNC = Pacing(mode=ModeName.SYNC)
PACINGS = [
    SYNC,
    Pacing(mode=ModeName.ONE_STEP),
    Pacing(mode=ModeName.BOUNDED, alpha=1),
    Pacing(mode=ModeName.BOUNDED, alpha=2),
]


def prediction(step_s: float, **fields: object) -> Prediction:
    nothing = {"staleness": 0.0, "stalest": 0, "engines": {}, "trainer": {}}
    seconds = dict.fromkeys(("step_s", "fastest_s", "slowest_s"), step_s)
    shares = {"step_tokens": 1.0, "kv_used": 0.0, "dropped": 0.0}
    made: dict[str, Any] = {**nothing, **seconds, **shares, **fields}
    return Prediction(**made)


def candidate(trainer: int, pacing: Pacing) -> Candidate:
    group = EngineGroup(pool="", count=16 - trainer, degree=1)
    return Candidate(split=Split(pool="", trainer=trainer, engines=(group,)), pacing=pacing)


ALL = [candidate(trainer, pacing) for trainer in range(1, 7) for pacing in PACINGS]
PREDICTED = st.dictionaries(
    st.sampled_from(ALL), st.integers(1, 6).map(float).map(prediction), min_size=1
)


@settings(max_examples=examples(50))
@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.sampled_from(DEGREES), unique=True))
def test_splits_are_all_that_use_the_gpus(gpus: int, least: int, degrees: list[int]) -> None:
    divisions = splits({"": gpus}, {"": degrees}, {"": least})
    counts = trainer_counts(gpus - 1, least)
    apart = [
        (trainer, degree)
        for trainer, degree in itertools.product(counts, degrees)
        if trainer < gpus and (gpus - trainer) % degree == 0
    ]
    in_turn = [(gpus, degree) for degree in degrees if gpus % degree == 0 and least <= gpus]
    shown = [
        (split.trainer, group.degree)
        for split in divisions
        for group in split.engines
        if not split.colocated
    ]
    assert sorted(shown) == sorted(apart)
    assert sorted(
        (split.trainer, split.engines[0].degree) for split in divisions if split.colocated
    ) == sorted(in_turn)
    for split in divisions:
        used = sum(group.gpus for group in split.engines)
        assert used == (gpus if split.colocated else gpus - split.trainer)


@settings(max_examples=examples(50))
@given(st.integers(1, 300), st.integers(1, 300))
def test_trainers_have_parts_of_a_machine_or_whole_ones(gpus: int, least: int) -> None:
    counts = trainer_counts(gpus, least)
    assert len(counts) <= MOST_SPLITS
    assert counts == sorted(set(counts))
    for count in counts:
        assert least <= count <= gpus
        assert count in TRAINERS or count % MACHINE == 0 or count == gpus - MACHINE // 2
    possible = [n for n in range(least, gpus + 1) if n in TRAINERS or n % MACHINE == 0]
    if possible:
        assert counts[0] <= possible[0]


def test_engines_of_two_pools_have_all_that_the_trainer_leaves() -> None:
    divisions = splits({"a": 8, "b": 4}, {"a": [2], "b": [1, 2]}, {"a": 4})
    assert {split.pool for split in divisions} == {"a"}
    assert not any(split.colocated for split in divisions)
    engines = {
        (split.trainer, tuple((one.pool, one.count, one.degree) for one in split.engines))
        for split in divisions
    }
    assert engines == {
        (4, (("a", 2, 2), ("b", 2, 2))),
        (4, (("a", 2, 2), ("b", 4, 1))),
        (6, (("a", 1, 2), ("b", 2, 2))),
        (6, (("a", 1, 2), ("b", 4, 1))),
        (8, (("b", 2, 2),)),
        (8, (("b", 4, 1),)),
    }


def test_all_gpus_may_be_as_many_as_the_trainer_needs() -> None:
    (only,) = [one for one in splits({"": 8}, {"": [1]}, {"": 8}) if one.colocated]
    assert only.trainer == 8


def test_all_but_half_a_machine_may_train() -> None:
    assert MACHINE == 8
    assert 20 - 4 in trainer_counts(20, 1)
    assert 22 - 4 in trainer_counts(22, 1)


def test_gpus_take_turns_only_in_mode_sync() -> None:
    divisions = candidates(splits({"": 8}, {"": [1]}, {"": 4}), PACINGS)
    assert {one.pacing for one in divisions if one.split.colocated} == {SYNC}
    assert {one.pacing for one in divisions if not one.split.colocated} == set(PACINGS)


@settings(max_examples=examples(50))
@given(st.dictionaries(st.sampled_from(ALL), st.integers(1, 5).map(float)), st.integers(0, 30))
def test_screening_takes_the_best_of_every_pacing_in_turn(
    estimates: dict[Candidate, float], most: int
) -> None:
    kept = screened(estimates, most)
    assert len(kept) == len(set(kept)) == min(most, len(estimates))
    for one, other in itertools.product(kept, estimates.keys() - set(kept)):
        if one.pacing == other.pacing:
            assert estimates[one] <= estimates[other]
    counts = {
        pacing: (
            sum(one.pacing == pacing for one in kept),
            sum(one.pacing == pacing for one in estimates),
        )
        for pacing in PACINGS
    }
    for few, many in itertools.product(counts.values(), counts.values()):
        assert few[0] == few[1] or many[0] <= few[0] + 1


@settings(max_examples=examples(50))
@given(PREDICTED, st.integers(1, 8))
def test_the_fastest_survive_and_no_pacing_is_lost(
    predictions: dict[Candidate, Prediction], most: int
) -> None:
    kept = survivors(predictions, most)
    assert len(kept) == len(set(kept))
    assert {one.pacing for one in kept} == {one.pacing for one in predictions}
    seconds = sorted(one.step_s for one in predictions.values())
    assert [predictions[one].step_s for one in kept][:most] == seconds[:most]
    for pacing in {one.pacing for one in predictions}:
        assert min(predictions[one].step_s for one in kept if one.pacing == pacing) == min(
            predictions[one].step_s for one in predictions if one.pacing == pacing
        )


@settings(max_examples=examples(50))
@given(PREDICTED, st.integers(1, 6))
def test_answers_have_the_fastest_and_the_best_synchronous_one(
    predictions: dict[Candidate, Prediction], count: int
) -> None:
    chosen = listed(predictions, count)
    assert 1 <= len(chosen) == len(set(chosen)) <= count
    fastest = min(one.step_s for one in predictions.values())
    in_sync = [one for one in predictions if one.synchronous]
    if count > 1 or not in_sync:
        assert predictions[chosen[0]].step_s == fastest
    if in_sync:
        assert min(predictions[one].step_s for one in chosen if one.synchronous) == min(
            predictions[one].step_s for one in in_sync
        )
    for pacing in PACINGS:
        assert sum(one.pacing == pacing for one in chosen) <= 2


@pytest.mark.parametrize(
    ("engines", "trainer", "kv_used", "cause"),
    [
        ({"busy": 0.9, "window": 0.1}, {"busy": 0.4, "batch": 0.6}, 0.2, "engines"),
        ({"busy": 0.9, "window": 0.1}, {"busy": 0.4, "batch": 0.6}, 0.9, "kv"),
        ({"busy": 0.3, "window": 0.7}, {"busy": 0.95, "batch": 0.05}, 0.9, "trainer"),
        ({"busy": 0.2, "environment": 0.6}, {"busy": 0.1}, 0.1, "environment"),
        ({"busy": 0.3, "stragglers": 0.4, "training": 0.3}, {"busy": 0.3}, 0.1, "stragglers"),
        ({"busy": 0.2, "window": 0.8}, {"busy": 0.3, "batch": 0.7}, 0.1, "window"),
        ({"busy": 0.4, "window": 0.6}, {"busy": 0.6, "batch": 0.4}, 0.1, "trainer"),
        ({"busy": 0.2, "weights": 0.5}, {"busy": 0.3}, 0.1, "weights"),
    ],
)
def test_the_limit_is_the_part_with_the_most_time(
    engines: dict[str, float], trainer: dict[str, float], kv_used: float, cause: str
) -> None:
    figures = prediction(1.0, engines=engines, trainer=trainer, kv_used=kv_used)
    assert limit(figures) == cause


@settings(max_examples=examples(50))
@given(count=st.integers(1, 40))
def test_engines_of_one_pool_are_divided_by_shares(count: int) -> None:
    whole = Split(pool="", trainer=1, engines=(EngineGroup(pool="", count=count, degree=2),))
    ways = divided(whole)
    prompts = {max(1, round(share * count)) for share in (0.25, 0.5, 0.75)}
    assert {way.engines[0].count for way in ways} == {one for one in prompts if one < count}
    for way in ways:
        assert [group.phase for group in way.engines] == ["prefill", "decode"]
        assert sum(group.gpus for group in way.engines) == whole.gpus_of("") - 1
        assert (way.trainer, way.pool) == (1, "")


def test_engines_of_two_pools_are_divided_by_pool() -> None:
    groups = tuple(EngineGroup(pool=pool, count=2, degree=1) for pool in ("h20", "h800"))
    ways = divided(Split(pool="h800", trainer=1, engines=groups))
    assert [[group.phase for group in way.engines] for way in ways] == [
        ["prefill", "decode"],
        ["decode", "prefill"],
    ]
    assert divided(Split(pool="", trainer=4, engines=groups[:1], colocated=True)) == []
