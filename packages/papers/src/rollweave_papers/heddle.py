"""Heddle's experiments: rollout throughput and time by scheduler, placement and GPUs of
a worker.

The quality of length prediction is in `heddle_prediction.py`, runs and measurements in
`heddle_runs.py`. The text of our copy lacks Figures 12 to 16 except for the maximum
gain and for directions: who is faster.

Invariants: the rows of a figure differ only in the subject of its section; the compared
systems get the same batch, GPUs and engine. Lengths are the estimates of
`core/policy/predict`, after one step's training of its regressor.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from rollweave_papers import heddle_prediction
from rollweave_papers.cluster import geometric_mean
from rollweave_papers.heddle_runs import (
    DEGREES,
    HYBRID,
    MODELS,
    OURS,
    PAPERS,
    SLIME,
    STUDIED,
    TASKS,
    VERL,
    WORKER_BATCH,
    Case,
    Rollout,
    System,
    rollout,
)
from rollweave_papers.results import Experiment, Row
from rollweave_sim.cost import EngineCost
from rollweave_sim.hardware import gpu, model

FULL_PARTS, FULL_STEPS = 4, 3
"""Divisor of the cluster and steps of a full form: a quarter has 16 GPUs and 1,600
trajectories (32B: 800), so that all of Heddle takes minutes.
"""

QUICK_PARTS, QUICK_STEPS = 32, 2

WIDE, QUICK_WIDE = 8, 2
"""GPUs of a worker in Fix-8 (Heddle §7.4), and their number where the part of the
cluster is too small.
"""

SHORT_SLOTS = 32
"""Slots of a worker in Fig. 14, for a third of its trajectories: with a slot for each,
no scheduling would be needed. Our choice.
"""

Rollouts = Mapping[str, Rollout]
"""Rollouts by their name in a note."""


def study(
    quick: bool, cases: list[tuple[str, str]], ways: Callable[[Case], Mapping[str, Case]]
) -> list[tuple[str, str, Rollouts, str]]:
    """Return for each task and model: both names, the rollouts of all `ways` to run it,
    and their scale for a note.
    """
    studies: list[tuple[str, str, Rollouts, str]] = []
    for task, shape in [("math", STUDIED)] if quick else cases:
        parts, steps = (QUICK_PARTS, QUICK_STEPS) if quick else (FULL_PARTS, FULL_STEPS)
        case = Case(task=task, model=shape, system=OURS, parts=parts, steps=steps, tp=MODELS[shape])
        runs = ways(case)
        scale = next(iter(runs.values())).describe()
        studies.append((task, shape, {name: rollout(run) for name, run in runs.items()}, scale))
    return studies


def speeds(runs: Rollouts) -> str:
    """Describe the throughput of rollouts, for a note."""
    return "tokens/s: " + ", ".join(f"{name} {one.tokens_per_s:,.0f}" for name, one in runs.items())


def over(runs: Rollouts, name: str, *others: str) -> float:
    """Return the throughput of `name` over that of the best of the `others`."""
    return runs[name].tokens_per_s / max(runs[other].tokens_per_s for other in others)


# Fig. 7.

MACHINE = 8
"""GPUs that are divided into workers of one size (Heddle Fig. 7)."""

TYPICAL_CONTEXT = 8_000
"""Tokens of each context. Our choice; Fig. 7 does not state them."""


def fig7(quick: bool) -> list[Row]:
    """Reproduce seconds of a token and throughput of one machine by the GPUs of a
    worker, in closed form: the cost of a step.

    The seconds are those of a batch of one, as the paper defines its base per-token
    time (§2.2). Each worker has the trajectories of the baselines (§7.1); a row of ours
    has as many for all workers together, however they are divided.
    """
    costs = {tp: EngineCost(gpu=gpu("h100"), model=model(STUDIED), tp=tp) for tp in DEGREES}

    def step_s(tp: int, batch: int) -> float:
        return costs[tp].decode_s(decode=batch, decode_context=batch * TYPICAL_CONTEXT, steps=1)

    def rate(tp: int, batch: int) -> float:
        return MACHINE // tp * batch / step_s(tp, batch)

    alone = {tp: step_s(tp, 1) for tp in DEGREES}
    rates = {tp: rate(tp, WORKER_BATCH) for tp in DEGREES}
    divided = {tp: rate(tp, WORKER_BATCH * tp) for tp in DEGREES}
    same = f"{STUDIED} on eight H100, contexts of {TYPICAL_CONTEXT:,} tokens; closed form"
    rows = []
    for before, after in itertools.pairwise(DEGREES):
        sizes = f"{before} over {after} GPUs a worker"
        rows += [
            Row(
                row=f"time of a token, {sizes}",
                ours=alone[before] / alone[after],
                note=f"{same}; {1e3 * alone[before]:.1f} and {1e3 * alone[after]:.1f} ms",
            ),
            Row(
                row=f"throughput, {sizes}",
                ours=rates[before] / rates[after],
                note=f"{WORKER_BATCH} trajectories on each worker; {rates[before]:,.0f} and "
                f"{rates[after]:,.0f} tokens/s",
            ),
            Row(
                row=f"throughput of {MACHINE * WORKER_BATCH} trajectories, {sizes}",
                ours=divided[before] / divided[after],
                note=f"{divided[before]:,.0f} and {divided[after]:,.0f} tokens/s: a larger worker "
                "reads its weights less often",
                own=True,
            ),
        ]
    return rows


# Fig. 12.

BASELINES: Mapping[str, System] = {"Verl": VERL, "Verl*": HYBRID, "Slime": SLIME}
"""The compared systems (Heddle §7): all schedule round robin, on workers of one size;
Verl* ignores the cache beyond a load ratio of 32.
"""


RULES = "the paper's rules"
"""Name of the runs with Heddle's placement and its migration by rank (§5.2, §5.3)."""


