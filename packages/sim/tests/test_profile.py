"""Prices fitted to measured steps: exact where the samples are, the best nonnegative
ones elsewhere.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from rollweave.schema.errors import ConfigError
from rollweave_sim import profile
from rollweave_sim.cost import EngineCosts
from rollweave_sim.profile import ProfileCost, Sample
from tests.support.simulation import decode_step, looped

PRICES = st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-7, 1e-2)) for _ in range(4)])
WORK = st.tuples(
    st.integers(0, 2048), st.integers(0, 10**6), st.integers(0, 256), st.integers(0, 10**6)
)
ENDS = [(0, 0, 1, 10), (64, 2080, 0, 0)]


def sample(work: tuple[int, int, int, int], seconds: float) -> Sample:
    tokens, pairs, decode, context = work
    return Sample(
        prefill_tokens=tokens,
        prefill_context=pairs,
        decode=decode,
        decode_context=context,
        seconds=seconds,
    )


def predicted(costs: ProfileCost, one: Sample) -> float:
    return costs.step_s(
        prefill_tokens=one.prefill_tokens,
        prefill_context=one.prefill_context,
        decode=one.decode,
        decode_context=one.decode_context,
    )


@given(st.floats(1e-5, 1e-2), PRICES, st.lists(WORK, min_size=4, max_size=20))
def test_exact_samples_are_fitted_exactly(fixed, prices, works):
    samples = [
        sample(work, fixed + sum(a * p for a, p in zip(work, prices, strict=True)))
        for work in [*ENDS, *works]
    ]
    costs = ProfileCost(samples=samples, kv_tokens=1000)
    for one in samples:
        assert predicted(costs, one) == pytest.approx(one.seconds, rel=1e-6)


@given(
    st.lists(st.tuples(WORK, st.floats(1e-4, 1.0), st.floats(1e-4, 1.0)), min_size=4, max_size=20),
    st.integers(0, 4),
    st.floats(0, 0.1),
)
def test_no_other_nonnegative_prices_fit_better(measured, column, step):
    works, seconds, scales = zip(*[*((end, 0.01, 0.02) for end in ENDS), *measured], strict=True)
    amounts, relative, scale = (
        np.array([(1, *work) for work in works], dtype=float),
        np.array(seconds),
        np.array(scales),
    )
    prices = profile._weighted_fit(amounts, relative, scale)
    assert (prices >= 0).all()

    def error(prices):
        return (((amounts @ prices - relative) / scale) ** 2).sum()

    moved = prices.copy()
    # the error is convex, so that no better neighbor along any price means no better
    # fit at all
    for sign in (1, -1):
        moved[column] = max(
            0.0, prices[column] + sign * step / (amounts / scale[:, None])[:, column].max()
        )
        assert error(moved) >= error(prices) * (1 - 1e-9) - 1e-12


def test_more_work_never_costs_less_even_where_samples_do():
    samples = [sample((0, 0, n, 10 * n), 0.01 / n) for n in (1, 2, 4, 8)] + [
        sample((64, 2080, 0, 0), 0.01)
    ]
    costs = ProfileCost(samples=samples, kv_tokens=1000)
    assert decode_step(costs, 1, 10) <= decode_step(costs, 8, 80)


@given(st.integers(1, 64), st.integers(0, 10_000), st.integers(0, 300))
def test_a_profile_s_decode_s_equals_the_sum_of_steps(decode, context, steps):
    samples = [
        sample(ENDS[0], 0.001),
        sample((0, 0, 8, 100), 0.002),
        sample((0, 0, 8, 9000), 0.004),
        sample(ENDS[1], 0.003),
    ]
    costs = ProfileCost(samples=samples, kv_tokens=1000)
    closed = costs.decode_s(decode=decode, decode_context=context, steps=steps)
    assert closed == pytest.approx(looped(costs, decode, context, steps), rel=1e-9)


GOOD = {
    "kv_tokens": 4096,
    "subject": "tiny model, one thread",
    "samples": [asdict(sample(ENDS[0], 0.001)), asdict(sample(ENDS[1], 0.004))],
}


def test_a_profile_is_read_from_json(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(GOOD))
    costs: EngineCosts = ProfileCost.from_json(path)
    assert costs.kv_tokens == 4096
    assert decode_step(costs, 1, 10) == pytest.approx(0.001)


def changed(**fields: object) -> str:
    return json.dumps({**GOOD, "samples": [{**GOOD["samples"][0], **fields}, GOOD["samples"][1]]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "profile must be JSON with kv_tokens and samples"),
        ("\udcff", "profile must be JSON"),
        (json.dumps({"kv_tokens": 1}), "missing required field `samples`"),
        (json.dumps({**GOOD, "kv_tokens": 0}), "kv_tokens must be at least 1, got 0"),
        (json.dumps({**GOOD, "kv_token": 0}), "kv_token"),
        (
            json.dumps({**GOOD, "samples": []}),
            "samples must have at least two different values of prefill_tokens, got []",
        ),
        (
            json.dumps({**GOOD, "samples": GOOD["samples"][:1]}),
            "different values of prefill_tokens, got [0]",
        ),
        (changed(decode=0), "different values of decode, got [0]"),
        (changed(decode="many"), "Expected `int`, got `str` - at `$.samples[0].decode`"),
        (changed(decode=-1), "samples[0].decode must be at least 0, got -1"),
        (changed(seconds=0.0), "samples[0].seconds must be positive and finite, got 0.0"),
    ],
)
def test_refuses_bad_profiles_with_file_and_field(tmp_path, text, words):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        ProfileCost.from_json(path)
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)


def test_refuses_a_missing_profile(tmp_path):
    with pytest.raises(ConfigError, match="profile must be a readable file"):
        ProfileCost.from_json(tmp_path / "none.json")


def test_noise_moves_the_fit_not_below_the_mean():
    """Half of the samples take three times as long by chance: a step costs their
    average.
    """
    samples = [
        sample((p, 0, d, 0), (1.0 + p + d) * chance)
        for p in (0, 1, 2)
        for d in (0, 1, 2)
        for chance in (0.5, 1.5)
    ]
    costs = ProfileCost(samples=samples, kv_tokens=1)
    assert predicted(costs, sample((1, 0, 1, 0), 1.0)) == pytest.approx(3.0)
    assert predicted(costs, sample((0, 0, 0, 0), 1.0)) == pytest.approx(1.0)
