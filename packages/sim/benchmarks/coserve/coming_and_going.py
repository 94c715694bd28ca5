"""Loans that come and go: a run that may borrow one engine at a time, of two that
lend. The lent engine is taken back while it computes a turn, the run borrows the other
engine, and a new one takes the place of the first.
"""

import signal
import statistics
import time
from contextlib import ExitStack
from functools import partial
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

        wait = partial(run.wait, limit_s=LOAN_S, every_s=POLL_S)
        first, second = lend(), lend()
        wait(lambda: _lent(first) or _lent(second), what="a loan")
        lent, other = (first, second) if _lent(first) else (second, first)
        for _ in range(returns):
            wait(partial(_samples_beyond, lent, _tokens(lent)), what="tokens of the lent engine")
            began = time.monotonic()
            lent.process.send_signal(signal.SIGUSR1)
            wait(partial(_is_back, lent), what="the return of the lent engine")
            return_s.append(time.monotonic() - began)
            wait(partial(_lent, other), what="a loan of the other engine")
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


def _is_back(engine: ServingEngine) -> bool:
    return not _lent(engine)


def _samples_beyond(engine: ServingEngine, tokens: int) -> bool:
    return _tokens(engine) > tokens


def _tokens(engine: ServingEngine) -> int:
    return int(engine.stats()["lending"]["rollout_tokens"])


def _borrowed(run: BorrowingRun) -> int:
    """Return the number of engines that the run has borrowed, by its journal."""
    return sum(
        isinstance(command, StartEngine) and bool(command.lender)
        for _, _, commands in Replay(run.run.journal, run.config, rules=rules_of(run.config))
        for command in commands
    )
