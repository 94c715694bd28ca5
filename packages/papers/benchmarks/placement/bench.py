"""Bench `placement`: assignment of trajectories to workers and of GPUs to workers:
exact, by Heddle's dynamic program, and by its annealing.

Lengths are drawn from the simulator's families of Heddle's three tasks, step times are
those of its 14B model on its GPUs (`sim/cost`), and the paper has 64 GPUs and 6,400
trajectories (100 on each). All contenders get the same lengths and cost table and take
turns on one core. Times are medians; of the three tasks, the slowest is reported.
Figures end in _TRAJECTORIES_GPUS.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.contract import Figure, Result
from benchmarks.harness import in_turn
from packages.papers.benchmarks.placement.drawn import (
    DEGREES,
    DOMAINS,
    GPU,
    MEMBERS,
    MODEL,
    Workload,
    draw_workload,
)
from packages.papers.benchmarks.placement.whole_lists import allocate, by_length, place
from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import (
    Allocation,
    ByTable,
    Placement,
    Problem,
    in_order,
)
from rollweave_papers.heddle_placement import anneal, place_dp

CASES = (
    (256, 16),
    (256, 64),
    (6_400, 64),
    (6_400, 256),
    (6_400, 1_024),
    (100_000, 64),
    (100_000, 1_024),
)
QUICK = ((256, 16), (6_400, 64))
PAPER = (6_400, 64)
"""Trajectories and GPUs of the paper."""

ROUNDS = 5

PROGRAM_S = 1e-9
"""Seconds of the paper's program per worker and pair of positions, as measured: they
predict whether it is affordable.
"""

AFFORDED_S, AFFORDED_QUICK_S = 120.0, 5.0
"""Maximum seconds for all rounds of the paper's program on one case."""

CHUNK = 16
"""Trajectories that the aggregated program does not divide: those shorter than the mean
length.
"""


@dataclass
class Timed:
    """A contender, with each of its runs timed."""

    work: Callable[..., Any]
    taken_ms: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        self.results.append(self.work(*arguments))
        self.taken_ms.append((time.perf_counter() - start) * 1e3)
        return self.results[-1]

    @property
    def ms(self) -> float:
        return statistics.median(self.taken_ms)


def timed(contenders: Mapping[str, Callable[[int], Any]], rounds: int) -> dict[str, Timed]:
    """Call all contenders with the round's number, in turns."""
    runs = {name: Timed(work) for name, work in contenders.items()}
    in_turn(runs, rounds)
    return runs


def bench_placement(*, quick: bool) -> Result:
    """Return times of all cases; for the paper's case also how annealing spends its
    time, and a simulation of the plans.
    """
    if quick:
        return measured(QUICK, PAPER, rounds=ROUNDS, slow_rounds=1, afforded_s=AFFORDED_QUICK_S)
    return measured(CASES, PAPER, rounds=ROUNDS, slow_rounds=ROUNDS, afforded_s=AFFORDED_S)


def measured(
    cases: Sequence[tuple[int, int]],
    paper: tuple[int, int],
    *,
    rounds: int,
    slow_rounds: int,
    afforded_s: float,
) -> Result:
    """Run the bench on these (trajectories, GPUs).

    `slow_rounds` are those of annealing over the paper's program.
    """
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = {
        "lengths": f"families {', '.join(DOMAINS)} of the simulator, {MEMBERS} members a prompt",
        "cost": f"{MODEL} on {GPU.upper()} by sim/cost, tensor parallel over {DEGREES}",
        "times": f"one core, medians of {rounds}, the slowest of the tasks; table given",
        "exact": "allocate: degrees, sizes and placement at once; place: homogeneous workers of "
        "degree 1",
        "anneal": "Alg. 2 with our search as placement; its schedule is assumed. "
        "speedup_over_anneal: with eq. 3 as placement, short trajectories in runs of "
        f"{CHUNK}; the paper reports 0.036 s a placement and 5.0 s in all, on another machine",
        "simulated_s": f"tasks {', '.join(DOMAINS)}; tokens only, no tools",
    }
    ratios: list[float] = []
    for count, gpus in cases:
        ratios += _case(count, gpus, rounds, figures)
    figures["anneal_over_exact_cost_min"] = min(ratios)
    figures["anneal_over_exact_cost_median"] = statistics.median(ratios)
    figures["anneal_over_exact_cost_max"] = max(ratios)
    for count, gpus in cases:
        if gpus <= count:
            _program(count, gpus, rounds, afforded_s, figures, conditions)
    _annealings(*paper, slow_rounds, figures)
    _simulations(*paper, figures)
    return Result(bench="placement", figures=figures, conditions=conditions)


def _anneal(
    drawn: Workload, gpus: int, cost: CostTable, placing: Callable[..., Placement] | None = None
) -> Callable[[int], Allocation]:
    """Return annealing with a seed."""
    return lambda seed: anneal(
        drawn.lengths, gpus, DEGREES, cost, np.random.default_rng(seed), placing=placing
    )


