"""Copies weights between a device and the host's memory through two alternating
buffers.

While the device copies one buffer, on its own stream and from or to pinned memory, the
CPU writes, hashes or fills the other. The same code runs without streams if the device
is the CPU. Invariant: a buffer is not read before its copy is done, and not overwritten
while it is still being read.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from rollweave.weights.publication import bytes_of

BUFFER_BYTES = 32 << 20
"""Bytes of each buffer: some milliseconds on a PCIe link, compared with microseconds to
start a copy.
"""


class Staging:
    """Two buffers for one device. Supports one iteration at a time."""

    def __init__(self, device: torch.device, *, nbytes: int = BUFFER_BYTES) -> None:
        if nbytes < 16:
            raise ValueError(f"nbytes must be at least 16, a few elements, got {nbytes}")
        cuda = device.type == "cuda"
        self._device = device
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]

    def download(
        self, slices: Iterable[tuple[int, torch.Tensor]], dtype: torch.dtype
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes of `slices` (offset, tensor on the device) as `dtype`, in
        order: (offset, bytes), valid until the next item.

        The tensors must not change before the last item; the snapshot is complete when
        the last item arrives.
        """
        step = len(self._buffers[0]) // dtype.itemsize
        waiting: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None
        turn = 0
        for offset, tensor in slices:
            flat = tensor.detach().reshape(-1)
            self._wait_for_device()
            for start in range(0, len(flat), step):
                piece = flat[start : start + step]
                if self._stream is None and piece.dtype == dtype:
                    target, copied = piece, None  # it is already on the host
                else:
                    target = self._buffers[turn % 2][: len(piece) * dtype.itemsize].view(dtype)
                    copied = self._copy(target, piece)
                if waiting is not None:
                    yield _completed(*waiting)
                waiting = (offset + start * dtype.itemsize, target, copied)
                turn += 1
        if waiting is not None:
            yield _completed(*waiting)

    def upload(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield CPU tensors on the device, one after the other, each valid until the
        next.

        The call itself allocates memory for the largest tensor, so that
        `torch.OutOfMemoryError` is raised before anything has been copied.
        """
        largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
        return self._upload(tensors, torch.empty(largest, dtype=torch.uint8, device=self._device))

    def _upload(
        self, tensors: Mapping[str, torch.Tensor], scratch: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        copied: list[torch.cuda.Event | None] = [None, None]
        turn, size = 0, len(self._buffers[0])
        for name, tensor in tensors.items():
            source = tensor.contiguous().reshape(-1).view(torch.uint8)
            self._wait_for_device()  # the last tensor is no longer in use
            for start in range(0, len(source), size):
                piece, buffer, event = (
                    source[start : start + size],
                    self._buffers[turn % 2],
                    copied[turn % 2],
                )
                if event is not None:
                    event.synchronize()
                staged = buffer[: len(piece)]
                staged.copy_(piece)
                copied[turn % 2] = self._copy(scratch[start : start + len(piece)], staged)
                turn += 1
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            yield name, scratch[: len(source)].view(tensor.dtype).view(tensor.shape)

    def _wait_for_device(self) -> None:
        """Order the next copy after the work queued on the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> "torch.cuda.Event | None":
        """Start to copy, converting on the device.

        Return the event to wait for, or None if the copy is done.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source.to(target.dtype), non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event


def on_device(
    tensors: Mapping[str, torch.Tensor], device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield `tensors` on the device: through `Staging.upload`, or unchanged if they are
    there.
    """
    there = all(tensor.device.type == device.type for tensor in tensors.values())
    return tensors.items() if there else Staging(device).upload(tensors)


def _completed(
    offset: int, target: torch.Tensor, copied: "torch.cuda.Event | None"
) -> tuple[int, memoryview]:
    if copied is not None:
        copied.synchronize()
    return offset, bytes_of(target)
