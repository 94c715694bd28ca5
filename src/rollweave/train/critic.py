"""The critic of PPO: a model that predicts the return from each state, trained together
with the policy, and generalized advantage estimation with its values (GAE,
arXiv:1506.02438 eq. 16), token by token or turn by turn.

Invariants: the critic starts from the weights of the policy, with the names and shapes
of the policy's parameters, except that a head `value`, which gives 0 at first, is in
place of the head over the vocabulary; it has the policy's division into minibatches,
ranks and micro-batches; a minibatch changes it only if the policy's part of the step
has succeeded, too. A value is the value of the state in which a token is sampled; the
state after the last turn has the value 0; `gamma` discounts between turns, never within
a turn.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from rollweave.io.machine import computed_dtype
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import OF_CRITIC, Schedule
from rollweave.schema.errors import NonFiniteLossError
from rollweave.schema.work import Batch, Trajectory, TurnSpan
from rollweave.train.advantages import MIN_DEVIATION, reward_of, turn_rewards, turns_of
from rollweave.train.distributed import ALONE, RankGroup, local_tensor
from rollweave.train.loading import Implementation, implementation_of, load_transformers_as
from rollweave.train.model import Model, Reference, Scores, load_as
from rollweave.train.packing import Packed
from rollweave.train.passes import Passes, group_means
from rollweave.train.rows import Row
from rollweave.train.state import (
    TrainedState,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from rollweave.train.transformers_model import TransformersModel
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.views import StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(Model):
    """A decoder of this package's own implementation."""

    def __init__(self, shape: ModelShape, compute_dtype: torch.dtype) -> None:
        super().__init__(shape, compute_dtype)
        del self.lm_head
        self.value = nn.Parameter(torch.zeros(shape.hidden))

    def tie(self) -> None:
        """Do nothing: there is no head over the vocabulary."""

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return values in the place of log-probs."""
        return _scores(self.hidden(packed), self.value)


class TransformersValueModel(TransformersModel):
    """A decoder of transformers. It chooses experts by itself, even where the policy's
    experts are recorded.
    """

    def __init__(
        self, causal: "PreTrainedModel", stored: StoredTensors, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(causal, stored, compute_dtype)
        width = causal.get_output_embeddings().weight.shape[1]
        self.value = nn.Parameter(torch.empty(width, device="meta"))

    def parts_of(self, causal: "PreTrainedModel") -> Iterable[tuple[str, nn.Module]]:
        head = causal.get_output_embeddings()
        return ((name, child) for name, child in causal.named_children() if child is not head)

    def forward(
        self, packed: Packed, temperature: float, reference: Reference | None = None
    ) -> Scores:
        """Return values in the place of log-probs."""
        return _scores(self.hidden(dataclasses.replace(packed, routes=None)), self.value)


def load_value_model(
    path: Path,
    implementation: Implementation | None,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
) -> ValueModel | TransformersValueModel:
    """Load the trunk of a Hugging Face checkpoint directory, sharded over `ranks`.
    Raises `TrainerError`, which names what is not supported or missing.
    """
    model: ValueModel | TransformersValueModel
    if (implementation or implementation_of(path)) == "transformers":
        model = load_transformers_as(
            TransformersValueModel, path, dtype=dtype, device=device, ranks=ranks
        )
    else:
        model = load_as(ValueModel, path, dtype=dtype, device=device, ranks=ranks)
    with torch.no_grad():
        local_tensor(model.value).zero_()
    return model


def _scores(states: torch.Tensor, value: nn.Parameter) -> Scores:
    values = states.float() @ value.float()
    nothing = torch.zeros_like(values)
    return Scores(values, nothing, nothing)


class Estimate(NamedTuple):
    """The estimates at the output tokens of one row, each [M].

    `valued` are the tokens at which the critic is to predict `returns`; `covered` are
    the tokens that belong to a turn.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    valued: torch.Tensor
    covered: torch.Tensor


def estimate(
    trajectory: Trajectory,
    rows: Sequence[Row],
    values: Sequence[torch.Tensor],
    *,
    gae_lambda: float,
) -> list[Estimate]:
    """Return the estimates of a trajectory's rows from the values [M] at their tokens.

    - `gae`: each token is a step, and the last one of a turn has the turn's reward.
      A_t = δ_t + γ λ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t, where γ is 1 within a
      turn.
    - `gae_turn`: each turn is a step with the value of its first token; all its tokens
      have its advantage, and the critic learns at the first one.

    A turn without output tokens is not a step, but its reward and discount count.
    """
    algorithm = rows[0].algorithm
    by_turn = algorithm.advantage == "gae_turn"
    estimates = [
        Estimate(
            advantages=torch.zeros(row.outputs),
            returns=torch.zeros(row.outputs),
            valued=torch.zeros(row.outputs, dtype=torch.bool),
            covered=torch.zeros(row.outputs, dtype=torch.bool),
        )
        for row in rows
    ]
    place_of = {row.sequence: place for place, row in enumerate(rows)}
    spans = turns_of(trajectory)
    rewards = turn_rewards(reward_of(trajectory, algorithm), spans)
    next_value = next_advantage = 0.0
    for (sequence, span), reward in zip(reversed(spans), reversed(rewards), strict=True):
        place = place_of.get(sequence)
        inside = [] if place is None else _inside(rows[place], span)
        if place is None or not inside:  # no state: its reward belongs to the turn before it
            next_value = reward + algorithm.gamma * next_value
            next_advantage *= algorithm.gamma
            continue
        made = estimates[place]
        for number, index in enumerate(reversed(inside[:1] if by_turn else inside)):
            value = float(values[place][index])
            discount = algorithm.gamma if number == 0 else 1.0
            delta = (reward if number == 0 else 0.0) + discount * next_value - value
            next_advantage = delta + discount * gae_lambda * next_advantage
            next_value = value
            made.advantages[index] = next_advantage
            made.returns[index] = next_advantage + value
            made.valued[index] = True
        if by_turn:
            made.advantages[inside] = next_advantage
        made.covered[inside] = True
    return estimates


