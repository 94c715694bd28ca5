"""The device on which a process computes."""

import contextlib
import ctypes

import torch


def device_named(name: str) -> torch.device:
    """Return the device that `name` stands for, as in `model.device`: `auto` is a GPU
    if this process sees one, and `cuda` the first GPU that it sees.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def give_back_memory(device: torch.device) -> None:
    """Return freed memory of the device, which allocators would keep, to the system, so
    that other processes can use it.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
