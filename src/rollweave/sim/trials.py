"""Trials of configurations in several processes.

Invariants: the results are in the order of the trials, whichever ends first; no process
outlives the pool, or the process that started it.
"""

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rollweave.core.policy.ratio import Prediction
from rollweave.io.boot import die_with
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


class Trials:
    """A pool of `processes` workers, with one workload for each task domain; a context.

    Of one process, this one runs the trials.
    """

    def __init__(self, work: Mapping[str, Workload], *, processes: int) -> None:
        self._work = dict(work)
        self._pool = (
            ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(), self._work),
            )
            if processes > 1
            else None
        )

    def run(self, trials: Sequence[Trial]) -> list[Result]:
        """Return the result of each trial."""
        if self._pool is None:
            return [run_trial(trial, self._work) for trial in trials]
        return list(self._pool.map(_run, trials))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


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
    """Prepare a worker: it ends with its parent, and Ctrl-C is for the parent alone."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work.update(work)


def _run(trial: Trial) -> Result:
    return run_trial(trial, _work)
