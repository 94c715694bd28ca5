"""Deterministic fault simulation: faults at seeded moments, after which the accounts
must still balance.

A seed fixes the scenario (mode, sizes, workload) and every fault. After each event the
core's invariants are checked, and `sim/trainer_oracle` checks the commands to the
trainer; at the end every started trajectory must be accounted for, and no component may
wait forever. Messages are delayed, duplicated, lost and, beyond the behavior of a
connection, overtaken by later ones of their sender.
"""

import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.members import next_id
from rollweave.core.state import Phase
from rollweave.record.journal import Replay, RunJournal
from rollweave.record.summary import AccountError, summarize
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave.schema.errors import DiskError
from rollweave_sim.scenarios import (
    FLEET_CHANGES,
    HOST_FAULTS,
    LENDER_FAULTS,
    MAX_FLEET,
    MAX_HOSTS,
    PROCESS_FAULTS,
    RELAY_FAULTS,
    STORM_S,
    WORKER_FAULTS,
    FaultyWorkload,
    rates,
    scenario,
    serving_of,
)
from rollweave_sim.trainer_oracle import TrainerOracle
from rollweave_sim.workload import Workload
from rollweave_sim.world import StuckError, World, workloads_of

MAX_EVENTS = 100_000
"""Events after which a run counts as endless: a scenario of ours has a hundredth of
that without faults.
"""

MAX_EVENTS_RATIO = 100
"""Maximum events of a run of the user's configuration, as a multiple of its events
without faults.
"""


OF_THE_CONTROLLER = (
    e.TimerFired,
    e.RunStarted,
    e.WorldLost,
    e.HostJoined,
    e.HostLost,
    e.WorkerJoined,
    e.WorkerLost,
)
"""Events of the controller itself, which no connection can lose or delay."""


class Report(Struct, frozen=True, kw_only=True):
    """The result of a seed.

    `violation` is empty where every check passed; `error` is the run's own, where it
    did not survive its faults.
    """

    seed: int
    mode: str
    violation: str
    error: str
    events: int
    faults: dict[str, int]


def search(
    seed: int,
    config: RunConfig | None = None,
    serving: ServingFile | None = None,
    *,
    make_core: Callable[[RunConfig], Core] = Core,
) -> Report:
    """Run the scenario of `seed`, or `config` beside the `serving` engines under the
    faults of `seed`, and report violations.

    `make_core` builds the core under test. Raises ConfigError and DiskError.
    """
    storm_s, max_events = STORM_S, MAX_EVENTS
    if config is None:
        config = scenario(seed)
        serving = serving_of(seed) if config.loans is not None else None
    else:
        quiet = World(config, observer=NullObserver(), serving=serving)
        quiet.run()
        storm_s, max_events = 3 * quiet.clock.now, max(MAX_EVENTS, MAX_EVENTS_RATIO * quiet.events)
    with tempfile.TemporaryDirectory(prefix="rollweave-faults-") as scratch:
        chaos = Chaos(
            config,
            serving,
            seed,
            Path(scratch) / "journal.bin",
            storm_s=storm_s,
            max_events=max_events,
            core=make_core(config),
        )
        violation = ""
        try:
            chaos.run()
        except (AssertionError, AccountError, StuckError) as error:
            violation = str(error)
        except DiskError:
            raise
        except Exception as error:  # any exception of the core or its world is a bug
            at = traceback.extract_tb(error.__traceback__)[-1]
            violation = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        finally:
            chaos.close()
    return Report(
        seed=seed,
        mode=config.rollout.mode,
        violation=violation,
        error=chaos.world.over or "",
        events=chaos.world.events,
        faults=dict(sorted(chaos.faults.items())),
    )


