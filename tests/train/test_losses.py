"""The policy loss equals a slow, token-by-token reference in plain Python, including
gradients.
"""

import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.config.sections import AlgorithmConfig
from rollweave.train import losses
from rollweave.train.losses import IS_CAP, k3, kl_coefficient, policy_loss, token_weights
from rollweave.train.metrics import TOKEN_SUMS, metrics_from_sums
from tests.support.properties import examples


def slow_loss(
    logprob: float,
    entropy: float,
    behavior: float,
    advantage: float,
    proximal: float,
    reference: float,
    algorithm: AlgorithmConfig,
) -> tuple[float, float, float]:
    """Compute one token's loss, and its derivatives by logprob and entropy, written out
    by hand.
    """
    old = behavior if algorithm.correction == "bypass" else proximal
    ratio = math.exp(logprob - old)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if advantage >= 0:
        surrogate, slope = (
            (ratio * advantage, ratio * advantage) if ratio <= high else (high * advantage, 0.0)
        )
    else:
        surrogate, slope = (
            (ratio * advantage, ratio * advantage) if ratio >= low else (low * advantage, 0.0)
        )
    importance = math.exp(proximal - behavior)
    if algorithm.correction == "bypass":
        importance = 1.0
    elif importance > IS_CAP:
        importance = 0.0 if algorithm.correction == "decoupled" else IS_CAP
    difference = reference - logprob
    loss = -importance * surrogate - algorithm.entropy * entropy
    slope = -importance * slope
    if algorithm.kl:
        loss += algorithm.kl * (math.exp(difference) - difference - 1)
        slope += algorithm.kl * (1 - math.exp(difference))
    return loss, slope, -algorithm.entropy


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmConfig:
    return AlgorithmConfig(
        correction=draw(st.sampled_from(["bypass", "decoupled", "tis"])),
        clip_low=draw(st.sampled_from([0.1, 0.2])),
        clip_high=draw(st.sampled_from([0.2, 0.28])),
        kl=draw(st.sampled_from([0.0, 0.3])),
        entropy=draw(st.sampled_from([0.0, 0.05])),
    )


