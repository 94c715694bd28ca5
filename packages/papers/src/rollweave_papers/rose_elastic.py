"""ROSE end to end: its throughput over systems with a fixed number of GPUs (§6.1, Fig.
7), and its rollouts beside those of elastic baselines (Fig. 8).

The elastic baselines are λRL, with serverless GPUs whose lease is 15 minutes, and
RLBoost+, with spot instances. Fig. 7d compares scores, and no simulation learns.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, Struct
from rollweave_papers.cluster import Setup, mean_of, pace, steps_of
from rollweave_papers.results import Experiment, Row
from rollweave_papers.rose import rollout_times
from rollweave_papers.rose_serving import SIZES
from rollweave_papers.sharing import DOWN_S, START_S, UP_S

ELASTIC_GPUS = {"8B": 16, "32B": 32}
"""Serverless GPUs, and spot GPUs at most (§6.1)."""

STEPS = {"8B": 4, "32B": 3}
"""Steps of a run of Fig. 7; the paper's have 50 to 100 and 25 to 40. One is too short:
the first batches are those that finish early.
"""

ROLLOUTS = {"8B": 6, "32B": 3}
"""Steps of a run of Fig. 8: about half an hour; the paper's window has two hours."""

RUNS: Mapping[str, Mapping[str, Any]] = {
    "ROLL-GRPO": {"mode": "one_step"},
    "ROLL-DAPO": {
        "mode": "one_step",
        "reference": False,
        "rollout": {"dynamic_sampling": True, "spare_groups": "learned"},
    },
    "AReaL": {"mode": "partial", "alpha": 1},
}
"""Changes of the set-up for the baselines of Fig. 7. ROSE runs with the same change;
`resource_fixed` has what else differs.
"""


def without_borrowing(setup: Setup) -> Setup:
    """Return the same run on its own GPUs alone."""
    return setup.but(serving={}, borrowed=0)


def resource_fixed(setup: Setup) -> Setup:
    """Return the run of a resource-fixed baseline: on its own GPUs alone, with all
    turns of a trajectory on one engine.

    So do ROLL (`RequestScheduler`), AReaL (`RemoteSGLangEngine`), and the baseline of
    ROSE's Table 3. To route each turn by affinity is part of what ROSE gains (§6.1).
    """
    return without_borrowing(setup).but(policies=("pinned",))


