"""This machine: its resources, the device on which a process computes, the number
format in which the CPU computes a model, the priority of threads, and sockets at its
addresses. Torch is imported only by the functions that need it, so that checks before a
run stay fast.
"""

import contextlib
import ctypes
import functools
import os
import platform
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Linux's names of instructions for products of bfloat16: the first two are x86's, the
last is ARM's.
"""

M_MMAP_THRESHOLD = -3  # <malloc.h>

LARGE_BLOCK = 1 << 20
"""Fewest bytes of memory that return to the system when they are freed."""

NICENESS = 10
"""Niceness of a thread that yields, in addition to the niceness of its process: the
thread gets a tenth of a core that another thread wants.
"""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> tuple[int, int]:
    """Return total and available main memory in bytes, within the container's limit if
    any; zeros if unknown.
    """
    lines = [line for line in _lines("/proc/meminfo") if line.endswith("kB")]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, limit - (used or 0))
    return total, available


def _cgroup(name: str) -> int | None:
    text = "".join(_lines(f"/sys/fs/cgroup/{name}")).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the kernel; none if there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


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
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


@functools.cache
def has_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16."""
    lines = _lines("/proc/cpuinfo")
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


def device_named(name: str) -> "torch.device":
    """Return the device that `name` stands for, as in `model.device`: `auto` is a GPU
    if this process sees one, and `cuda` the first GPU that it sees.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def give_back_memory(device: "torch.device") -> None:
    """Return freed memory of the device, which allocators would keep, to the system, so
    that other processes can use it.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory() -> None:
    """Let this process return each large block to the system as soon as it is freed.
    Otherwise glibc keeps blocks of up to 32 MiB, and loses what other sizes leave
    between them. A threshold of the user's own (`MALLOC_MMAP_THRESHOLD_`) stays.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def yield_to_others() -> None:
    """Lower the priority of this thread for good, on systems on which threads have
    priorities (Linux).
    """
    with contextlib.suppress(AttributeError, OSError):
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a TCP socket, IPv4 or IPv6, that is bound to this address and port. Raises
    OSError.

    A port that a former process used is free immediately. Port 0 stands for any free
    port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except BaseException:
        sock.close()
        raise
    return sock
