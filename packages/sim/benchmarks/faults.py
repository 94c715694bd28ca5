"""Bench `faults`: many seeds of the fault search on all cores, with the number of
violations.

Each worker process is killed with the bench. A failing seed is reported with the
command that reproduces it.
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress
from rollweave.io.boot import serve_parent
from rollweave_sim.faults import Report, search
from rollweave_sim.scenarios import STORM_S

SEEDS = 1000
QUICK_SEEDS = 20
PROGRESS_EVERY = 100
"""Number of seeds between two lines of progress."""


def bench_faults(*, seeds: int | None, quick: bool, progress: Progress) -> Result:
    """Return figures `seeds`, `faults` and `faults_…` by kind, `violations`, `events`,
    `seeds_per_s`.
    """
    count = seeds if seeds is not None else QUICK_SEEDS if quick else SEEDS
    workers = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        count,
    )
    began, done = time.perf_counter(), []
    for report in searched(range(count), workers=workers):
        done.append(report)
        if report.violation:
            progress(
                f"seed {report.seed}: {report.violation}\n  replay with: rollweave simulate "
                f"--faults {report.seed}"
            )
        if len(done) % PROGRESS_EVERY == 0:
            progress(f"{len(done)} of {count} seeds")
    return result_of(done, seconds=time.perf_counter() - began, workers=workers)


def result_of(reports: Sequence[Report], *, seconds: float, workers: int) -> Result:
    """Return the result; its conditions name the failed seeds, and why runs ended
    early.
    """
    kinds: Counter[str] = Counter()
    for report in reports:
        kinds.update(report.faults)
    figures: dict[str, Figure] = {
        "seeds": len(reports),
        "violations": sum(bool(report.violation) for report in reports),
        "faults": kinds.total(),
    }
    figures |= {f"faults_{kind.replace(' ', '_')}": count for kind, count in sorted(kinds.items())}
    figures |= {
        "runs_ended_by_faults": sum(bool(report.error) for report in reports),
        "events": sum(report.events for report in reports),
        "seeds_per_s": round(len(reports) / seconds, 3),
    }
    failed = {
        str(report.seed): report.violation
        for report in sorted(reports, key=lambda report: report.seed)
        if report.violation
    }
    conditions = {
        "workers": workers,
        "storm": f"{STORM_S:g} simulated seconds of faults a seed; a quarter of the seeds are calm",
        "violation": "an invariant, the account, the staleness bound or a replay does not hold, "
        "or the run does not end",
        "failed": failed,
    }
    return Result(bench="faults", figures=figures, conditions=conditions)


def searched(seeds: Sequence[int], *, workers: int) -> Iterator[Report]:
    """Yield the report of each seed, in order.

    Workers are fresh interpreters that end with this one.
    """
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=serve_parent,
        initargs=(os.getpid(),),
    )
    try:
        yield from pool.map(search, seeds, chunksize=4)
    finally:
        pool.shutdown(cancel_futures=True)
