"""A world made of a heap of future events: it answers every command after a random
delay, and fails in every way.

It checks what would break a real world: commands about things that do not exist, slots
used twice, late answers.
"""

import heapq
import itertools
import random
import types
from typing import Any

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.members import first_engines, next_id, ranks_to_start
from rollweave.core.mechanisms.relays.state import part_of
from rollweave.core.policy.retry import TIMEOUTS_BEFORE_RESTART
from rollweave.core.state import Stage
from rollweave.core.weights import MAX_VERSIONS
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot, RankSlot
from rollweave.schema.work import Limits, Measures, Purpose, StopReason, Task
from tests.support.kinds import of
from tests.support.properties import checked_every
from tests.support.turn_records import TurnRecords

BEGIN_S = 1e6
"""The time at which a run begins: later than every limit, so that a time is not taken
for a duration.
"""


class Lineage:
    """All weights that a trainer ever had, as a tree: the slow reference for staleness.
    Each step adds a child; a restored trainer goes on from an ancestor.
    """

    def __init__(self) -> None:
        self.parents = [-1]  # by weights; those of the start have none
        self.current = [0]  # the trainer's weights by version
        self.newest = {0: 0}  # the last weights with each version's number

    def trained(self) -> None:
        self.parents.append(self.current[-1])
        self.current.append(len(self.parents) - 1)
        self.newest[len(self.current) - 1] = self.current[-1]

    def restored(self, step: int) -> None:
        del self.current[step + 1 :]

    def of(self, version: int) -> int:
        """Return the weights that an engine has which reports `version`."""
        return self.current[version] if version < len(self.current) else self.newest[version]

    def age(self, weights: int) -> int:
        """Return the steps from these weights back to the trainer's way, and on to the
        trainer's weights.
        """
        back = 0
        while weights not in self.current:
            weights, back = self.parents[weights], back + 1
        return back + len(self.current) - 1 - self.current.index(weights)


