"""Published weights on one rank of a vLLM server (`register_engine`).

An update has two parts, each of which runs on all ranks before the next one begins:
`check` maps the published bytes and compares their layout with the model, and `swap`
loads this rank's slices. Invariants: `check` changes nothing, so that a version that
any rank refuses leaves all ranks with their former weights; every parameter of the
model is loaded, or `swap` raises.

The bytes were verified by the process that owns the server, and cannot change: they
are in sealed memory, or in a file that its publisher never writes again.
"""

import math
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

Tensors = list[tuple[str, torch.Tensor]]


@dataclass
class Start(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing is agreed upon before the first update."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One part of an update. `tensors` are (name, dtype, shape, offset), by the names
    of the checkpoint, in the `nbytes` bytes at `location`.
    """

    part: str
    location: str = ""
    nbytes: int = 0
    tensors: Sequence[tuple[str, str, Sequence[int], int]] = ()


class RollweaveTransfer(WeightTransferEngine[Start, Update]):  # type: ignore[misc]
    """Loads weights from memory that this host's processes share."""

    init_info_cls = Start
    update_info_cls = Update
    supports_draft_weight_update = False
    _checked: Tensors | None = None

    def init_transfer_engine(self, init_info: Start) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Forget an update that was never swapped in."""
        self._checked = None

    def finish_weight_update(self) -> None:
        """Do nothing: `swap` leaves the model complete."""
        self._checked = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # a CPU has nothing to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        if update_info.part == "check":
            self._checked = _mapped(update_info)
        elif update_info.part == "swap" and self._checked is not None:
            self._swap(self._checked)
        else:
            raise ValueError(f"part must be check, then swap, got {update_info.part!r}")

    def shutdown(self) -> None:
        self._checked = None

    def _swap(self, tensors: Tensors) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self.device.type == "cpu":
            _pack_experts_anew(self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # The packed copy of a head that is tied to the embeddings is not made anew:
            # no weights of the head are reloaded.
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
        if loaded is not None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise ValueError(f"no weights for {missing[:3]}")


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Have the next load pack the weights of experts. A CPU computes with packed ones,
    but vLLM packs them only when it makes the kernel of a layer: it would copy the
    weights of a later load as they are. There are no graphs that refer to a kernel.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _mapped(update: Update) -> Tensors:
    """Return the tensors by name, mapped without a copy."""
    fd = os.open(update.location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != update.nbytes:
            raise ValueError(f"{update.location}: {status.st_size} bytes, not {update.nbytes}")
        buffer = mmap.mmap(fd, update.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    tensors: Tensors = []
    for name, kind, shape, offset in update.tensors:
        dtype = getattr(torch, kind)
        count = math.prod(shape)
        if offset + count * dtype.itemsize > update.nbytes:
            raise ValueError(f"{name} lies beyond the {update.nbytes} bytes")
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        tensors.append((name, flat.view(shape)))
    return tensors
