"""Attempts of a lost controller continue only with weights that survive, and only while
their staleness allows.
"""

import itertools

import pytest

from rollweave.core.policy.continuation import may_continue, surviving_version
from rollweave.core.policy.modes import preset
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.work import Purpose


@pytest.mark.parametrize(
    ("checkpoint", "warms_up", "version"),
    [(7, False, 7), (7, True, 7), (0, True, 0), (None, False, 0), (None, True, -1)],
)
def test_weights_after_the_checkpoint_are_lost(
    checkpoint: int | None, warms_up: bool, version: int
) -> None:
    assert surviving_version(checkpoint, warms_up=warms_up) == version


@pytest.mark.parametrize("name", ModeName)
def test_an_attempt_continues_within_the_window(name: ModeName) -> None:
    mode = preset(name, alpha=2)
    windows = {"sync": 0, "one_step": 1, "stream": 1, "partial": 2, "bounded": 2}
    for initiated, launch, ahead in itertools.product(range(6), range(6), range(4)):
        trained_at = launch + ahead
        if name is ModeName.DECOUPLED:
            expected = initiated == launch and ahead <= 2
        else:
            expected = initiated <= launch and trained_at - initiated <= windows[name]
        assert expected == may_continue(
            initiated, launch=launch, next_version=trained_at, mode=mode, purpose=Purpose.TRAIN
        ), (initiated, launch, trained_at)


@pytest.mark.parametrize("name", ModeName)
def test_only_training_bounds_the_staleness_of_what_continues(name: ModeName) -> None:
    """An episode has the one version that is evaluated."""
    mode = preset(name, alpha=1)
    for initiated, launch in itertools.product(range(4), range(4)):
        episode, rollout = (
            may_continue(initiated, launch=launch, next_version=9, mode=mode, purpose=purpose)
            for purpose in (Purpose.EVAL, Purpose.SERVE)
        )
        assert (episode, rollout) == (initiated == launch, True)


def test_decoupled_without_a_maximum_age_needs_only_the_same_weights() -> None:
    mode = preset(ModeName.DECOUPLED)
    train = Purpose.TRAIN
    assert may_continue(2, launch=2, next_version=99, mode=mode, purpose=train)
    assert not may_continue(2, launch=3, next_version=3, mode=mode, purpose=train)