def fig7(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.1: tokens per second over those of resource-fixed baselines."""
    conditions = {
        "ROLL-GRPO": "one-step",
        "ROLL-DAPO": "one-step; at most twice a batch is launched, where the paper has up to 5.7 "
        "times; half of our attempts succeed",
        "AReaL": "both in mode partial, which is our reading, with η = 1",
    }
    rows = []
    for size in ("8B",) if quick else tuple(SIZES):
        steps = 1 if quick else STEPS[size]
        for name, changes in RUNS.items():
            setup = SIZES[size].but(**changes)
            if name == "ROLL-DAPO":  # the step before decides how many more than a batch run
                setup = setup.but(environments=2 * setup.batch)
            rose, fixed = (
                pace(one, steps=steps).tokens_per_s for one in (setup, resource_fixed(setup))
            )
            rows.append(
                Row(
                    row=f"{size} ROSE over {name}, throughput",
                    ours=rose / fixed,
                    note=f"{mean_of(steps, 'step')}; the baseline keeps a trajectory on one "
                    f"engine, as its code does; {conditions[name]}",
                )
            )
    return rows


class Borrowing:
    """The loans of a run, by its journal.

    `starting_s` are the seconds in which they were not ready: until they had weights
    for the first time. `held_s` are all seconds in which the run had them.
    """

    def __init__(self) -> None:
        self.loans = 0
        self.starting_s = self.held_s = 0.0
        self._since: dict[EngineId, float] = {}
        self._starts: dict[EngineId, float] = {}

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        """Count what an event and its commands change."""
        if isinstance(event, e.WeightsLoaded):
            self._ready(event.engine_id, now)
        for command in commands:
            if isinstance(command, c.StartEngine) and command.lender:
                self.loans += 1
                self._since[command.engine_id] = self._starts[command.engine_id] = now
            elif isinstance(command, c.RemoveEngine):
                self._end(command.engine_id, now)

    def _ready(self, engine: EngineId, now: float) -> None:
        if engine in self._starts:
            self.starting_s += now - self._starts.pop(engine)

    def _end(self, engine: EngineId, now: float) -> None:
        self._ready(engine, now)
        if engine in self._since:
            self.held_s += now - self._since.pop(engine)

    def finish(self, now: float) -> None:
        """Count what is still borrowed at the end of the run."""
        for engine in tuple(self._since):
            self._end(engine, now)


class Elastic(Struct, frozen=True, kw_only=True):
    """Mean seconds of a rollout, and the share of the time of all GPUs for rollouts in
    which borrowed ones were not ready.
    """

    rollout_s: float
    not_ready: float
    loans: int


def elastic(size: str, kind: str, *, steps: int) -> Elastic:
    """Simulate so many steps with GPUs of this kind beside the run's own: "none",
    "rose", "serverless" or "spot". Raises ExperimentError.
    """
    setup = SIZES[size]
    if kind == "none":
        setup = resource_fixed(setup)
    elif kind != "rose":
        gpus = ELASTIC_GPUS[size]
        setup = setup.but(serving={"engines": gpus // setup.tp}, borrowed=gpus, sharing=kind)
    borrowing = Borrowing()
    outcome = steps_of(setup, steps=steps, watch=borrowing)
    borrowing.finish(outcome.summary.wall_s)
    own_s = outcome.summary.wall_s * setup.rollout_gpus / setup.tp
    return Elastic(
        rollout_s=statistics.fmean(rollout_times(outcome)),
        not_ready=borrowing.starting_s / (own_s + borrowing.held_s),
        loans=borrowing.loans,
    )


def fig8(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.1: rollouts with serverless GPUs and with spot instances, and
    the share of time that their coming and going costs.
    """
    names = {"serverless": "λRL", "spot": "RLBoost+", "rose": "ROSE"}
    what = {
        "serverless": f"serverless engines end every 15 minutes, start in {START_S:g} s, and their "
        "turns continue elsewhere with the tokens that they have, where the paper restarts them",
        "spot": f"spot instances are drawn: there for {UP_S / 60:g} minutes in the mean, then not "
        f"for {DOWN_S / 60:g}; the paper's trace is a figure alone",
        "rose": "published: its factor over RLBoost+ times that one's over ROLL",
    }
    bounds = {
        "serverless": "published: at most",
        "spot": "published: of both sizes",
        "rose": "published: less than",
    }
    rows = []
    for size in ("8B",) if quick else tuple(SIZES):
        steps = 1 if quick else ROLLOUTS[size]
        runs = {kind: elastic(size, kind, steps=steps) for kind in ("none", *names)}
        for kind, name in names.items():
            rows += [
                Row(
                    row=f"{size} {name} over ROLL, rollout",
                    ours=runs["none"].rollout_s / runs[kind].rollout_s,
                    note=f"{mean_of(steps, 'rollout')} of a run; ROLL keeps a trajectory on one "
                    f"engine, as its code does; {what[kind]}",
                ),
                Row(
                    row=f"{size} {name}, GPU time in which engines were not ready",
                    ours=100 * runs[kind].not_ready,
                    unit="%",
                    note=f"{bounds[kind]}; of the GPUs for rollouts; {runs[kind].loans} starts",
                ),
            ]
        rows.append(
            Row(
                row=f"{size} ROSE over RLBoost+, rollout",
                ours=runs["spot"].rollout_s / runs["rose"].rollout_s,
                note=f"{mean_of(steps, 'rollout')} of a run",
            )
        )
    return rows


EXPERIMENTS = (
    Experiment("rose-fig7", "Throughput end to end", "ROSE Fig. 7, §6.1", fig7),
    Experiment("rose-fig8", "Elastic baselines", "ROSE Fig. 8, §6.1", fig8),
)
