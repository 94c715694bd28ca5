"""The residence of the trainer's state: on its device, or in the host's memory while
the engines have the device (colocated placement).

On a CPU the two are the same memory: only memory that a step has freed is given back.
"""

from typing import Any

import torch
from torch import nn

from rollweave.io.device import give_back_memory
from rollweave.train.distributed import is_sharded, local_tensor, placed_like
from rollweave.train.optimizer import MOMENTS, OffloadedAdamW, on_host


class Residence:
    """Moves a model, the state of its optimizer and, if there is one, the reference.

    Gradients are dropped: there are none between two steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        on_device: bool = True,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._on_device = on_device

    def leave(self, reference: list[torch.Tensor] | None) -> None:
        """Move everything to the host's memory, and give back the device's memory."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._on_device and self._device.type != "cpu":
            self._model._apply(_to_host)  # type: ignore[no-untyped-call]
            for state in self._optimizer.state.values():
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
            offloaded = isinstance(self._optimizer, OffloadedAdamW)
            for parameter, state in self._optimizer.state.items():
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
