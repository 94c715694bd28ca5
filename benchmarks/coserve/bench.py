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
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.cluster.run import lost_trajectories
from benchmarks.contract import Figure, Result
from benchmarks.coserve.borrowing_run import BorrowingRun
from benchmarks.coserve.cores import Cores
from benchmarks.coserve.engine_program import PAGE_BYTES
from benchmarks.coserve.figures import (
    QUIET_S,
    delay_ms,
    largest,
    quantile,
    tpot_p99,
    ttft_p99,
    yield_ms,
)
from benchmarks.coserve.load import (
    ANSWER_S,
    BURST,
    OUTPUT_MEDIAN,
    PROMPT_MEDIAN,
    LoadPlan,
    LoadReport,
    Served,
    bursty,
    generate,
    with_burst,
)
from benchmarks.coserve.serving_engine import KV_TOKENS, MODEL, ServingEngine, save_model
from benchmarks.runs import run_secret
from rollweave.cli.engine import TAKE_BACK
from rollweave.engine.pages.base import PagePool
from rollweave.engine.pages.mmap import MmapPages
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.sim.traffic import Arrival

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

CALIBRATIONS, SLICES, REMAPS = 7, 21, 200

BURST_FROM_S = 1.0


class Way(Struct, frozen=True, kw_only=True):
    """A way of sharing: the limits that are kept, and how memory is shared."""

    ttft: bool = False
    tpot: bool = False
    prefix_cache: bool = True
    partitioned: bool = False


WAYS = {
    "dual": Way(ttft=True, tpot=True),
    "without_admission": Way(),
    "ttft_only": Way(ttft=True),
    "tpot_only": Way(tpot=True),
    "preemption": Way(prefix_cache=False),
    "partition": Way(prefix_cache=False, partitioned=True),
}
"""Dual admission, and the ablations of ROSE's Fig. 9 and Table 2, of whose memory
preemption with a prefix cache `without_admission` is the live counterpart.
"""

OF_EACH_WAY = (
    "ttft_p99_over_alone",
    "tpot_p99_over_alone",
    "slo_violations",
    "rollout_tokens_per_s",
    "share_of_idle_harvested",
    "aborted_rollouts",
)
OF_DUAL = (
    "pages_moved_per_s",
    "activation_s",
    "activation_seconds_over_alone",
    "burst_missed",
    "burst_missed_alone",
    "burst_missed_over_alone",
    "burst_seconds_over_alone",
    "burst_yield_ms",
    "burst_delay_ms",
    "idle_footprint_mb",
)


class CoservePlan(Struct, frozen=True, kw_only=True):
    """Length of the bench: seconds of each load, the number of engines that have a
    burst while they are lent and one after the loan, the seconds of a burst and those
    after it, and the ways.
    """

    load_s: float
    bursts: int
    burst_s: float
    after_s: float
    ways: tuple[str, ...]


FULL = CoservePlan(load_s=120.0, bursts=6, burst_s=3.0, after_s=6.0, ways=tuple(WAYS))
QUICK = CoservePlan(
    load_s=4.0, bursts=1, burst_s=0.5, after_s=2.0, ways=("dual", "without_admission")
)

CONDITIONS = {
    "ttft_p99_over_alone": "P99 of the time to the first token, seen by the load generator, by "
    "that of the engine alone under the same load; so tpot: mean time per further token of each "
    "request. In the names of ablations, ttft_only and tpot_only keep one limit; "
    "without_admission, preemption (without a prefix cache) and partition (that, and half of the "
    "memory for each model) keep none, and serving and rollouts take turns",
    "slo_violations": "share of requests beyond a limit or unanswered; the limits are 1.2 times "
    "the P99 of the engine alone",
    "share_of_idle_harvested": "seconds of rollout steps by the seconds in which serving computed "
    "nothing. The run asks for no more than its trajectories need",
    "burst_yield_ms": f"from the beginning of a burst of {BURST} times the load until the last "
    f"rollout step before the first {QUIET_S:g} s without any, the largest of all bursts; null if "
    "rollouts paused at no time in one",
    "burst_delay_ms": "for how long some request waited for a rollout step in a burst, the mean",
    "burst_missed": "requests of a burst beyond a limit, the mean; burst_missed_alone: of the same "
    "engine when it was taken back, beside the same run",
    "burst_seconds_over_alone": "mean seconds of a burst's requests over those of the same burst "
    "after the loan, the median of all bursts",
    "activation_s": "from the run's request until its model was ready in the engine",
    "activation_seconds_over_alone": "mean seconds of requests, each sent when the one before is "
    "answered, from the start of an engine until its first rollout step, over the same after the "
    "loan; the median of all engines with a burst. In this time the run connects, and its model "
    "is read and measured",
    "idle_footprint_mb": "memory of the processes of an engine that was taken back, less that of "
    "one that never lent itself",
    "idle_step_over_plain": "seconds of a step of an engine with --lend and no borrower by those "
    "of one without --lend, interleaved",
    "pages_moved_per_s": f"pages of {PAGE_BYTES >> 10} KiB that changed hands under the load; the "
    f"KV cache has {KV_TOKENS} tokens, of which a burst takes most",
    "remap_us": "median of unmapping a page of 2 MiB and mapping it elsewhere, zeroed",
}


