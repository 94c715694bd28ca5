"""Predictions for a recorded run in other modes, with other bounds and numbers of
engines, from its own trajectories and measured times.

Engines, trainer and controller of a run on a CPU share its cores: what one takes then
depends on how much the others compute (`sim/sharing`). The measured times include what
they lost in the recorded run, so only the change counts: the recorded configuration is
simulated first, with these times as they are.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollweave.core.policy.ratio import Candidate, EngineGroup, Pacing, Prediction, Split
from rollweave.record.report.data import read_run as read_data
from rollweave.record.rundir import RunDir
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.tasks import BufferConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError
from rollweave.sim.advise import pacings_of
from rollweave.sim.hosts import NO_POOL
from rollweave.sim.measured import MeasuredEngine, MeasuredTrainer, read_timings
from rollweave.sim.scaled import Factors, scaled, scaled_work
from rollweave.sim.sharing import slowdown
from rollweave.sim.trial import Length, ahead, try_out
from rollweave.sim.workload import Workload, read_run
from rollweave.sim.world import Costs

LENGTH = Length(warm=1, steps=6)
"""Steps of a trial."""

ROUNDS = 3
"""Number of times that the shares of computing and the slowdowns follow from each
other; afterwards they hardly change.
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded run: what it measured, and `step_s`, the mean seconds of its steps
    after those with which it began; None if it has no others. `cores` are those that
    its processes share, None if they share none.
    """

    config: RunConfig
    costs: Costs
    work: Mapping[str, Workload]
    step_s: float | None
    cores: int | None


class Shares(Struct, frozen=True, kw_only=True):
    """Shares of time in which an engine and the trainer compute."""

    engine: float
    trainer: float


def read_recording(path: Path, *, cores: int | None) -> Recording:
    """Read the directory of a run, finished or running, whose processes share so many
    cores (None if none). Raises ConfigError for one that cannot be predicted from.
    """
    run = RunDir(path)
    run.must_fit()
    config = run.configuration()
    if len(config.engines) > 1 or config.pools or config.allocation is not None:
        raise ConfigError(
            f"{path}: the run must have one [engines], and neither [pools] nor [allocation]"
        )
    if config.trainer.colocated:
        raise ConfigError(f"{path}: the run must have trainer.colocated false, got true")
    timings = read_timings(run.journal, config)
    (engines,) = config.engines
    engine = MeasuredEngine(timings, kv_tokens=engines.kv_tokens)
    settled = [float(line["wall_s"]) for line in read_data(run).steps[1 + ahead(config) :]]
    return Recording(
        config=config,
        costs=({(NO_POOL, engines.degree): engine}, MeasuredTrainer(timings)),
        work={task.name: read_run(path, domain=task.name) for task in config.tasks},
        step_s=statistics.fmean(settled) if settled else None,
        cores=cores,
    )


def itself(recording: Recording) -> Candidate:
    """Return the recorded configuration as a candidate."""
    rollout = recording.config.rollout
    bounded = rollout.mode in (ModeName.BOUNDED, ModeName.PARTIAL)
    pacing = Pacing(mode=rollout.mode, alpha=rollout.alpha if bounded else 0)
    return _candidate(recording, pacing, recording.config.engines[0].count)


def candidates(recording: Recording) -> list[Candidate]:
    """Return the recorded configuration, and it in each other mode, with each bound and
    number of engines: on a CPU up to one for each core, otherwise at most as many as
    there were.
    """
    count = recording.config.engines[0].count
    most = max(count, recording.cores or 1)
    counts = sorted({count, *(1 << power for power in range(most.bit_length()))})
    chosen = {
        _candidate(recording, pacing, number)
        for pacing in pacings_of(recording.config)
        for number in counts
        if number <= most
    }
    return sorted({itself(recording), *chosen})


def _candidate(recording: Recording, pacing: Pacing, count: int) -> Candidate:
    (engines,), ranks = recording.config.engines, recording.config.trainer.ranks
    group = EngineGroup(pool=NO_POOL, count=count, degree=engines.degree)
    return Candidate(split=Split(pool=NO_POOL, trainer=ranks, engines=(group,)), pacing=pacing)


def rearranged(recording: Recording, candidate: Candidate) -> RunConfig:
    """Return the configuration of a candidate. Raises ConfigError where the run's other
    settings do not allow it.
    """
    base, (group,) = recording.config, candidate.split.engines
    decoupled = candidate.pacing.mode is ModeName.DECOUPLED
    mechanisms = {"early_updates", *([] if decoupled else ["repack"])}
    if candidate.pacing.mode is base.rollout.mode:
        mechanisms = set()
    left = tuple(one for one in base.ablation.without if one not in mechanisms)
    settings = {"mode": candidate.pacing.mode, "alpha": max(1, candidate.pacing.alpha)}
    if decoupled:
        settings["spare_groups"] = 0
    else:
        settings["engine_batch"] = None
    update = {
        "rollout": base.rollout.model_copy(update=settings),
        "engines": (base.engines[0].model_copy(update={"count": group.count, "address": ()}),),
        "buffer": base.buffer if decoupled else BufferConfig(),
        "ablation": base.ablation.model_copy(update={"without": left}),
        "eval": EvalConfig(final_episodes=0),
        "cluster": None,
        "weights": WeightsConfig(),
        "sim": SimConfig(model="qwen3-8b"),  # of no effect: all costs are given
    }
    made = base.model_copy(update=update)
    return validated(RunConfig, made.model_dump(), "the candidate")


def recorded_shares(recording: Recording) -> Shares:
    """Return the shares of the recorded configuration. Raises RollweaveError where it
    cannot be simulated.
    """
    return _try(recording, itself(recording), Factors())[1]


def predict(recording: Recording, candidate: Candidate, before: Shares | None = None) -> Prediction:
    """Return the figures of a candidate; `before` are the `recorded_shares`, if they
    are known already. Raises RollweaveError where it cannot be simulated.
    """
    if recording.cores is None or candidate == itself(recording):
        return _try(recording, candidate, Factors())[0]
    (group,) = candidate.split.engines
    before = before or recorded_shares(recording)
    count = recording.config.engines[0].count
    prediction, now = _try(recording, candidate, Factors())
    for _ in range(ROUNDS):
        prediction, now = _try(
            recording,
            candidate,
            change(before, count, now, group.count, cores=recording.cores),
        )
    return prediction


def change(
    before: Shares, engines_before: int, now: Shares, engines: int, *, cores: int
) -> Factors:
    """Return how many times as long the parts of a run take beside so many engines with
    these shares, in place of those before.
    """

    def beside(shares: Shares, count: int) -> tuple[float, float, float]:
        fleet = [shares.engine] * count
        return (
            slowdown([*fleet[1:], shares.trainer], cores),
            slowdown(fleet, cores),
            slowdown([*fleet, shares.trainer], cores),
        )

    engine, trainer, controller = (
        new / old
        for new, old in zip(beside(now, engines), beside(before, engines_before), strict=True)
    )
    return Factors(engines=engine, trainer=trainer, environment=controller)


def _try(recording: Recording, candidate: Candidate, factors: Factors) -> tuple[Prediction, Shares]:
    prediction, computing = try_out(
        rearranged(recording, candidate),
        LENGTH,
        work=scaled_work(recording.work, factors),
        costs=scaled(recording.costs, factors),
    )
    return prediction, Shares(engine=computing, trainer=prediction.trainer.get("busy", 0.0))
