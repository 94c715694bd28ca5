"""The table of a recorded run in other modes, with other bounds and numbers of engines,
from its own trajectories and measured times (`sim/measured`).

Engines, trainer and controller of a run on a CPU share its cores: what one takes then
depends on how much the others compute. The measured times include what they lost in the
recorded run, so only the change counts (`sim/trial.Crowd`).
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollweave.record.report.data import read_run as read_data
from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.tasks import BufferConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.sim.advise import pacings_of
from rollweave.sim.candidates import Candidate, EngineGroup, Pacing, Split
from rollweave.sim.hosts import NO_POOL
from rollweave.sim.measured import MeasuredEngine, MeasuredTrainer, read_timings
from rollweave.sim.trial import AS_IT_IS, Crowd, Factors, Length, Trial, ahead, try_out
from rollweave.sim.workload import Workload, read_run
from rollweave.sim.world import Costs

LENGTH = Length(warm=1, steps=6)
"""Steps of a trial."""


class Reruns:
    """The table of a run, finished or running, whose directory is `path`: as it was,
    and in each other mode, with each bound and number of engines; on a CPU up to one
    for each core, otherwise at most as many as there were.

    `cores` are those that its processes share, None if they share none. `step_s` is the
    mean seconds of its steps after those with which it began; None if it has no others.
    Raises ConfigError for a run that cannot be predicted from.
    """

    rounds: Sequence[Length] = (LENGTH,)
    seeds = 1
    parts: Sequence[str] = ()

    def __init__(self, path: Path, *, cores: int | None) -> None:
        run = RunDir(path)
        run.must_fit()
        self.config, self.cores = run.configuration(), cores
        config = self.config
        if len(config.engines) > 1 or config.pools or config.allocation is not None:
            raise ConfigError(
                f"{path}: the run must have one [engines], and neither [pools] nor [allocation]"
            )
        if config.trainer.colocated:
            raise ConfigError(f"{path}: the run must have trainer.colocated false, got true")
        timings = read_timings(run.journal, config)
        (engines,) = config.engines
        engine = MeasuredEngine(timings, kv_tokens=engines.kv_tokens)
        self.costs: Costs = ({(NO_POOL, engines.degree): engine}, MeasuredTrainer(timings))
        self.work: Mapping[str, Workload] = {
            task.name: read_run(path, domain=task.name) for task in config.tasks
        }
        settled = [float(line["wall_s"]) for line in read_data(run).steps[1 + ahead(config) :]]
        self.step_s = statistics.fmean(settled) if settled else None
        self._shares: tuple[float, float] | None = None
        self.everything: Sequence[Candidate] = self._candidates()

    @property
    def itself(self) -> Candidate:
        """The recorded configuration as a candidate."""
        rollout = self.config.rollout
        bounded = rollout.mode in (ModeName.BOUNDED, ModeName.PARTIAL)
        pacing = Pacing(mode=rollout.mode, alpha=rollout.alpha if bounded else 0)
        return self._candidate(pacing, self.config.engines[0].count)

    def screened(self) -> list[Candidate]:
        return list(self.everything)

    def trial(
        self, one: Candidate, length: Length, *, seed: int = 0, factors: Factors = AS_IT_IS
    ) -> Trial:
        crowd = None
        if self.cores is not None and one != self.itself:
            engine, trainer = self.shares()
            crowd = Crowd(
                cores=self.cores,
                engines_before=self.config.engines[0].count,
                engine=engine,
                trainer=trainer,
                engines=one.split.engines[0].count,
            )
        return Trial(
            config=self.rearranged(one),
            length=length,
            factors=factors,
            costs=self.costs,
            crowd=crowd,
        )

    def shares(self) -> tuple[float, float]:
        """Return the shares of time in which an engine and the trainer of the recorded
        run computed. Raises ConfigError where it cannot be simulated.
        """
        if self._shares is None:
            config = self.rearranged(self.itself)
            try:
                own, computing = try_out(config, LENGTH, work=self.work, costs=self.costs)
            except RollweaveError as error:
                raise ConfigError(f"the run itself cannot be simulated: {error}") from error
            self._shares = computing, own.trainer.get("busy", 0.0)
        return self._shares

    def _candidates(self) -> list[Candidate]:
        count = self.config.engines[0].count
        most = max(count, self.cores or 1)
        counts = sorted({count, *(1 << power for power in range(most.bit_length()))})
        chosen = {
            self._candidate(pacing, number)
            for pacing in pacings_of(self.config)
            for number in counts
            if number <= most
        }
        return sorted({self.itself, *chosen})

    def _candidate(self, pacing: Pacing, count: int) -> Candidate:
        (engines,), ranks = self.config.engines, self.config.trainer.ranks
        group = EngineGroup(pool=NO_POOL, count=count, degree=engines.degree)
        return Candidate(split=Split(pool=NO_POOL, trainer=ranks, engines=(group,)), pacing=pacing)

    def rearranged(self, one: Candidate) -> RunConfig:
        """Return the configuration of a candidate. Raises ConfigError where the run's
        other settings do not allow it.
        """
        base, (group,) = self.config, one.split.engines
        decoupled = one.pacing.mode is ModeName.DECOUPLED
        mechanisms = {"early_updates", *([] if decoupled else ["repack"])}
        if one.pacing.mode is base.rollout.mode:
            mechanisms = set()
        left = tuple(each for each in base.ablation.without if each not in mechanisms)
        settings = {"mode": one.pacing.mode, "alpha": max(1, one.pacing.alpha)}
        settings |= {"spare_groups": 0} if decoupled else {"engine_batch": None}
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