class Loaded(Struct, frozen=True, kw_only=True):
    """An engine under the load: its requests, and its statistics before and after."""

    report: LoadReport
    seconds: float
    before: dict[str, Any]
    after: dict[str, Any]

    def grown(self, name: str, *, lending: bool = True) -> float:
        """Return by how much a counter has grown."""
        before, after = self.before, self.after
        if lending:
            before, after = before["lending"], after["lending"]
        return float(after[name]) - float(before[name])


def bench_coserve(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the figures of all ways of sharing, and of a burst."""
    plan, cores = QUICK if quick else FULL, Cores.of_machine()
    with (
        tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch,
        cores.beside(),
        run_secret(),
    ):
        return _Bench(Path(scratch), plan, cores, progress).result()


class _Bench:
    def __init__(
        self, folder: Path, plan: CoservePlan, cores: Cores, progress: Callable[[str], None]
    ) -> None:
        self._folder, self._plan, self._cores, self._progress = folder, plan, cores, progress
        self._model = save_model(folder / "serving")
        self._figures: dict[str, Figure] = {}
        self._conditions: dict[str, Any] = dict(CONDITIONS)
        self._engines = 0

    def result(self) -> Result:
        self._alone()
        self._figures["remap_us"] = remap_us()
        self._lost = 0
        cached = [name for name in self._plan.ways if WAYS[name].prefix_cache]
        others = [name for name in self._plan.ways if not WAYS[name].prefix_cache]
        self._lend(cached, prefix_cache=True)
        if others:
            self._lend(others, prefix_cache=False)
        self._figures["lost_trajectories"] = self._lost
        for name in WAYS:
            if name not in self._plan.ways:
                self._leave_out(name, "left out of --quick")
        self._conditions["load"] = (
            f"{self._plan.load_s:g} s a way, {len(self._arrivals)} requests, "
            f"{self._rate:.2f} a second, of which the engine alone computes a share of "
            f"{UTILIZATION:g}; the same seed each time; bursts of the factors of ROSE §3.2"
        )
        return Result(bench="coserve", figures=self._figures, conditions=self._conditions)

    # The engine alone

    def _alone(self) -> None:
        with self._engine() as plain:
            service_s = statistics.median(
                _seconds_of_one(plain, number) for number in range(CALIBRATIONS)
            )
            self._rate = max(UTILIZATION / service_s, FEWEST / self._plan.load_s)
            self._arrivals = bursty(self._rate, self._plan.load_s, seed=0)
            alone = self._offer(plain, self._arrivals)
            self._ttft_s, self._tpot_s = ttft_p99(alone.served), tpot_p99(alone.served)
            self._figures["ttft_p99_alone_ms"] = 1e3 * self._ttft_s
            self._figures["tpot_p99_alone_ms"] = 1e3 * self._tpot_s
            self._progress(
                f"alone: {len(alone.served)} requests, P99 {1e3 * self._ttft_s:.0f} ms to the "
                f"first token and {1e3 * self._tpot_s:.1f} ms a token"
            )
            late_ms = 1e3 * quantile([one.late_s for one in alone.served], 0.99)
            self._conditions["late_p99_ms"] = f"{late_ms:.1f} ms: P99 of the load generator's delay"
            self._plain_mb = plain.memory_mb()
            # nothing listens at port 9, so that nobody borrows it
            with self._engine("--lend", "127.0.0.1:9") as lendable:
                self._figures["idle_step_over_plain"] = self._step_ratio(plain, lendable)

    def _step_ratio(self, plain: ServingEngine, lendable: ServingEngine) -> float:
        ratios = [
            _step_s(lendable, seed=number) / _step_s(plain, seed=number) for number in range(SLICES)
        ]
        return statistics.median(ratios)

    # The engine while it is lent

    def _lend(self, names: Sequence[str], *, prefix_cache: bool) -> None:
        """Offer the load to an engine of each way, which one run borrows in turn."""
        directory = self._folder / f"run-{prefix_cache}"
        directory.mkdir()
        ablation = {} if prefix_cache else {"without": ["prefix_cache"]}
        with BorrowingRun(directory, ablation=ablation) as run:
            for name in names:
                try:
                    self._measure(name, run)
                except RollweaveError as error:
                    if run.status is not None:
                        raise
                    self._leave_out(name, str(error))
            summary = run.ended()
            self._lost += lost_trajectories(summary["account"])
            self._lost += run.unaccounted(summary["account"])

    def _measure(self, name: str, run: BorrowingRun) -> None:
        way = WAYS[name]
        limits = [
            *("--ttft-ms", f"{1e3 * MARGIN * self._ttft_s if way.ttft else NO_LIMIT_MS}"),
            *("--tpot-ms", f"{1e3 * MARGIN * self._tpot_s if way.tpot else NO_LIMIT_MS}"),
        ]
        with self._engine("--lend", run.address, *limits, partitioned=way.partitioned) as engine:
            self._until_lent(engine, run)
            loaded = self._loaded(engine)
            self._note(name, loaded)
            if name == "dual":
                self._take_back(engine)
                self._figures["idle_footprint_mb"] = engine.memory_mb() - self._plain_mb
        if name == "dual":
            self._bursts(run, limits)

    def _leave_out(self, name: str, why: str) -> None:
        """Record that a way of sharing was not measured."""
        figures = [_named(name, figure) for figure in OF_EACH_WAY]
        if name == "dual":
            figures += OF_DUAL
        self._figures |= dict.fromkeys(figures)
        self._conditions |= dict.fromkeys(figures, f"not measured: {why}")
        self._progress(f"{name}: not measured: {why}")

    def _until_lent(self, engine: ServingEngine, run: BorrowingRun) -> None:
        """Wait until rollouts are computed in the engine."""
        deadline = time.monotonic() + LENT_S
        while not (lending := engine.stats()["lending"])["rollout_steps"]:
            run.inspect()
            if time.monotonic() > deadline or run.status is not None:
                raise RollweaveError(
                    f"the run has not borrowed the engine within {LENT_S:g} s: {lending}; "
                    f"{engine.log} {run.output}"
                )
            time.sleep(POLL_S)

    def _loaded(self, engine: ServingEngine) -> Loaded:
        before, started = engine.stats(), time.monotonic()
        report = self._offer(engine, self._arrivals)
        return Loaded(
            report=report,
            seconds=time.monotonic() - started,
            before=before,
            after=engine.stats(),
        )

    def _note(self, name: str, loaded: Loaded) -> None:
        served = loaded.report.served
        idle_s = loaded.seconds - loaded.grown("busy_s", lending=False)
        values = (
            ttft_p99(served) / self._ttft_s,
            tpot_p99(served) / self._tpot_s,
            sum(map(self._violates, served)) / len(served),
            loaded.grown("rollout_tokens") / loaded.seconds,
            loaded.grown("rollout_busy_s") / idle_s,
            loaded.grown("aborted"),
        )
        figures = dict(zip(OF_EACH_WAY, values, strict=True))
        self._figures |= {_named(name, figure): value for figure, value in figures.items()}
        if name == "dual":
            self._figures["pages_moved_per_s"] = loaded.grown("pages_moved") / loaded.seconds
            self._figures["activation_s"] = loaded.after["lending"]["activation_s"]
        self._progress(
            f"{name}: {figures['ttft_p99_over_alone']:.2f} and "
            f"{figures['tpot_p99_over_alone']:.2f} of the P99 alone, "
            f"{100 * figures['slo_violations']:.1f} % violations, "
            f"{figures['rollout_tokens_per_s']:.0f} rollout tokens/s, "
            f"{100 * figures['share_of_idle_harvested']:.0f} % of the idle time"
        )

    def _bursts(self, run: BorrowingRun, limits: Sequence[str]) -> None:
        """Offer each burst to an engine twice: while it is lent, and after the loan.
        Steps take longer at some times than at others, so one burst follows the other
        at once.
        """
        lent, alone, activations = [], [], []
        for seed in range(self._plan.bursts):
            arrivals = with_burst(
                self._rate,
                before_s=BURST_FROM_S,
                burst_s=self._plan.burst_s,
                after_s=self._plan.after_s,
                seed=seed,
            )
            with self._engine("--lend", run.address, *limits) as engine:
                with _Asking(engine) as asking:
                    self._until_lent(engine, run)
                lent.append(self._offer(engine, arrivals, watch_s=WATCH_S))
                self._take_back(engine)
                alone.append(self._offer(engine, arrivals, watch_s=WATCH_S))
                after_s = [
                    # other prompts, of which nothing is cached
                    _seconds_of_one(engine, len(asking.seconds) + number)
                    for number in range(CALIBRATIONS)
                ]
                activations.append(statistics.mean(asking.seconds) / statistics.mean(after_s))
        self._compare(lent, alone)
        self._figures["activation_seconds_over_alone"] = statistics.median(activations)
        self._conditions["activations"] = f"{[round(one, 2) for one in activations]}"

    def _compare(self, lent: Sequence[LoadReport], alone: Sequence[LoadReport]) -> None:
        """Note the bursts of a lent engine beside those after the loan."""
        missed = [self._missed_in_burst(report) for report in lent]
        missed_alone = [self._missed_in_burst(report) for report in alone]
        ratios = [
            self._burst_s(one) / self._burst_s(other)
            for one, other in zip(lent, alone, strict=True)
        ]
        yields = [yield_ms(report, since=BURST_FROM_S) for report in lent]
        end = BURST_FROM_S + self._plan.burst_s
        delays = [delay_ms(report, since=BURST_FROM_S, until=end) for report in lent]
        self._figures |= {
            "burst_missed": statistics.mean(missed),
            "burst_missed_alone": statistics.mean(missed_alone),
            "burst_missed_over_alone": sum(missed) / max(1, sum(missed_alone)),
            "burst_seconds_over_alone": statistics.median(ratios),
            "burst_yield_ms": largest(yields),
            "burst_delay_ms": statistics.mean(delays),
        }
        self._conditions["burst"] = (
            f"{self._plan.burst_s:g} s at {BURST} times {self._rate:.2f} requests a second, from "
            f"one request to the next, which is within 100 ms; missed in each burst: {missed} "
            f"lent, {missed_alone} alone, of {[len(self._in_burst(report)) for report in lent]}; "
            f"seconds over those alone {[round(one, 2) for one in ratios]}; delays "
            f"{[round(one, 1) for one in delays]} ms"
        )
        self._progress(
            f"bursts: {missed} requests beyond a limit lent, {missed_alone} alone, "
            f"{statistics.median(ratios):.2f} times as long"
        )

    def _take_back(self, engine: ServingEngine) -> None:
        """End the loan of an engine."""
        engine.process.send_signal(TAKE_BACK)
        deadline = time.monotonic() + LENT_S
        while engine.stats()["lending"]["lent"]:
            if time.monotonic() > deadline:
                raise RollweaveError(f"the loan has not ended within {LENT_S:g} s; {engine.log}")
            time.sleep(POLL_S)

    # All

    def _engine(self, *options: str, partitioned: bool = False) -> ServingEngine:
        self._engines += 1
        log = self._folder / f"engine-{self._engines}.log"
        return ServingEngine(self._model, log, self._cores, *options, partitioned=partitioned)

    def _offer(
        self, engine: ServingEngine, arrivals: Sequence[Arrival], *, watch_s: float = 0.0
    ) -> LoadReport:
        """Raises RollweaveError if no request at all is answered."""
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

    def _in_burst(self, report: LoadReport) -> list[Served]:
        end = BURST_FROM_S + self._plan.burst_s
        return [one for one in report.served if BURST_FROM_S <= one.at < end]

    def _burst_s(self, report: LoadReport) -> float:
        return statistics.mean(
            one.last_s if one.tokens else ANSWER_S for one in self._in_burst(report)
        )

    def _missed_in_burst(self, report: LoadReport) -> int:
        return sum(map(self._violates, self._in_burst(report)))


class _Asking:
    """Typical requests, each once the one before is answered, while the context lasts.
    `seconds` are those of each.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine, self._over = engine, threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.seconds: list[float] = []

    def __enter__(self) -> "_Asking":
        self._asked = self._pool.submit(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self._asked.result()

    def _ask(self) -> None:
        while not self._over.is_set():
            self.seconds.append(_seconds_of_one(self._engine, len(self.seconds)))


def remap_us() -> float:
    """Return the median of moving a page from one range to another."""
    pool = PagePool(MmapPages(), 2)
    one, other = pool.reserve(1), pool.reserve(1)
    one.map(0)
    times = []
    for _ in range(REMAPS):
        started = time.perf_counter()
        one.unmap(0)
        other.map(0)
        times.append(time.perf_counter() - started)
        one, other = other, one
    pool.close()
    return 1e6 * statistics.median(times)


def _named(way: str, figure: str) -> str:
    if way == "dual":
        return figure
    if way == "without_admission" and figure == "slo_violations":
        return "slo_violations_without_admission"
    return f"{way}_{figure}"


def _seconds_of_one(engine: ServingEngine, seed: int) -> float:
    """Return the seconds of a typical request without others."""
    draw, started = random.Random(seed), time.perf_counter()
    prompt = [draw.randrange(1, MODEL.config["vocab_size"]) for _ in range(PROMPT_MEDIAN)]
    engine.complete(prompt, output_tokens=OUTPUT_MEDIAN)
    return time.perf_counter() - started


def _step_s(engine: ServingEngine, *, seed: int) -> float:
    """Return the mean seconds of a step in which one request is computed."""
    before = engine.stats()
    _seconds_of_one(engine, seed)
    after = engine.stats()
    return float((after["busy_s"] - before["busy_s"]) / (after["steps"] - before["steps"]))
