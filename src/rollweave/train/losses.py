"""The policy loss, token by token, as a sum whose weights make it the desired mean.

Invariants: the loss of a minibatch is the sum over its micro-batches and ranks, because
every token's weight already accounts for the whole minibatch; the inputs contain only
output tokens; log-probs are at the sampling temperature on all sides.
"""

from collections.abc import Sequence

import torch

from rollweave.schema.config.sections import AlgorithmConfig

IS_CAP = 2.0
"""Cap of the importance weights of `decoupled` and `tis`."""

FORWARD_UNTIL = 0.9
"""Share of the run after which the forward KL term, which keeps choices alive, is 0; it
falls over the second half of that share.
"""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: beyond ±20 the exponential would overflow or dominate the batch,
and only the sign matters.
"""


def token_weights(lengths: Sequence[int], aggregate: str) -> list[float]:
    """Return the weight of each token of sequences with these numbers of output tokens;
    over all tokens they sum to 1.

    `token_mean`: every token of the minibatch counts the same. `sequence_mean`: every
    sequence does.
    """
    if aggregate == "token_mean":
        total = sum(lengths)
        return [1 / total] * len(lengths)
    return [1 / (len(lengths) * length) for length in lengths]


def policy_loss(
    *,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    proximal: torch.Tensor | None,
    divergence: torch.Tensor | None,
    kl: float,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss (a scalar) and the sums of `metrics.TOKEN_SUMS`; all
    inputs are [M], for M output tokens.

    With ratio ρ = exp(logprobs - old), PPO-clip is -min(ρ A, clip(ρ, 1 - clip_low, 1 +
    clip_high) A), where

    - `bypass`: old = behavior, the log-probs of the engine (the clip bounds the whole
      distance from the rollout);
    - `decoupled` (AReaL §5.2): old = proximal, recomputed when the step began; the loss
      is weighted by exp(proximal - behavior), and tokens whose weight exceeds `IS_CAP`
      are dropped;
    - `tis`: as decoupled, but the weight is truncated to `IS_CAP` and no token is
      dropped.

    Added to this are `kl` times each token's `divergence` from the reference, and minus
    `entropy` times the entropy.
    """
    with torch.no_grad():
        to_behavior = (logprobs - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        behavior_ratio = to_behavior.exp()
    importance, masked = _importance(proximal, behavior, algorithm)
    old = behavior if proximal is None else proximal
    ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages
    token_loss = -torch.minimum(plain, bounded)
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
                (bounded < plain).float(),
                masked,
            ]
        ).sum(1, dtype=torch.float64)
    return (token_loss * weights).sum(), sums


def _importance(
    proximal: torch.Tensor | None, behavior: torch.Tensor, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the constant weight of each token, and 1.0 where the cap applied."""
    if algorithm.correction == "bypass":
        return None, torch.zeros_like(behavior)
    assert proximal is not None, "decoupled and tis need recomputed log-probs"
    weight = (proximal - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    beyond = weight > IS_CAP
    if algorithm.correction == "decoupled":
        return weight.masked_fill(beyond, 0.0), beyond.float()
    return weight.clamp(max=IS_CAP), beyond.float()


def kl_coefficient(algorithm: AlgorithmConfig, *, step: int, steps: int) -> float:
    """Return `kl` at training step `step` of `steps`: constant for the reverse
    divergence; for the forward one constant, then decreasing linearly to 0 at
    `FORWARD_UNTIL` of the run.
    """
    if algorithm.kl_direction == "reverse":
        return algorithm.kl
    left = 1 - step / max(1.0, FORWARD_UNTIL * steps)
    return algorithm.kl * min(1.0, max(0.0, 2 * left))


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy, reference) from log(reference / policy) of sampled tokens:
    Schulman's nonnegative exp(d) - d - 1.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return bounded.exp() - bounded - 1
