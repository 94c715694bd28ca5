"""The optimizer steps of one batch: epochs, minibatches, corrections and metrics, which
docs/METRICS.md describes by name.

Token metrics are means over the output tokens that went through the model, over all
passes of the batch; metrics that do not apply to a step are absent. Invariants: group
advantages are computed before anything is split; proximal and reference log-probs are
computed once per batch, before the first update; a minibatch whose loss or gradient
norm is not finite raises before its optimizer step.
"""

import math
from collections.abc import Sequence

import torch

from rollweave.core.policy.health import GAP
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import NonFiniteLossError
from rollweave.schema.work import Batch
from rollweave.train.critic import Critic
from rollweave.train.distributed import RankGroup
from rollweave.train.losses import k3, kl_coefficient, policy_loss, token_weights
from rollweave.train.model import Reference, Scores
from rollweave.train.passes import Passes
from rollweave.train.rows import Row, minibatches
from rollweave.train.state import clip_gradients, learning_rate, set_learning_rate, swapped_weights
from rollweave.train.transformers_model import routed_fraction

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


class Update:
    """The update of one batch. Call `run` once."""

    def __init__(
        self,
        config: RunConfig,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        *,
        batch: Batch,
        rows: Sequence[Row],
        reference: Sequence[torch.Tensor] | None,
        critic: Critic | None = None,
    ) -> None:
        self._config = config
        self._passes = passes
        self._optimizer = optimizer
        self._batch = batch
        self._rows = rows
        self._examples = [row.example for row in rows]
        self._reference_weights = reference
        self._critic = critic
        self._proximal: dict[int, torch.Tensor] = {}
        # log-probs, or hidden states for the forward divergence
        self._reference: dict[int, torch.Tensor] = {}
        # the reference's output weights, for the forward divergence
        self._head: torch.Tensor | None = None
        self._kl = kl_coefficient(config.algorithm, step=batch.step, steps=config.run.steps)
        self._corrects = config.algorithm.correction != "bypass"
        # Without entropy bonus and KL, a row without advantage cannot change the
        # weights, and needs no pass.
        always = bool(config.algorithm.entropy or self._kl)
        self._needed = [always or bool(row.advantages.any()) for row in rows]
        self._gap = GapMeter(sorted({row.engine for row in rows}))
        self._sums = torch.zeros(len(TOKEN_SUMS), dtype=torch.float64, device=passes.device)
        self._losses: list[float] = []
        self._norms: list[float] = []

    def run(self) -> dict[str, float]:
        """Take all optimizer steps and return metrics (docs/METRICS.md).

        Raises `NonFiniteLossError` before a bad step.
        """
        trainer, batch = self._config.trainer, self._batch
        lr = learning_rate(trainer, step=batch.step, steps=self._config.run.steps)
        set_learning_rate(self._optimizer, lr)
        self._compute_fixed_logprobs()
        # a part of a streamed step is a minibatch already
        parts = trainer.minibatches if batch.parts == 1 else 1
        for epoch in range(trainer.epochs):
            seed = f"{self._config.run.seed}/{batch.step}/{batch.part}/{epoch}"
            for chosen in minibatches(self._rows, parts=parts, seed=seed):
                self._minibatch(chosen)
        return self._metrics() | {"lr": lr}

    def _compute_fixed_logprobs(self) -> None:
        """Compute the log-probs that stay constant during the batch: under its initial
        weights, and under the reference.
        """
        chosen = [index for index, needed in enumerate(self._needed) if needed]
        temperature = self._config.rollout.temperature
        if chosen and self._corrects:
            self._proximal = self._passes.logprobs(self._examples, chosen, temperature=temperature)
        if chosen and self._kl and self._reference_weights is not None:
            with swapped_weights(self._passes.model, self._reference_weights):
                if self._config.algorithm.kl_forward:
                    self._head = self._passes.model.output_weights().detach().clone()
                    self._reference = self._passes.hidden(self._examples, chosen)
                else:
                    self._reference = self._passes.logprobs(
                        self._examples, chosen, temperature=temperature
                    )

    def _minibatch(self, chosen: Sequence[int]) -> None:
        """Take one optimizer step, and the critic's step if there is a critic: both
        steps or neither.
        """
        if self._critic is not None:
            self._critic.backward(self._rows, chosen, step=self._batch.step)
        self._policy_step(chosen)
        if self._critic is not None:
            self._critic.apply()

    def _policy_step(self, chosen: Sequence[int]) -> None:
        # The weights account for all rows of the minibatch; rows without advantage add
        # nothing and need no pass.
        weight_of = self._weights(chosen)
        needed = [index for index in chosen if self._needed[index]]
        if not needed:
            return
        self._optimizer.zero_grad(set_to_none=True)
        measure = self._batch.part == 0 and not self._norms
        loss = self._passes.backward(
            self._examples,
            needed,
            temperature=self._config.rollout.temperature,
            loss_of=lambda indices, scores: self._loss(indices, scores, weight_of, measure),
            reference_of=self._reference_of if self._head is not None else None,
        )
        norm = (
            clip_gradients(self._passes.model, self._config.trainer.max_grad_norm)
            if math.isfinite(loss)
            else math.nan
        )
        if not math.isfinite(norm):
            raise NonFiniteLossError(f"step {self._batch.step}: loss {loss}, gradient norm {norm}")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss)
        self._norms.append(norm)

    def _weights(self, chosen: Sequence[int]) -> dict[int, float]:
        """Return the weight of the tokens of each row."""
        rows = [self._rows[index] for index in chosen]
        weights = token_weights(
            [row.outputs for row in rows],
            self._config.algorithm.loss_values.aggregate,
            budgets=[row.budget for row in rows],
        )
        return dict(zip(chosen, weights, strict=True))

    def _reference_of(self, indices: Sequence[int]) -> Reference:
        assert self._head is not None, "called only with a reference"
        return Reference(torch.cat([self._reference[index] for index in indices]), self._head)

    def _divergence(self, indices: Sequence[int], scores: Scores) -> torch.Tensor | None:
        """Return each token's KL to the reference, in the configured direction, or None
        without KL.
        """
        if self._head is not None:
            return scores.divergence
        if not self._reference:
            return None
        return k3(torch.cat([self._reference[index] for index in indices]) - scores.logprobs)

    def _loss(
        self, indices: Sequence[int], scores: Scores, weight_of: dict[int, float], measure: bool
    ) -> torch.Tensor:
        """Return the loss of the rows `indices`."""
        rows = [self._rows[index] for index in indices]
        logprobs = scores.logprobs
        device = logprobs.device
        behavior = torch.cat([row.behavior for row in rows]).to(device)
        weights = torch.cat(
            [torch.full((row.outputs,), weight_of[i]) for row, i in zip(rows, indices, strict=True)]
        )
        loss, sums = policy_loss(
            logprobs=logprobs,
            entropy=scores.entropy,
            behavior=behavior,
            advantages=torch.cat([row.advantages for row in rows]).to(device),
            weights=weights.to(device),
            lengths=[row.outputs for row in rows],
            proximal=torch.cat([self._proximal[index] for index in indices])
            if self._corrects
            else None,
            divergence=self._divergence(indices, scores),
            kl=self._kl,
            algorithm=self._config.algorithm,
        )
        self._sums += sums
        if measure:
            gaps = torch.split(
                (logprobs.detach() - behavior).abs().cpu(), [row.outputs for row in rows]
            )
            for row, gap in zip(rows, gaps, strict=True):
                self._gap.add(row.engine, gap[row.current])
        return loss

    def _metrics(self) -> dict[str, float]:
        ranks = self._passes.ranks
        metrics = metrics_from_sums(
            ranks.all_reduce_sum(self._sums).cpu(), with_reference=bool(self._kl)
        )
        metrics |= self._gap.metrics(ranks)
        metrics |= age_shares([row.ages for row in self._rows])
        if self._critic is not None:
            metrics |= self._critic.metrics()
        outputs = sum(row.outputs for row in self._rows)
        skipped = sum(
            row.outputs for row, needed in zip(self._rows, self._needed, strict=True) if not needed
        )
        if self._config.algorithm.routing_replay:
            metrics["routed_fraction"] = routed_fraction(self._examples)
        return metrics | {
            "loss": math.fsum(self._losses) / max(1, len(self._losses)),
            "grad_norm": math.fsum(self._norms) / max(1, len(self._norms)),
            "updates": float(len(self._norms)),
            "tokens": float(outputs),
            "input_tokens": float(sum(row.tokens for row in self._rows)),
            "skipped_fraction": skipped / max(1, outputs),
        }
