"""Bench `coserve`: rollouts of a real training run in the slack of a real serving
engine under a bursty load (ROSE §4.1, §6.2), and what that costs the engine's own
clients.

On two cores: one is the engine's device, on which nothing else computes; the run, its
own engine and the load generator have the other. The same load is offered to the engine
alone, whose P99 times 1.2 are the limits, and then to the engine while it is lent, with
each way of sharing in turn. Ways of sharing are settings of the engine: with a limit
that nothing exceeds, serving and rollouts take turns step by step.
"""

import random
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.run import lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, scratch_folder
from benchmarks.runs import run_secret
from packages.sim.benchmarks.coserve import figures
from packages.sim.benchmarks.coserve import plan as plans
from packages.sim.benchmarks.coserve.borrowing_run import BorrowingRun
from packages.sim.benchmarks.coserve.coming_and_going import loans_that_come_and_go
from packages.sim.benchmarks.coserve.cores import Cores
from packages.sim.benchmarks.coserve.load import (
    ANSWER_S,
    OUTPUT_MEDIAN,
    PROMPT_MEDIAN,
    LoadPlan,
    LoadReport,
    Served,
    bursty,
    generate,
    with_burst,
)
from packages.sim.benchmarks.coserve.plan import CoservePlan
from packages.sim.benchmarks.coserve.serving_engine import MODEL, ServingEngine, save_model
from rollweave.cli.engine import TAKE_BACK
from rollweave.schema.errors import RollweaveError
from rollweave_sim.traffic import Arrival

UTILIZATION = 0.2
"""Share of the engine's time that the load takes: ROSE's serving GPUs use 18.9 % of
their computing power on average (§2.3).
"""

FEWEST = 8
"""Minimum number of requests of a load, whatever the engine's speed."""

MARGIN = 1.2
"""Limits over the P99 of the engine alone."""

NO_LIMIT_MS = 1e9

LENT_S = 600.0
"""Maximum seconds until a run's model computes in the serving engine."""

POLL_S = 0.1
WATCH_S = 0.05
"""Seconds between two readings of the engine's statistics in a burst."""

CALIBRATIONS = 7
BURST_FROM_S = 1.0


def bench_coserve(*, quick: bool, progress: Progress) -> Result:
    """Return the figures of all ways of sharing, and of a burst."""
    plan, cores = plans.QUICK if quick else plans.FULL, Cores.of_machine()
    with scratch_folder() as scratch, cores.beside(), run_secret():
        return _Bench(scratch, plan, cores, progress).result()


