"""The simulated world: a virtual clock and a heap of scheduled actions drive the core,
whose commands schedule further actions.

Invariants: the core is the production core, unchanged; the same configuration and seed
give the same events at the same times, so that two journals are equal to the byte. No
wall clock, no threads, no torch.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rollweave.core.continuation import continuable
from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.members import engines_to_start, ranks_to_start
from rollweave.core.mechanisms.relays.state import relay_id
from rollweave.core.state import Stage, State
from rollweave.envs.tasks import rules_of
from rollweave.record.trace import Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile, SimConfig
from rollweave.schema.errors import ConfigError, FieldError, RollweaveError
from rollweave.train.lengths import check_installed
from rollweave_sim.clock import Clock
from rollweave_sim.cores import SharedCores
from rollweave_sim.cost import EngineCost, EngineCosts, TrainerCost, TrainerCosts
from rollweave_sim.effects import Effects, SimObserver, SimPredictor
from rollweave_sim.fleet import SimFleet
from rollweave_sim.hardware import ModelShape, gpu, link, model
from rollweave_sim.hosts import NO_POOL, SimHosts, degrees_of, gpu_of
from rollweave_sim.lending import Lending
from rollweave_sim.noise import Noise
from rollweave_sim.profile import ProfileCost
from rollweave_sim.relays import SimRelays
from rollweave_sim.rollouts import Rollouts
from rollweave_sim.serving import lending_of
from rollweave_sim.trainer import SimTrainer
from rollweave_sim.training import passes_of
from rollweave_sim.workers import Judges, SimWorkers
from rollweave_sim.workload import Workload, workload


class StuckError(RollweaveError):
    """The run is not over and no action is scheduled: the core would wait forever.

    This is a bug.
    """


class Journal(Protocol):
    """A receiver of every event: a run's own journal, or a measuring client."""

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        """Record an event and the core's commands, before they are executed."""


PROFILE = ".json"
"""End of the name of a file with measured step times, as `sim.gpu`."""

TRAINER_GPU = "h800"
"""GPU of the trainer where that of the engines trains nothing."""

ONLY_SERVE = ("h20",)
"""GPUs on which engines run, but no trainer (RollArt §7.1)."""

Costs = tuple[Mapping[tuple[str, int], EngineCosts], TrainerCosts]
"""The cost models of engines, by the pool of their host ("" in a run without pools) and
their degree, and of the trainer.
"""


