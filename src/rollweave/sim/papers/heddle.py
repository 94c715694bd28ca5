"""Heddle's experiments: rollout throughput and time by when, where and on how many GPUs
a trajectory runs.

How well lengths are predicted is in `heddle_prediction.py`, what is run and measured in
`heddle_runs.py`. Figures 12 to 16 are not in the text of our copy but for the greatest
gain: other rows have nothing to be compared with.

Invariants: the rows of a figure differ in nothing but what its section studies; the
systems compared with get the same batch, GPUs and engine. Lengths are what
`core/policy/predict` believes, after one step's training of its regressor.
"""

import functools
from collections.abc import Callable, Mapping

from rollweave.sim.papers import heddle_prediction
from rollweave.sim.papers.cluster import geometric_mean
from rollweave.sim.papers.heddle_runs import (
    HYBRID,
    MODELS,
    OURS,
    PAPERS,
    SLIME,
    STUDIED,
    TASKS,
    VERL,
    Case,
    Rollout,
    System,
    rollout,
)
from rollweave.sim.papers.rows import Experiment, Row

FULL_PARTS, FULL_STEPS = 4, 3
"""A quarter of the cluster: 16 GPUs and 1,600 trajectories (32B: 800), so that all of
Heddle takes minutes.
"""

QUICK_PARTS, QUICK_STEPS = 32, 2

WIDE, QUICK_WIDE = 8, 2
"""GPUs of a worker in Fix-8 (Heddle §7.4), and where the part of the cluster is too
small for it.
"""

SHORT_SLOTS = 32
"""Slots of a worker in Fig. 14, for a third of its trajectories: with one for each
there would be nothing to schedule. Ours.
"""

NOT_IN_TEXT = "figure not in text"

Found = Mapping[str, Rollout]
"""Rollouts by what they are called in a note."""


def study(
    quick: bool, cases: list[tuple[str, str]], ways: Callable[[Case], Mapping[str, Case]]
) -> list[tuple[str, str, Found, str]]:
    """For each task and model: the two, the rollouts of all `ways` of running it, and
    their scale for a note.
    """
    found: list[tuple[str, str, Found, str]] = []
    for task, model in [("math", STUDIED)] if quick else cases:
        parts, steps = (QUICK_PARTS, QUICK_STEPS) if quick else (FULL_PARTS, FULL_STEPS)
        case = Case(task=task, model=model, system=OURS, parts=parts, steps=steps, tp=MODELS[model])
        runs = ways(case)
        scale = next(iter(runs.values())).told()
        found.append((task, model, {name: rollout(run) for name, run in runs.items()}, scale))
    return found


def speeds(found: Found) -> str:
    """For a note."""
    return "tokens/s: " + ", ".join(
        f"{name} {one.tokens_per_s:,.0f}" for name, one in found.items()
    )


def over(found: Found, name: str, *others: str) -> float:
    """Throughput of `name` over that of the best of the `others`."""
    return found[name].tokens_per_s / max(found[other].tokens_per_s for other in others)


# Fig. 12.

BASELINES: Mapping[str, System] = {"Verl": VERL, "Verl*": HYBRID, "Slime": SLIME}
"""Heddle §7: all go round robin, on workers of one size; Verl* leaves the cache beyond
a load ratio of 32.
"""