def _inside(row: Row, span: TurnSpan) -> list[int]:
    """Return the places of a turn's tokens among the output tokens of its row."""
    targets = row.example.targets
    found: list[int] = ((targets >= span.start) & (targets < span.end)).nonzero().flatten().tolist()
    return found


def standardized(estimates: Mapping[int, Estimate]) -> dict[int, torch.Tensor]:
    """Return advantages by row, minus their mean over the tokens of all turns and
    divided by their standard deviation, as PPO's implementations do.
    """
    flat = torch.cat([of_row.advantages[of_row.covered] for of_row in estimates.values()])
    mean, deviation = flat.mean(), flat.std(correction=0)
    scale = 0.0 if float(deviation) <= MIN_DEVIATION else 1 / float(deviation)
    return {
        index: torch.where(each.covered, (each.advantages - mean) * scale, 0.0)
        for index, each in estimates.items()
    }


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
        if lr is not None:
            schedule = trainer.lr if isinstance(trainer.lr, dict) else Schedule(peak=lr)
            trainer = trainer.model_copy(update={"lr": schedule | {"peak": lr}})
        self._schedule = trainer
        self._steps = config.run.steps
        self.model = load_value_model(
            model_dir,
            config.model.implementation,
            dtype=computed_dtype(config.model.dtype, device.type),
            device=device if on_device else torch.device("cpu"),
            ranks=ranks,
        )
        self.model.recompute_activations("activations" in trainer.save_memory)
        self.state = TrainedState(self.model, self._schedule, ranks, device, on_device=on_device)
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
            self.state.optimizer, learning_rate(self._schedule, step=batch.step, steps=self._steps)
        )
        self._losses, self._norms, self._explained = [], [], 0.0
        values, estimates = self._estimates(batch, rows, self._gae_lambda)
        if not estimates:
            return list(rows)
        self._explained = _explained([(values[at], made) for at, made in estimates.items()])
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

    def td_errors(self, batch: Batch, rows: Sequence[Row]) -> list[float | None]:
        """Return the mean absolute TD error of each group, over the steps of its rows;
        None for a group without steps, such as one whose estimator uses no critic.

        A TD error is an advantage with λ = 0, before standardization. Raises
        `NonFiniteLossError` for a value that is not finite.
        """
        _, estimates = self._estimates(batch, rows, 0.0)
        errors = {index: made.advantages[made.valued].abs() for index, made in estimates.items()}
        return group_means(errors, rows, batch.groups, what="TD errors")

    def _estimates(
        self, batch: Batch, rows: Sequence[Row], gae_lambda: float
    ) -> tuple[dict[int, torch.Tensor], dict[int, Estimate]]:
        """Return the values and the estimates of the rows whose estimator uses the
        critic, by index.
        """
        chosen = [index for index, row in enumerate(rows) if row.algorithm.advantage in OF_CRITIC]
        if not chosen:
            return {}, {}
        # the scores of a value model are values
        values = self._passes.logprobs([row.example for row in rows], chosen, temperature=1.0)
        values = {index: each.cpu() for index, each in values.items()}
        trajectories = [member for group in batch.groups for member in group.trajectories]
        of_trajectory: dict[int, list[int]] = {}
        for index in chosen:
            of_trajectory.setdefault(rows[index].trajectory, []).append(index)
        estimates: dict[int, Estimate] = {}
        for trajectory, indices in of_trajectory.items():
            made = estimate(
                trajectories[trajectory],
                [rows[index] for index in indices],
                [values[index] for index in indices],
                gae_lambda=gae_lambda,
            )
            estimates |= dict(zip(indices, made, strict=True))
        return values, {index: estimates[index] for index in chosen}

    def backward(self, rows: Sequence[Row], chosen: Sequence[int], *, step: int) -> None:
        """Compute the gradient of half the mean squared error of a minibatch, over all
        tokens at which the critic is to learn.

        Raises `NonFiniteLossError`, after which `apply` does nothing.
        """
        self.state.optimizer.zero_grad(set_to_none=True)
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
            self.state.optimizer.step()
        self._ready = False
        self.state.optimizer.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the batch; empty if the critic has not learned."""
        if not self._losses:
            return {}
        return {
            "critic_loss": math.fsum(self._losses) / len(self._losses),
            "critic_grad_norm": math.fsum(self._norms) / len(self._norms),
            "critic_explained": self._explained,
        }


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
