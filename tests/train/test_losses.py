"""The policy losses and corrections equal slow references in plain Python, token by
token, including gradients.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.config.training import AlgorithmConfig
from rollweave.train import losses
from rollweave.train.distributed import ALONE
from rollweave.train.losses import IS_CAP, k3, kl_coefficient, policy_loss, token_weights
from rollweave.train.update import TOKEN_SUMS, GapMeter, age_shares, metrics_from_sums
from tests.support.properties import examples

LOSSES = ["ppo", "dual_clip", "gspo", "cispo", "dppo"]
CORRECTIONS = ["bypass", "decoupled", "tis", "icepop", "sequence_mask", "reject"]


class SlowToken(NamedTuple):
    """One token of the reference: its loss, and the derivatives by hand."""

    loss: float
    by_logprob: float
    by_entropy: float
    clipped: bool
    masked: bool


class Token(NamedTuple):
    logprob: float
    entropy: float
    behavior: float
    advantage: float
    proximal: float
    reference: float


def slow_surrogate(
    token: Token, sequence: Sequence[Token], algorithm: AlgorithmConfig
) -> tuple[float, float, bool]:
    """Return a token's loss without correction, its derivative by the log-prob, and
    whether the bounds changed its gradient; written from the papers.
    """
    bypass = algorithm.correction == "bypass"
    olds = [each.behavior if bypass else each.proximal for each in sequence]
    old = token.behavior if bypass else token.proximal
    ratio, advantage = math.exp(token.logprob - old), token.advantage
    low, high, _ = algorithm.loss_values
    match algorithm.loss:
        case "cispo":
            weight = ratio
            if ratio > 1 + high:
                weight = 1 + high
            if ratio < 1 - low:
                weight = 1 - low
            return -weight * advantage * token.logprob, -weight * advantage, weight != ratio
        case "dppo":
            probability, sampled = math.exp(token.logprob), math.exp(token.behavior)
            if advantage > 0 and probability - sampled > high:
                return 0.0, 0.0, True
            if advantage < 0 and sampled - probability > low:
                return 0.0, 0.0, True
            return -ratio * advantage, -ratio * advantage, False
        case "gspo":
            # geometric mean over the sequence; each token has the gradient of its own
            # ratio
            ratio = 1.0
            for each, each_old in zip(sequence, olds, strict=True):
                ratio *= math.exp(each.logprob - each_old) ** (1 / len(sequence))
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0, True
    if algorithm.loss == "dual_clip" and advantage < 0 and ratio > 3:
        return -3 * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def slow_weight(token: Token, sequence: Sequence[Token], correction: str) -> tuple[float, bool]:
    """Return the constant weight of a token, and whether the correction changed it."""
    weight = math.exp(token.proximal - token.behavior)
    weights = [math.exp(each.proximal - each.behavior) for each in sequence]
    truncated = (min(weight, 2.0), weight > 2.0)
    match correction:
        case "bypass":
            return 1.0, False
        case "decoupled":
            return (0.0, True) if weight > 2 else (weight, False)
        case "tis":
            return truncated
        case "icepop":
            return (weight, False) if 0.5 <= weight <= 5 else (0.0, True)
        case "sequence_mask":
            mean = math.prod(weights) ** (1 / len(weights))
            return truncated if 0.5 <= mean <= 5 else (0.0, True)
        case "reject":
            return truncated if all(1e-4 <= each <= 100 for each in weights) else (0.0, True)
    raise AssertionError(correction)


def slow_token(token: Token, sequence: Sequence[Token], algorithm: AlgorithmConfig) -> SlowToken:
    """Compute one token's loss, with the divergence and the entropy, and its
    derivatives.
    """
    surrogate, slope, clipped = slow_surrogate(token, sequence, algorithm)
    weight, masked = slow_weight(token, sequence, algorithm.correction)
    loss = weight * surrogate - algorithm.entropy * token.entropy
    slope = weight * slope
    if algorithm.kl:
        difference = token.reference - token.logprob
        loss += algorithm.kl * (math.exp(difference) - difference - 1)
        slope += algorithm.kl * (1 - math.exp(difference))
    return SlowToken(loss, slope, -algorithm.entropy, clipped, masked)


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmConfig:
    loss = draw(st.sampled_from(LOSSES))
    # GSPO's own bounds are so narrow that hardly any random sequence is within them
    wide = [(0.1, 0.2), (0.2, 0.28), (0.5, 1.5)]
    bounds = draw(st.sampled_from([None, *wide] if loss != "gspo" else wide))
    return AlgorithmConfig(
        loss=loss,
        correction=draw(st.sampled_from(CORRECTIONS)),
        clip=bounds,
        kl=draw(st.sampled_from([0.0, 0.3])),
        entropy=draw(st.sampled_from([0.0, 0.05])),
    )


def random_sequences(rng: random.Random, lengths: Sequence[int]) -> list[list[Token]]:
    """Draw sequences of which some have stayed near the rollout, some have moved, and
    some have single tokens that are far off.
    """
    sequences = []
    for length in lengths:
        spread = rng.choice([0.05, 0.9, 1.5])
        shift = rng.choice([0.0, 0.0, -1.0, 1.8])
        tokens = []
        for _ in range(length):
            behavior = -rng.uniform(0.01, 4)
            far = rng.choice([0.0] * 12 + [-10.0, 5.0])
            proximal = behavior + shift + rng.uniform(-spread, spread) + far
            logprob = proximal + rng.choice([rng.uniform(-0.6, 0.6), rng.uniform(-2, 2)])
            tokens.append(
                Token(
                    logprob=logprob,
                    entropy=rng.uniform(0, 3),
                    behavior=behavior,
                    advantage=rng.choice([-1.3, -0.4, 0.0, 0.7, 2.0]),
                    proximal=proximal,
                    reference=logprob + rng.uniform(-1, 1),
                )
            )
        sequences.append(tokens)
    return sequences


@settings(max_examples=examples(400))
@given(
    algorithm=algorithms(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_loss_and_gradients(algorithm: AlgorithmConfig, lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    sequences = random_sequences(rng, lengths)
    rows = [token for sequence in sequences for token in sequence]
    weights = [rng.uniform(0, 1) for _ in rows]

    def tensor(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    logprobs = tensor([row.logprob for row in rows]).requires_grad_()
    entropy = tensor([row.entropy for row in rows]).requires_grad_()
    bypass = algorithm.correction == "bypass"
    loss, sums = policy_loss(
        logprobs=logprobs,
        entropy=entropy,
        behavior=tensor([row.behavior for row in rows]),
        advantages=tensor([row.advantage for row in rows]),
        weights=tensor(weights),
        lengths=lengths,
        proximal=None if bypass else tensor([row.proximal for row in rows]),
        divergence=k3(tensor([row.reference for row in rows]) - logprobs) if algorithm.kl else None,
        kl=algorithm.kl,
        algorithm=algorithm,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    slow = [slow_token(token, sequence, algorithm) for sequence in sequences for token in sequence]
    assert loss.item() == pytest.approx(
        sum(w * s.loss for w, s in zip(weights, slow, strict=True)), rel=1e-9, abs=1e-9
    )
    assert logprobs.grad is not None
    expected = [w * s.by_logprob for w, s in zip(weights, slow, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if algorithm.entropy:
        assert entropy.grad is not None
        assert entropy.grad.tolist() == pytest.approx(
            [w * s.by_entropy for w, s in zip(weights, slow, strict=True)]
        )
    check_sums(dict(zip(TOKEN_SUMS, sums.tolist(), strict=True)), rows, slow, algorithm)


def check_sums(
    sums: dict[str, float],
    rows: Sequence[Token],
    slow: Sequence[SlowToken],
    algorithm: AlgorithmConfig,
) -> None:
    ratios = [math.exp(row.logprob - row.behavior) for row in rows]
    assert sums["count"] == len(rows)
    assert sums["advantage_abs"] == pytest.approx(sum(abs(row.advantage) for row in rows))
    assert sums["entropy"] == pytest.approx(sum(row.entropy for row in rows))
    differences = [row.reference - row.logprob for row in rows]
    divergence = sum(math.exp(d) - d - 1 for d in differences) if algorithm.kl else 0.0
    assert sums["kl_reference"] == pytest.approx(divergence)
    assert sums["ratio"] == pytest.approx(sum(ratios))
    assert sums["ratio_squared"] == pytest.approx(sum(r * r for r in ratios))
    assert sums["chi2"] == pytest.approx(sum((r - 1) ** 2 for r in ratios))
    assert sums["kl_rollout"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
    assert sums["clipped"] == sum(token.clipped for token in slow)
    assert sums["masked"] == sum(token.masked for token in slow)


@settings(max_examples=examples(60))
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "budget"])
def test_weights_make_the_configured_mean(lengths: list[int], seed: int, aggregate: str) -> None:
    rng = random.Random(seed)
    losses = [[rng.uniform(-1, 1) for _ in range(length)] for length in lengths]
    budgets = [rng.choice([10, 25]) for _ in lengths]
    weights = token_weights(lengths, aggregate, budgets=budgets)
    mean = sum(weight * sum(row) for weight, row in zip(weights, losses, strict=True))
    if aggregate == "token_mean":
        flat = [value for row in losses for value in row]
        expected = sum(flat) / len(flat)
    elif aggregate == "budget":
        sums = [sum(row) / budget for row, budget in zip(losses, budgets, strict=True)]
        expected = sum(sums) / len(losses)
    else:
        expected = sum(sum(row) / len(row) for row in losses) / len(losses)
    assert mean == pytest.approx(expected, abs=1e-12)
    assert token_weights([], aggregate, budgets=[]) == []


def run_one(
    correction: str,
    *,
    logprob: float,
    behavior: float,
    proximal: float,
    loss: str = "ppo",
    advantage: float = 1.0,
) -> float:
    """Return the gradient by the log-prob of one token."""
    logprobs_input = torch.tensor([logprob], requires_grad=True)
    value, _ = policy_loss(
        logprobs=logprobs_input,
        entropy=torch.zeros(1),
        behavior=torch.tensor([behavior]),
        advantages=torch.tensor([advantage]),
        weights=torch.ones(1),
        lengths=[1],
        proximal=None if correction == "bypass" else torch.tensor([proximal]),
        divergence=None,
        kl=0.0,
        algorithm=AlgorithmConfig(correction=correction, loss=loss),  # type: ignore[arg-type]
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert logprobs_input.grad is not None
    return float(logprobs_input.grad)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_on_policy_every_loss_is_the_policy_gradient(loss: str, correction: str) -> None:
    """Where the ratio is 1, -A ∇log π remains of every loss and correction."""
    for logprob in (-3.0, -0.1):
        for advantage in (-1.5, 0.7):
            gradient = run_one(
                correction,
                logprob=logprob,
                behavior=logprob,
                proximal=logprob,
                loss=loss,
                advantage=advantage,
            )
            assert gradient == pytest.approx(-advantage)


def test_published_values_hold_where_nothing_is_set() -> None:
    values = {loss: AlgorithmConfig(loss=loss).loss_values for loss in LOSSES}  # type: ignore[arg-type]
    assert values == {
        "ppo": (0.2, 0.28, "token_mean"),
        "dual_clip": (0.2, 0.2, "token_mean"),
        "gspo": (3e-4, 4e-4, "sequence_mean"),
        "cispo": (1.0, 4.0, "token_mean"),
        "dppo": (0.2, 0.2, "token_mean"),
    }
    own = AlgorithmConfig(loss="gspo", clip=(0.0, 4e-4), aggregate="budget").loss_values
    assert own == (0.0, 4e-4, "budget")


def test_where_the_losses_differ() -> None:
    """A token that has become likely enough still learns by cispo (up to its cap), and
    by dppo if its probability has hardly moved; an unlikely one that is discouraged is
    bounded by dual_clip alone.
    """

    def gradient(loss: str, *, before: float, now: float, advantage: float) -> float:
        old, new = math.log(before), math.log(now)
        where = {"logprob": new, "behavior": old, "proximal": old}
        return run_one("bypass", **where, loss=loss, advantage=advantage)

    rare = {"before": 0.001, "now": 0.003, "advantage": 1.0}
    assert gradient("ppo", **rare) == gradient("gspo", **rare) == 0.0
    assert gradient("dppo", **rare) == gradient("cispo", **rare) == pytest.approx(-3.0)
    assert gradient("cispo", before=0.001, now=0.01, advantage=1.0) == pytest.approx(-5.0)
    likely = {"before": 0.75, "now": 0.5, "advantage": -1.0}
    assert gradient("dppo", **likely) == 0.0
    assert gradient("cispo", **likely) == pytest.approx(2 / 3, rel=1e-5)
    grown = {"before": 0.1, "now": 0.4, "advantage": -1.0}
    assert gradient("ppo", **grown) == pytest.approx(4.0, rel=1e-5)
    assert gradient("dual_clip", **grown) == 0.0


def test_the_corrections_differ_beyond_the_cap() -> None:
    def weight(correction: str, log_weight: float) -> float:
        return -run_one(correction, logprob=-1.0, behavior=-1.0 - log_weight, proximal=-1.0)

    assert weight("decoupled", 2.0) == 0.0
    assert weight("tis", 2.0) == pytest.approx(2.0)
    assert weight("icepop", 1.5) == pytest.approx(math.exp(1.5))
    assert weight("icepop", 2.0) == weight("icepop", -0.8) == 0.0
    assert weight("sequence_mask", 1.5) == pytest.approx(2.0)
    assert weight("sequence_mask", 2.0) == weight("sequence_mask", -0.8) == 0.0
    assert weight("reject", 2.0) == pytest.approx(2.0)
    assert weight("reject", 5.0) == weight("reject", -9.5) == 0.0


def test_a_weight_at_the_cap_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "IS_CAP", 1.0)
    for correction in ("decoupled", "tis", "sequence_mask", "reject"):
        assert run_one(correction, logprob=-1.0, behavior=-1.0, proximal=-1.0) == -1.0
    assert IS_CAP == 2.0


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_log_probs_stay_finite(loss: str) -> None:
    for correction in CORRECTIONS:
        for behavior in (-1e4, -1e-9):
            assert math.isfinite(
                run_one(correction, logprob=-50.0, behavior=behavior, proximal=-30.0, loss=loss)
            )


def test_without_tokens_nothing_but_the_mask_is_known() -> None:
    metrics = metrics_from_sums(torch.zeros(len(TOKEN_SUMS)), with_reference=True)
    assert metrics == {"mask_fraction": 0.0}


def test_metrics_are_means_over_tokens() -> None:
    sums = torch.tensor([4.0, 6, 8, 2, 3, 10, 12, 14, 1, 3])
    metrics = metrics_from_sums(sums, with_reference=True)
    assert list(metrics.values()) == [1.5, 2, 2.5, 1 / 3, 3.5, 0.25, 0.75, 3]
    assert list(metrics) == [
        "advantage_abs",
        "kl_rollout",
        "chi2",
        "ess",
        "entropy",
        "clip_fraction",
        "mask_fraction",
        "kl_reference",
    ]
    del metrics["kl_reference"]
    assert metrics_from_sums(sums, with_reference=False) == metrics


def test_gaps_are_means_of_each_engine_and_of_all() -> None:
    meter = GapMeter(["a", "", "b"])
    assert meter.metrics(ALONE) == {}
    for engine, gaps in (("a", [1.0, 3.0]), ("", [5.0]), ("b", []), ("a", [2.0])):
        meter.add(engine, torch.tensor(gaps))
    metrics = {"logprob_gap/a": 2.0, "logprob_gap_mean": 2.75, "logprob_gap_max": 5.0}
    assert meter.metrics(ALONE) == metrics


def test_ages_are_shares_of_tokens() -> None:
    ages = [torch.tensor([0, 0, 2]), torch.tensor([1, 40, 17, 0, 0])]
    shares = age_shares(ages)
    assert (shares["age/0"], shares["age/1"], shares["age/2"]) == (0.5, 0.125, 0.125)
    assert shares["age/16"] == 0.25
    assert sum(shares.values()) == 1
    assert age_shares([torch.tensor([0])]) == {"age/0": 1.0}
    assert age_shares([]) == {}


def test_the_kl_coefficient_is_constant_then_decreases_to_zero() -> None:
    constant = AlgorithmConfig(kl=0.1)
    assert [kl_coefficient(constant, step=step, steps=10) for step in (0, 5, 9)] == [0.1] * 3
    falling = AlgorithmConfig(kl={"forward": 0.1})
    coefficients = [kl_coefficient(falling, step=step, steps=20) for step in range(20)]
    assert coefficients[:10] == pytest.approx([0.1] * 10)
    assert coefficients[15] == pytest.approx(0.1 / 3)
    assert coefficients[18:] == [0.0, 0.0]
    assert coefficients == sorted(coefficients, reverse=True)
    assert kl_coefficient(falling, step=1, steps=2) == pytest.approx(0.1 * 2 * (1 - 1 / 1.8))