def _summed(
    label: str, name: str, what: str, studies: Sequence[tuple[str, str, Rollouts, str]]
) -> Iterator[Row]:
    """Yield the maximum gain over the best baseline and the mean gain over each, of the
    runs called `name`.
    """
    gains = {f"{task} {shape}": over(runs, name, *BASELINES) for task, shape, runs, _ in studies}
    bound = "; published: up to" if name == RULES else ""
    yield Row(
        row=f"{label} over the best baseline, maximum",
        ours=max(gains.values()),
        note=f"{what}, our allocation; every step from the second on; the maximum at "
        f"{max(gains, key=lambda one: gains[one])}, the minimum over tasks and models is "
        f"{min(gains.values()):.2f}{bound}",
        own=name != RULES,
    )
    for baseline in BASELINES:
        ratios = [over(runs, name, baseline) for *_, runs, _ in studies]
        yield Row(
            row=f"{label} over {baseline}",
            ours=geometric_mean(ratios),
            note=f"geometric mean, {min(ratios):.2f} to {max(ratios):.2f}",
            own=name != RULES,
        )


def fig12(quick: bool) -> list[Row]:
    """Reproduce rollout throughput over tasks and models."""
    studies = study(
        quick,
        [(task, shape) for task in TASKS for shape in MODELS],
        lambda case: {
            **{name: case.but(system=system) for name, system in BASELINES.items()},
            "ours": case.but(adaptive=True),
            RULES: case.but(system=PAPERS, adaptive=True),
        },
    )
    rows = [
        *_summed("Heddle", RULES, "longest first, the paper's placement and migration", studies),
        *_summed("ours", "ours", "longest first, our placement, migration by gain", studies),
    ]
    for task, shape, runs, scale in studies:
        fleet = f"GPUs of a worker, ours: {runs['ours'].fleet}"
        for label, name in (
            ("ours", "ours"),
            ("with the paper's migration by rank", RULES),
        ):
            note = (
                f"{scale}; {speeds(runs)}; {fleet}"
                if name == "ours"
                else "a trajectory moves whenever its rank's worker differs"
            )
            rows.append(
                Row(
                    row=f"{task}, {shape}: {label}, over the best baseline",
                    ours=over(runs, name, *BASELINES),
                    note=note,
                    own=True,
                )
            )
    return rows


# Fig. 14.

PRIORITIES = {
    "progressive": OURS,
    "FCFS": OURS.but(priority="fcfs"),
    "round robin": OURS.but(priority="round_robin"),
    "shortest first (Autellix)": OURS.but(priority="shortest_first"),
}


