"""The table of a recorded run in other modes, with other bounds and numbers of engines,
from its own trajectories and measured times (`sim/measured`).

There are at most as many engines as the run had: what more of them would take on shared
cores is not known from its times.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollweave.core.policy.modes import preset
from rollweave.record.report.data import read_run as read_data
from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError
from rollweave.sim.advise import pacings_of
from rollweave.sim.candidates import Candidate, EngineGroup, Pacing, Split
from rollweave.sim.hosts import NO_POOL
from rollweave.sim.measured import MeasuredEngine, MeasuredTrainer, read_timings
from rollweave.sim.trial import Length, Trial, ahead
from rollweave.sim.workload import Workload, read_run
from rollweave.sim.world import Costs

LENGTH = Length(warm=1, steps=6)
"""Steps of a trial."""


class Reruns:
    """The table of a run, finished or running, whose directory is `path`: as it was,
    and in each other mode, with each bound and with 1, 2, 4, … engines, at most as many
    as there were.

    `step_s` is the mean seconds of its steps after those with which it began; None if
    it has no others. Raises ConfigError for a run that cannot be predicted from.
    """

    rounds: Sequence[Length] = (LENGTH,)
    seeds = 1
    parts: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        run = RunDir(path)
        run.must_fit()
        config = self.config = run.configuration()
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
        self.everything: Sequence[Candidate] = self._candidates()

    @property
    def itself(self) -> Candidate:
        """The recorded configuration as a candidate."""
        rollout = self.config.rollout
        bounded = rollout.mode in (ModeName.BOUNDED, ModeName.PARTIAL)
        window = preset(rollout.mode, rollout.alpha).window or 0
        pacing = Pacing(mode=rollout.mode, alpha=window if bounded else 0)
        return self._candidate(pacing, self.config.engines[0].count)

    def screened(self) -> list[Candidate]:
        return list(self.everything)

    def trial(self, one: Candidate, length: Length, *, seed: int = 0, faster: str = "") -> Trial:
        config = self.rearranged(one)
        return Trial(config=config, length=length, faster=faster, costs=self.costs)

    def _candidates(self) -> list[Candidate]:
        count = self.config.engines[0].count
        counts = {count, *(1 << power for power in range(count.bit_length()))}
        chosen = {
            self._candidate(pacing, number)
            for pacing in pacings_of(self.config)
            for number in counts
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
        settings = {"mode": one.pacing.mode, "alpha": one.pacing.alpha or None}
        settings |= {"spare_groups": 0} if one.pacing.mode is ModeName.DECOUPLED else {}
        update = {
            "rollout": base.rollout.model_copy(update=settings),
            "engines": (base.engines[0].model_copy(update={"count": group.count, "address": ()}),),
            "eval": EvalConfig(final_episodes=0),
            "cluster": None,
            "weights": WeightsConfig(),
            "sim": SimConfig(model="qwen3-8b"),  # of no effect: all costs are given
        }
        made = base.model_copy(update=update)
        return validated(RunConfig, made.model_dump(), "the candidate")
