"""Trials of configurations in several processes.

Invariants: the results are in the order of the trials, whichever ends first; no process
outlives the pool, or the process that started it.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rollweave.core.policy.ratio import Prediction
from rollweave.io.boot import serve_parent
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave.sim.scaled import Factors, scaled, scaled_work
from rollweave.sim.trial import Length, try_out
from rollweave.sim.workload import Workload
from rollweave.sim.world import costs_of

AS_IT_IS = Factors()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A configuration, how long it is simulated, and by how much longer its parts
    take.
    """

    config: RunConfig
    length: Length
    factors: Factors = AS_IT_IS


Result = Prediction | str
"""The figures of a trial, or why it has none."""

_work: dict[str, Workload] = {}
"""The workloads of the trials of a worker."""


@contextlib.contextmanager
def trials_in(
    processes: int, work: Mapping[str, Workload]
) -> Iterator[Callable[[Sequence[Trial]], Iterable[Result]]]:
    """Yield what returns the result of each trial as soon as it and those before it
    have one, with one workload for each task domain. Of one process, this one runs the
    trials.
    """
    if processes == 1:
        yield lambda trials: (run_trial(trial, work) for trial in trials)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), dict(work)),
    )
    try:
        yield lambda trials: pool.map(_run, trials)
    finally:
        pool.shutdown(cancel_futures=True)


def run_trial(trial: Trial, work: Mapping[str, Workload]) -> Result:
    """Run one trial in this process."""
    try:
        costs, chosen = costs_of(trial.config), dict(work)
        if trial.factors != AS_IT_IS:
            costs, chosen = scaled(costs, trial.factors), scaled_work(work, trial.factors)
        return try_out(trial.config, trial.length, work=chosen, costs=costs)[0]
    except RollweaveError as error:
        return str(error)


def _begin(parent: int, work: dict[str, Workload]) -> None:
    """Prepare a worker."""
    serve_parent(parent)
    _work.update(work)


def _run(trial: Trial) -> Result:
    return run_trial(trial, _work)