class World:
    """One simulated run: `run()` to the end, or `step()` by event.

    `core` and the parts may be inspected in between. Raises ConfigError for impossible
    hardware, models, workloads or placements.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        observer: SimObserver,
        journal: Journal | None = None,
        trace: Trace | None = None,
        costs: Costs | None = None,
        work: dict[str, Workload] | None = None,
        rewards: Judges | None = None,
        serving: ServingFile | None = None,
        keep_partial_turns: bool = False,
        cores: int = 0,
    ) -> None:
        """`rewards` computes them, all at once if None; `serving` are the engines that
        the run may borrow. `keep_partial_turns` is that of `rollout/pipeline.py`.
        Engines and trainer share `cores`, or each has its own if there are 0.
        """
        check_installed(config)
        self.config, self._journal = config, journal
        self.core = Core(config, rules=rules_of(config))
        self.clock, self.inbox, self.events = Clock(), deque[e.Event](), 0
        self.over: str | None = None
        engine_costs, trainer_cost = costs if costs is not None else costs_of(config)
        self.hosts = SimHosts(config)
        self.relays = SimRelays(
            clock=self.clock, post=self.post, cost=trainer_cost, hosts=self.hosts, trace=trace
        )
        self.lending = self._lenders(serving)
        self.fleet = SimFleet(
            clock=self.clock,
            post=self.post,
            costs=engine_costs,
            pool_of=self.hosts.pool_of,
            trainer=trainer_cost,
            relays=self.relays,
            settings=config.engines.__getitem__,
            prefix_cache="prefix_cache" not in config.ablation.without,
            trace=trace,
            noise=lambda name: Noise(f"{config.run.seed}/{name}"),
            lending=self.lending,
            context=config.profiled_context,
        )
        self.rollouts = Rollouts(
            clock=self.clock,
            post=self.post,
            fleet=self.fleet,
            work=work if work is not None else workloads_of(config),
            seed=config.run.seed,
            trace=trace,
            judges=rewards,
            keep_partial_turns=keep_partial_turns
            or (self.lending is not None or config.rollout.mode is ModeName.DECOUPLED),
        )
        self.trainer = self._make_trainer(trainer_cost, trace)
        self.cores = SharedCores(cores=cores, fleet=self.fleet, trainer=self.trainer)
        self.workers = self._make_workers(trace)
        self.fleet.checkpoints = lambda: self.trainer.checkpoints
        self.predictor = self._make_predictor()
        self.effects = Effects(
            clock=self.clock,
            post=self.post,
            rollouts=self.rollouts,
            fleet=self.fleet,
            trainer=self.trainer,
            relays=self.relays,
            workers=self.workers,
            predictor=self.predictor,
            limits={task.name: task.limits for task in config.tasks}.__getitem__,
            observer=observer,
            finish=self._finish,
        )
        self.slots = self._place(self.core.state)
        # called after every event: tests and fault searches check the core here
        self.each_event: Callable[[], None] | None = None

    def _place(self, state: State) -> tuple[e.EngineSlot, ...]:
        """Return the engines of a new world, and place the trainer's ranks."""
        engines = engines_to_start(self.config, state)
        return self.hosts.place(engines, ranks=ranks_to_start(self.config, state))

    def post(self, event: e.Event) -> None:
        self.inbox.append(event)

    def start(self) -> None:
        self.post(
            e.RunStarted(
                engines=self.slots,
                hosts=self.hosts.first,
                ranks=self.hosts.ranks,
                workers=self._start_workers(),
                relays=self.hosts.relays,
            )
        )
        self.fleet.start(self.slots)
        self.relays.start()
        self.trainer.start()
        if self.lending is not None:
            self.lending.start()

    def _lenders(self, serving: ServingFile | None) -> Lending | None:
        """Return the engines that lend themselves. Raises ConfigError."""
        if serving is None:
            if self.config.loans is not None:
                rule = "be left out without serving engines (`rollweave simulate --serving FILE`)"
                raise FieldError("loans", rule, f"engines {self.config.loans.engines}")
            return None
        make = lending_of(serving.sharing)
        return make(self.config, serving, clock=self.clock, post=self._report)

    def _report(self, event: e.Event) -> None:
        self.post(event)  # which a search for faults replaces

    def revive(self, core: Core, journal: Journal) -> None:
        """Restart the world after the loss of its controller: only the store and the
        turn log survive (docs/decisions/0007).
        """
        self.core, self._journal = core, journal
        known = [
            trajectory.id
            for trajectory in core.state.trajectories.values()
            if trajectory.stage is Stage.SCORED
        ]
        store = self.rollouts.scored
        missing = [trajectory_id for trajectory_id in known if trajectory_id not in store]
        self.rollouts.evict(
            c.Evict(trajectory_ids=tuple(store.keys() - set(known)), reason="world_lost")
        )
        self.inbox.clear()
        self.rollouts.forget_all()
        self.fleet.drop_all()
        self.relays.drop_all()
        if self.workers is not None:
            self.workers.drop_all()
        self.trainer.drop()
        self.predictor.drop()
        self.hosts.begin()
        self.slots = self._place(core.state)
        self.fleet.start(self.slots)
        self.relays.start()
        self.post(
            e.WorldLost(
                engines=self.slots,
                hosts=self.hosts.first,
                ranks=self.hosts.ranks,
                workers=self._start_workers(),
                missing=tuple(missing),
                recorded=self.rollouts.recorded(continuable(core.state)),
                relays=self.hosts.relays,
            )
        )
        if self.lending is not None:  # its engines came back, and may be borrowed again
            self.lending.report()

    def pools_busy(self) -> dict[str, float]:
        """Return the share of the time in which the GPUs of the engines of each pool,
        as the run began, have computed.
        """
        busy = self.fleet.busy_by_pool()
        gpus = Counter[str]()
        for slot in self.slots:
            gpus[self.hosts.pool_of(slot.host)] += slot.degree
        seconds = max(self.clock.now, 1e-9)
        return {pool: busy.get(pool, 0.0) / (count * seconds) for pool, count in gpus.items()}

    def lose_host(self, number: int, error: str) -> str | None:
        """Kill all processes of a host. Returns its pool, or None if it is not up."""
        pool = self.hosts.lose(number)
        if pool is not None:
            self.fleet.lose_host(number)
            self.relays.silence(relay_id(number))
            if self.workers is not None:
                self.workers.lose_host(number, error)
            if any(rank.host == number for rank in self.core.state.hosts.ranks):
                self.trainer.drop()
            self.post(e.HostLost(host=number, error=error))
        return pool

    def _make_trainer(self, cost: TrainerCosts, trace: Trace | None) -> SimTrainer:
        return SimTrainer(
            clock=self.clock,
            post=self.post,
            cost=cost,
            scored=self.rollouts.scored,
            trace=trace,
            critic=self.config.has_critic,
            of_ranks=_of_ranks(self.config, cost),
        )

    def _make_predictor(self) -> SimPredictor:
        name = self.config.ablation.predictor
        return SimPredictor(clock=self.clock, post=self.post, name=name)

    def _make_workers(self, trace: Trace | None) -> SimWorkers | None:
        """Make the rollout workers; none if attempts run in the controller."""
        if not self.config.workers.elastic:
            return None
        return SimWorkers(
            clock=self.clock, post=self.post, on_gone=self.rollouts.lose_worker, trace=trace
        )

    def _start_workers(self) -> tuple[e.WorkerSlot, ...]:
        """Start the workers with which a world begins."""
        if self.workers is None:
            return ()
        slots = self.hosts.place_workers(self.slots)
        self.workers.start(slots)
        return slots

    def join_host(self, pool: str) -> None:
        """Let another host of this pool join."""
        self.post(e.HostJoined(host=self.hosts.add(pool)))

    def run(self) -> Core:
        """Run to the end. Raises StuckError."""
        self.start()
        while self.over is None:
            self.step()
        return self.core

    def step(self) -> None:
        """Handle the next event, or run the next action. Raises StuckError."""
        if self.inbox:
            self._handle(self.inbox.popleft())
            return
        self.cores.settle()
        self.fleet.settle()
        if not self.clock.step():
            raise StuckError(
                f"nothing is left to happen at {self.clock.now:.1f} s, and the run is not over"
            )

    def _handle(self, event: e.Event) -> None:
        commands = self.core.handle(self.clock.now, event)
        self.events += 1
        if self._journal is not None:
            self._journal.append(self.clock.now, event, commands)
        for command in commands:
            self.effects.execute(command)
        if self.each_event is not None:
            self.each_event()

    def _finish(self, error: str) -> None:
        self.over = error