class _Bench:
    def __init__(self, folder: Path, plan: CoservePlan, cores: Cores, progress: Progress) -> None:
        self._folder, self._plan, self._cores, self._progress = folder, plan, cores, progress
        self._model = save_model(folder / "serving")
        self._figures: dict[str, Figure] = {}
        self._conditions: dict[str, Any] = dict(plans.CONDITIONS)
        self._engines = 0

    def result(self) -> Result:
        self._alone()
        directory = self._folder / "run"
        directory.mkdir()
        with BorrowingRun(directory) as run:
            for name in self._plan.ways:
                try:
                    self._measure(name, run)
                except RollweaveError as error:
                    if run.status is not None:
                        raise
                    self._leave_out(name, str(error))
            account = run.ended()["account"]
            lost = lost_trajectories(account) + run.unaccounted(account)
            self._figures["lost_trajectories"] = lost
        loans, returns = self._folder / "loans", self._plan.returns
        self._figures |= loans_that_come_and_go(
            loans, self._model, self._cores, self._progress, returns=returns
        )
        for name in plans.WAYS.keys() - {*self._plan.ways}:
            self._leave_out(name, "left out of --quick")
        self._conditions["load"] = (
            f"{self._plan.load_s:g} s a way, {len(self._arrivals)} requests, "
            f"{self._rate:.2f} a second, of which the engine alone computes a share of "
            f"{UTILIZATION:g}; the same seed each time; bursts of the factors of ROSE §3.2"
        )
        return Result(bench="coserve", figures=self._figures, conditions=self._conditions)

    def _alone(self) -> None:
        """Measure the engine alone: the rate of the load, and its P99."""
        with self._engine() as plain:
            service_s = statistics.median(
                _seconds_of_one(plain, number) for number in range(CALIBRATIONS)
            )
            self._rate = max(UTILIZATION / service_s, FEWEST / self._plan.load_s)
            self._arrivals = bursty(self._rate, self._plan.load_s, seed=0)
            served = self._offer(plain, self._arrivals).served
        self._ttft_s, self._tpot_s = figures.ttft_p99(served), figures.tpot_p99(served)
        self._figures["ttft_p99_alone_ms"] = 1e3 * self._ttft_s
        self._figures["tpot_p99_alone_ms"] = 1e3 * self._tpot_s
        late_ms = 1e3 * figures.quantile([one.late_s for one in served], 0.99)
        self._conditions["late_p99_ms"] = f"{late_ms:.1f} ms: P99 of the load generator's delay"
        self._progress(
            f"alone: {len(served)} requests, P99 {1e3 * self._ttft_s:.0f} ms to the first token "
            f"and {1e3 * self._tpot_s:.1f} ms a token"
        )

    def _measure(self, name: str, run: BorrowingRun) -> None:
        """Offer the load to an engine that the run borrows."""
        kept = zip(
            ("--ttft-ms", "--tpot-ms"), (self._ttft_s, self._tpot_s), plans.WAYS[name], strict=True
        )
        limits = [
            text
            for option, seconds, keeps in kept
            for text in (option, f"{1e3 * MARGIN * seconds if keeps else NO_LIMIT_MS}")
        ]
        with self._engine("--lend", run.address, *limits) as engine:
            self._until_lent(engine, run)
            before, started = engine.stats(), time.monotonic()
            report = self._offer(engine, self._arrivals)
            self._note(name, report.served, time.monotonic() - started, before, engine.stats())
        if name == "dual":
            self._bursts(run, limits)

    def _leave_out(self, name: str, why: str) -> None:
        """Record that a way of sharing was not measured."""
        left_out = [plans.named(name, figure) for figure in plans.OF_EACH_WAY]
        left_out += plans.OF_DUAL if name == "dual" else ()
        self._figures |= dict.fromkeys(left_out)
        self._conditions |= dict.fromkeys(left_out, f"not measured: {why}")
        self._progress(f"{name}: not measured: {why}")

    def _until_lent(self, engine: ServingEngine, run: BorrowingRun) -> None:
        """Wait until rollouts are computed in the engine."""

        def is_lent() -> bool:
            run.inspect()
            if run.status is not None:
                raise RollweaveError(f"the run has ended: {engine.log} {run.output}")
            return bool(engine.stats()["lending"]["rollout_steps"])

        _until(is_lent, f"the run must borrow the engine: {engine.log}")

    def _note(
        self,
        name: str,
        served: Sequence[Served],
        seconds: float,
        before: dict[str, Any],
        after: dict[str, Any],
    ) -> None:
        """Note the figures of a load, from its requests and the engine's statistics
        before and after it.
        """
        lending = {
            counter: float(after["lending"][counter]) - float(before["lending"][counter])
            for counter in ("rollout_tokens", "rollout_busy_s", "aborted", "pages_moved")
        }
        values = (
            figures.ttft_p99(served) / self._ttft_s,
            figures.tpot_p99(served) / self._tpot_s,
            sum(map(self._violates, served)) / len(served),
            lending["rollout_tokens"] / seconds,
            lending["rollout_busy_s"] / (seconds - (after["busy_s"] - before["busy_s"])),
            lending["aborted"],
        )
        noted = dict(zip(plans.OF_EACH_WAY, values, strict=True))
        self._figures |= {plans.named(name, figure): value for figure, value in noted.items()}
        if name == "dual":
            self._figures["pages_moved_per_s"] = lending["pages_moved"] / seconds
            self._figures["activation_s"] = after["lending"]["activation_s"]
        self._progress(f"{name}: {noted}")

    def _bursts(self, run: BorrowingRun, limits: Sequence[str]) -> None:
        """Offer each burst to an engine twice: while it is lent, and after the loan.
        Steps take longer at some times than at others, so one burst follows the other
        at once.
        """
        lent, alone, counts = [], [], Counter[str]()
        for seed in range(self._plan.bursts):
            arrivals = with_burst(
                self._rate,
                before_s=BURST_FROM_S,
                burst_s=self._plan.burst_s,
                after_s=self._plan.after_s,
                seed=seed,
            )
            with self._engine("--lend", run.address, *limits) as engine:
                self._until_lent(engine, run)
                before = engine.stats()["lending"]
                lent.append(self._offer(engine, arrivals, watch_s=WATCH_S))
                after = engine.stats()["lending"]
                counts += Counter({name: after[name] - before[name] for name in plans.COUNTED})
                engine.process.send_signal(TAKE_BACK)
                _until(lambda: not engine.stats()["lending"]["lent"], "the loan must end")
                alone.append(self._offer(engine, arrivals, watch_s=WATCH_S))
        end = BURST_FROM_S + self._plan.burst_s
        within = [
            [[one for one in report.served if BURST_FROM_S <= one.at < end] for report in reports]
            for reports in (lent, alone)
        ]
        missed, missed_alone = (
            [sum(map(self._violates, served)) for served in bursts] for bursts in within
        )
        means = [
            [
                statistics.mean(one.last_s if one.tokens else ANSWER_S for one in served)
                for served in of
            ]
            for of in within
        ]
        delays = [figures.delay_ms(report, since=BURST_FROM_S, until=end) for report in lent]
        self._figures |= {
            "burst_missed": statistics.mean(missed),
            "burst_missed_alone": statistics.mean(missed_alone),
            "burst_missed_over_alone": sum(missed) / max(1, sum(missed_alone)),
            "burst_seconds_over_alone": statistics.median(
                one / other for one, other in zip(*means, strict=True)
            ),
            "burst_yield_ms": figures.largest(
                [figures.yield_ms(report, since=BURST_FROM_S) for report in lent]
            ),
            "burst_delay_ms": statistics.mean(delays),
            **{f"burst_{name}": counts[name] for name in plans.COUNTED},
        }
        self._progress(f"bursts: {missed} requests beyond a limit lent, {missed_alone} alone")

    def _engine(self, *options: str) -> ServingEngine:
        self._engines += 1
        log = self._folder / f"engine-{self._engines}.log"
        return ServingEngine(self._model, log, self._cores, *options)

    def _offer(
        self, engine: ServingEngine, arrivals: Sequence[Arrival], *, watch_s: float = 0.0
    ) -> LoadReport:
        """Offer a load. Raises RollweaveError if no request at all is answered."""
        report = generate(
            LoadPlan(
                name=secrets.token_hex(4),
                url=engine.url,
                token=engine.token,
                arrivals=tuple(arrivals),
                vocabulary=MODEL.config["vocab_size"],
                watch_s=watch_s,
            )
        )
        if not any(one.tokens for one in report.served):
            raise RollweaveError(f"the serving engine answers nothing: {report.served[0].error}")
        return report

    def _violates(self, one: Served) -> bool:
        """Return whether a request was not answered within the limits."""
        return (
            not one.tokens
            or one.first_s > MARGIN * self._ttft_s
            or (one.tpot_s or 0.0) > MARGIN * self._tpot_s
        )


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LENT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RollweaveError(f"{what}, but has not within {LENT_S:g} s")
        time.sleep(POLL_S)


def _seconds_of_one(engine: ServingEngine, seed: int) -> float:
    """Return the seconds of a typical request without others."""
    draw, started = random.Random(seed), time.perf_counter()
    prompt = [draw.randrange(1, MODEL.config["vocab_size"]) for _ in range(PROMPT_MEDIAN)]
    engine.complete(prompt, output_tokens=OUTPUT_MEDIAN)
    return time.perf_counter() - started
