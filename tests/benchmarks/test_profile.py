"""Step times of an engine: every kind of step is sampled with its amounts, and
simulations can read the file.
"""

from pathlib import Path

import pytest

from benchmarks.engine.models import model_cases, random_model
from benchmarks.engine.profile import (
    Measurement,
    bench_profile,
    fit_figures,
    fitted,
    longest_context,
    sample_of,
)
from benchmarks.sim.fidelity import Computed, grid_of
from rollweave.engine.planner.batching import StepWork
from rollweave.sim.profile import Profile, ProfileCost, Sample
from rollweave.sim.workload import Plan, Recorded, TurnPlan


def test_simulations_read_a_profile(tmp_path: Path) -> None:
    random_model(model_cases(quick=True)[0]).save_pretrained(tmp_path / "model")
    result = bench_profile(tmp_path / "out" / "profile.json", tmp_path / "model", quick=True)
    cost = ProfileCost.from_json(tmp_path / "out" / "profile.json")
    assert cost.kv_tokens == 65536
    one = cost.step_s(prefill_tokens=0, prefill_context=0, decode=1, decode_context=100)
    assert (
        0
        < one
        <= cost.step_s(prefill_tokens=256, prefill_context=256 * 128, decode=1, decode_context=100)
    )
    assert isinstance(result.figures["samples"], int)
    assert result.figures["samples"] >= 10
    assert 0 < result.figures["core_share"] <= 1  # type: ignore[operator]
    assert isinstance(result.figures["slots"], int)
    assert 1 <= result.figures["slots"] <= 256
    assert min(len(result.figures[name]) for name in ("decode_s", "prefill_s")) >= 4  # type: ignore[arg-type]


def test_a_sample_is_the_mean_of_its_steps() -> None:
    steps = [(StepWork(0, 0, 4, 100), 0.25), (StepWork(0, 0, 4, 104), 0.75)]
    assert sample_of(steps) == Sample(
        prefill_tokens=0, prefill_context=0, decode=4, decode_context=102, seconds=0.5
    )


def test_slots_are_capped_by_throughput_and_by_kv() -> None:
    """A step takes 1 s, and 0.1 s for each sequence: 95 % of the throughput of 256."""
    samples = tuple(
        Sample(prefill_tokens=p, prefill_context=0, decode=d, decode_context=100 * d, seconds=s)
        for p, d, s in ((0, 1, 1.1), (0, 11, 2.1), (1, 0, 2.0), (1, 1, 2.1))
    )
    assert longest_context(Profile(kv_tokens=1, samples=samples)) == 100
    for kv_tokens, expected in ((10**6, 107), (2000, 18), (50, 1)):
        cost = ProfileCost(samples=samples, kv_tokens=kv_tokens)
        most = max(1, min(256, kv_tokens // 100))
        rates = [count / (1 + 0.1 * count) for count in range(1, most + 1)]
        slow = next(n for n, rate in enumerate(rates, 1) if rate >= 0.95 * max(rates))
        assert cost.slots(context=100) == slow == expected


def test_a_fit_is_judged_by_its_samples() -> None:
    samples = [
        Sample(prefill_tokens=p, prefill_context=0, decode=d, decode_context=0, seconds=1.0 + p + d)
        for p in (0, 1)
        for d in (0, 1)
    ]
    exact = Profile(kv_tokens=1, samples=tuple(samples))
    assert fitted(exact) == pytest.approx([1.0, 2.0, 2.0, 3.0])
    fit = fit_figures(Measurement(profile=exact, core_share=0.5))
    assert fit == pytest.approx(
        {"fit_error_median": 0.0, "fit_over_measured": 1.0, "core_share": 0.5}, abs=1e-9
    )
    # More work took less time: without negative prices, the best fit is the
    # mean.
    odd = [
        Sample(prefill_tokens=n, prefill_context=n, decode=n, decode_context=n, seconds=2.0 - n)
        for n in (0, 1)
    ]
    fit = fit_figures(Measurement(profile=Profile(kv_tokens=1, samples=tuple(odd)), core_share=0.5))
    assert fit["fit_error_median"] == pytest.approx((0.25 + 0.5) / 2)
    assert fit["fit_over_measured"] == pytest.approx(1.0)


def test_the_controller_s_computations_take_no_separate_time() -> None:
    plan = Plan(
        prompt_tokens=5,
        init_s=1.0,
        turns=(TurnPlan(output_tokens=1, observation_tokens=2, env_s=0.5),) * 2,
        reward_s=0.0,
        reward=1.0,
        success=True,
    )

    class Same:
        def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
            return plan

    made = Computed(Same(), turn_s=0.125).plan(index=0, member=0, attempt=0, seed=0)
    assert (made.init_s, made.reward_s, [turn.env_s for turn in made.turns]) == (
        0.0,
        0.0,
        [0.125, 0.125],
    )
    assert (made.prompt_tokens, made.reward) == (5, 1.0)


def test_a_run_is_measured_on_turns_of_its_lengths() -> None:
    def plan(prompt: int, turns: int) -> Plan:
        turn, last = (
            TurnPlan(output_tokens=2, observation_tokens=seen, env_s=0.0) for seen in (10, 0)
        )
        all_turns = (turn,) * (turns - 1) + (last,)
        return Plan(
            prompt_tokens=prompt,
            init_s=0.0,
            turns=all_turns,
            reward_s=0.0,
            reward=0.0,
            success=False,
        )

    grid = grid_of(Recorded([[[plan(30, 4)], [plan(34, 6)]]]), slots=12, repeats=7)
    assert (grid.batches, grid.output, grid.observation, grid.repeats) == ((1, 2, 4, 8), 2, 10, 7)
    assert grid.prompts == (32, 32 + 30)  # five turns of 12 tokens: half of them
