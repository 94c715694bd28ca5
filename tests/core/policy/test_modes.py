"""Modes: the presets, and when engines update."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.modes import (
    Mode,
    Update,
    acceptable,
    origin,
    parted,
    preset,
    staleness,
    update_now,
)
from rollweave.schema.config.rollout import ModeName
from tests.support.random_world import Lineage


@given(initiated=st.integers(0, 50), trained_at=st.integers(0, 50), window=st.integers(0, 5))
def test_staleness_is_the_distance_between_the_versions(
    initiated: int, trained_at: int, window: int
) -> None:
    assert acceptable(initiated, trained_at, window) == (staleness(initiated, trained_at) <= window)
    assert staleness(initiated, trained_at) == staleness(trained_at, initiated)
    assert acceptable(initiated, initiated, window)


@given(trained=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_staleness_counts_the_way_back_from_discarded_weights(
    trained: list[int], data: st.DataObject
) -> None:
    """Staleness is the way between two weights in the tree of all of them."""
    tree = Lineage()
    sampled: list[tuple[int, int, int | None]] = []  # weights, version, restored_to
    for steps in trained:
        for _ in range(steps):
            tree.trained()
            version = data.draw(st.integers(0, len(tree.current) - 1))
            sampled.append((tree.of(version), version, None))
        back = data.draw(st.integers(0, len(tree.current) - 1))
        tree.restored(back)
        sampled = [
            (weights, version, back if before is None else min(before, back))
            for weights, version, before in sampled
        ]
        step = len(tree.current) - 1
        for weights, version, restored_to in sampled:
            assert step - origin(version, restored_to) == tree.age(weights)


@given(trained=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data())
def test_a_launch_under_discarded_weights_counts_from_where_they_part(
    trained: list[int], data: st.DataObject
) -> None:
    """An engine may keep any published weights, while the trainer goes on and is
    restored again.
    """
    tree, next_id = Lineage(), 1
    published: list[tuple[int, int, int]] = [(tree.of(0), 0, 0)]  # weights, version, id
    restores: dict[int, int] = {}
    for steps in trained:
        for version in range(len(tree.current), len(tree.current) + steps):
            tree.trained()
            published.append((tree.of(version), version, next_id))
            next_id += 1
            for weights, launch, publication_id in published:
                restored_to = parted(restores, launch, publication_id)
                assert version - origin(launch, restored_to) == tree.age(weights)
        back = data.draw(st.integers(0, len(tree.current) - 1))
        tree.restored(back)
        restores[next_id] = back
        published.append((tree.of(back), back, next_id))
        next_id += 1


def test_the_presets_are_those_of_the_design() -> None:
    assert preset(ModeName.SYNC, 9) == Mode(window=0, update=Update.AT_ONCE)
    assert preset(ModeName.ONE_STEP, 9) == Mode(window=1, update=Update.ROLLED_OUT)
    assert preset(ModeName.STREAM, 9) == Mode(window=1, update=Update.ROLLED_OUT, streamed=True)
    assert preset(ModeName.PARTIAL, 9) == Mode(window=9, update=Update.AT_ONCE, aborts=False)
    assert preset(ModeName.BOUNDED, 9) == Mode(window=9, update=Update.AT_ONCE)
    paper = preset(ModeName.BOUNDED, 9, early_updates=False)
    assert paper == Mode(window=9, update=Update.ROLLED_OUT)


@pytest.mark.parametrize(
    ("update", "batch_ready", "in_flight", "too_old", "expected"),
    [
        (Update.AT_ONCE, False, 5, False, True),
        (Update.ROLLED_OUT, False, 5, False, False),
        (Update.ROLLED_OUT, False, 0, False, True),
        (Update.ROLLED_OUT, True, 5, False, True),
        (Update.ROLLED_OUT, False, 5, True, True),
    ],
)
def test_when_engines_take_new_weights(
    update: Update, batch_ready: bool, in_flight: int, too_old: bool, expected: bool
) -> None:
    mode = Mode(window=1, update=update)
    assert (
        update_now(mode, batch_ready=batch_ready, in_flight=in_flight, too_old=too_old) is expected
    )
