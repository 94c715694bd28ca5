"""The presets of scheduling and the settings that override them."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.scheduling import (
    MARGIN,
    OVERTAKES,
    RANKS,
    RATIO,
    UNKNOWN,
    Scheduling,
    TurnView,
    is_overdue,
    level_of,
    overdue_rank,
    scheduling,
)
from rollweave.schema.config.rollout import ModeName, RolloutConfig
from rollweave.schema.config.run import AblationConfig
from tests.support.properties import examples


def view(**fields: float) -> TurnView:
    return TurnView(**{"launched_at": 0.0, "arrival": 0, "output_tokens": 0, "level": 0, **fields})


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("fcfs", {"launched_at": 1.0}, {"launched_at": 2.0}),
        ("round_robin", {"arrival": 3}, {"arrival": 4}),
        ("shortest_first", {"output_tokens": 10}, {"output_tokens": 11}),
        ("longest_first", {"level": 5}, {"level": 4}),
    ],
)
def test_each_priority_ranks_its_first_turn_higher(
    name: str, first: dict[str, float], then: dict[str, float]
) -> None:
    assert RANKS[name](view(**first)) > RANKS[name](view(**then))


@settings(max_examples=examples(200))
@given(tokens=st.floats(1, 1e6), wobble=st.floats(-0.09, 0.09))
def test_a_prediction_that_wobbles_keeps_its_level(tokens: float, wobble: float) -> None:
    """Hysteresis: less than the margin up or down from where the level was entered
    changes nothing.
    """
    level = level_of(tokens, None)
    assert level_of(tokens * RATIO ** (wobble * MARGIN / 0.1), level) == level
    assert level_of(tokens * RATIO**2, level) > level
    assert level_of(tokens / RATIO**2, level) < level or tokens < RATIO**2


@given(st.floats(1, 1e9))
def test_levels_grow_with_lengths_below_the_unknown(tokens: float) -> None:
    assert 0 <= level_of(tokens, None) <= level_of(2 * tokens, None) < UNKNOWN


def test_overdue_turns_outrank_all_and_come_in_order() -> None:
    assert overdue_rank(1) > overdue_rank(2) > RANKS["longest_first"](view(level=UNKNOWN))
    assert not is_overdue(OVERTAKES * 3, slots=3)
    assert is_overdue(OVERTAKES * 3 + 1, slots=3)


@pytest.mark.parametrize("placement", ["affinity", "least_load", "pinned", "partition"])
@pytest.mark.parametrize("priority", ["fcfs", "round_robin", "shortest_first", "longest_first"])
def test_derived_properties_of_the_choices(priority: str, placement: str) -> None:
    policies = Scheduling(priority=priority, placement=placement, migration="never")
    by_rank = placement == "partition"
    assert policies.by_rank is by_rank
    assert policies.predicts is (by_rank or priority == "longest_first")
    assert policies.preempts is (priority in ("shortest_first", "longest_first"))
    assert policies.assigns is (by_rank or placement == "pinned")
    assert policies.reserves_kv is (by_rank and priority in ("fcfs", "longest_first"))


def test_settings_override_presets() -> None:
    assert scheduling(RolloutConfig(), AblationConfig()).placement == "affinity"
    assert not scheduling(RolloutConfig(), AblationConfig()).predicts
    overridden = scheduling(RolloutConfig(scheduling="trajectory"), AblationConfig())
    expected = ("longest_first", "partition", "gain")
    assert (overridden.priority, overridden.placement, overridden.migration) == expected
    assert overridden.predicts
    assert overridden.preempts
    pinned = scheduling(RolloutConfig(scheduling="trajectory"), AblationConfig(changes=("pinned",)))
    assert pinned.migration == "never"
    assert pinned.assigns
    assert not pinned.by_rank


@pytest.mark.parametrize(("name", "priority"), [("turn", "fcfs"), ("trajectory", "longest_first")])
def test_in_mode_decoupled_a_preset_is_its_priority(
    name: Literal["turn", "trajectory"], priority: str
) -> None:
    """Engines launch trajectories by their weights, and consolidation moves them."""
    rollout = RolloutConfig(scheduling=name, mode=ModeName.DECOUPLED)
    expected = Scheduling(priority=priority, placement="pinned", migration="never")
    assert scheduling(rollout, AblationConfig()) == expected
