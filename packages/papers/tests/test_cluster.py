"""Set-ups become the described runs, measurements cover the requested steps, and
workload changes are isolated.
"""

import math
import statistics

import pytest

from rollweave.schema.work import StopReason
from rollweave_papers.cluster import (
    ExperimentError,
    GaussianSteps,
    NarrowOutputs,
    ScaledSteps,
    Setup,
    SlowStarts,
    pace,
    ratio_of,
    rollout_s,
)
from rollweave_sim.cost import TrainerCost
from rollweave_sim.hardware import gpu, link, model
from rollweave_sim.training import passes_of
from rollweave_sim.workload import Plan, Workload, workload
from rollweave_sim.world import costs_of

SMALL = Setup(
    model="qwen3-8b",
    tasks=("gem-math",),
    context=32_768,
    rollout_gpus=2,
    trainer_gpus=8,
    batch=16,
    group_size=4,
)


class Failing:
    """A workload in which every environment fails at its start."""

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = workload("gem-math").plan(index=index, member=member, attempt=attempt, seed=seed)
        return Plan(
            prompt_tokens=plan.prompt_tokens,
            init_s=1.0,
            turns=(),
            reward_s=0.0,
            reward=0.0,
            success=False,
            stop=StopReason.ENV_ERROR,
            fails_in="init",
        )


def test_a_set_up_is_a_run() -> None:
    config = SMALL.but(
        rollout_gpus=8, tp=4, gpu="h20", mode="bounded", alpha=3, rollout={"spare_groups": 2}
    ).config(steps=5)
    assert (
        config.engines[0].count,
        config.rollout.groups_per_step,
        config.rollout.max_running,
    ) == (2, 4, 16)
    assert (config.rollout.mode, config.rollout.alpha, config.rollout.spare_groups) == (
        "bounded",
        3,
        2,
    )
    assert config.sim is not None
    assert (config.sim.gpu, config.engines[0].degree) == ("h20", 4)
    passes = passes_of(config)
    assert passes.forwards == 2, "the log-probs before the step, and the reference's"
    h800 = TrainerCost(
        gpu=gpu("h800"), model=model("qwen3-8b"), gpus=8, link=link("rdma"), passes=passes
    )
    trainer = costs_of(config)[1]
    assert trainer.step_s(tokens=10_000, context=1) == h800.step_s(tokens=10_000, context=1)


@pytest.mark.parametrize("mode", ["sync", "one_step", "partial", "bounded"])
def test_a_pace_is_measured_over_full_steps(mode: str) -> None:
    pace_ = pace(SMALL.but(mode=mode), steps=2)
    starts = [line["at"] for line in pace_.outcome.steps]
    assert pace_.step_s == pytest.approx((starts[2] - starts[0]) / 2)
    tokens = sum(line["batch_tokens"] for line in pace_.outcome.steps[1:3])
    assert pace_.tokens_per_s == pytest.approx(tokens / (starts[2] - starts[0]))
    assert all(line["trajectories"] == SMALL.batch for line in pace_.outcome.steps)


def test_more_engines_roll_out_faster_and_repetitions_are_equal() -> None:
    few = rollout_s(SMALL.but(rollout_gpus=1, batch=64), steps=2)
    assert few == rollout_s(SMALL.but(rollout_gpus=1, batch=64), steps=2)
    assert rollout_s(SMALL.but(rollout_gpus=8, batch=64), steps=2) < few


def test_a_run_that_ends_early_gives_no_result() -> None:
    with pytest.raises(ExperimentError, match="no attempt at gem-math has started its environment"):
        pace(SMALL, steps=1, vary=lambda work: Failing())


def _plans(work: Workload) -> list[Plan]:
    return [
        work.plan(index=index, member=member, attempt=0, seed=0)
        for index in range(50)
        for member in range(4)
    ]


