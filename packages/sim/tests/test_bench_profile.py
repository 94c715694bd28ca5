"""Step times of an engine: every kind of step is sampled with its amounts, and
simulations can read the file.
"""

from pathlib import Path

import pytest

from benchmarks.engine.models import model_cases, model_of
from packages.sim.benchmarks import profile
from rollweave.engine.batching import StepWork
from rollweave_sim.profile import Profile, ProfileCost, Sample


@pytest.mark.extended
def test_simulations_read_a_profile(tmp_path: Path) -> None:
    model_of(model_cases(quick=True)[0]).save_pretrained(tmp_path / "model")
    result = profile.bench_profile(
        tmp_path / "out" / "profile.json", tmp_path / "model", quick=True
    )
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
    assert profile.sample_of(steps) == Sample(
        prefill_tokens=0, prefill_context=0, decode=4, decode_context=102, seconds=0.5
    )


def test_slots_are_capped_by_throughput_and_by_kv() -> None:
    """A step takes 1 s, and 0.1 s for each sequence: 95 % of the throughput of 256."""
    samples = tuple(
        Sample(prefill_tokens=p, prefill_context=0, decode=d, decode_context=100 * d, seconds=s)
        for p, d, s in ((0, 1, 1.1), (0, 11, 2.1), (1, 0, 2.0), (1, 1, 2.1))
    )
    assert profile.longest_context(Profile(kv_tokens=1, samples=samples)) == 100
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
    assert profile.fitted(exact) == pytest.approx([1.0, 2.0, 2.0, 3.0])
    fit = profile.fit_figures(profile.Measurement(profile=exact, core_share=0.5))
    assert fit == pytest.approx(
        {"fit_error_median": 0.0, "fit_over_measured": 1.0, "core_share": 0.5}, abs=1e-9
    )
    # More work took less time: without negative prices, the best fit is the
    # mean.
    odd = [
        Sample(prefill_tokens=n, prefill_context=n, decode=n, decode_context=n, seconds=2.0 - n)
        for n in (0, 1)
    ]
    fit = profile.fit_figures(
        profile.Measurement(profile=Profile(kv_tokens=1, samples=tuple(odd)), core_share=0.5)
    )
    assert fit["fit_error_median"] == pytest.approx((0.25 + 0.5) / 2)
    assert fit["fit_over_measured"] == pytest.approx(1.0)
