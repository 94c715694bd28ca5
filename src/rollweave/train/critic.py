"""The critic of PPO: a model that predicts the return from each state, trained together
with the policy.

Invariants: it starts from the weights of the policy, with a head that gives 0; it has
the policy's division into minibatches, ranks and micro-batches; a minibatch changes it
only if the policy's part of the step has succeeded, too.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from rollweave.io.machine import computed_dtype
from rollweave.schema.config.algorithm import OF_CRITIC
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import NonFiniteLossError
from rollweave.schema.work import Batch
from rollweave.train.distributed import RankGroup, local_tensor
from rollweave.train.gae import Estimate, estimate, standardized
from rollweave.train.model import Scores
from rollweave.train.optimizer import (
    Snapshot,
    clip_gradients,
    learning_rate,
    load_optimizer_tensors,
    new_optimizer,
    optimizer_tensors,
    set_learning_rate,
)
from rollweave.train.passes import Passes
from rollweave.train.residence import Residence
from rollweave.train.rows import Row
from rollweave.train.values import load_value_model
from rollweave.train.weights import load_named_tensors, named_tensors


class Critic:
    """The critic, its optimizer, and its measurements in the current batch."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        *,
        ranks: RankGroup,
        device: torch.device,
        on_device: bool,
    ) -> None:
        """Load the trunk from `model_dir`. Raises `TrainerError`."""
        trainer = config.trainer
        lr = config.critic.lr
        self._gae_lambda = config.critic.gae_lambda
        self._schedule = trainer if lr is None else trainer.model_copy(update={"lr": lr})
        self._steps = config.run.steps
        self._ranks = ranks
        self.model = load_value_model(
            model_dir,
            config.model.implementation,
            dtype=computed_dtype(config.model.dtype, device.type),
            device=device if on_device else torch.device("cpu"),
            ranks=ranks,
        )
        self.model.recompute_activations("activations" in trainer.save_memory)
        self.optimizer = new_optimizer(
            self.model,
            lr=self._schedule.lr,
            weight_decay=trainer.weight_decay,
            offload="optimizer" in trainer.save_memory,
        )
        self.residence = Residence(self.model, self.optimizer, device, on_device=on_device)
        self._passes = Passes(self.model, ranks, micro_tokens=trainer.micro_tokens, device=device)
        self._ready = False  # gradients of a minibatch
        self._explained = 0.0
        self._losses: list[float] = []
        self._norms: list[float] = []

    @torch.no_grad()
    def start_from(self, policy: nn.Module) -> None:
        """Copy the weights that it shares with the policy."""
        own = dict(self.model.named_parameters())
        for name, parameter in policy.named_parameters():
            if name in own:
                local_tensor(own[name]).copy_(local_tensor(parameter))

    def estimated(self, batch: Batch, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, with advantages and returns where their estimator uses the
        critic.
        """
        set_learning_rate(
            self.optimizer, learning_rate(self._schedule, step=batch.step, steps=self._steps)
        )
        self._losses, self._norms, self._explained = [], [], 0.0
        chosen = [index for index, row in enumerate(rows) if row.algorithm.advantage in OF_CRITIC]
        if not chosen:
            return list(rows)
        examples = [row.example for row in rows]
        # the scores of a value model are values
        values = self._passes.logprobs(examples, chosen, temperature=1.0)
        trajectories = [member for group in batch.groups for member in group.trajectories]
        of_trajectory: dict[int, list[int]] = {}
        for index in chosen:
            of_trajectory.setdefault(rows[index].trajectory, []).append(index)
        estimates: dict[int, Estimate] = {}
        for trajectory, indices in of_trajectory.items():
            made = estimate(
                trajectories[trajectory],
                [rows[index] for index in indices],
                [values[index].cpu() for index in indices],
                gae_lambda=self._gae_lambda,
            )
            estimates |= dict(zip(indices, made, strict=True))
        self._explained = _explained([(values[index].cpu(), estimates[index]) for index in chosen])
        advantages = standardized(estimates)
        return [
            dataclasses.replace(
                row,
                advantages=advantages[index],
                returns=estimates[index].returns,
                valued=estimates[index].valued,
            )
            if index in estimates
            else row
            for index, row in enumerate(rows)
        ]

    def backward(self, rows: Sequence[Row], chosen: Sequence[int], *, step: int) -> None:
        """Compute the gradient of half the mean squared error of a minibatch, over all
        tokens at which the critic is to learn.

        Raises `NonFiniteLossError`, after which `apply` does nothing.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._ready = False
        own = [index for index in chosen if rows[index].returns is not None]
        total = sum(int(_valued(rows[index]).sum()) for index in own)
        if not total:
            return

        def loss_of(indices: list[int], scores: Scores) -> torch.Tensor:
            values = scores.logprobs
            returns = torch.cat([_returns(rows[index]) for index in indices]).to(values.device)
            valued = torch.cat([_valued(rows[index]) for index in indices]).to(values.device)
            errors = (values - returns).square() * valued
            return errors.sum() / (2 * total)

        loss = self._passes.backward(
            [row.example for row in rows], own, temperature=1.0, loss_of=loss_of
        )
        norm = (
            clip_gradients(self.model, self._schedule.max_grad_norm)
            if math.isfinite(loss)
            else math.nan
        )
        if not math.isfinite(norm):
            raise NonFiniteLossError(f"step {step}: critic loss {loss}, gradient norm {norm}")
        self._losses.append(loss)
        self._norms.append(norm)
        self._ready = True

    def apply(self) -> None:
        """Take the optimizer step of the gradient that `backward` has computed."""
        if self._ready:
            self.optimizer.step()
        self._ready = False
        self.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the batch; empty if the critic has not learned."""
        if not self._losses:
            return {}
        return {
            "critic_loss": math.fsum(self._losses) / len(self._losses),
            "critic_grad_norm": math.fsum(self._norms) / len(self._norms),
            "critic_explained": self._explained,
        }

    def snapshot(self) -> Snapshot:
        return Snapshot.take(self.model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights (of this rank's shards), on the CPU."""
        return named_tensors(self.model, self._ranks)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the optimizer's state, on the CPU."""
        return optimizer_tensors(self.model, self.optimizer, self._ranks)

    def load(
        self, tensors: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]
    ) -> None:
        """Restore the copies that `tensors` and `optimizer_tensors` have returned."""
        load_named_tensors(self.model, tensors)
        load_optimizer_tensors(self.model, self.optimizer, optimizer)
        self.optimizer.zero_grad(set_to_none=True)


def _explained(pairs: Sequence[tuple[torch.Tensor, Estimate]]) -> float:
    """Return the share of the returns' variance that the values explain; 0 if they do
    not vary.
    """
    returns = torch.cat([made.returns[made.valued] for _, made in pairs]).double()
    values = torch.cat([value[made.valued] for value, made in pairs]).double()
    if not len(returns) or not float(returns.var(correction=0)):
        return 0.0
    left = (returns - values).var(correction=0) / returns.var(correction=0)
    return 1 - float(left)


def _returns(row: Row) -> torch.Tensor:
    assert row.returns is not None, "only rows with returns are chosen"
    return row.returns


def _valued(row: Row) -> torch.Tensor:
    assert row.valued is not None, "only rows with returns are chosen"
    return row.valued
