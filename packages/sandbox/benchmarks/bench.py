"""Bench `sandbox`: start time of a sandbox, number of concurrent sandboxes and their
cost. (Tests attack sandboxes: `packages/sandbox/tests/test_attacks.py`.)

The back ends take turns in one run. A sandbox is ready when its Python server, inside,
has answered. Figures without a suffix are of the default back end, others end in its
name.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contract import Figure, Result
from rollweave.sandbox.base import Backend, Sandbox, SandboxSpec
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.tools import IPython
from rollweave.schema.errors import SandboxError
from rollweave_sandbox.processes import Table, started
from rollweave_sandbox.registry import backend

DEFAULT = "bubblewrap"
ISOLATING = (DEFAULT, "zygote")

ROUNDS, QUICK_ROUNDS = 100, 20
WARM_UP = 3
"""Number of rounds before the measured ones."""

CONCURRENT, QUICK_CONCURRENT = 200, 40

POOL = 4
"""Number of sandboxes that a pool keeps ready while they are taken one by one."""

WITH_CELLS = SandboxSpec(packages=("ipython",))

FIGURES = (
    "ready_ms_p50",
    "ready_ms_p95",
    "cell_ms_p50",
    "pool_ms_p50",
    "concurrent",
    "concurrent_s",
    "mb_each",
)
"""Figures of each back end."""


@dataclass
class BackendMeasurement:
    """Measurements of one back end."""

    ready_ms: list[float] = field(default_factory=list)
    cell_ms: list[float] = field(default_factory=list)
    pool_ms: list[float] = field(default_factory=list)
    concurrent: int = 0
    concurrent_s: float = 0.0
    mb_each: float = 0.0


def bench_sandbox(*, quick: bool) -> Result:
    """Measure every installed isolating back end.

    A missing one has null figures, with the reason.
    """
    return asyncio.run(_bench(quick=quick))


async def _bench(*, quick: bool) -> Result:
    opened: dict[str, Backend] = {}
    conditions: dict[str, Any] = {
        "ready_ms": "from the request until the server inside has answered; back ends take turns, "
        "one sandbox at a time",
        "cell_ms": "from the request until the interpreter inside has answered its first cell, 1 "
        "+ 1",
        "pool_ms": f"the same for a sandbox from a pool of {POOL} ready ones",
        "mb_each": "proportional set size of a sandbox's processes, all alive at once, without its "
        "files, which are in memory too",
        "uid": "separate uids, assigned by root" if os.getuid() == 0 else "our own",
    }
    try:
        for name in ISOLATING:
            try:
                opened[name] = backend(name)
                await (await opened[name].start(SandboxSpec())).stop(grace_s=0.0)
            except SandboxError as error:
                conditions[name] = f"not measured: {error}"
        measured = {name: BackendMeasurement() for name in opened if name not in conditions}
        live = {name: opened[name] for name in measured}
        await _ready(live, measured, rounds=QUICK_ROUNDS if quick else ROUNDS)
        for name, made in live.items():
            await _concurrent(made, measured[name], count=QUICK_CONCURRENT if quick else CONCURRENT)
    finally:
        for made in opened.values():
            await made.close()
    return Result(bench="sandbox", figures=_figures(measured), conditions=conditions)


async def _ready(
    live: dict[str, Backend], measured: dict[str, BackendMeasurement], *, rounds: int
) -> None:
    for number in range(WARM_UP + rounds):
        for name, made in live.items():
            began = time.perf_counter()
            sandbox = await made.start(WITH_CELLS)
            cell = await IPython(sandbox).run("1 + 1")
            if number >= WARM_UP and cell.result == "2":
                measured[name].ready_ms.append(1e3 * sandbox.ready_s)
                measured[name].cell_ms.append(1e3 * (time.perf_counter() - began))
            await sandbox.stop(grace_s=0.0)
    for name, made in live.items():
        pool = Pool(made, SandboxSpec(), size=POOL)
        for _ in range(rounds):
            await pool.filled()
            began = time.perf_counter()
            sandbox = await pool.take()
            await sandbox.call("ping", timeout_s=10.0)
            measured[name].pool_ms.append(1e3 * (time.perf_counter() - began))
            await sandbox.stop(grace_s=0.0)
        await pool.close()


async def _concurrent(made: Backend, measured: BackendMeasurement, *, count: int) -> None:
    """Start all at once; each must run a command while all others are alive."""
    began = time.perf_counter()
    results = await asyncio.gather(
        *(made.start(SandboxSpec()) for _ in range(count)), return_exceptions=True
    )
    measured.concurrent_s = time.perf_counter() - began
    living: list[Any] = [sandbox for sandbox in results if not isinstance(sandbox, BaseException)]
    try:
        answers = await asyncio.gather(*(_answers(sandbox) for sandbox in living))
        measured.concurrent = sum(answers)
        measured.mb_each = _used_mb([sandbox.pid for sandbox in living]) / max(1, len(living))
    finally:
        await asyncio.gather(*(sandbox.stop(grace_s=0.0) for sandbox in living))


async def _answers(sandbox: Sandbox) -> bool:
    try:
        return (await sandbox.exec(["echo", "hi"], timeout_s=60.0)).stdout == b"hi\n"
    except SandboxError:
        return False


def _used_mb(pids: Sequence[int]) -> float:
    return sum(each.proportional_bytes() for each in Table.now().below(started(pids))) / 1e6


def _figures(measured: dict[str, BackendMeasurement]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for name in ISOLATING:
        suffix = "" if name == DEFAULT else f"_{name}"
        measurement = measured.get(name)
        own: tuple[Figure, ...] = (None,) * len(FIGURES)
        if measurement is not None:
            p95 = statistics.quantiles(measurement.ready_ms, n=20)[-1]
            pool = statistics.median(measurement.pool_ms)
            cell = statistics.median(measurement.cell_ms)
            own = (
                statistics.median(measurement.ready_ms),
                p95,
                cell,
                pool,
                measurement.concurrent,
                measurement.concurrent_s,
                measurement.mb_each,
            )
        figures |= {f"{figure}{suffix}": value for figure, value in zip(FIGURES, own, strict=True)}
    return figures
