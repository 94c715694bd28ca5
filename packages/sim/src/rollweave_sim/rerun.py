"""The table of a recorded run in other modes, with other bounds and numbers of engines,
from its own trajectories and its measured times: the turns of its engines and the times
of its trainer, read from its journal, as costs for a simulation.

There are at most as many engines as the run had: what more of them would take on shared
cores is not known from its times. Times are the controller's: from the event on which
it issued a command to the event that answers it, including the wait for a busy
controller. Journals of both worlds are supported, and must be complete: not compacted
by a checkpoint.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rollweave.core.policy.modes import preset
from rollweave.core.policy.turn_times import KEPT_OF_DOMAINS, TurnTime, TurnTimes, Worked, fit
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.record.report.data import read_run as read_data
from rollweave.record.rundir import RunDir
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
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
from rollweave_sim.trial import Length, Trial, ahead
from rollweave_sim.workload import Workload, read_run
from rollweave_sim.world import Costs


class Timings(msgspec.Struct, kw_only=True):
    """Seconds, in the order of the run. `trained` holds tokens and seconds of every
    (mini-)batch, `turns` are the newest turns of each batch size, and `worked` what all
    of them took.
    """

    trained: list[tuple[int, float]] = []
    published: list[float] = []
    loaded: list[float] = []
    swapped: list[float] = []
    saved: list[float] = []
    copied: list[float] = []
    turns: TurnTimes = msgspec.field(default_factory=TurnTimes)
    worked: Worked = msgspec.field(default_factory=Worked)


def read_timings(journal: Path, config: RunConfig) -> Timings:
    """Read the journal of a run of `config`.

    Raises ConfigError for a compacted one, CorruptJournalError.
    """
    replay, reader = Replay(journal, config, rules=rules_of(config)), _Reader()
    replay.observe(reader)
    return reader.timings


class _Engine:
    """The turns of an engine, and their integrals over time: seconds of turns, and of
    the tokens of their contexts. It serves since `since`.
    """

    def __init__(self) -> None:
        self.at = self.since = self.turn_s = self.context_s = 0.0
        self.prompt_tokens = 0
        # turn → context, start, and the integrals then
        self.turns: dict[TrajectoryId, tuple[int, float, float, float, int]] = {}

    def charge(self, now: float) -> None:
        """Add the time since the last call. Call before turns change."""
        self.turn_s += (now - self.at) * len(self.turns)
        self.context_s += (now - self.at) * sum(turn[0] for turn in self.turns.values())
        self.at = now


class _Reader:
    """Keeps the time of each request until its answer arrives."""

    def __init__(self) -> None:
        self.timings = Timings()
        self._engines: dict[EngineId, _Engine] = {}
        self._contexts: dict[TrajectoryId, int] = {}
        self._engine_of: dict[TrajectoryId, EngineId] = {}
        # whose open turns' prompts another engine has computed, or tokens sampled
        self._split: set[TrajectoryId] = set()
        self._moved: set[TrajectoryId] = set()
        self._lengths: dict[TrajectoryId, int] = {}
        self._training: tuple[float, int] = (0.0, 0)
        self._publishing = self._saving = 0.0
        self._loading: dict[EngineId, float] = {}
        self._staging: dict[EngineId, float] = {}
        self._staged: dict[EngineId, int] = {}

    def on_command(self, now: float, command: c.Command) -> None:
        match command:
            case c.TrainStep():
                members = [member for group in command.groups for member in group.trajectory_ids]
                self._training = now, sum(self._lengths[member] for member in members)
            case c.PublishWeights():
                self._publishing = now
            case c.SaveCheckpoint():
                self._saving = now
            case c.StageWeights():
                self._staging[command.engine_id] = now
            case c.LoadWeights():
                self._loading[command.engine_id] = now
            case c.StartTurn():
                self._start(now, command)
            case c.AbortTurn() | c.CancelTrajectory():
                self._leave(now, command.trajectory_id)
            case c.ResumeEngine():
                self._engine(command.engine_id).since = now
            case _:
                pass

    def _engine(self, name: EngineId) -> _Engine:
        return self._engines.setdefault(name, _Engine())

    def _start(self, now: float, command: c.StartTurn) -> None:
        """Record the engine that samples the turn, and whether another one has begun
        to: the turn's tokens are not all of this one then.
        """
        name = command.trajectory_id
        if command.prefill:
            self._split.add(name)
            return
        self._leave(now, name)
        engine = self._engine(command.engine_id)
        engine.charge(now)
        context = self._contexts.get(name, 0)
        engine.turns[name] = context, now, engine.turn_s, engine.context_s, engine.prompt_tokens
        self._engine_of[name] = command.engine_id
        if command.dispatch != (name in self._split):
            self._moved.add(name)

    def _leave(self, now: float, name: TrajectoryId) -> None:
        """Forget a turn that did not end by itself."""
        engine_id = self._engine_of.pop(name, None)
        if engine_id is not None:
            engine = self._engine(engine_id)
            engine.charge(now)
            engine.turns.pop(name, None)

    def _learn(self, now: float, event: e.TurnDone) -> None:
        """Keep the turn's time, as `mechanisms/costs/rates.learn_turn` does. Left out
        are turns that have begun elsewhere, and those during which the engine loaded
        weights.
        """
        engine_id = self._engine_of.get(event.trajectory_id)
        if engine_id is None or event.replayed:
            return
        engine = self._engine(engine_id)
        engine.charge(now)
        began = engine.turns.get(event.trajectory_id)
        self._leave(now, event.trajectory_id)
        if began is None:
            return  # it began before the engine was lost
        context, since, turn_s, context_s, prompts = began
        computed = max(0, context - event.cached_tokens)
        engine.prompt_tokens += computed
        elapsed, turn_s = now - since, engine.turn_s - turn_s
        moved = event.trajectory_id in self._moved
        if moved or since < engine.since or min(elapsed - event.queue_s, turn_s) <= 0:
            return
        time = TurnTime(
            seconds=elapsed - event.queue_s,
            output_tokens=max(1, event.output_tokens),
            prompt_tokens=engine.prompt_tokens - prompts,
            batch=max(1.0, turn_s / elapsed),
            # contexts grow during turns, which are half done on average
            context=(engine.context_s - context_s) / turn_s + event.output_tokens / 2,
        )
        self.timings.turns.add(time, most=KEPT_OF_DOMAINS)
        self.timings.worked.add(time, prompt=computed, context=time.context)

    def on_event(self, now: float, event: e.Event) -> None:
        timings = self.timings
        match event:
            case e.TurnRequested():
                self._contexts[event.trajectory_id] = event.context_tokens
                self._split.discard(event.trajectory_id)
                self._moved.discard(event.trajectory_id)
            case e.TurnDone():
                self._learn(now, event)
            case e.TurnFailed() | e.TurnWithdrawn():
                self._leave(now, event.trajectory_id)
            case e.EngineLost():
                self._engines.pop(event.engine_id, None)
            case e.WorldLost():  # what was under way ended with the controller
                for started in (self._engines, self._engine_of, self._staged):
                    started.clear()
            case e.TrajectoryEnded():
                self._lengths[event.trajectory_id] = event.tokens
            case e.StepTrained():
                since, tokens = self._training
                timings.trained.append((tokens, now - since))
            case e.WeightsPublished():
                timings.published.append(now - self._publishing)
            case e.WeightsStaged():
                timings.loaded.append(now - self._staging[event.engine_id])
                self._staged[event.engine_id] = event.publication_id
            case e.WeightsLoaded():
                staged = self._staged.get(event.engine_id) == event.publication_id
                seconds = timings.swapped if staged else timings.loaded
                seconds.append(now - self._loading[event.engine_id])
            case e.CheckpointCopied():
                timings.copied.append(now - self._saving)
            case e.CheckpointSaved():
                timings.saved.append(now - self._saving)
            case _:
                pass


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
        self.prices = timings.worked.scaled(fit(timings.turns.turns)).prices
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
        if config.trainer.elastic:
            rule = "the run must have a fixed number of trainer.ranks"
            raise ConfigError(f"{path}: {rule}, got {config.trainer.ranks}")
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
