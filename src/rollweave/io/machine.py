"""This machine: its resources, and the number format in which its CPU computes a model.
Torch is imported only by the functions that need it, so that checks before a run stay
fast.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Any

BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Linux's names of instructions for products of bfloat16: the first two are x86's, the
last is ARM's.
"""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Return total and available main memory in bytes, within the container's limit if
    any; zeros if unknown.
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
    """Return total and free bytes of a CUDA device. Raises RuntimeError without a CUDA
    device.
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


@functools.cache
def has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())


def computed_dtype(dtype: str, device_type: str) -> str:
    """Return the format in which a model of `dtype` is computed on a device of this
    type, "cpu" or "cuda": `dtype`, or float32 on a CPU without instructions for
    bfloat16.

    Such a CPU would convert each number before it multiplies it. Matrix products then
    take 20 to 80 times as long as in float32 (measured with torch 2.13 and AVX2).
    """
    short = device_type == "cpu" and dtype != "float32" and not has_bfloat16()
    return "float32" if short else dtype


def describe_computation(dtype: str, device_type: str) -> str:
    """Return a sentence for users about the format in which a model is computed."""
    computed = computed_dtype(dtype, device_type)
    if computed == dtype:
        return f"models of {dtype} are computed in {dtype}"
    return (
        f"models of {dtype} are computed in {computed}, with twice the memory, since this CPU has "
        f"no instructions for {dtype}"
    )
