"""Bench `gpu`: an engine and a trainer on one GPU, alone and together.

Without a GPU it runs on the CPU, with models small enough for that, so that the bench
itself can be checked anywhere. Weights and prompts are random. A part that fails costs
its own figures only: these are missing, with the reason. Figures carry the model's name
as suffix.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.contract import Figure, Result
from benchmarks.gpu.cases import CASES, TINY, GpuCase, write_checkpoint
from benchmarks.gpu.subject import DECODE, KV, SHARED, TOGETHER, TRAIN, Subject
from benchmarks.harness import Progress, scratch_folder
from rollweave.schema.errors import RollweaveError


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
    for case in cases:
        conditions[case.name] = {"dtype": case.dtype, **case.config}
        _measure_case(case, device, figures, conditions, progress)
    return Result(bench="gpu", figures=figures, conditions=conditions)


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
        works: list[tuple[str, Sequence[str], Callable[[], dict[str, Figure]]]] = [
            ("engine", DECODE, subject.decode),
            ("KV", KV, subject.kv),
            ("trainer", TRAIN, subject.train),
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
            full = f"{key}_{model}"
            if figures.setdefault(full, None) is None:
                conditions[full] = reason
        progress(f"{model} {name}: {reason}".strip())
    else:
        progress(f"{model} {name}: {time.perf_counter() - started:.1f} s".strip())
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