def _case(count: int, gpus: int, rounds: int, figures: dict[str, Figure]) -> list[float]:
    """Measure one case, and return how much slower every annealed allocation is than
    the exact one.
    """
    suffix = f"_{count}_{gpus}"
    times: dict[str, list[float]] = {}
    ratios: list[float] = []
    for domain in DOMAINS:
        drawn = draw_workload(domain, count)
        cost, lengths = drawn.table(), drawn.lengths
        contenders: dict[str, Callable[[int], Any]] = {
            "exact": lambda _: allocate(lengths, gpus, DEGREES, cost),  # noqa: B023
            "anneal": _anneal(drawn, gpus, cost),
        }
        if gpus <= count:
            contenders["place"] = lambda _: place(lengths, [1] * gpus, cost)  # noqa: B023
        timings = timed(contenders, rounds)
        for name, runs in timings.items():
            times.setdefault(name, []).append(runs.ms)
        least = timings["exact"].results[0].makespan_s
        ratios += [one.makespan_s / least for one in timings["anneal"].results]
    figures |= {f"{name}_ms{suffix}": max(medians) for name, medians in times.items()}
    return ratios


def _program(
    count: int,
    gpus: int,
    rounds: int,
    afforded_s: float,
    figures: dict[str, Figure],
    conditions: dict[str, Any],
) -> None:
    """Run the paper's program (eq. 3) on homogeneous workers, if affordable: its time
    over that of `place`.
    """
    name = f"dp_over_exact_{count}_{gpus}"
    expected_s = rounds * PROGRAM_S * count**2 * gpus / 2
    if expected_s > afforded_s:
        figures[name] = None
        conditions[name] = (
            f"not measured: {rounds} runs in O(n² workers) would take about {expected_s:,.0f} s"
        )
        return
    drawn = draw_workload(DOMAINS[0], count)
    workers, cost = [1] * gpus, drawn.table()
    timings = timed(
        {
            "exact": lambda _: place(drawn.lengths, workers, cost),
            "dp": lambda _: place_dp(drawn.lengths, workers, cost),
        },
        rounds,
    )
    found = {kind: runs.results[0].makespan_s for kind, runs in timings.items()}
    if found["dp"] != found["exact"]:
        raise RuntimeError(f"eq. 3 and the search must find the same makespan, got {found}")
    figures[name] = timings["dp"].ms / timings["exact"].ms
    figures[f"dp_ms_{count}_{gpus}"] = timings["dp"].ms


def _annealings(count: int, gpus: int, rounds: int, figures: dict[str, Figure]) -> None:
    """Run the exact allocation beside the paper's annealing, over its aggregated
    program, and over our own placement.
    """
    drawn = draw_workload(DOMAINS[0], count)
    cost = drawn.table()
    problem = Problem(ByTable(drawn.lengths, cost))
    below = statistics.fmean(drawn.lengths)

    def search(workers: Sequence[int]) -> Placement:
        solution = problem.least(in_order(workers))
        return Placement(spans=solution.spans, makespan_s=solution.makespan_s, exact=False)

    def paper(workers: Sequence[int]) -> Placement:
        return place_dp(drawn.lengths, workers, cost, below=below, chunk=CHUNK)

    inner = {"anneal": Timed(paper), "anneal_our_search": Timed(search)}
    annealings = {name: _anneal(drawn, gpus, cost, placing) for name, placing in inner.items()}
    exact = {"exact": lambda _: allocate(drawn.lengths, gpus, DEGREES, cost)}
    timings = timed({**exact, **annealings}, rounds)
    for name, placing in inner.items():
        figures[f"speedup_over_{name}"] = timings[name].ms / timings["exact"].ms
        figures[f"{name}_placements"] = len(placing.taken_ms) / rounds
        figures[f"{name}_placement_ms"] = placing.ms
        share = sum(placing.taken_ms) / sum(timings[name].taken_ms)
        figures[f"{name}_placement_share"] = share
    figures["anneal_program_ms"] = timings["anneal"].ms


def _simulations(count: int, gpus: int, figures: dict[str, Figure]) -> None:
    """Return by task: eq. 2, and a simulation of the same plans in which batches shrink
    as members end.
    """
    rows: dict[str, list[float]] = {}
    for domain in DOMAINS:
        drawn = draw_workload(domain, count)
        cost = drawn.table()
        ordered = [drawn.lengths[index] for index in by_length(drawn.lengths)]
        allocations = {
            "exact": allocate(drawn.lengths, gpus, DEGREES, cost),
            "anneal": _anneal(drawn, gpus, cost)(0),
        }
        for degree in DEGREES:
            workers = (degree,) * (gpus // degree)
            allocations[f"homogeneous_{degree}"] = Allocation(
                degrees=workers, placement=place(drawn.lengths, workers, cost)
            )
        for name, made in allocations.items():
            rows.setdefault(f"eq2_s_{name}", []).append(made.makespan_s)
            groups = [ordered[start:end] for start, end in made.placement.spans]
            simulated = drawn.simulated(made.degrees, groups)
            rows.setdefault(f"simulated_s_{name}", []).append(simulated)
    figures |= dict(sorted(rows.items()))