def test_gaussian_steps() -> None:
    base = workload("webshop")
    plans = _plans(GaussianSteps(base, mean_s=10.0, sigma_s=2.0))
    seconds = [turn.env_s for plan in plans for turn in plan.turns]
    assert statistics.fmean(seconds) == pytest.approx(10.0, rel=0.02)
    assert statistics.stdev(seconds) == pytest.approx(2.0, rel=0.05)
    assert [[turn.output_tokens for turn in plan.turns] for plan in plans] == [
        [turn.output_tokens for turn in plan.turns] for plan in _plans(base)
    ]
    assert (
        min(
            turn.env_s
            for plan in _plans(GaussianSteps(base, mean_s=1.0, sigma_s=9.0))
            for turn in plan.turns
        )
        == 0.0
    )


def test_scaled_steps() -> None:
    base = workload("swe")
    for plan, slow in zip(_plans(base), _plans(ScaledSteps(base, factor=2.0)), strict=True):
        assert [turn.env_s * 2 for turn in plan.turns] == [turn.env_s for turn in slow.turns]
        assert (plan.init_s, plan.reward_s) == (slow.init_s, slow.reward_s)


def test_narrow_outputs_have_the_same_mean_and_less_spread() -> None:
    base = workload("gem-game")
    logs = []
    for work in (base, NarrowOutputs(base, factor=0.5)):
        plans = [work.plan(index=i, member=0, attempt=0, seed=0) for i in range(300)]
        outputs = [turn.output_tokens for plan in plans for turn in plan.turns]
        logs.append((statistics.fmean(outputs), statistics.stdev(map(math.log, outputs))))
    (mean, spread), (narrow_mean, narrow_spread) = logs
    assert narrow_mean == pytest.approx(mean, rel=0.01)
    assert narrow_spread == pytest.approx(spread / 2, rel=0.01)


def test_slow_starts() -> None:
    base = workload("gem-math")
    pairs = list(zip(_plans(base), _plans(SlowStarts(base, rate=0.25, seconds=300.0)), strict=True))
    delays = [slow.init_s - plan.init_s for plan, slow in pairs]
    assert set(map(round, delays)) == {0, 300}
    assert sum(map(round, delays)) / 300 / len(delays) == pytest.approx(0.25, abs=0.08)
    assert all(plan.turns == slow.turns for plan, slow in pairs)


def test_kinds_of_gpus_are_pools_that_tasks_prefer() -> None:
    setup = Setup(
        model="qwen3-14b",
        tasks=("frozenlake", "gem-math", "webshop"),
        context=8192,
        rollout_gpus=0,
        trainer_gpus=8,
        batch=8,
        tp=2,
        kinds={"h800": 8, "h20": 4},
        prefers={"gem-math": "h20", "frozenlake": "h800"},
    )
    config = setup.config(steps=1)
    assert [(group.pool, group.count) for group in config.engines] == [("h800", 4), ("h20", 2)]
    assert [task.pool for task in config.tasks] == ["h800", "h20", None]
    engines, _ = costs_of(config)
    assert engines.keys() == {("h800", 2), ("h20", 2)}
    assert engines["h800", 2].kv_tokens < engines["h20", 2].kv_tokens, "80 and 96 GB"


def test_training_may_take_longer_and_nothing_else_does() -> None:
    """A synchronous step is a rollout, which stays, and training."""
    plain, longer = (pace(SMALL, steps=1, training=factor) for factor in (1.0, 5.0))
    trained = [one.outcome.steps[0]["trainer"]["train_s"] for one in (plain, longer)]
    assert trained[1] == pytest.approx(5 * trained[0])
    assert longer.step_s - plain.step_s == pytest.approx(trained[1] - trained[0], abs=0.01)
    assert plain.outcome.steps[0]["at"] == longer.outcome.steps[0]["at"]


def test_a_ratio_is_that_of_means_with_the_range_of_each_seed() -> None:
    assert ratio_of([2.0, 6.0], [4.0, 4.0]) == (1.0, (0.5, 1.5))
    assert ratio_of([2.0], [4.0]) == (0.5, None)