class Chaos:
    """One run under faults.

    The controller restarts repeatedly; the clock continues.
    """

    def __init__(
        self,
        config: RunConfig,
        serving: ServingFile | None,
        seed: int,
        journal: Path,
        *,
        storm_s: float,
        max_events: int,
        core: Core,
    ) -> None:
        self._config, self._path, self._max_events = config, journal, max_events
        self._random = random.Random(f"chaos/{seed}")
        self._rates = rates(seed, storm_s=storm_s)
        self.faults: Counter[str] = Counter()
        work: dict[str, Workload] = {
            name: FaultyWorkload(workload, self._rates.env, self.faults)
            for name, workload in workloads_of(config).items()
        }
        self._journal = RunJournal(journal)
        self._ready: dict[str, float] = {}  # sender → arrival time of its last message
        self._in_flight: Counter[str] = Counter()  # sender → delayed messages in flight
        self._life = 0  # of the controller; messages to an earlier one never arrive
        self.world = World(
            config, observer=NullObserver(), journal=self._journal, work=work, serving=serving
        )
        self.world.core = core
        self._oracle = TrainerOracle(config, self.world.rollouts.scored)
        self._seed = seed
        self._hook()

    def close(self) -> None:
        self._journal.close()

    def run(self) -> None:
        """Run to the end.

        Raises AssertionError, AccountError or StuckError for a violation, and any
        exception of a broken core.
        """
        world = self.world
        world.start()
        if self._rates.until_s:
            self._plan_next()
        if self._rates.stop_s is not None:
            world.clock.at(self._rates.stop_s, lambda: world.inbox.append(e.StopRequested()))
        while world.over is None:
            world.step()
            if world.events >= self._max_events:
                state = world.core.state
                raise AssertionError(
                    f"no end after {world.events} events: {state.phase}, step {state.trainer.step}"
                )
        summary = summarize(world.core, evaluation=None, wall_s=world.clock.now)
        assert world.over or not world.rollouts.alive, (
            f"{world.rollouts.alive} attempts are left over"
        )
        if not world.over and not self.faults["message lost"]:
            leftover = world.rollouts.scored.keys() - world.core.state.trajectories.keys()
            # The score of a trajectory may arrive after the end.
            leftover = {key for key in leftover if not self._in_flight[f"trajectory_id/{key}"]}
            assert not leftover, f"the store keeps {sorted(leftover)}, which the core has forgotten"
        self._oracle.close(summary)
        self._replayed()

    def _hook(self) -> None:
        world = self.world
        deliver, execute = world.inbox.append, world.effects.execute

        def post(event: e.Event) -> None:
            self._oracle.on_event(event)
            self._send(event, deliver)

        def hooked(command: c.Command) -> None:
            self._oracle.on_command(command)
            execute(command)
            if isinstance(command, c.StartTurn) and self._is_hostile(command.trajectory_id):
                self.faults["engine ended by a turn"] += 1
                world.fleet.lose(command.engine_id, "ended by a turn")

        world.post = post  # type: ignore[method-assign]
        world.effects.execute = hooked  # type: ignore[method-assign]
        for part in (
            world.fleet,
            world.relays,
            world.rollouts,
            world.trainer,
            world.predictor,
            world.effects,
        ):
            part._post = post
        if world.workers is not None:
            world.workers._post = post
        world.each_event = lambda: world.core.check()

    def _is_hostile(self, trajectory_id: TrajectoryId) -> bool:
        """Return whether the trajectory's turns end their engines."""
        draw = random.Random(f"hostile/{self._seed}/{trajectory_id}")
        return draw.random() < self._rates.hostile

    # Messages.

    def _send(self, event: e.Event, deliver: Callable[[e.Event], None]) -> None:
        draw, rates, now, life = self._random, self._rates, self.world.clock.now, self._life
        if now > rates.until_s or isinstance(event, OF_THE_CONTROLLER):
            deliver(event)
            return
        if draw.random() < rates.lost:
            self.faults["message lost"] += 1
            return

        sender = _sender(event)

        def arrive() -> None:
            self._in_flight[sender] -= 1
            if self._life == life:
                deliver(event)

        due = max(now, self._ready.get(sender, 0.0))
        if draw.random() < rates.delayed:
            self.faults["message delayed"] += 1
            due = max(due, now + draw.expovariate(1 / 5.0))
        self._ready[sender] = due
        if draw.random() < rates.reordered:
            self.faults["message reordered"] += 1
            due += draw.expovariate(1 / 20.0)
        if draw.random() < rates.doubled:
            self.faults["message doubled"] += 1
            self._in_flight[sender] += 1
            self.world.clock.at(due + draw.expovariate(1 / 20.0), arrive)
        if due > now:
            self._in_flight[sender] += 1
            self.world.clock.at(due, arrive)
        else:
            deliver(event)

    # Processes.

    def _plan_next(self) -> None:
        self.world.clock.after(self._random.expovariate(1 / self._rates.between_s), self._strike)

    def _strike(self) -> None:
        if self.world.over is not None or self.world.clock.now > self._rates.until_s:
            return
        hosts, planned = self.world.hosts, self._config.allocation is not None
        kinds = {
            **PROCESS_FAULTS,
            **(RELAY_FAULTS if hosts.relays else {}),
            **(HOST_FAULTS if hosts.up else {}),
            **(WORKER_FAULTS if self.world.workers is not None else {}),
            **({} if planned else FLEET_CHANGES),
            **(LENDER_FAULTS if self.world.lending is not None else {}),
        }
        kind = self._random.choices(list(kinds), weights=list(kinds.values()))[0]
        handlers = (
            self._strike_engine,
            self._change_fleet,
            self._strike_relay,
            self._strike_worker,
            self._strike_host,
            self._strike_lender,
            self._strike_other,
        )
        if any(strike(kind) for strike in handlers):
            self.faults[kind] += 1
        self._plan_next()

    def _strike_engine(self, kind: str) -> bool:
        draw, fleet = self._random, self.world.fleet
        if not fleet.nodes:
            return False
        engine = draw.choice(list(fleet.nodes))
        match kind:
            case "engine lost":
                fleet.lose(engine, "injected")
            case "engine silent":
                fleet.silence(engine)
            case "engine stalled":
                fleet.stall(engine, draw.choice([5.0, 60.0, 1e6]))
            case "heartbeat lost":
                fleet.suspect(engine, "no heartbeat")
            case "load refused":
                fleet.refusals[engine] = draw.randint(1, 3)
            case _:
                return False
        return True

    def _change_fleet(self, kind: str) -> bool:
        """Request one more engine, or one fewer.

        The request may be late, duplicated and refused.
        """
        draw, state = self._random, self.world.core.state
        if kind == "engine joins" and len(state.engines) < MAX_FLEET:
            group, name = draw.randrange(len(self._config.engines)), next_id(state)
            slot = e.EngineSlot(id=name, degree=self._config.engines[group].degree, group=group)
            self.world.post(e.EngineRegistered(engine=slot))
            return True
        if kind == "engine leaves" and state.engines:
            engine_id = draw.choice(list(state.engines))
            self.world.post(e.EngineWithdrawn(engine_id=engine_id, drain=draw.random() < 0.7))
            return True
        return False

    def _strike_relay(self, kind: str) -> bool:
        draw, relays = self._random, self.world.relays
        if kind not in RELAY_FAULTS or not relays.nodes:
            return False
        relay = draw.choice(list(relays.nodes))
        match kind:
            case "relay lost":
                relays.lose(relay, "injected")
            case "relay silent":
                relays.silence(relay)
            case "relay hangs":
                relays.hang(relay, draw.choice([0.3, 2.0, 4.0, 60.0]))
            case _:
                relays.refusals[relay] = draw.randint(1, 3)
        return True

    def _strike_worker(self, kind: str) -> bool:
        workers = self.world.workers
        if kind not in WORKER_FAULTS or workers is None or not workers.nodes:
            return False
        workers.lose(self._random.choice(list(workers.nodes)), "injected")
        return True

    def _strike_host(self, kind: str) -> bool:
        """Lose a host, unless it is the last one, or let one join the pool of
        another.
        """
        draw, world = self._random, self.world
        up = [*world.hosts.up]
        if kind == "host lost" and len(up) > 1:
            world.lose_host(draw.choice(up), "injected")
            return True
        if kind == "host joins" and len(up) < MAX_HOSTS:
            world.join_host(world.hosts.pool_of(draw.choice(up)))
            return True
        return False

    def _strike_lender(self, kind: str) -> bool:
        """Recall an engine for a while, or let the reports stop."""
        draw, lending, clock = self._random, self.world.lending, self.world.clock
        if lending is None or kind not in LENDER_FAULTS:
            return False
        if kind == "lenders silent":
            lending.silent = True
            clock.after(draw.choice([5.0, 60.0]), lambda: setattr(lending, "silent", False))
            return True
        name = draw.choice(lending.names)
        lending.recalled.add(name)
        lending.report()
        clock.after(draw.choice([1.0, 60.0]), lambda: lending.recalled.discard(name))
        return True

    def _strike_other(self, kind: str) -> bool:
        trainer = self.world.trainer
        match kind:
            case "trainer lost":
                trainer.lose("injected")
            case "trainer silent":
                trainer.drop()
            case "step failed":
                trainer.refuse_step = True
            case "save failed":
                trainer.refuse_save = True
            case "checkpoint damaged":
                trainer.refuse_restore = True
                trainer.lose("injected")
            case "controller lost":
                self._restart_controller()
            case _:
                return False
        return True

    def _restart_controller(self) -> None:
        """Kill the controller between two events and restart it from its journal.

        Sometimes the store has lost a trajectory.
        """
        world, draw = self.world, self._random
        self._journal.close()
        core = self._replayed()
        if draw.random() < 0.5:
            core = core.restore(core.snapshot(), self._config)
        self._journal = RunJournal(self._path)
        if core.state.phase is not Phase.FINISHED and draw.random() < 0.5:
            self._journal.rotate(core.snapshot())
        if world.rollouts.scored and draw.random() < 0.3:
            self.faults["store damaged"] += 1
            del world.rollouts.scored[draw.choice(list(world.rollouts.scored))]
        self._ready.clear()
        self._life += 1
        world.revive(core, self._journal)

    def _replayed(self) -> Core:
        """Return the core replayed from its journal, which must equal the current
        core.
        """
        replay = Replay(self._path, self._config)
        core = replay.finish()
        assert replay.differing == 0, f"a replay decides differently at {replay.differing} events"
        assert core.snapshot() == self.world.core.snapshot(), "a replay gives another state"
        return core


class NullObserver:
    """A run observer that ignores all reports."""

    def warned(self, command: c.Warn) -> None:
        pass

    def evaluated(self, command: c.RecordEvaluation) -> None:
        pass

    def best(self, command: c.MarkBest) -> None:
        pass


def _sender(event: e.Event) -> str:
    """Return the sender of an event: messages of one sender arrive in order."""
    for name in ("trajectory_id", "engine_id", "relay_id", "group_id"):
        sender_id = getattr(event, name, None)
        if sender_id is not None:
            return f"{name}/{sender_id}"
    return "trainer"