def fig14(quick: bool) -> list[Row]:
    """Reproduce rollout time, and the queueing delay of the longest trajectory, by
    scheduler.
    """
    rows = []
    for task, _, runs, scale in study(
        quick,
        [(task, STUDIED) for task in TASKS],
        lambda case: {
            name: case.but(system=system, slots=SHORT_SLOTS) for name, system in PRIORITIES.items()
        },
    ):
        same = f"{scale}; our placement and migration for all; {SHORT_SLOTS} slots a GPU"
        ours = runs["progressive"]
        for name, one in runs.items():
            if name != "progressive":
                note = f"{same}; {one.seconds:,.0f} s and {ours.seconds:,.0f} s"
                value = one.seconds / ours.seconds
                rows.append(
                    Row(row=f"{task}: rollout time, {name} over progressive", ours=value, note=note)
                )
        for name, one in runs.items():
            note = "sum over its turns, mean of the steps measured"
            label = f"{task}: queueing of the longest, {name}"
            rows.append(Row(row=label, ours=one.longest_queued_s, unit="s", note=note))
    return rows


# Fig. 15.

PLACEMENTS = {
    "cache-aware": OURS.but(placement="pinned", migration="never"),
    "least load": OURS.but(placement="hybrid", migration="never"),
    "least load alone": OURS.but(placement="least_load", migration="never"),
    "ours": OURS,
    "ours, never moved": OURS.but(migration="never"),
    RULES: PAPERS,
}
"""The compared placements. All use Heddle's priority, as its ablations keep all else
equal (§7).
"""


def fig15(quick: bool) -> list[Row]:
    """Reproduce rollout throughput by placement."""
    rows = []
    for task, _, runs, scale in study(
        quick,
        [(task, STUDIED) for task in TASKS],
        lambda case: {
            **{name: case.but(system=system) for name, system in PLACEMENTS.items()},
            **{
                f"{name}, round robin": case.but(system=system)
                for name, system in BASELINES.items()
            },
        },
    ):
        notes = {
            (RULES, "cache-aware"): f"{scale}; progressive priority for all; {speeds(runs)}",
            (RULES, "least load"): "which ignores the cache beyond a load ratio of 32",
        }
        alone = {
            ("ours", "cache-aware"): "migration where it gains",
            ("ours", "least load"): "which ignores the cache beyond a load ratio of 32",
            ("ours", "least load alone"): "which ignores the cache, as Slime does",
            (
                "ours",
                *(f"{name}, round robin" for name in BASELINES),
            ): "Verl, Verl* and Slime unchanged",
            ("ours, never moved", "cache-aware"): "no migration",
        }
        for names, note in (notes | alone).items():
            against = names[1] if len(names) == 2 else "the best baseline with its own priority"
            label = f"{task}: {names[0]} over {against}"
            rows.append(Row(row=label, ours=over(runs, *names), note=note, own=names in alone))
    return rows


# Fig. 16.


def fig16(quick: bool) -> list[Row]:
    """Reproduce rollout throughput by the number of GPUs of a worker."""
    wide = f"Fix-{QUICK_WIDE if quick else WIDE}"
    rows = []
    for task, _, runs, scale in study(
        quick,
        [(task, STUDIED) for task in TASKS],
        lambda case: {
            "Fix-1": case,
            wide: case.but(tp=QUICK_WIDE if quick else WIDE),
            "adaptive": case.but(adaptive=True),
        },
    ):
        note = f"{scale}; {speeds(runs)}"
        fleet = f"GPUs of a worker: {runs['adaptive'].fleet}"
        rows += [
            Row(row=f"{task}: {wide} over Fix-1", ours=over(runs, wide, "Fix-1"), note=note),
            Row(
                row=f"{task}: adaptive over Fix-1",
                ours=over(runs, "adaptive", "Fix-1"),
                note=fleet,
            ),
            Row(row=f"{task}: adaptive over {wide}", ours=over(runs, "adaptive", wide), note=fleet),
        ]
    return rows


EXPERIMENTS = [
    Experiment("heddle-fig7", "Latency and throughput", "Heddle Fig. 7, §2.3", fig7),
    Experiment("heddle-fig12", "Rollout throughput", "Heddle Fig. 12, §7.1", fig12),
    heddle_prediction.EXPERIMENT,
    Experiment("heddle-fig14", "Schedulers", "Heddle Fig. 14, §7.2", fig14),
    Experiment("heddle-fig15", "Placements", "Heddle Fig. 15, §7.3", fig15),
    Experiment("heddle-fig16", "GPUs of a worker", "Heddle Fig. 16, §7.4", fig16),
]
