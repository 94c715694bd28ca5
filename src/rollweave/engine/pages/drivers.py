"""The driver of the pages of a device."""

import importlib
from typing import Any

import torch

from rollweave.engine.pages.base import PageDriver
from rollweave.engine.pages.cuda import CudaPages
from rollweave.engine.pages.mmap import MmapPages
from rollweave.schema.errors import ConfigError


def driver_of(device: torch.device, page_bytes: int) -> PageDriver:
    """Return the driver of a device's pages, of `page_bytes` or more. Call it on the
    thread that uses it.

    Raises ConfigError for a GPU without the package that calls its driver.
    """
    if device.type == "cpu":
        return MmapPages(page_bytes)
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"--device must be cpu with --lend unless cuda-bindings is installed, got {device}: "
            f"{error}"
        ) from None
    make_current(device)
    return CudaPages(driver, device.index or 0)


def make_current(device: torch.device) -> None:
    """Make torch's context of a GPU that of the calling thread."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
