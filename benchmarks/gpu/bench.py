"""Bench `gpu`: an engine and a trainer on one GPU, alone and together.

Without a GPU it runs on the CPU, with models small enough for that, so that the bench
itself can be checked anywhere. Weights and prompts are random. A part that fails costs
its own figures only: these are missing, with the reason. Figures carry the model's name
as suffix.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.contract import Figure, Result
from benchmarks.gpu.cases import CASES, TINY, GpuCase, write_checkpoint
from benchmarks.gpu.subject import (
    ATTENTION,
    DECODE,
    KV,
    MEMORY,
    SHARED,
    TOGETHER,
    TRAIN,
    Subject,
)
from benchmarks.harness import Progress, scratch_folder
from rollweave.schema.errors import RollweaveError

COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Bytes that are copied to measure the memory's bandwidth."""

MATRIX = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices that are multiplied to measure the peak."""


def bench_gpu(*, quick: bool, progress: Progress) -> Result:
    """Return rates of the engine and the trainer, seconds of each way of weights and
    KV, and what sharing the device costs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = (TINY,) if device == "cpu" else CASES[:1] if quick else (TINY, *CASES)
    return measure(cases, device=device, progress=progress)


def measure(cases: Sequence[GpuCase], *, device: str, progress: Progress) -> Result:
    """Return all figures of these models on a device."""
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {"device": device, "requests_together": TOGETHER}
    if device == "cpu":
        conditions["device"] = "cpu: there is no CUDA device"
        conditions["decode_tokens_per_s"] = "the variants are the same engine on a CPU"
        conditions["train_peak_bytes"] = "with 64 MiB of buffers for publishing"
        conditions["train_peak_bytes_optimizer"] = "moments are in the host's memory anyway"
    with _part("peaks", PEAKS, "", figures, conditions, progress):
        figures |= _peaks(device)
    for case in cases:
        conditions[case.name] = {"dtype": case.dtype, **case.config}
        _measure_case(case, device, figures, conditions, progress)
    for name in (name for name, value in figures.items() if value is None):
        conditions.setdefault(name, "the device's peak was not measured")
    return Result(bench="gpu", figures=figures, conditions=conditions)


PEAKS = ("copy_gb_per_s", "matmul_tflops")


def _measure_case(
    case: GpuCase,
    device: str,
    figures: dict[str, Figure],
    conditions: dict[str, Any],
    progress: Progress,
) -> None:
    with scratch_folder() as scratch:
        path = scratch / "model"
        at = case.name
        with _part("checkpoint", (), at, figures, conditions, progress):
            write_checkpoint(path, case, device)
        subject = Subject(case, path, scratch, device)
        peaks = {name: figures.get(name) for name in PEAKS}
        works: list[tuple[str, Sequence[str], Callable[[], dict[str, Figure]]]] = [
            ("engine", DECODE, lambda: subject.decode(peaks)),
            ("attention", ATTENTION, subject.attention),
            ("KV", KV, subject.kv),
            ("trainer", TRAIN, subject.train),
            ("memory", MEMORY, subject.memory),
            ("sharing", SHARED, subject.shared),
        ]
        for name, keys, work in works:
            with _part(name, keys, at, figures, conditions, progress):
                figures |= {f"{key}_{at}": value for key, value in work().items()}


@contextlib.contextmanager
def _part(
    name: str,
    keys: Sequence[str],
    model: str,
    figures: dict[str, Figure],
    conditions: dict[str, Any],
    progress: Progress,
) -> Iterator[None]:
    """Measure one part; if it fails, its figures are missing."""
    started = time.perf_counter()
    try:
        yield
    except (RollweaveError, RuntimeError, OSError, ValueError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
        for key in keys:
            full = f"{key}_{model}" if model else key
            if figures.setdefault(full, None) is None:
                conditions[full] = reason
        progress(f"{model} {name}: {reason}".strip())
    else:
        progress(f"{model} {name}: {time.perf_counter() - started:.1f} s".strip())
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _peaks(device: str) -> dict[str, Figure]:
    """Return what the device reaches in a large copy, and in a large product."""
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = MATRIX[device]
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    copy_s = _best_s(device, lambda: target.copy_(source))
    product_s = _best_s(device, lambda: torch.mm(left, left))
    return {
        "copy_gb_per_s": 2 * len(source) / copy_s / 1e9,
        "matmul_tflops": 2 * size**3 / product_s / 1e12,
    }


def _best_s(device: str, work: Callable[[], object], repeats: int = 5) -> float:
    best = math.inf
    for _ in range(repeats):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
