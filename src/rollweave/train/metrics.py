"""The metrics of a training step, and their computation from per-token sums.

Names are stable: dashboards and tests read them. Token metrics are means over the
output tokens that went through the model, over all passes of the batch; metrics that do
not apply to a step are absent.

- `loss`: mean loss of the optimizer steps
- `reward_mean`, `reward_std`: total reward of the batch's trajectories
- `advantage_abs`: mean absolute advantage per token
- `kl_rollout`: k3 estimate of KL(rollout policy, trained policy), which grows with
  staleness and updates
- `chi2`: mean of (ratio - 1)², the χ² divergence of the trained policy from the rollout
  policy
- `ess`: effective sample size of the ratio weights, as a share of the tokens, in (0, 1]
- `kl_reference`: KL to the starting weights in the direction `algorithm.kl_direction`,
  where `algorithm.kl` is set
- `kl_teacher`: mean of log p(student) - log p(teacher) over the tokens of trajectories
  that the teacher has seen: KL(rollout policy, teacher)
- `entropy`: mean entropy of the policy at the sampling temperature, in nats
- `clip_fraction`: share of tokens whose gradient the bounds of the loss removed, or
  whose weight they truncated (`cispo`)
- `mask_fraction`: share of tokens that a correction dropped, or whose weight it
  truncated; 0 where none was computed
- `age/<n>`: share of the batch's output tokens that were sampled n versions before the
  step's weights; the last one (16) includes older tokens
- `overlong_fraction`: share of trajectories that `tasks.max_tokens` cut
- `logprob_gap_mean`, `logprob_gap_max`: absolute difference of the trainer's and the
  engine's log-prob of the same weights
- `logprob_gap/<engine>`: the mean gap on one engine
- `routed_fraction`: share of the tokens whose experts are the engine's, with
  `algorithm.routing_replay`; the last one of each sequence does not count
- `critic_loss`: half the mean squared error of the critic, where an estimator takes one
- `critic_explained`: share of the returns' variance that the critic explained before
  the step
- `critic_grad_norm`: mean gradient norm of the critic before clipping
- `grad_norm`: mean gradient norm before clipping
- `lr`: learning rate of the step
- `updates`: optimizer steps taken
- `tokens`: output tokens of the batch
- `input_tokens`: all tokens of the batch
- `skipped_fraction`: share of output tokens without any advantage, which were skipped
- `tokens_per_s`: input tokens times passes per second of training
"""

from collections.abc import Sequence

import torch

from rollweave.core.policy.health import GAP
from rollweave.train.distributed import RankGroup

TOKEN_SUMS = (
    "count",
    "advantage_abs",
    "kl_rollout",
    "ratio",
    "ratio_squared",
    "chi2",
    "kl_reference",
    "entropy",
    "clipped",
    "masked",
)
"""The per-token values that `losses.policy_loss` sums, in the order of its tensor."""

OLDEST = 16
"""Greatest age, in versions, that is counted separately; older tokens count as this
age.
"""


def metrics_from_sums(sums: torch.Tensor, *, with_reference: bool) -> dict[str, float]:
    """Compute metrics from summed `TOKEN_SUMS` [10]. If no token was computed, only the
    share of masked tokens is known, which is 0.
    """
    total = dict(zip(TOKEN_SUMS, sums.tolist(), strict=True))
    count = total["count"]
    if not count:
        return {"mask_fraction": 0.0}
    metrics = {
        "advantage_abs": total["advantage_abs"] / count,
        "kl_rollout": total["kl_rollout"] / count,
        "chi2": total["chi2"] / count,
        "ess": total["ratio"] ** 2 / (count * total["ratio_squared"]),
        "entropy": total["entropy"] / count,
        "clip_fraction": total["clipped"] / count,
        "mask_fraction": total["masked"] / count,
    }
    if with_reference:
        metrics["kl_reference"] = total["kl_reference"] / count
    return metrics


def age_shares(ages: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the share of tokens of each age, up to the oldest age. Empty without
    tokens.
    """
    if not ages:
        return {}
    counts = torch.cat(list(ages)).clamp(0, OLDEST).bincount()
    total = int(counts.sum())
    return {f"age/{age}": count / total for age, count in enumerate(counts.tolist())}


class GapMeter:
    """Measures the train-inference gap by engine: |trainer's - engine's log-prob| of
    tokens that exactly the same weights sampled.
    """

    def __init__(self, engines: Sequence[str]) -> None:
        self._engines = list(engines)
        self._sums = torch.zeros(len(self._engines), 2, dtype=torch.float64)  # gaps, tokens
        self._max = torch.zeros(1, dtype=torch.float64)

    def add(self, engine: str, gaps: torch.Tensor) -> None:
        """Add gaps [K] of tokens sampled on `engine`."""
        if len(gaps):
            place = self._engines.index(engine)
            self._sums[place, 0] += gaps.sum(dtype=torch.float64)
            self._sums[place, 1] += len(gaps)
            self._max = torch.maximum(self._max, gaps.max().double())

    def metrics(self, ranks: RankGroup) -> dict[str, float]:
        """Return the metrics; empty if there was no such token (for example because all
        are stale).
        """
        sums = ranks.all_reduce_sum(self._sums)
        gap, count = sums.sum(0).tolist()
        greatest = ranks.all_reduce_max(self._max)
        if not count:
            return {}
        by_engine = {
            f"{GAP}{engine}": float(total) / float(tokens)
            for engine, (total, tokens) in zip(self._engines, sums.tolist(), strict=True)
            if engine and tokens
        }
        return by_engine | {"logprob_gap_mean": gap / count, "logprob_gap_max": float(greatest)}
