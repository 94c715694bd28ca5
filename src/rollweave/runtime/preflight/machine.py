"""The resources of this machine."""

import os
import platform
from pathlib import Path
from typing import Any


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Return total and available main memory in bytes, within the container's limit if
    there is one; zeros if unknown.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")
    }
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    return total, available


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def gpu_memory(device: str) -> tuple[int, int]:
    """Return total and free bytes of a CUDA device. Raises RuntimeError if there is
    none.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return total, free


def describe() -> dict[str, Any]:
    """Describe the machine, as benchmarks record it."""
    import torch

    total, _ = memory_bytes()
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gib": round(total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
    return machine


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
