"""The presets of scheduling and the settings that override them."""

from typing import Literal

import pytest

from rollweave.core.policy.scheduling import Scheduling, scheduling
from rollweave.schema.config.ablation import AblationConfig
from rollweave.schema.config.rollout import ModeName, RolloutConfig


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
    assert (overridden.priority, overridden.placement, overridden.migration) == (
        "longest_first",
        "partition",
        "gain",
    )
    assert overridden.predicts
    assert overridden.preempts
    pinned = scheduling(
        RolloutConfig(scheduling="trajectory"), AblationConfig(policies=("pinned",))
    )
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