@settings(max_examples=examples(150))
@given(algorithm=algorithms(), count=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_loss_and_gradients(algorithm: AlgorithmConfig, count: int, seed: int) -> None:
    rng = random.Random(seed)
    behavior = [-rng.uniform(0.01, 4) for _ in range(count)]
    proximal = [value + rng.uniform(-0.9, 0.9) for value in behavior]
    logprobs = [value + rng.uniform(-0.6, 0.6) for value in proximal]
    reference = [value + rng.uniform(-1, 1) for value in logprobs]
    entropy = [rng.uniform(0, 3) for _ in range(count)]
    advantages = [rng.choice([-1.3, -0.4, 0.0, 0.7, 2.0]) for _ in range(count)]
    weights = [rng.uniform(0, 1) for _ in range(count)]
    logprobs_input = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    entropy_input = torch.tensor(entropy, dtype=torch.float64, requires_grad=True)

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    loss, sums = policy_loss(
        logprobs=logprobs_input,
        entropy=entropy_input,
        behavior=tensor(behavior),
        advantages=tensor(advantages),
        weights=tensor(weights),
        proximal=None if algorithm.correction == "bypass" else tensor(proximal),
        divergence=k3(tensor(reference) - logprobs_input) if algorithm.kl else None,
        kl=algorithm.kl,
        algorithm=algorithm,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    rows = list(zip(logprobs, entropy, behavior, advantages, proximal, reference, strict=True))
    slow = [slow_loss(*row, algorithm) for row in rows]
    assert loss.item() == pytest.approx(
        sum(w * s[0] for w, s in zip(weights, slow, strict=True)), rel=1e-9, abs=1e-9
    )
    assert logprobs_input.grad is not None
    expected = [w * s[1] for w, s in zip(weights, slow, strict=True)]
    assert logprobs_input.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if algorithm.entropy:
        assert entropy_input.grad is not None
        assert entropy_input.grad.tolist() == pytest.approx(
            [w * s[2] for w, s in zip(weights, slow, strict=True)]
        )
    check_sums(dict(zip(TOKEN_SUMS, sums.tolist(), strict=True)), rows, algorithm)


def check_sums(
    sums: dict[str, float], rows: list[tuple[float, ...]], algorithm: AlgorithmConfig
) -> None:
    ratios = [math.exp(logprob - behavior) for logprob, _, behavior, *_ in rows]
    assert sums["count"] == len(rows)
    assert sums["advantage_abs"] == pytest.approx(sum(abs(row[3]) for row in rows))
    assert sums["entropy"] == pytest.approx(sum(row[1] for row in rows))
    differences = [reference - logprob for logprob, *_, reference in rows]
    divergence = sum(math.exp(d) - d - 1 for d in differences) if algorithm.kl else 0.0
    assert sums["kl_reference"] == pytest.approx(divergence)
    assert sums["ratio"] == pytest.approx(sum(ratios))
    assert sums["ratio_squared"] == pytest.approx(sum(r * r for r in ratios))
    assert sums["chi2"] == pytest.approx(sum((r - 1) ** 2 for r in ratios))
    assert sums["kl_behaviour"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
    clipped = masked = 0
    for logprob, _, behavior, advantage, proximal, _ in rows:
        ratio = math.exp(logprob - (behavior if algorithm.correction == "bypass" else proximal))
        clipped += (advantage > 0 and ratio > 1 + algorithm.clip_high) or (
            advantage < 0 and ratio < 1 - algorithm.clip_low
        )
        masked += algorithm.correction != "bypass" and math.exp(proximal - behavior) > IS_CAP
    assert sums["clipped"] == clipped
    assert sums["masked"] == masked


@settings(max_examples=examples(60))
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
def test_weights_make_the_configured_mean(lengths: list[int], seed: int, aggregate: str) -> None:
    rng = random.Random(seed)
    losses = [[rng.uniform(-1, 1) for _ in range(length)] for length in lengths]
    weights = token_weights(lengths, aggregate)
    mean = sum(weight * sum(row) for weight, row in zip(weights, losses, strict=True))
    if aggregate == "token_mean":
        flat = [value for row in losses for value in row]
        expected = sum(flat) / len(flat)
    else:
        expected = sum(sum(row) / len(row) for row in losses) / len(losses)
    assert mean == pytest.approx(expected, abs=1e-12)


def run_one(correction: str, *, logprob: float, behavior: float, proximal: float) -> float:
    """Return the gradient by the log-prob of one token with advantage 1."""
    logprobs_input = torch.tensor([logprob], requires_grad=True)
    loss, _ = policy_loss(
        logprobs=logprobs_input,
        entropy=torch.zeros(1),
        behavior=torch.tensor([behavior]),
        advantages=torch.ones(1),
        weights=torch.ones(1),
        proximal=torch.tensor([proximal]),
        divergence=None,
        kl=0.0,
        algorithm=AlgorithmConfig(correction=correction),  # type: ignore[arg-type]
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_input.grad is not None
    return float(logprobs_input.grad)


def test_decoupled_at_the_start_is_the_importance_weighted_policy_gradient() -> None:
    """Before the first update the ratio to the proximal policy is 1, so that only
    staleness weights the loss.
    """
    for stale in (-1.0, -0.3, 0.0, 0.6):
        gradient = run_one("decoupled", logprob=-1.0, behavior=-1.0 - stale, proximal=-1.0)
        assert gradient == pytest.approx(-math.exp(stale), rel=1e-5)


def test_the_two_corrections_differ_beyond_the_cap() -> None:
    assert run_one("decoupled", logprob=-1.0, behavior=-3.0, proximal=-1.0) == 0.0
    assert run_one("tis", logprob=-1.0, behavior=-3.0, proximal=-1.0) == pytest.approx(-2.0)


def test_a_weight_at_the_cap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "IS_CAP", 1.0)
    for correction in ("decoupled", "tis"):
        assert run_one(correction, logprob=-1.0, behavior=-1.0, proximal=-1.0) == -1.0


def test_extreme_log_probs_stay_finite() -> None:
    for correction in ("bypass", "decoupled", "tis"):
        for behavior in (-1e4, -1e-9):
            assert math.isfinite(
                run_one(correction, logprob=-50.0, behavior=behavior, proximal=-30.0)
            )


def test_no_tokens_give_no_metrics() -> None:
    assert metrics_from_sums(torch.zeros(len(TOKEN_SUMS)), with_reference=True) == {}


def test_the_kl_coefficient_is_constant_then_decreases_to_zero() -> None:
    constant = AlgorithmConfig(kl=0.1)
    assert [kl_coefficient(constant, step=step, steps=10) for step in (0, 5, 9)] == [0.1] * 3
    falling = AlgorithmConfig(kl=0.1, kl_direction="forward")
    coefficients = [kl_coefficient(falling, step=step, steps=20) for step in range(20)]
    assert coefficients[:10] == pytest.approx([0.1] * 10)
    assert coefficients[15] == pytest.approx(0.1 / 3)
    assert coefficients[18:] == [0.0, 0.0]
    assert coefficients == sorted(coefficients, reverse=True)
    assert kl_coefficient(falling, step=1, steps=2) == pytest.approx(0.1 * 2 * (1 - 1 / 1.8))
