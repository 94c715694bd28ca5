"""All experiments by name, in the order of the papers; and runs of experiments in
several processes, with each result as it arrives.

Invariants: a name identifies one experiment; its part before the first hyphen names the
paper, and selects all experiments of the paper. An experiment that fails, or whose
process dies, is an outcome with an error and does not stop the others; no process
outlives the iteration.
"""

import difflib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from rollweave.io.boot import serve_parent
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave_papers import (
    heddle,
    laminar,
    ours,
    prorl,
    ranges,
    rollart,
    rose,
    rose_elastic,
    rose_serving,
)
from rollweave_papers.results import Experiment, Row

EXPERIMENTS = {
    experiment.name: experiment
    for module in (rollart, laminar, heddle, rose, rose_serving, rose_elastic, prorl)
    for experiment in module.EXPERIMENTS
}

ALL = EXPERIMENTS | {one.name: one for module in (ranges, ours) for one in module.EXPERIMENTS}
"""The experiments of the papers, and ours, which run if they are named: `ranges`, over
what the papers leave open, and `ours`, of our own policies.
"""

PAPERS = tuple(dict.fromkeys(name.partition("-")[0] for name in EXPERIMENTS))
GROUPS = tuple(dict.fromkeys(name.partition("-")[0] for name in ALL))


def select(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names or groups, once each, in registry order;
    all of the papers if none is named. Raises ConfigError.
    """
    for name in names:
        if name not in ALL and name not in GROUPS:
            near = difflib.get_close_matches(name, [*ALL, *GROUPS], n=3)
            hint = (
                f"; did you mean {' or '.join(near)}?"
                if near
                else f": one of {', '.join([*GROUPS, *ALL])}"
            )
            raise ConfigError(f"NAME must be an experiment or a paper, got {name!r}{hint}")
    return [
        experiment
        for name, experiment in ALL.items()
        if name in names or name.partition("-")[0] in names or (not names and name in EXPERIMENTS)
    ]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The outcome of an experiment. `seconds` are processor time.

    `error` is empty on success, and `rows` are then complete.
    """

    experiment: Experiment
    rows: tuple[Row, ...]
    seconds: float
    error: str = ""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(experiments: Sequence[Experiment], *, quick: bool, processes: int) -> Iterator[Finished]:
    """Yield results in the order in which they arrive, from this process where one is
    enough.
    """
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
                assert isinstance(ready, Connection), "only our connections are awaited"
                process, experiment = workers[ready]
                assert experiment is not None, "an idle worker is not awaited"
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
    """Run one experiment in this process."""
    start, experiment = time.process_time(), ALL[name]
    rows: tuple[Row, ...] = ()
    error = ""
    try:
        rows = tuple(experiment.rows(quick))
    except RollweaveError as problem:
        error = str(problem)
    return Finished(
        experiment=experiment, rows=rows, seconds=time.process_time() - start, error=error
    )


def _start() -> tuple[Connection, SpawnProcess]:
    """Start a worker and return it with our end of its pipe.

    It imports this module itself and inherits no state of the parent.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()  # so that the worker's end closes the pipe
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
    """Run experiments by name in a worker until the parent ends."""
    serve_parent(parent)
    while True:
        try:
            name, quick = theirs.recv()
        except EOFError:
            return
        finished = work(name, quick)
        theirs.send((finished.rows, finished.seconds, finished.error))
