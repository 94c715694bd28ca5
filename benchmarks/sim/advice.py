"""Bench `advice`: do the predictions of `rollweave advise RUN` hold in live runs?

FrozenLake is trained live. Its journal predicts the seconds of a step of the same run
in other modes and with another engine, and each of these is trained live, too. Nothing
is fitted to them.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.runs import conditions_of, example, interleaved
from rollweave.runtime.preflight.machine import cores
from rollweave.schema.errors import ConfigError
from rollweave.sim.candidates import Candidate, Prediction
from rollweave.sim.rerun import LENGTH, Reruns
from rollweave.sim.trial import run_trial

CONFIG = "frozenlake_fixed.toml"
OVERRIDES = (
    "run.steps=24",
    "run.checkpoint_every=0",
    "run.name=advice",
    "eval={final_episodes=0}",
    "model.device=cpu",
    "rollout.mode=bounded",
    "rollout.alpha=1",
    "engines.count=1",
)
"""Settings of the recorded run, which only trains steps."""

QUICK = ("run.steps=10", "warmup.steps=5")
CASES: dict[str, tuple[str, ...]] = {
    "itself": (),
    "sync": ("rollout.mode=sync",),
    "two_engines": ("engines.count=2",),
}
"""Changes of the recorded run, which is the first."""

SEEDS = 3
CONDITIONS = {
    "ratio": "predicted over live seconds of a step, after those with which a run begins; of "
    "itself the prediction is for the recorded run, of others for runs that follow it",
    "modeled": "turns, steps, publications, loads and environments as the recorded run had them, "
    "and cores that its processes share",
    "not_modeled": "the controller's own share of the cores; load that changes between runs",
}


def bench_advice(*, seeds: int | None, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return seconds of a step by seed, live and predicted, and the medians of their
    ratios.
    """
    if cores() < 2:
        raise ConfigError("bench advice needs two cores or more, for a second engine")
    path = example(CONFIG)
    overrides = (*OVERRIDES, *QUICK) if quick else OVERRIDES
    count = seeds if seeds is not None else 1 if quick else SEEDS
    live: dict[str, list[float]] = {name: [] for name in CASES}
    predicted: dict[str, list[float]] = {name: [] for name in CASES}
    cases = {name: tuple(sorted({*changes})) for name, changes in CASES.items()}
    for name, seed, run, _ in interleaved(path, overrides, cases, range(count)):
        recording = Reruns(run.path, cores=cores())
        if name == "itself":
            for case, chosen in chosen_of(recording).items():
                result = run_trial(recording.trial(chosen, LENGTH), recording.work)
                if not isinstance(result, Prediction):
                    raise ConfigError(f"{case} cannot be simulated: {result}")
                predicted[case].append(result.step_s)
        assert recording.step_s is not None, "the run has steps after its beginning"
        live[name].append(recording.step_s)
        progress(
            f"seed {seed}, {name}: {live[name][-1]:.2f} s a step live, "
            f"{predicted[name][-1]:.2f} s predicted"
        )
    figures: dict[str, Figure] = {}
    for name in CASES:
        pairs = zip(predicted[name], live[name], strict=True)
        figures[f"ratio_{name}"] = statistics.median(ours / real for ours, real in pairs)
        figures[f"live_step_s_{name}"] = [float(f"{value:.4g}") for value in live[name]]
        figures[f"predicted_step_s_{name}"] = [float(f"{value:.4g}") for value in predicted[name]]
    conditions: dict[str, Any] = conditions_of(path, overrides) | CONDITIONS
    conditions["cases"] = {name: list(changes) for name, changes in CASES.items()}
    conditions["load"] = (
        f"{os.getloadavg()[1]:.1f} processes wanted one of {cores()} cores in the last five "
        "minutes, this bench's included"
    )
    return Result(bench="advice", figures=figures, conditions=conditions)


def chosen_of(recording: Reruns) -> dict[str, Candidate]:
    """Return the candidate of each case."""
    own, known = recording.itself, recording.everything

    def find(mode: str, engines: int) -> Candidate:
        return next(
            one
            for one in known
            if (one.pacing.mode.value, one.split.engines[0].count) == (mode, engines)
            and one.pacing.alpha <= 1
        )

    return {"itself": own, "sync": find("sync", 1), "two_engines": find("bounded", 2)}
