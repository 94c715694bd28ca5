"""The trainer's state: the trained weights as values, AdamW with warm-up and linear
decay, and the memory in which both reside.

The trained weights are the whole model, or its adapters; frozen weights never change.
In a colocated run the state is in the host's memory while the engines have the device.
Invariants: the learning rate is a function of the step alone; `Snapshot` restores
weights and optimizer bitwise.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollweave.io.machine import give_back_memory
from rollweave.schema.config.training import TrainerConfig
from rollweave.schema.errors import TrainerError
from rollweave.train.distributed import (
    ALONE,
    RankGroup,
    from_rows,
    is_sharded,
    local_tensor,
    on_cpu,
    placed_like,
)
from rollweave.train.tensor_parallel import division_of, total_norm

BETAS = (0.9, 0.95)
"""AdamW's decay rates of the first and the second moment."""

MOMENTS = ("exp_avg", "exp_avg_sq")

NORM_EPSILON = 1e-6
"""Number that torch adds to the norm by which it divides gradients."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def clone_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Copy every trained parameter (of this rank's shard), in the order of
    `trained_parameters`, on its device.
    """
    return [local_tensor(parameter).clone() for parameter in trained_parameters(model).values()]


@torch.no_grad()
def load_clones(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Restore copies from `clone_parameters`."""
    for parameter, value in zip(trained_parameters(model).values(), values, strict=True):
        local_tensor(parameter).copy_(value)


@contextlib.contextmanager
def swapped_weights(model: nn.Module, values: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run with other weights.

    Costs a copy of the trained weights for the duration, instead of a second model
    permanently.
    """
    own = clone_parameters(model)
    load_clones(model, values)
    try:
        yield
    finally:
        load_clones(model, own)


def named_tensors(
    model: nn.Module, ranks: RankGroup, values: Sequence[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the trained parameters (of this rank's shards), or `values` from
    `clone_parameters`, by transformers' names, on the CPU: themselves, or copies of
    what is on a GPU; a tied head appears once, as the embedding.
    """
    parameters, splits = trained_parameters(model), division_of(model).splits
    chosen = parameters.values() if values is None else values
    return {
        name: on_cpu(value, ranks, like=parameter, split=splits.get(name))
        for (name, parameter), value in zip(parameters.items(), chosen, strict=True)
    }


@torch.no_grad()
def load_named_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors from `named_tensors`.

    Raises `TrainerError` if names or shapes differ, before anything is changed.
    """
    parameters = trained_parameters(model)
    if tensors.keys() != parameters.keys():
        raise TrainerError(
            f"weights of another model: {sorted(tensors.keys() ^ parameters.keys())[:3]} differ"
        )
    division = division_of(model)
    for name, parameter in parameters.items():
        if tensors[name].shape != division.shape(name, parameter):
            raise TrainerError(
                f"weight {name} must have shape {tuple(division.shape(name, parameter))}, got "
                f"{tuple(tensors[name].shape)}"
            )
    for name, parameter in parameters.items():
        value = own_part(model, name, tensors[name])
        local_tensor(parameter).copy_(local_tensor(placed_like(value, parameter)))


def own_part(model: nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's value (such as its weights), from the
    rows that this rank has saved.
    """
    division = division_of(model)
    split = division.splits.get(name)
    if split is None or not is_sharded(value):
        return value
    return from_rows(local_tensor(value), value.shape[0], split, division.ranks)


class FrugalAdamW(torch.optim.AdamW):
    """AdamW that updates one parameter after the other, and drops each gradient then:
    updated weights may need new memory (`train/publishing`).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        parameters = group["params"]
        try:
            for parameter in parameters:
                if parameter.grad is not None:
                    group["params"] = [parameter]
                    self._step_alone(parameter)
                    parameter.grad = None
        finally:
            group["params"] = parameters

    def _step_alone(self, parameter: nn.Parameter) -> None:
        super().step()


class OffloadedAdamW(FrugalAdamW):
    """AdamW with its moments in the host's memory. The moments of one parameter at a
    time are moved to its device, for its step.
    """

    def _step_alone(self, parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        kept = {key: state[key] for key in MOMENTS if key in state}
        for key, moment in kept.items():
            state[key] = placed_like(moment, parameter)
        super()._step_alone(parameter)
        for key in MOMENTS:
            moment = local_tensor(state[key])
            state[key] = kept[key].copy_(moment) if key in kept else on_host(moment)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host's memory, pinned if it is on a GPU."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)


def new_optimizer(
    model: nn.Module, trainer: TrainerConfig, *, lr: float, device: torch.device
) -> torch.optim.AdamW:
    """Return AdamW of the parameters that are trained on `device`, with its moments in
    the host's memory if that is configured.
    """
    parameters = list(trained_parameters(model).values())
    kind = FrugalAdamW if device.type == "cpu" else torch.optim.AdamW
    if "optimizer" in trainer.save_memory:
        kind = OffloadedAdamW
    return kind(parameters, lr=lr, betas=BETAS, weight_decay=trainer.weight_decay, fused=True)


def learning_rate(trainer: TrainerConfig, *, step: int, steps: int) -> float:
    """Return the learning rate at training step `step` of `steps`, from 0: it increases
    linearly over `warmup_steps`, then decreases linearly to `final_lr` at the last
    step.
    """
    if step < trainer.warmup_steps:
        return trainer.peak_lr * (step + 1) / trainer.warmup_steps
    span = steps - 1 - trainer.warmup_steps
    progress = min(1.0, (step - trainer.warmup_steps) / span) if span > 0 else 1.0
    return trainer.peak_lr * (1 - (1 - trainer.final_lr) * progress)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients down to `max_norm` (over all ranks); return the norm before.

    Gradients that are not finite are left unchanged.
    """
    parameters = list(trained_parameters(model).values())
    if division_of(model).splits:
        value = float(total_norm(model))
        if math.isfinite(value) and value > max_norm:
            for parameter in parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).mul_(max_norm / (value + NORM_EPSILON))
        return value
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if is_sharded(norm):
        norm = norm.full_tensor()
    value = float(norm)
    if math.isfinite(value) and value > max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return value


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of weights and optimizer state on the CPU; shards stay shards."""

    weights: list[torch.Tensor]
    moments: list[dict[str, torch.Tensor]]

    @classmethod
    def take(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> "Snapshot":
        parameters = list(trained_parameters(model).values())
        return cls(
            weights=[_copy(parameter) for parameter in parameters],
            moments=[
                {key: _copy(value) for key, value in optimizer.state.get(p, {}).items()}
                for p in parameters
            ],
        )

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter, weight, moments in zip(
            trained_parameters(model).values(), self.weights, self.moments, strict=True
        ):
            local_tensor(parameter).copy_(weight)
            if not moments:
                optimizer.state.pop(parameter, None)
            for key, value in moments.items():
                local_tensor(optimizer.state[parameter][key]).copy_(value)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup = ALONE
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state (of this rank's shards) by `<moment>.<parameter>`
    and `step.<parameter>`, on the CPU: itself, or copies of what is on a GPU.
    """
    tensors: dict[str, torch.Tensor] = {}
    splits = division_of(model).splits
    for name, parameter in trained_parameters(model).items():
        state: Mapping[str, torch.Tensor] = optimizer.state.get(parameter, {})
        for key, value in state.items():
            tensors[f"{key}.{name}"] = on_cpu(value, ranks, like=parameter, split=splits.get(name))
    return tensors


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Restore tensors from `optimizer_tensors`.

    A parameter without tensors loses its current state.
    """
    for name, parameter in trained_parameters(model).items():
        optimizer.state.pop(parameter, None)
        if f"step.{name}" in tensors:
            state = {key: own_part(model, name, tensors[f"{key}.{name}"]) for key in MOMENTS}
            for key, moment in state.items():
                state[key] = (
                    on_host(local_tensor(moment))
                    if isinstance(optimizer, OffloadedAdamW)
                    else placed_like(moment, parameter)
                )
            state["step"] = tensors[f"step.{name}"].to(parameter.device)
            optimizer.state[parameter] = state


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).to("cpu", copy=True)


class TrainedState:
    """A model that is trained, with its optimizer: what a checkpoint and a snapshot
    have, and what moves between its device and the host's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        trainer: TrainerConfig,
        ranks: RankGroup,
        device: torch.device,
        *,
        on_device: bool,
    ) -> None:
        self._model, self._ranks, self._device = model, ranks, device
        self._on_device = on_device
        self.optimizer = new_optimizer(model, trainer, lr=trainer.peak_lr, device=device)

    def snapshot(self) -> Snapshot:
        return Snapshot.take(self._model, self.optimizer)

    def undo(self, before: Snapshot | None) -> None:
        """Drop the gradients, and restore an earlier snapshot, if there is one."""
        self.optimizer.zero_grad(set_to_none=True)
        if before is not None:
            before.restore(self._model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights as `named_tensors` does."""
        return named_tensors(self._model, self._ranks)

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state as the function `optimizer_tensors` does."""
        return optimizer_tensors(self._model, self.optimizer, self._ranks)

    def load(
        self, tensors: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]
    ) -> None:
        """Restore the copies that `tensors` and `optimizer_tensors` have returned.
        Raises `TrainerError` for tensors of another model.
        """
        load_named_tensors(self._model, tensors)
        load_optimizer_tensors(self._model, self.optimizer, optimizer)
        self.optimizer.zero_grad(set_to_none=True)

    def leave(self, reference: list[torch.Tensor] | None) -> None:
        """Move everything, and the reference if there is one, to the host's memory, and
        give back the device's memory. Gradients are dropped: there are none between two
        steps. On a CPU, only memory that a step has freed is given back.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self._on_device and self._device.type != "cpu":
            self._model._apply(_to_host)  # type: ignore[no-untyped-call]
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    state[key] = _to_host(value)
            if reference is not None:
                reference[:] = [_to_host(tensor) for tensor in reference]
        self._on_device = False
        give_back_memory(self._device)

    def enter(self, reference: list[torch.Tensor] | None) -> None:
        """Move everything to the device. Raises RuntimeError if there is no room."""
        if not self._on_device and self._device.type != "cpu":
            self._model.to(self._device)
            offloaded = isinstance(self.optimizer, OffloadedAdamW)
            for parameter, state in self.optimizer.state.items():
                for key, value in state.items():
                    if not (offloaded and key in MOMENTS):
                        state[key] = self._to_device(value, parameter)
            if reference is not None:
                reference[:] = [tensor.to(self._device) for tensor in reference]
        self._on_device = True

    def _to_device(self, value: torch.Tensor, parameter: Any) -> torch.Tensor:
        return placed_like(value, parameter) if value.dim() else value.to(self._device)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the host's memory; a shard stays a shard."""
    if tensor.device.type == "cpu":
        return tensor
    return tensor.to("cpu") if is_sharded(tensor) else on_host(local_tensor(tensor))
