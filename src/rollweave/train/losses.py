"""The policy loss, token by token, as a sum whose weights make it the desired mean.

Invariants: the loss of a minibatch is the sum over its micro-batches and ranks, because
every token's weight already accounts for the whole minibatch; the inputs contain only
output tokens, and the tokens of a sequence are together; log-probs are at the sampling
temperature on all sides.
"""

from collections.abc import Sequence

import torch

from rollweave.schema.config.training import AlgorithmConfig

IS_CAP = 2.0
"""Cap of the importance weights of all corrections but `icepop`."""

BAND = (0.5, 5.0)
"""Bounds of a token's weight in `icepop`, and of the geometric mean of a sequence's
weights in `sequence_mask`.
"""

FAR_OFF = (1e-4, 100.0)
"""Bounds of every token's weight in a sequence that `reject` keeps."""

DUAL_CLIP = 3.0
"""Maximum ratio that counts for a token with a negative advantage in `dual_clip`."""

FORWARD_UNTIL = 0.9
"""Share of the run after which the forward KL term, which keeps choices alive, is 0; it
falls over the second half of this share.
"""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: beyond ±20 the exponential would overflow or dominate the batch,
and only the sign matters.
"""


def token_weights(lengths: Sequence[int], aggregate: str, *, budgets: Sequence[int]) -> list[float]:
    """Return the weight of each token of sequences with these numbers of output tokens.

    - `token_mean`: every token of the minibatch counts the same.
    - `sequence_mean`: every sequence does.
    - `budget` (Dr. GRPO, arXiv:2503.20783): the sum of a sequence is divided by its
      constant budget, so that no length is preferred; then every sequence counts the
      same.

    Over all tokens the weights of the first two sum to 1.
    """
    if not lengths:
        return []
    if aggregate == "token_mean":
        total = sum(lengths)
        return [1 / total] * len(lengths)
    divisors = budgets if aggregate == "budget" else lengths
    return [1 / (len(lengths) * divisor) for divisor in divisors]


def policy_loss(
    *,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    lengths: Sequence[int],
    proximal: torch.Tensor | None,
    divergence: torch.Tensor | None,
    kl: float,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss (a scalar) and the sums of `update.TOKEN_SUMS`; all
    inputs are [M], for M output tokens of sequences with `lengths` of them.

    The loss of a token is the loss of `_surrogate`, with the ratio ρ = exp(logprobs -
    old), times the constant weight of the correction. With `bypass` there is no weight,
    and old = behavior, the log-probs of the engine (the bounds hold for the whole
    distance from the rollout). Otherwise old = proximal, recomputed when the step
    began, and the weight is a function of w = exp(proximal - behavior); see
    `_importance`.

    Added to this are `kl` times each token's `divergence` from the reference, and minus
    `entropy` times the entropy.
    """
    with torch.no_grad():
        to_behavior = (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        behavior_ratio = to_behavior.exp()
    importance, masked = _importance(proximal, behavior, lengths, algorithm)
    token_loss, clipped = _surrogate(
        logprobs,
        old=behavior if proximal is None else proximal,
        behavior=behavior,
        advantages=advantages,
        lengths=lengths,
        algorithm=algorithm,
    )
    if importance is not None:
        token_loss = token_loss * importance
    if divergence is not None:
        token_loss = token_loss + kl * divergence
    if algorithm.entropy:
        token_loss = token_loss - algorithm.entropy * entropy
    with torch.no_grad():
        sums = torch.stack(
            [
                torch.ones_like(logprobs),
                advantages.abs(),
                behavior_ratio - 1 - to_behavior,
                behavior_ratio,
                behavior_ratio.square(),
                (behavior_ratio - 1).square(),
                divergence if divergence is not None else torch.zeros_like(logprobs),
                entropy,
                clipped.float(),
                masked,
            ]
        ).sum(1, dtype=torch.float64)
    return (token_loss * weights).sum(), sums


def _surrogate(
    logprobs: torch.Tensor,
    *,
    old: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    lengths: Sequence[int],
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss, and whether the bounds removed or reduced its gradient.

    With l and h for the bounds `clip`, and sg for a constant:

    - `ppo` (arXiv:1707.06347 eq. 7; h apart from l: DAPO, arXiv:2503.14476 eq. 8):
      -min(ρ A, clip(ρ, 1 - l, 1 + h) A).
    - `dual_clip` (arXiv:1912.09729): as ppo, but at most -3 A for A < 0, where ρ
      would be unbounded.
    - `gspo` (GSPO-token, arXiv:2507.18071 §4.3): as ppo, with sg(s / π) π for ρ, where
      s is the geometric mean of ρ over the sequence.
    - `cispo` (arXiv:2506.13585 eq. 4 and 5): -sg(clip(ρ, 1 - l, 1 + h)) A log π. No
      token loses its gradient.
    - `dppo` (arXiv:2602.04879, binary total variation): -ρ A, and 0 for tokens whose
      probability is already further from the rollout's μ than allowed, in the direction
      of the advantage: π - μ > h for A > 0, μ - π > l for A < 0.
    """
    low, high, _ = algorithm.loss_values
    log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if algorithm.loss == "gspo":
        mean = _over_sequences(log_ratio.detach(), lengths, "mean")
        log_ratio = mean + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    if algorithm.loss == "cispo":
        whole = ratio.detach()
        weight = whole.clamp(1 - low, 1 + high)
        return -weight * advantages * logprobs, weight != whole
    plain = ratio * advantages
    if algorithm.loss == "dppo":
        moved = logprobs.detach().exp() - behavior.exp()
        outside = torch.where(advantages > 0, moved > high, moved < -low)
        return -plain.masked_fill(outside, 0.0), outside & (advantages != 0)
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    surrogate = torch.minimum(plain, bounded)
    clipped = bounded < plain
    if algorithm.loss == "dual_clip":
        least = DUAL_CLIP * advantages
        beyond = (advantages < 0) & (surrogate < least)
        surrogate, clipped = torch.where(beyond, least, surrogate), clipped | beyond
    return -surrogate, clipped


def _importance(
    proximal: torch.Tensor | None,
    behavior: torch.Tensor,
    lengths: Sequence[int],
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the constant weight of each token, and 1.0 where the correction dropped it
    or truncated its weight; w = exp(proximal - behavior).

    - `decoupled` (AReaL §5.2): w, and 0 for tokens with w > `IS_CAP`.
    - `tis` (truncated importance sampling): min(w, `IS_CAP`).
    - `icepop` (IcePop, Ling team; arXiv:2510.18855): w in `BAND`, else 0.
    - `sequence_mask`: as tis in sequences whose geometric mean of w is in `BAND`, else
      0.
    - `reject`: as tis in sequences in which every w is in `FAR_OFF`, else 0.
    """
    if algorithm.correction == "bypass":
        return None, torch.zeros_like(behavior)
    assert proximal is not None, "every correction but bypass needs recomputed log-probs"
    log_weight = (proximal - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = log_weight.exp()
    beyond = weight > IS_CAP
    if algorithm.correction == "decoupled":
        return weight.masked_fill(beyond, 0.0), beyond.float()
    if algorithm.correction == "icepop":
        beyond = (weight < BAND[0]) | (weight > BAND[1])
        return weight.masked_fill(beyond, 0.0), beyond.float()
    weight = weight.clamp(max=IS_CAP)
    if algorithm.correction == "tis":
        return weight, beyond.float()
    if algorithm.correction == "sequence_mask":
        mean = _over_sequences(log_weight, lengths, "mean").exp()
        dropped = (mean < BAND[0]) | (mean > BAND[1])
    else:
        least = _over_sequences(log_weight, lengths, "min").exp()
        most = _over_sequences(log_weight, lengths, "max").exp()
        dropped = (least < FAR_OFF[0]) | (most > FAR_OFF[1])
    return weight.masked_fill(dropped, 0.0), (beyond | dropped).float()


def _over_sequences(values: torch.Tensor, lengths: Sequence[int], reduce: str) -> torch.Tensor:
    """Return, for each token, the mean, minimum or maximum of its sequence's values."""
    counts = torch.tensor(lengths, device=values.device)
    reduced = torch.segment_reduce(values, reduce, lengths=counts)
    return reduced.repeat_interleave(counts)


def kl_coefficient(algorithm: AlgorithmConfig, *, step: int, steps: int) -> float:
    """Return `kl` at training step `step` of `steps`: constant for the reverse
    divergence; for the forward divergence first constant, then decreasing linearly to 0
    at `FORWARD_UNTIL` of the run.
    """
    if not algorithm.kl_forward:
        return algorithm.kl_coefficient
    left = 1 - step / max(1.0, FORWARD_UNTIL * steps)
    return algorithm.kl_coefficient * min(1.0, max(0.0, 2 * left))


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) from log(reference / policy) of sampled tokens:
    Schulman's nonnegative exp(d) - d - 1.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.exp() - bounded - 1
