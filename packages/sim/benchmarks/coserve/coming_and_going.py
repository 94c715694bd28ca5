"""Loans that come and go: a run that may borrow one engine at a time, of two that
lend. The lent engine is taken back while it computes a turn, the run borrows the other
engine, and a new one takes the place of the first.
"""

import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cluster.run import lost_trajectories
from benchmarks.contract import Figure
from benchmarks.harness import Progress
from packages.sim.benchmarks.coserve.borrowing_run import BorrowingRun
from packages.sim.benchmarks.coserve.cores import Cores
from packages.sim.benchmarks.coserve.serving_engine import ServingEngine
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.schema.commands import StartEngine
from rollweave.schema.errors import RollweaveError

LOAN_S = 300.0
"""Maximum seconds of a wait: for a loan, for a turn on the lent engine, or a return."""

POLL_S = 0.005

LIMITS = ("--ttft-ms", "60000", "--tpot-ms", "60000")
"""Limits of the engines' users, who have no requests here."""

CONDITIONS = {
    "return_s": "from the signal by which the operator takes a lent engine back, in a turn, until "
    "no run computes there; the largest of all loans",
    "join_s": "from that signal until the other engine computes for the run; the median",
    "joined": "engines that the run has borrowed, one at a time, and returned: those that were "
    "taken back; the last one is returned at the end of the run",
}


def loans_that_come_and_go(
    folder: Path, model: Path, cores: Cores, progress: Progress, *, returns: int
) -> dict[str, Figure]:
    """Take the lent engine back `returns` times, and return the figures."""
    folder.mkdir()
    return_s, join_s = list[float](), list[float]()
    with ExitStack() as stack:
        run = stack.enter_context(BorrowingRun(folder, loans=1))
        numbers = iter(range(returns + 2))

        def lend() -> ServingEngine:
            log = folder / f"lent{next(numbers)}.log"
            options = ("--lend", run.address, *LIMITS)
            return stack.enter_context(ServingEngine(model, log, cores, *options))

        first, second = lend(), lend()
        _until(lambda: _lent(first) or _lent(second), "a loan", run)
        lent, other = (first, second) if _lent(first) else (second, first)
        for _ in range(returns):
            before = lent.stats()["lending"]["rollout_tokens"]
            _until(lambda: _tokens(lent) > before, "tokens of the lent engine", run)  # noqa: B023
            began = time.monotonic()
            lent.process.send_signal(signal.SIGUSR1)
            _until(lambda: not _lent(lent), "the return of the lent engine", run)  # noqa: B023
            return_s.append(time.monotonic() - began)
            _until(lambda: _lent(other), "a loan of the other engine", run)  # noqa: B023
            join_s.append(time.monotonic() - began)
            progress(f"returned in {return_s[-1]:.2f} s, the other lent in {join_s[-1]:.2f} s")
            lent, other = other, lend()
        account = run.ended()["account"]
        lost = lost_trajectories(account) + run.unaccounted(account)
    return {
        "joined": _borrowed(run),
        "returned": len(return_s),
        "return_s": max(return_s),
        "join_s": statistics.median(join_s),
        "lost_with_loans": lost,
    }


def _lent(engine: ServingEngine) -> bool:
    return bool(engine.stats()["lending"]["lent"])


def _tokens(engine: ServingEngine) -> int:
    return int(engine.stats()["lending"]["rollout_tokens"])


def _until(condition: Callable[[], bool], what: str, run: BorrowingRun) -> None:
    """Raise RollweaveError if the run ends, or what is awaited does not happen."""
    deadline = time.monotonic() + LOAN_S
    while not condition():
        run.inspect()
        if run.status is not None or time.monotonic() > deadline:
            raise RollweaveError(f"{what} must come within {LOAN_S:g} s: {run.output}")
        time.sleep(POLL_S)


def _borrowed(run: BorrowingRun) -> int:
    """Return the number of engines that the run has borrowed, by its journal."""
    return sum(
        isinstance(command, StartEngine) and bool(command.lender)
        for _, _, commands in Replay(run.run.journal, run.config, rules=rules_of(run.config))
        for command in commands
    )
