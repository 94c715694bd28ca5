"""Experiments in several processes, each result as it comes.

Invariant: an experiment that fails, or whose process dies, is an outcome with an error
and does not stop the others; no process outlives the iteration.
"""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rollweave.io.boot import die_with
from rollweave.schema.errors import RollweaveError
from rollweave.sim.papers.registry import EXPERIMENTS
from rollweave.sim.papers.rows import Experiment, Row


@dataclass(frozen=True, kw_only=True)
class Finished:
    """`seconds` are of the processor.

    `error` is empty where all went well, and `rows` then are all.
    """

    experiment: Experiment
    rows: tuple[Row, ...]
    seconds: float
    error: str = ""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(experiments: Sequence[Experiment], *, quick: bool, processes: int) -> Iterator[Finished]:
    """Results in the order in which they come. In this process where one is enough."""
    if min(processes, len(experiments)) <= 1:
        yield from (work(one.name, quick) for one in experiments)
        return
    waiting = deque(experiments)
    workers: dict[Connection, tuple[SpawnProcess, Experiment | None]] = {}
    try:
        for _ in range(min(processes, len(experiments))):
            ours, process = _start()
            workers[ours] = (process, None)
            _next(workers, ours, waiting, quick)
        while any(experiment is not None for _, experiment in workers.values()):
            for ready in wait(
                [ours for ours, (_, experiment) in workers.items() if experiment is not None]
            ):
                assert isinstance(ready, Connection), "the connections that we gave"
                process, experiment = workers[ready]
                assert experiment is not None, "an idle worker is not waited for"
                try:
                    rows, seconds, error = ready.recv()
                    finished = Finished(
                        experiment=experiment, rows=rows, seconds=seconds, error=error
                    )
                except (EOFError, OSError):
                    del workers[ready]
                    process.join()
                    finished = Finished(
                        experiment=experiment,
                        rows=(),
                        seconds=0.0,
                        error=f"its process ended with code {process.exitcode}",
                    )
                    ready, process = _start()
                    workers[ready] = (process, None)
                _next(workers, ready, waiting, quick)
                yield finished
    finally:
        for ours, (process, _) in workers.items():
            ours.close()
            process.kill()
            process.join()


def work(name: str, quick: bool) -> Finished:
    """One experiment, here."""
    start, experiment = time.process_time(), EXPERIMENTS[name]
    rows: tuple[Row, ...] = ()
    error = ""
    try:
        rows = tuple(experiment.run(quick))
    except RollweaveError as problem:
        error = str(problem)
    return Finished(
        experiment=experiment, rows=rows, seconds=time.process_time() - start, error=error
    )


def _start() -> tuple[Connection, SpawnProcess]:
    """A worker and our end of its pipe.

    It imports this module afresh, whatever the parent holds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()  # so that the worker's death is the pipe's end
    return ours, process


def _next(
    workers: dict[Connection, tuple[SpawnProcess, Experiment | None]],
    ours: Connection,
    waiting: deque[Experiment],
    quick: bool,
) -> None:
    """Give the worker at `ours` the next experiment, if there is one."""
    process, _ = workers[ours]
    experiment = waiting.popleft() if waiting else None
    workers[ours] = (process, experiment)
    if experiment is not None:
        ours.send((experiment.name, quick))


def _serve(theirs: Connection, parent: int) -> None:
    """A worker: experiments by name, until the parent goes.

    An interruption is the parent's to handle.
    """
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            name, quick = theirs.recv()
        except EOFError:
            return
        finished = work(name, quick)
        theirs.send((finished.rows, finished.seconds, finished.error))