def _of_ranks(config: RunConfig, cost: TrainerCosts) -> Callable[[int], TrainerCosts] | None:
    """Return the costs of a trainer by its number of ranks, if that changes."""
    return cost.of_ranks if config.trainer.elastic and isinstance(cost, TrainerCost) else None


def section(config: RunConfig) -> SimConfig:
    """Return the [sim] section. Raises ConfigError where there is none."""
    if config.sim is None:
        raise ConfigError(
            "sim must be given for a simulation ([sim] with at least `model`), got none"
        )
    return config.sim


def costs_of(config: RunConfig) -> Costs:
    """Return the costs of engines and trainer. Raises ConfigError."""
    sim = section(config)
    with _as_settings(model="sim.model"):
        shape = model(sim.model)
    engines: dict[tuple[str, int], EngineCosts] = {}
    for pool, degrees in degrees_of(config).items():
        engines |= {
            (pool, degree): cost
            for degree, cost in _engine_costs(config, pool, degrees, shape).items()
        }
    longest, room = (
        max(task.max_tokens for task in config.tasks),
        min(engine.kv_tokens for engine in engines.values()),
    )
    if longest > room:
        raise ConfigError(
            f"tasks.max_tokens must fit the KV cache of an engine ({room} tokens), got {longest}"
        )
    name, key = gpu_of(config, config.trainer.pool or NO_POOL)
    if name.endswith(PROFILE) or name.lower() in ONLY_SERVE:
        name = TRAINER_GPU
    with _as_settings(gpus="trainer.ranks", gpu=key, link="sim.link"):
        trainer = TrainerCost(
            gpu=gpu(name),
            model=shape,
            gpus=config.trainer.first_ranks,
            link=link(sim.link),
            passes=passes_of(config),
        )
    return engines, trainer


def _engine_costs(
    config: RunConfig, pool: str, degrees: Sequence[int], shape: ModelShape
) -> dict[int, EngineCosts]:
    """Return the costs of a pool's engines by degree. Raises ConfigError."""
    name, key = gpu_of(config, pool)
    if name.endswith(PROFILE):
        if len(set(degrees)) > 1:
            raise ConfigError(
                f"{key} must stand for engines of one degree, got degrees {sorted(set(degrees))}"
            )
        return {degrees[0]: ProfileCost.from_json(name)}
    with _as_settings(tp="engines.degree", gpu=key, model="sim.model"):
        return {degree: EngineCost(gpu=gpu(name), model=shape, tp=degree) for degree in degrees}


@contextmanager
def _as_settings(**keys: str) -> Iterator[None]:
    """Name the user's setting in an error about a parameter, by the name of the
    parameter.
    """
    try:
        yield
    except FieldError as error:
        raise error.of(keys.get(error.field, error.field)) from error.__cause__


def workloads_of(config: RunConfig) -> dict[str, Workload]:
    """Return the workloads by task domain. Raises ConfigError."""
    workloads = {}
    for index, task in enumerate(config.tasks):
        with _as_settings(workload=f"tasks.{index}.env"):
            workloads[task.name] = workload(task.env, domain=task.name)
    return workloads
