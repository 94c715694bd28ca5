"""Bench `fidelity`: live runs beside the simulations of `rollweave advise RUN`.

Several configurations of one training run live, one after another. Each is simulated
from the costs and trajectories in its own journal, which shows what the simulator
leaves out; and all are simulated from the journal of one of them, which shows whether
advice holds: whether the predicted order is the measured one, and by how much the
predictions differ. The runs share the cores of one machine, as any run on a CPU does,
so the bench needs a machine that does nothing else.
"""

import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, load_average, rounded
from benchmarks.runs import interleaved, subject
from rollweave.schema.errors import RollweaveError
from rollweave_sim.candidates import Candidate
from rollweave_sim.rerun import LENGTH, Reruns
from rollweave_sim.trial import try_out

VARIANTS = {
    "sync": ["rollout.mode=sync"],
    "one_step": ["rollout.mode=one_step"],
    "bounded": ["rollout.mode=bounded"],
    "decoupled": ["rollout.mode=decoupled"],
    "bounded_two_engines": ["rollout.mode=bounded", "engines.count=2"],
}
"""The settings of each configuration."""

ADVISER = "bounded_two_engines"
"""The configuration whose journal predicts all: no other has as many engines."""

ALWAYS = [
    "run.name=fidelity",
    "run.checkpoint_every=0",  # a checkpoint compacts the journal, which must be whole
    "eval={final_episodes=0}",
    "trainer.lr.final=1",
]
STEPS, STEPS_QUICK, STEPS_MODEL = 20, 8, 14
"""Steps of a run: of the fixed lake, with `quick`, and of a pretrained model."""

NEAR = 0.1
"""Relative error up to which a prediction agrees with the measurement."""

TIE = 0.05
"""Relative difference up to which two measured times have no order."""


def bench_fidelity(
    *, quick: bool, seeds: int | None, model: Path | None, progress: Progress
) -> Result:
    """Return measured and predicted seconds a step by configuration, medians over
    `seeds` (by default 1), and how well the predictions agree. Raises ConfigError, and
    RollweaveError where a run fails.
    """
    steps = STEPS_QUICK if quick else STEPS if model is None else STEPS_MODEL
    measured: dict[str, list[float]] = {name: [] for name in VARIANTS}
    own: dict[str, list[float]] = {name: [] for name in VARIANTS}
    advised: dict[str, list[float]] = {name: [] for name in VARIANTS}
    load = load_average()
    with subject(model) as (path, settings):
        always = [*settings, *ALWAYS, f"run.steps={steps}"]
        tables = dict[int, dict[str, Candidate]]()
        for name, seed, run, _ in interleaved(path, always, VARIANTS, range(seeds or 1)):
            table = Reruns(run.path)
            if table.step_s is None:
                raise RollweaveError(f"{name}: the run has too few steps to measure: {steps}")
            candidates = tables.setdefault(seed, {})
            candidates[name] = table.itself
            measured[name].append(table.step_s)
            own[name].append(predicted(table, table.itself))
            progress(f"{name}: {table.step_s:.2f} s a step, predicted {own[name][-1]:.2f} s")
            if name == ADVISER:
                for other, candidate in candidates.items():
                    advised[other].append(predicted(table, candidate))
    return Result(
        bench="fidelity",
        figures=figures_of(*(_medians(of) for of in (measured, own, advised))),
        conditions={
            "configurations": list(VARIANTS),
            "runs": f"{steps} steps of {path.name}, {seeds or 1} of each configuration, one "
            "after another; the steps with which a run begins are left out",
            "own_ratio": "predicted from the run's own journal, over measured",
            "advice_ratio": f"predicted from the journal of {ADVISER}, over measured",
            "advice_order": f"share of the pairs that differ by more than {TIE:.0%} whose "
            "predicted order is the measured order",
            "load": load,
        },
    )


def predicted(table: Reruns, candidate: Candidate) -> float:
    """Return the simulated seconds a step of a candidate of the table."""
    config = table.rearranged(candidate)
    return try_out(config, LENGTH, work=table.work, costs=table.costs, cores=table.cores).step_s


def figures_of(
    measured: Mapping[str, float], own: Mapping[str, float], advised: Mapping[str, float]
) -> dict[str, Figure]:
    """Return the figures of these seconds a step, by configuration."""
    ratios = {
        kind: [times[name] / measured[name] for name in measured]
        for kind, times in (("own", own), ("advice", advised))
    }
    pairs = [
        advised[fast] < advised[slow]
        for fast, slow in itertools.permutations(measured, 2)
        if measured[fast] * (1 + TIE) < measured[slow]
    ]
    figures: dict[str, Figure] = {"measured_s": rounded(list(measured.values()))}
    for kind, values in ratios.items():
        figures[f"{kind}_ratio"] = rounded(values)
        figures[f"{kind}_agrees"] = sum(abs(value - 1) <= NEAR for value in values)
    figures["advice_order"] = statistics.fmean(pairs) if pairs else None
    return figures


def _medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}