class World:
    def __init__(
        self,
        config: RunConfig,
        seed: int,
        *,
        failure: float = 0.0,
        spread: float = 1.0,
        hang: float = 0.0,
        restless: float = 0.0,
    ) -> None:
        """`restless`: the share of events after which an engine is registered or
        withdrawn.
        """
        self.config, self.restless = config, restless
        self.stages = seed % 3 != 0  # engines can receive weights while they serve
        self.moves_kv = seed % 4 != 0  # engines can move KV
        self.measures = seed % 5 != 0  # engines measure themselves
        self.preempts = seed % 7 != 0  # turns of higher rank take the slots of others
        self.staged: dict[str, list[int]] = {}  # engine → weights received beside others
        self.colocated = config.trainer.colocated
        # engines with memory for weights, and of these the ones that are giving it back
        self.with_memory: set[str] = set()
        self.releasing: set[str] = set()
        self.trainer_has_devices = False
        self.changing_hosts = 0.0  # share of events after which a host is lost or joins
        self.own_machines = False  # hosts share no memory, and the trainer is lost with its host
        self.losing_workers = 0.0  # share of events after which a worker is lost
        self.worker_epoch = {f"w{number}": 0 for number in range(config.workers.maximum)}
        self.worker_host = dict.fromkeys(self.worker_epoch, 0)
        self.ready_workers: set[str] = set()
        self.core = Core(config)
        self.random = random.Random(seed)
        self.failure, self.spread, self.hang = failure, spread, hang
        self.now = BEGIN_S
        self.compared: set[str] = set()  # groups whose members the core had compared
        self.heap: list[tuple[float, int, e.Event]] = []
        self.count = 0
        self.timer: float | None = None
        self.relay_epoch: dict[str, int] = {}
        self.relay_has: dict[str, set[int]] = {}  # whole, in its memory
        self.reported_versions: dict[str, set[int]] = {}  # versions reported to the core
        self.fetches: dict[str, c.FetchWeights] = {}  # fetches under way
        self.begin_relays()
        self.engine_hosts: dict[str, int] = {}
        self.hosts = 99  # number of the newest host that has joined
        self.dying_relays: set[str] = set()  # relays that die as soon as they are up
        self.all_fetches: list[c.FetchWeights] = []
        self.finish: c.Finish | None = None
        self.journal: list[tuple[float, e.Event]] = []
        self.commands: list[list[c.Command]] = []
        self.trained: dict[int, list[str]] = {}
        self.trained_versions: list[tuple[int, int]] = []
        self.ages: list[int] = []  # of trained trajectories, by the tree of all weights
        self.initiated: dict[str, int] = {}
        self.weights = Lineage()
        self.sampled_by: dict[str, int] = {}  # the weights at launch, by trajectory
        self.engine_degrees = {str(slot.id): slot.degree for slot in first_engines(config)}
        self.engine_groups = {str(slot.id): slot.group for slot in first_engines(config)}
        self.splits = any(group.phase in ("prefill", "either") for group in config.engines)
        # turns whose prompt was given to a prefill engine, until they begin elsewhere
        self.prefilled: set[tuple[str, int, int]] = set()
        self.names = {*self.engine_degrees}  # of all engines that ever existed
        self.engine_epoch: dict[str, int] = dict.fromkeys(self.engine_degrees, 0)
        self.engine_version: dict[str, int] = {}
        self.trainer_epoch = 0
        self.trainer_step = 0
        self.checkpoints: dict[int, int] = {}  # step → the numbers that it holds
        self.numbers = 0  # of the trainer's weights: each (mini-)batch changes them
        self.batches = 0
        self.published: dict[int, int] = {}  # publication id → numbers
        self.published_weights: dict[int, int] = {}  # publication id → of the tree of all weights
        self.version_of: dict[int, int] = {}  # publication id → version
        self.newest = -1  # weights that were published last
        # engine → publication ids that it had, has, and was to load since
        self.loads: dict[str, list[int]] = {}
        # turn → its engine and dispatch
        self.open: dict[tuple[str, int, int], tuple[str, int]] = {}
        self.unanswered_turns: dict[str, int] = {}  # engine → consecutive turns without an answer
        self.failed_on: dict[tuple[str, int, int], list[str]] = {}  # turn → engines that failed it
        # turn → engines that it was with, also those lost since
        self.tried_on: dict[tuple[str, int, int], set[str]] = {}
        self.evaluations: list[c.RecordEvaluation] = []
        self.warnings: list[c.Warn] = []
        self.turns_of: dict[tuple[str, int], int] = {}
        self.handled = 0
        self.lost_worlds = 0
        self.silent_engines: set[str] = set()  # engines that never answer turns
        self.stuck_trainer = False
        self.records = TurnRecords()
        self.damaged_checkpoint = False  # a restarted trainer cannot read the newest checkpoint

    # Driving.

    def slots(self) -> tuple[e.EngineSlot, ...]:
        """Return the engines of a new world, dealt to its hosts."""
        hosts = max(1, self.config.weights.relays)
        self.engine_hosts = {
            name: number % hosts for number, name in enumerate(self.engine_degrees)
        }
        return tuple(
            e.EngineSlot(
                id=EngineId(name),
                degree=degree,
                group=self.engine_groups.get(name, 0),
                host=self.engine_hosts[name],
            )
            for name, degree in self.engine_degrees.items()
        )

    def sent(self, kind: type[c.Command] | types.UnionType) -> list[Any]:
        """Return all commands of this kind so far."""
        return of(itertools.chain(*self.commands), kind)

    def start(self) -> None:
        self.feed(
            e.RunStarted(
                engines=self.slots(),
                relays=len(self.relay_epoch),
                hosts=tuple(map(self.host, range(len(self.relay_epoch))))
                if self.own_machines
                else (),
                ranks=self.rank_slots(),
                workers=self.worker_slots(),
            )
        )
        for name in self.first_workers():
            self.join_worker(name)
        for name in self.relay_epoch:
            self.join_relay(name)
        for name in self.engine_epoch:
            self.join(name)
        self.later(e.TrainerReady(epoch=0, step=0))

    def rank_slots(self) -> tuple[RankSlot, ...]:
        """Return the trainer's ranks in a new world."""
        if self.config.trainer.elastic:
            return (RankSlot(),) * ranks_to_start(self.config, self.core.state)
        return (RankSlot(),) if self.own_machines else ()

    def host(self, number: int, cpus: int = 1) -> HostSlot:
        return HostSlot(number=number, cpus=cpus, machine=f"m{number}" if self.own_machines else "")

    def join(self, name: str) -> None:
        self.engine_version.pop(name, None)
        self.later(
            e.EngineJoined(
                engine_id=EngineId(name),
                epoch=self.engine_epoch[name],
                max_slots=self.config.engines[0].max_slots,
                kv_total_tokens=200 if self.config.rollout.mode is ModeName.DECOUPLED else 9,
                profile=tuple(
                    e.StepTime(batch=batch, seconds=(1 + 0.1 * batch) / self.engine_degrees[name])
                    for batch in (1, 4, 16)
                    if self.measures
                ),
                stages=self.stages,
                moves_kv=self.moves_kv,
                preempts=self.preempts,
            )
        )

    def worker_slots(self) -> tuple[e.WorkerSlot, ...]:
        """Begin the workers of a new world."""
        self.ready_workers.clear()
        self.worker_epoch = dict.fromkeys(self.worker_epoch, 0)
        self.worker_host = dict.fromkeys(self.worker_epoch, 0)
        return tuple(e.WorkerSlot(id=name) for name in self.first_workers())

    def first_workers(self) -> list[str]:
        """The workers with which a world begins."""
        return list(self.worker_epoch)[: self.config.workers.first]

    def join_worker(self, name: str) -> None:
        """The worker is ready later, unless it fails to start."""
        key = {"worker_id": name, "epoch": self.worker_epoch[name]}
        self.later(
            e.WorkerLost(**key, error="no memory") if self.fails() else e.WorkerJoined(**key)
        )

    def lose_worker(self) -> None:
        """One of the workers that are ready dies, and its attempts report nothing
        more.
        """
        if self.ready_workers:
            name = self.random.choice(sorted(self.ready_workers))
            lost = e.WorkerLost(
                worker_id=name,
                epoch=self.worker_epoch[name],
                error="killed",
                recorded=tuple(
                    one.id
                    for one in self.core.state.trajectories.values()
                    if one.worker == name and self.random.random() < 0.5
                ),
            )
            for _ in range(self.random.choice([1, 1, 2])):
                self.later(lost)

    def begin_relays(self) -> int:
        """Begin all relays of a new world; return their number."""
        names = [f"r{number}" for number in range(self.config.weights.relays)]
        self.relay_epoch = dict.fromkeys(names, 0)
        self.relay_has, self.reported_versions = (
            {name: set() for name in names},
            {name: set() for name in names},
        )
        self.fetches.clear()
        return len(names)

    def join_relay(self, name: str) -> None:
        self.later(e.RelayJoined(relay_id=name, epoch=self.relay_epoch[name]))
        if name in self.dying_relays:
            self.lose_relay(name)

    def lose_relay(self, name: str) -> None:
        self.later(e.RelayLost(relay_id=name, epoch=self.relay_epoch[name], error="killed"))

    def later(self, event: e.Event, delay: float | None = None) -> None:
        if self.random.random() < self.hang:
            return
        wait = self.random.expovariate(1 / self.spread) if delay is None else delay
        self.count += 1
        heapq.heappush(self.heap, (self.now + wait, self.count, event))

    def feed(self, event: e.Event) -> None:
        self.handled += 1
        if isinstance(event, e.TurnDone):
            engine_id, dispatch = self.open.get(
                (event.trajectory_id, event.attempt, event.turn), ("", -1)
            )
            if dispatch == event.dispatch:
                self.unanswered_turns[engine_id] = 0
        elif isinstance(event, e.TurnFailed):
            self.note_failure(event)
        elif isinstance(event, e.PrefillDone):
            trajectory = self.core.state.trajectories.get(event.trajectory_id)
            turn = trajectory.turn if trajectory is not None else None
            if turn is not None and turn.prefill and turn.dispatch == event.dispatch:
                self.unanswered_turns[turn.prefill] = 0
        elif isinstance(event, e.WeightsLoaded):
            loads = self.loads.get(event.engine_id, [])
            last = max(
                (place for place, version in enumerate(loads) if version == event.publication_id),
                default=0,
            )
            del loads[: max(0, last - 1)]
        elif isinstance(event, e.WeightsStaged) and event.epoch == self.engine_epoch.get(
            event.engine_id
        ):
            staged = self.staged[event.engine_id]
            del staged[: staged.index(event.publication_id)]  # it has replaced the former ones
        elif isinstance(event, e.WorldLost):
            self.lost_worlds += 1
        elif (
            isinstance(event, e.WorkerJoined | e.WorkerLost)
            and event.epoch == self.worker_epoch[event.worker_id]
        ):
            joined = isinstance(event, e.WorkerJoined)
            (self.ready_workers.add if joined else self.ready_workers.discard)(event.worker_id)
        self.note_memory(event)
        out = self.core.handle(self.now, event)
        if self.handled % checked_every() == 0 or any(isinstance(one, c.Finish) for one in out):
            self.core.check()
        self.journal.append((self.now, event))
        self.commands.append(out)
        for command in out:
            assert self.finish is None, f"{command} after Finish"
            self.execute(command)

    def note_memory(self, event: e.Event) -> None:
        """Note which weights the trainer has published, and which process gives back
        its memory, or loses it with its life.
        """
        if isinstance(event, e.WeightsPublished) and event.epoch == self.trainer_epoch:
            self.trainer_has_devices = False
            self.newest = event.publication_id
        elif isinstance(event, e.EngineSuspended | e.WeightsLoadFailed | e.EngineLost):
            name = event.engine_id
            releases = name in self.releasing or not isinstance(event, e.EngineSuspended)
            if releases and event.epoch == self.engine_epoch.get(name):
                self.forget_memory(name)

    def forget_memory(self, name: str) -> None:
        self.with_memory.discard(name)
        self.releasing.discard(name)

    def change_fleet(self) -> None:
        """Register one more engine, or withdraw one; the request may be refused, or
        sent twice.
        """
        state = self.core.state
        if self.random.random() < 0.5 and len(state.engines) < 5:
            event: e.Event | None = e.EngineRegistered(engine=e.EngineSlot(id=next_id(state)))
        else:
            name = self.random.choice(list(state.engines)) if state.engines else None
            event = (
                e.EngineWithdrawn(engine_id=name, drain=self.random.random() < 0.7)
                if name is not None
                else None
            )
        if event is not None:
            for _ in range(self.random.choice([1, 1, 2])):
                self.later(event)

    def change_hosts(self) -> None:
        """Lose a host, or let one join; the report may come twice."""
        up = self.core.state.hosts.up
        if len(up) > 1 and self.random.random() < 0.5:
            event: e.Event = e.HostLost(host=self.random.choice(list(up)), error="silent")
        else:
            self.hosts += 1
            event = e.HostJoined(host=self.host(self.hosts, self.random.randint(1, 4)))
        for _ in range(self.random.choice([1, 1, 2])):
            self.later(event)

    def step(self) -> None:
        if self.restless and self.random.random() < self.restless:
            self.change_fleet()
        if self.changing_hosts and self.random.random() < self.changing_hosts:
            self.change_hosts()
        if self.losing_workers and self.random.random() < self.losing_workers:
            self.lose_worker()
        if self.timer is not None and (not self.heap or self.timer <= self.heap[0][0]):
            self.now, self.timer = max(self.now, self.timer), None
            self.feed(e.TimerFired())
            return
        assert self.heap, "nothing will ever happen again: the core waits for ever"
        self.now, _, event = heapq.heappop(self.heap)
        if not isinstance(event, e.WeightsFetched | e.FetchFailed) or self.arrives(event):
            self.feed(event)
        if isinstance(event, e.HostLost) and self.own_machines:
            ranks = self.core.state.hosts.ranks
            if any(rank.host == event.host for rank in ranks):
                self.later(e.TrainerLost(epoch=self.trainer_epoch, error="its host is lost"))

    def arrives(self, event: e.WeightsFetched | e.FetchFailed) -> bool:
        """True if a fetch is over; false if a newer one has replaced it, or its source
        has not received or lacks the version.
        """
        take = self.fetches.get(event.relay_id)
        if self.relay_epoch.get(event.relay_id) != event.epoch:
            return True  # of an earlier life: late news
        if take is None or take.publication_id != event.publication_id:
            return False
        if isinstance(event, e.WeightsFetched) and take.source is not None:
            from_ = self.fetches.get(take.source)
            if from_ is not None and from_.publication_id == take.publication_id:
                self.later(event)
                return False
            if take.publication_id not in self.relay_has.get(take.source, ()):
                self.refuse(take, "source")
                return False
        del self.fetches[event.relay_id]
        if isinstance(event, e.WeightsFetched):
            self.relay_has[event.relay_id].add(event.publication_id)
            self.reported_versions[event.relay_id].add(event.publication_id)
        return True

    def refuse(self, take: c.FetchWeights, reason: str) -> None:
        self.later(
            e.FetchFailed(
                relay_id=take.relay_id,
                epoch=self.relay_epoch[take.relay_id],
                publication_id=take.publication_id,
                fetch_number=take.fetch_number,
                reason=reason,  # type: ignore[arg-type]
                error="no luck",
            ),
            0.0,
        )

    def run(self, max_events: int = 100_000) -> c.Finish:
        self.start()
        return self.run_on(max_events)

    def run_on(self, max_events: int = 100_000) -> c.Finish:
        while self.finish is None:
            assert self.handled < max_events, (
                f"no end: {self.core.state.phase}, step {self.core.state.trainer.step}"
            )
            self.step()
        return self.finish

    def launched(self, command: c.StartInit) -> None:
        self.initiated[command.trajectory_id] = command.initiated_version
        self.sampled_by[command.trajectory_id] = self.weights_of(command)

    def weights_of(self, command: c.StartInit) -> int:
        """The weights of the engine to which a new attempt is bound, in mode decoupled;
        its number alone may be that of discarded weights and of new ones.
        """
        versions = self.core.state.mechanisms.get("versions")
        bound = None if versions is None else versions.trajectories.get(command.trajectory_id)
        if bound is None or command.continues is not None:
            return self.weights.of(command.initiated_version)
        return self.published_weights[bound]

    def fails(self) -> bool:
        return self.random.random() < self.failure

    # Executing.

    def execute(self, command: c.Command) -> None:
        match command:
            case c.DrawTask():
                task = Task(
                    id=TaskId(f"{command.name}-{command.index}"),
                    env=command.name,
                    seed=command.index,
                    limits=Limits(step_s=5.0),
                )
                self.later(e.GroupSubmitted(group_id=command.group_id, task=task), 0.0)
            case c.StartInit():
                assert command.worker in (self.ready_workers or {""}), f"{command} to no worker"
                self.launched(command)
                self.records.begin(command)
                key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
                if self.fails():
                    self.later(
                        e.TrajectoryEnded(**key, stop_reason=StopReason.ENV_ERROR, error="boom")
                    )
                else:
                    self.later(e.EnvReady(**key, prompt_tokens=7))
            case c.StartRun():
                self.turns_of[command.trajectory_id, command.attempt] = 0
                self.next_turn(command.trajectory_id, command.attempt)
            case c.StartTurn(prefill=True):
                self.prefill(command)
            case c.StartTurn():
                assert command.engine_id in self.engine_version, (
                    "a turn on an engine without weights"
                )
                assert not self.colocated or command.engine_id in self.with_memory, command
                assert self.core.state.engines[command.engine_id].samples, command
                self.check_retry(command)
                key = {
                    "trajectory_id": command.trajectory_id,
                    "attempt": command.attempt,
                    "turn": command.turn,
                    "dispatch": command.dispatch,
                }
                if command.engine_id in self.silent_engines:
                    pass
                elif self.fails():
                    self.later(e.TurnFailed(**key, error="broken"))
                elif self.failure and self.fails():  # and an answer may be on its way
                    self.later(e.TurnDone(**key, output_tokens=3, cached_tokens=0, version=0))
                    del key["dispatch"]
                    self.turns_of[command.trajectory_id, command.attempt] = command.turn + 1
                    self.later(e.TurnWithdrawn(**key), self.spread)
                    self.next_turn(command.trajectory_id, command.attempt, after=self.spread * 12)
                else:
                    version = self.engine_version[command.engine_id]
                    self.later(e.TurnDone(**key, output_tokens=3, cached_tokens=0, version=version))
                    self.record(command)
                    self.turns_of[command.trajectory_id, command.attempt] = command.turn + 1
                    self.next_turn(command.trajectory_id, command.attempt, after=self.spread * 12)
            case c.AbortTurn():
                key_of_turn = (command.trajectory_id, command.attempt, command.turn)
                if self.open.get(key_of_turn) == (command.engine_id, command.dispatch):
                    del self.open[key_of_turn]
            case c.RestartWorker():
                self.lost_worlds += 1  # its attempts start again
                assert command.epoch > self.worker_epoch[command.worker_id], command
                assert command.host in self.core.state.hosts.up, command
                self.worker_epoch[command.worker_id] = command.epoch
                self.worker_host[command.worker_id] = command.host
                self.ready_workers.discard(command.worker_id)
                self.join_worker(command.worker_id)
            case c.RemoveWorker():
                self.lost_worlds += command.reason != "it was not needed"
                self.ready_workers.discard(command.worker_id)
            case c.Evict():
                self.records.evict(command, self.core.state)
            case c.ResumeEngine() | c.Harvest() | c.FitPredictor():
                pass
            case c.RerankTurn():
                assert command.engine_id in self.engine_version
            case c.Predict():
                self.predict(command)
            case c.Migrate():
                assert command.source != command.target
                assert self.moves_kv, f"{command} between engines that cannot"
                assert {command.source, command.target} <= self.engine_version.keys(), (
                    "a transfer between engines without weights"
                )
                error = "lost on the way" if self.fails() else ""
                done = e.MigrationDone(
                    number=command.number,
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    moved_tokens=0 if error else 5,
                    error=error,
                )
                self.later(done)
            case c.MarkBest():
                assert command.step in self.checkpoints, "the best is no checkpoint"
            case c.StartEval():
                key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
                if self.fails():
                    self.later(
                        e.RewardFailed(
                            **key, stop_reason=StopReason.REWARD_ERROR, error="bad reward"
                        )
                    )
                else:
                    reward, success = self.score(command.trajectory_id)
                    self.later(e.RewardReady(**key, reward=reward, success=success))
            case c.CompareGroup():
                assert command.group_id not in self.compared, f"{command} twice"
                self.compared.add(command.group_id)
                self.check_compared(command)
                if self.random.random() >= self.hang:
                    rewards = {
                        name: self.random.choice([0.0, 0.5, 1.0])
                        for name in command.rewards
                        if not self.fails()
                    }
                    self.later(
                        e.GroupCompared(
                            group_id=command.group_id, rewards=rewards, error="no verdict"
                        )
                    )
            case c.CancelComparison():
                assert command.group_id in self.compared, f"{command} of no comparison"
            case c.CancelTrajectory():
                key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
                self.later(e.TrajectoryEnded(**key, stop_reason=command.reason))
            case c.SetTimer():
                self.timer = command.at
            case c.Warn():
                self.warnings.append(command)
                if "no answer within" in command.message:
                    self.unanswered_turns[command.component] = (
                        self.unanswered_turns.get(command.component, 0) + 1
                    )
            case c.RecordEvaluation():
                sizes = self.config.eval
                episodes = sizes.final_episodes if command.final else sizes.episodes
                counted = sum(command.episodes.values()) + sum(command.failed.values())
                assert counted == episodes * len(self.config.tasks), command
                self.evaluations.append(command)
            case c.Finish():
                self.finish = command
            case _:
                self.execute_plant(command)

    def score(self, trajectory_id: str) -> tuple[float, bool | None]:
        """The reward of an attempt, and its success if its environment defines one."""
        reward = self.random.choice([0.0, 1.0])
        return reward, reward > 0

    def check_compared(self, command: c.CompareGroup) -> None:
        """Assert that the compared members are scored, and all meet someone."""
        state = self.core.state
        for name in command.rewards:
            assert state.trajectories[name].stage is Stage.SCORED, command
        met = {number for pair in command.pairs for number in pair}
        assert met == set(range(len(command.rewards))), command

    def note_failure(self, event: e.TurnFailed) -> None:
        """Note that the turn failed on its engine, unless the answer is late."""
        turn = (event.trajectory_id, event.attempt, event.turn)
        engine_id, dispatch = self.open.get(turn, ("", -1))
        if dispatch == event.dispatch:
            self.failed_on.setdefault(turn, []).append(engine_id)
            del self.open[turn]

    def prefill(self, command: c.StartTurn) -> None:
        """Compute a prompt, or fail to. Answers may be doubled."""
        assert command.engine_id in self.engine_version, "a prompt on an engine without weights"
        assert not self.colocated or command.engine_id in self.with_memory, command
        assert not self.core.state.engines[command.engine_id].samples, command
        self.prefilled.add((command.trajectory_id, command.attempt, command.turn))
        key = {
            "trajectory_id": command.trajectory_id,
            "attempt": command.attempt,
            "turn": command.turn,
            "dispatch": command.dispatch,
        }
        if command.engine_id in self.silent_engines:
            return
        if self.fails():
            self.later(e.TurnFailed(**key, error="broken"))
            return
        for _ in range(1 + self.fails()):
            self.later(e.PrefillDone(**key, cached_tokens=0))

    def check_retry(self, command: c.StartTurn) -> None:
        """Assert that a turn is retried within the limit, and not where it failed while
        another engine could take it.

        An engine that was lost with the turn has failed it too, whether or not it has
        restarted since. An evaluation's turns run on engines that have its version.
        """
        evaluation = self.core.state.evaluations.current
        if command.trajectory_id.startswith("e") and evaluation is not None:
            version = self.engine_version[command.engine_id]
            assert version == evaluation.version, (
                f"{command} of an evaluation of {evaluation.version} on version {version}"
            )
        turn = (command.trajectory_id, command.attempt, command.turn)
        chosen_before = turn in self.prefilled
        self.prefilled.discard(turn)
        failed = self.failed_on.get(turn, [])
        assert len(failed) <= self.config.rollout.retries, f"{command} after {len(failed)} failures"
        assert command.attempt <= self.config.rollout.retries or self.lost_worlds, (
            f"{command} of one attempt too many"
        )
        run = self.core._run
        # perhaps after this one
        freed = any(isinstance(one, c.CancelTrajectory | c.AbortTurn) for one in self.commands[-1])
        # else its own engine may be the better one
        free_choice = not run.scheduling.assigns and not freed and not chosen_before
        if command.engine_id in failed and free_choice:
            others = {
                one.id for one in run.fleet.loads.values() if one.active < one.slots
            } - self.tried_on[turn]
            assert not others, f"{command} on an engine that failed it, while {others} are free"
        self.open[turn] = (command.engine_id, command.dispatch)
        self.tried_on.setdefault(turn, set()).add(command.engine_id)

    def check_retained(self, command: c.PublishWeights) -> None:
        """Assert that the retained versions include those that an engine has or loads,
        that trajectories in flight began with, and that relays pass on.

        An engine has its former version until a load succeeds, however many loads fail
        before.
        """
        state = self.core.state
        needed = {publication_id for loads in self.loads.values() for publication_id in loads}
        needed |= {publication_id for staged in self.staged.values() for publication_id in staged}
        versions_in_use = {
            state.trajectories[one].initiated for one in (*state.pools.init, *state.pools.run)
        }
        versions_in_use |= (
            {state.evaluations.current.version} if state.evaluations.current is not None else set()
        )
        needed |= {
            publication_id
            for publication_id, version in self.version_of.items()
            if version in versions_in_use
        }
        relays = part_of(state)
        for relay in relays.relays.values() if relays is not None else ():
            needed |= {*relay.versions[-1:]}
            if relay.fetch is not None:
                needed |= {relay.fetch.publication_id, relay.fetch.base}  # type: ignore[arg-type]
        spare = set(command.keep) - needed - {self.newest}
        assert not spare, f"{command} keeps {spare}, which nobody needs"

    def predict(self, command: c.Predict) -> None:
        """Answers may be wild, late, or never come."""
        if not self.fails():
            remaining = self.random.choice([0.5, 3.0, 40.0, 4000.0])
            event = e.PredictionReady(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                remaining_tokens=remaining,
            )
            self.later(event, self.random.expovariate(1 / self.spread))

    def next_turn(self, trajectory_id: str, attempt: int, after: float | None = None) -> None:
        """The episode requests a turn, or ends. Requests may be late or doubled, as in
        a real world.
        """
        turn = self.turns_of[trajectory_id, attempt]
        key = {"trajectory_id": trajectory_id, "attempt": attempt}
        if self.fails():
            self.later(
                e.TrajectoryEnded(
                    **key,
                    stop_reason=self.random.choice([StopReason.ENV_ERROR, StopReason.ENV_HANG]),
                ),
                after,
            )
        elif turn >= self.random.randint(1, 3):
            self.later(
                e.TrajectoryEnded(
                    **key, stop_reason=StopReason.FINISHED, turns=turn, tokens=turn * 3
                ),
                after,
            )
        else:
            # long prompts, where engines compute them for others
            tokens = 100 * (turn + 1) if self.splits else 10
            self.later(e.TurnRequested(**key, turn=turn, context_tokens=tokens), after)

    def execute_plant(self, command: c.Command) -> None:
        match command:
            case c.SuspendEngine():
                assert command.release == self.colocated, command
                if command.release:
                    self.releasing.add(command.engine_id)
                self.later(
                    e.EngineSuspended(
                        engine_id=command.engine_id, epoch=self.engine_epoch[command.engine_id]
                    )
                )
            case c.StageWeights():
                self.stage(command)
            case c.FetchWeights():
                state = self.core.state
                assert (
                    command.source is not None
                    or not self.own_machines
                    or state.mechanisms["relays"].relays[command.relay_id].host
                    == state.hosts.ranks[0].host
                ), f"{command.relay_id} cannot read the trainer's memory"
                self.take(command)
            case c.RestartRelay():
                self.forget_relay(command.relay_id)
                self.relay_epoch[command.relay_id] = command.epoch
                self.join_relay(command.relay_id)
            case c.RemoveRelay():
                self.forget_relay(command.relay_id)
                del self.relay_epoch[command.relay_id]
            case c.LoadWeights():
                if command.from_checkpoint is not None:
                    checkpoint = self.checkpoints.get(command.from_checkpoint)
                    assert checkpoint == self.published[command.publication_id], (
                        f"{command} of a checkpoint that holds {checkpoint}"
                    )
                    assert command.version == command.from_checkpoint
                elif self.reported_versions:
                    relay = f"r{self.engine_hosts[command.engine_id]}"
                    assert command.publication_id in self.reported_versions[relay], (
                        f"{command} of what {relay} does not hold"
                    )
                assert not (self.colocated and self.trainer_has_devices), command
                self.with_memory.add(command.engine_id)
                self.loads.setdefault(command.engine_id, []).append(command.publication_id)
                key = {
                    "engine_id": command.engine_id,
                    "epoch": self.engine_epoch[command.engine_id],
                    "publication_id": command.publication_id,
                }
                if self.fails():
                    self.later(e.WeightsLoadFailed(**key, error="torn"))
                else:
                    self.engine_version[command.engine_id] = command.version
                    self.later(e.WeightsLoaded(**key, version=command.version))
                if self.fails():
                    self.later(
                        e.EngineLost(
                            engine_id=command.engine_id,
                            epoch=self.engine_epoch[command.engine_id],
                            error="killed",
                        )
                    )
            case c.RestartEngine():
                silent = self.unanswered_turns.pop(command.engine_id, 0)
                assert (
                    "turns in a row" not in command.reason or silent >= TIMEOUTS_BEFORE_RESTART
                ), f"{command} of {silent}"
                self.engine_epoch[command.engine_id] = command.epoch
                self.forget_memory(command.engine_id)
                self.join(command.engine_id)
            case c.StartEngine():
                assert command.engine_id not in self.names, "an engine id is used again"
                self.names.add(command.engine_id)
                self.engine_degrees[command.engine_id] = command.degree
                self.engine_epoch[command.engine_id] = 0
                self.engine_hosts[command.engine_id] = command.host
                self.join(command.engine_id)
            case c.RemoveEngine():
                self.engine_version.pop(command.engine_id, None)
                self.forget_memory(command.engine_id)
                del self.engine_degrees[command.engine_id], self.engine_epoch[command.engine_id]
            case c.TrainStep():
                assert command.step == self.trainer_step
                assert not (self.colocated and self.with_memory), f"{command} without devices"
                self.trainer_has_devices = True
                if self.stuck_trainer:
                    return
                if self.fails():
                    self.later(e.TrainerLost(epoch=self.trainer_epoch, error="killed"))
                    return
                before = {member for members in self.trained.values() for member in members}
                self.trained.setdefault(command.step, [])
                for group in command.groups:
                    assert not before & {*group.trajectory_ids}, (
                        f"group {group.id} is trained twice, at {command.step}"
                    )
                    self.trained[command.step] += group.trajectory_ids
                    for member in group.trajectory_ids:
                        self.trained_versions.append((command.step, self.initiated[member]))
                        self.ages.append(self.weights.age(self.sampled_by[member]))
                if command.part == command.parts - 1:
                    self.trainer_step += 1
                    self.weights.trained()
                self.batches += 1
                self.numbers = self.batches
                self.later(
                    e.StepTrained(epoch=self.trainer_epoch, step=command.step, part=command.part)
                )
            case c.MeasureGroups():
                assert command.step == self.trainer_step
                if self.fails():
                    failed = e.TrainFailed(
                        epoch=self.trainer_epoch,
                        step=command.step,
                        error="out of memory",
                        nonfinite=False,
                    )
                    self.later(failed)
                    return
                groups = [
                    e.GroupMeasures(
                        id=ref.id,
                        measures=Measures(
                            ratio=(drawn := self.random.choice([0.5, 0.9, 1.0, 1.2])),
                            entropy=2.0 * drawn,
                            td_error=1.5 - drawn,
                        ),
                    )
                    for ref in command.groups
                ]
                done = e.GroupsMeasured(
                    epoch=self.trainer_epoch,
                    step=command.step,
                    part=command.part,
                    groups=tuple(groups),
                )
                self.later(done)
                if self.fails():  # and late, once more
                    self.later(done, self.spread * 5)
            case c.PublishWeights():
                assert command.release == self.colocated, command
                assert len(command.keep) <= MAX_VERSIONS
                self.check_retained(command)
                self.version_of[command.publication_id] = command.version
                if command.from_checkpoint is not None:
                    self.numbers = self.checkpoints[command.from_checkpoint]
                self.published[command.publication_id] = self.numbers
                self.published_weights[command.publication_id] = self.weights.of(command.version)
                self.records.publish(command, self.numbers)
                self.later(
                    e.WeightsPublished(
                        epoch=self.trainer_epoch,
                        version=command.version,
                        publication_id=command.publication_id,
                    )
                )
            case c.SaveCheckpoint():
                if self.fails():
                    self.later(
                        e.CheckpointFailed(
                            epoch=self.trainer_epoch, step=command.step, error="disk full"
                        )
                    )
                else:
                    self.checkpoints[command.step] = self.numbers
                    retained = {command.step, *command.keep}
                    self.checkpoints = {
                        step: numbers
                        for step, numbers in self.checkpoints.items()
                        if step in retained
                    }
                    if self.random.random() < 0.5:  # and trains on while it is written
                        self.later(e.CheckpointCopied(epoch=self.trainer_epoch, step=command.step))
                    self.later(e.CheckpointSaved(epoch=self.trainer_epoch, step=command.step))
            case c.RestartTrainer():
                assert command.step in {None, *self.checkpoints}, "a checkpoint that was pruned"
                # The one before may be gone: pruned by a later save whose answer the
                # controller did not survive to receive.
                newer = any(step > (command.step or 0) for step in self.checkpoints)
                assert command.fallback in {None, *self.checkpoints} or newer, (
                    "a fallback that was pruned"
                )
                damaged = command.fallback in self.checkpoints and (
                    self.damaged_checkpoint or self.fails()
                )
                self.trainer_epoch, self.trainer_has_devices = command.epoch, False
                restored = command.fallback if damaged else command.step
                self.trainer_step, self.numbers = (
                    restored or 0,
                    0 if restored is None else self.checkpoints[restored],
                )
                self.weights.restored(self.trainer_step)
                self.trained = {
                    step: ids for step, ids in self.trained.items() if step < self.trainer_step
                }
                self.later(e.TrainerReady(epoch=command.epoch, step=self.trainer_step))
            case _:
                raise AssertionError(f"nobody executes {command}")

    def record(self, command: c.StartTurn) -> None:
        """Record the turn under the weights of its engine; an episode of an evaluation
        has those that are evaluated.
        """
        state = self.core.state
        engine = state.engines[EngineId(command.engine_id)]
        numbers = self.published.get(engine.publication_id, -1)
        group_id = state.trajectories[command.trajectory_id].group_id
        if state.groups[group_id].purpose is Purpose.EVAL:
            current = state.evaluations.current
            assert current is not None, f"{command} of no evaluation"
            assert numbers == self.published[current.publication_id], command
        self.records.sample(command, engine.version, numbers)

    def take(self, command: c.FetchWeights) -> None:
        """Release the versions that are not to be kept, and finish the fetch, or
        fail.
        """
        name, retained = command.relay_id, {*command.keep, command.base_id}
        assert name in self.relay_epoch, f"{command} of a relay that is gone"
        assert command.source is None or command.source in self.relay_epoch, (
            f"{command} from a relay that is gone"
        )
        assert command.base_id is None or command.base_id in self.reported_versions[name], (
            f"{command} on a base that it never had"
        )
        state = self.core.state
        if command.source is None:
            ahead = state.mechanisms["relays"].order[: state.mechanisms["relays"].order.index(name)]
            assert all(state.mechanisms["relays"].relays[one].suspected for one in ahead), (
                f"{command} past {ahead}"
            )
        else:
            assert not state.mechanisms["relays"].relays[command.source].suspected, (
                f"{command} from a relay that is suspected"
            )
        self.relay_has[name] &= retained
        self.reported_versions[name] &= retained
        self.all_fetches.append(command)
        self.fetches[name] = command
        if self.fails():
            self.refuse(command, self.random.choice(["source", "base", "broken", "room"]))
        else:
            epoch = self.relay_epoch[name]
            self.later(
                e.WeightsFetched(relay_id=name, epoch=epoch, publication_id=command.publication_id)
            )
        if self.fails():
            self.lose_relay(name)
        if self.fails():
            self.doubt_relay(name)
        if self.fails() and command.source is not None:
            key = {
                "relay_id": name,
                "epoch": self.relay_epoch[name],
                "publication_id": command.publication_id,
            }
            self.later(e.FetchStalled(**key, source=command.source))

    def stage(self, command: c.StageWeights) -> None:
        """Receive weights beside those that the engine serves, or fail."""
        name = command.engine_id
        assert self.stages, f"{command} of an engine that cannot"
        assert not self.colocated, f"{command} beside weights in use"
        if self.reported_versions:
            held = self.reported_versions[f"r{self.engine_hosts[name]}"]
            assert command.publication_id in held, f"{command} of what its relay does not hold"
        key = {
            "engine_id": name,
            "epoch": self.engine_epoch[name],
            "publication_id": command.publication_id,
        }
        self.staged.setdefault(name, []).append(command.publication_id)
        if self.fails():
            self.later(e.StagingFailed(**key, error="torn"))
        else:
            self.later(e.WeightsStaged(**key))

    def doubt_relay(self, name: str) -> None:
        """The relay is silent for a while; the two reports of it may arrive in either
        order.
        """
        key = {"relay_id": name, "epoch": self.relay_epoch[name]}
        self.later(e.RelaySuspected(**key))
        self.later(e.RelayRecovered(**key), self.random.expovariate(1 / (3 * self.spread)))

    def forget_relay(self, name: str) -> None:
        self.relay_has[name], self.reported_versions[name] = set(), set()
        self.fetches.pop(name, None)
