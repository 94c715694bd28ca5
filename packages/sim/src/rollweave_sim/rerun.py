"""The table of a recorded run in other modes, with other bounds and numbers of engines,
from its own trajectories and its measured times: the turns of its engines and the times
of its trainer, read from its journal, as costs for a simulation.

There are at most as many engines as the run had: what more of them would take is not
known from its times (`timings`). Embedded engines on CPUs share the cores of this
machine with the trainer, in the simulation as in the run.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollweave.core.policy.modes import preset
from rollweave.core.policy.turn_times import fit
from rollweave.io.machine import cores
from rollweave.record.report.data import read_run as read_data
from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import validated
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import SimConfig
from rollweave.schema.config.training import EvalConfig, WeightsConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.advise import pacings_of
from rollweave_sim.candidates import Candidate, EngineGroup, Pacing, Split
from rollweave_sim.cost import sum_of_line
from rollweave_sim.hosts import NO_POOL
from rollweave_sim.timings import Timings, read_timings
from rollweave_sim.trial import Length, Trial, ahead
from rollweave_sim.workload import Workload, read_run
from rollweave_sim.world import Costs


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return constant and slope, neither negative, that minimize the squared errors."""
    if not points:
        raise ConfigError("a recorded trainer must have trained a step, but has trained none")
    mean_x, mean_y = statistics.fmean(x for x, _ in points), statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    constant = mean_y - slope * mean_x
    if slope < 0:
        return mean_y, 0.0
    if constant < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return constant, slope


class MeasuredTrainer:
    """The trainer of a recorded run (see `TrainerCosts`): a line through its steps,
    medians of all other times (0 without samples), for any number of engines.
    """

    def __init__(self, timings: Timings) -> None:
        """Raises ConfigError where the run has trained no step."""
        self.constant, self.per_token = fit_line(timings.trained)
        self._publish_s, self._load_s, self._swap_s, self._save_s, self._copy_s = (
            statistics.median(seconds) if seconds else 0.0
            for seconds in (
                timings.published,
                timings.loaded,
                timings.swapped,
                timings.saved,
                timings.copied,
            )
        )

    def step_s(self, *, tokens: int, context: int) -> float:
        """The price of a token includes attention, since steps of one run have similar
        lengths.
        """
        return self.constant + self.per_token * tokens

    def forward_s(self, *, tokens: int, context: int) -> float:
        """A forward pass was not recorded separately: a third of a step, as the
        backward pass has twice its FLOPs. The update is counted in, which
        overestimates.
        """
        return self.step_s(tokens=tokens, context=context) / 3

    def publish_s(self) -> float:
        return self._publish_s

    def load_s(self, *, engines: int, tp: int) -> float:
        return self._load_s

    beside_s = load_s

    def hop_s(self, *, share: float) -> float:
        """Relays were not recorded separately: a hop takes as long as a full load."""
        return share * self._load_s

    def delta_s(self) -> float:
        """Finding and applying changes is part of a recorded load."""
        return 0.0

    def lag_s(self) -> float:
        return 0.0

    def swap_s(self, *, engines: int, tp: int) -> float:
        """The time between the suspension and the swap of staged weights."""
        return self._swap_s

    def copy_s(self) -> float:
        return self._copy_s

    def checkpoint_s(self) -> float:
        return max(0.0, self._save_s - self._copy_s)

    def saved_s(self, *, engines: int) -> float:
        """The time of writing: reading was seldom recorded."""
        return engines * self._save_s


class MeasuredEngine:
    """An engine whose steps cost what the turns of a recorded run took, waits for the
    controller and for cores included.
    """

    def __init__(self, timings: Timings, *, kv_tokens: int) -> None:
        """Raises ConfigError where the run has finished no turn."""
        if not timings.turns.count:
            raise ConfigError("a recorded engine must have finished a turn, but has finished none")
        turns = timings.turns.turns
        # Turns of one batch have one error, so the prior weighs as much as a batch.
        best = fit(turns, weight=statistics.fmean(turn.batch for turn in turns))
        self.prices = timings.worked.scaled(best).prices
        self.kv_tokens = kv_tokens

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        """See `EngineCosts`. The price of a prompt token includes attention."""
        del prefill_context
        prices = self.prices
        return (
            prices.fixed_s
            + prefill_tokens * prices.prompt_s
            + decode * prices.sequence_s
            + decode_context * prices.context_s
        )

    def move_s(self, tokens: int) -> float:
        """See `EngineCosts`. Assumed is the time of computing the tokens again."""
        return tokens * self.prices.prompt_s

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        """See `EngineCosts`."""
        first = self.prices.step_s(decode, decode_context / decode if decode else 0.0)
        return sum_of_line((first, decode * self.prices.context_s), 0, steps)


LENGTH = Length(warm=1, steps=12)
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
        if config.trainer.elastic:
            rule = "the run must have a fixed number of trainer.ranks"
            raise ConfigError(f"{path}: {rule}, got {config.trainer.ranks}")
        timings = read_timings(run.journal, config, cores=cores(), warm=1 + ahead(config))
        self.cores = timings.cores
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
        return Trial(
            config=config, length=length, faster=faster, costs=self.costs, cores=self.cores
        )

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
        (engines,), ranks = self.config.engines, self.config.trainer.first_ranks
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