def fig12(quick: bool) -> list[Row]:
    """Rollout throughput over tasks and models."""
    row = functools.partial(Row, experiment="heddle-fig12")
    found = study(
        quick,
        [(task, model) for task in TASKS for model in MODELS],
        lambda case: {
            **{name: case.but(system=system) for name, system in BASELINES.items()},
            "ours": case.but(adaptive=True),
            "the paper's rules": case.but(system=PAPERS, adaptive=True),
        },
    )
    gains = {f"{task} {model}": over(runs, "ours", *BASELINES) for task, model, runs, _ in found}
    what = (
        "longest first, our exact placement and allocation, migration where it gains; every step "
        "from the second on"
    )
    rows = [
        row(
            row="Heddle over the best baseline, greatest",
            published=2.5,
            ours=max(gains.values()),
            note=f"{what}; at {max(gains, key=lambda name: gains[name])}, least "
            f"{min(gains.values()):.2f}; Figs. 15 and 16 "
            "show what placement and allocation alone do of it; published: up to",
        )
    ]
    for name in BASELINES:
        ratios = [over(runs, "ours", name) for *_, runs, _ in found]
        note = f"geometric mean, {min(ratios):.2f} to {max(ratios):.2f}; {NOT_IN_TEXT}"
        rows.append(
            row(row=f"Heddle over {name}", published=None, ours=geometric_mean(ratios), note=note)
        )
    for task, model, runs, scale in found:
        fleet = f"GPUs of a worker, ours: {runs['ours'].fleet}"
        for label, name in (
            ("ours", "ours"),
            ("with the paper's migration by rank", "the paper's rules"),
        ):
            note = (
                f"{scale}; {speeds(runs)}; {fleet}"
                if name == "ours"
                else "a trajectory moves whenever its rank's worker differs"
            )
            rows.append(
                row(
                    row=f"{task}, {model}: {label}, over the best baseline",
                    published=None,
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
    """Rollout time, and queueing delay of the longest trajectory, by scheduler."""
    row = functools.partial(Row, experiment="heddle-fig14")
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
                note = f"{same}; {one.seconds:,.0f} s and {ours.seconds:,.0f} s; {NOT_IN_TEXT}"
                value = one.seconds / ours.seconds
                rows.append(
                    row(
                        row=f"{task}: rollout time, {name} over progressive",
                        published=None,
                        ours=value,
                        note=note,
                    )
                )
        for name, one in runs.items():
            note = "sum over its turns, mean of the steps measured"
            label = f"{task}: queueing of the longest, {name}"
            rows.append(
                row(row=label, published=None, ours=one.longest_queued_s, unit="s", note=note)
            )
    return rows


# Fig. 15.

PLACEMENTS = {
    "cache-aware": OURS.but(placement="pinned", migration="never"),
    "least load": OURS.but(placement="hybrid", migration="never"),
    "least load alone": OURS.but(placement="least_load", migration="never"),
    "ours": OURS,
    "ours, never moved": OURS.but(migration="never"),
    "ours, moved by rank": PAPERS,
}
"""The priority is Heddle's for all, as its ablations keep all else equal (§7)."""


def fig15(quick: bool) -> list[Row]:
    """Rollout throughput by placement."""
    row = functools.partial(Row, experiment="heddle-fig15")
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
            ("ours", "cache-aware"): f"{scale}; progressive priority for all; {speeds(runs)}; "
            f"{NOT_IN_TEXT}",
            ("ours", "least load"): "which leaves the cache beyond a load ratio of 32; "
            f"{NOT_IN_TEXT}",
        }
        alone = {
            ("ours", "least load alone"): "which ignores the cache, as Slime does",
            (
                "ours",
                *(f"{name}, round robin" for name in BASELINES),
            ): "Verl, Verl* and Slime as they are",
            ("ours, never moved", "cache-aware"): "no migration",
            ("ours, moved by rank", "cache-aware"): "the paper's migration, whenever the rank's "
            "worker differs",
        }
        for names, note in (notes | alone).items():
            against = names[1] if len(names) == 2 else "the best baseline with its own priority"
            label = f"{task}: {names[0]} over {against}"
            rows.append(
                row(
                    row=label,
                    published=None,
                    ours=over(runs, *names),
                    note=note,
                    own=names in alone,
                )
            )
    return rows


# Fig. 16.

LINEAR = (
    "in our hardware model tensor parallelism scales almost linearly, so that wide workers lose "
    "no throughput to narrow ones, "
    "and little is left to gain over them; what they lose where observations are long comes from "
    "the prompt tokens of a step, "
    "as many for a wide worker as for a narrow one, of which the plan knows nothing"
)


def fig16(quick: bool) -> list[Row]:
    """Rollout throughput by GPUs of a worker."""
    row = functools.partial(Row, experiment="heddle-fig16")
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
        note = f"{scale}; {speeds(runs)}; {NOT_IN_TEXT}"
        why = f"GPUs of a worker: {runs['adaptive'].fleet}; {LINEAR}; {NOT_IN_TEXT}"
        rows += [
            row(
                row=f"{task}: {wide} over Fix-1",
                published=None,
                ours=over(runs, wide, "Fix-1"),
                note=note,
            ),
            row(
                row=f"{task}: adaptive over Fix-1",
                published=None,
                ours=over(runs, "adaptive", "Fix-1"),
                note=NOT_IN_TEXT,
            ),
            row(
                row=f"{task}: adaptive over {wide}",
                published=None,
                ours=over(runs, "adaptive", wide),
                note=why,
            ),
        ]
    return rows


EXPERIMENTS = [
    Experiment(
        name="heddle-fig12", title="rollout throughput", source="Heddle Fig. 12, §7.1", run=fig12
    ),
    heddle_prediction.EXPERIMENT,
    Experiment(name="heddle-fig14", title="schedulers", source="Heddle Fig. 14, §7.2", run=fig14),
    Experiment(name="heddle-fig15", title="placements", source="Heddle Fig. 15, §7.3", run=fig15),
    Experiment(
        name="heddle-fig16", title="GPUs of a worker", source="Heddle Fig. 16, §7.4", run=fig16
    ),
]
