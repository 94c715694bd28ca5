"""The context that the sub-machines share: the settings, the state, the time, the
facts posted and the commands emitted while one event is handled; and the form of a
mechanism, an optional behavior that the kernel calls by a few hooks.
"""

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from rollweave.core.fleet import Fleet
from rollweave.core.policy.experience import Rule
from rollweave.core.policy.modes import Mode, origin, parted, preset
from rollweave.core.policy.redundancy import trained_at
from rollweave.core.policy.routing import EngineLoad
from rollweave.core.policy.scheduling import Scheduling, has_learned_pools, scheduling
from rollweave.core.policy.waiting import Wait
from rollweave.core.state import (
    DomainStats,
    Engine,
    GroupStatus,
    Phase,
    Queued,
    Stage,
    State,
    TrainerStatus,
    Trajectory,
    Turn,
)
from rollweave.core.turn_queues import TurnQueues
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.commands import Command, Warn
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import Event
from rollweave.schema.work import Purpose, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOver:
    """The fact that an attempt is over: scored, or ended for `reason`."""

    trajectory_id: TrajectoryId
    reason: StopReason
    scored: bool = False
    repeated: bool = False


@dataclass(slots=True, kw_only=True)
class EngineFailure:
    """The failure of an engine, described by `error`; with `lost`, its process is gone.
    A mechanism sets `excused` if the engine is not to blame.
    """

    error: str
    lost: bool
    excused: bool = False


class Pacing(Protocol):
    """The way engines and trajectories keep pace with the trainer. The answers given
    here are those of a run in which any engine can run any turn.

    A version is the number of the step that the weights came from; each publication of
    weights has an id of its own.
    """

    interchangeable: bool = True
    """True if any engine can run any turn: trajectories are not bound to weights, which
    may therefore change under them.
    """
    loads_checkpoints: bool = False
    """True if engines load older versions from checkpoints."""
    evaluates_on_one_engine: bool = False
    """True if one engine that serves the version is enough to start an evaluation."""
    check_s: float = math.inf
    """Maximum seconds between two checks of the deadlines."""

    def admits(self, run: "Run") -> bool:
        """True if a later step could train on a trajectory that is launched now."""

    def room(self, run: "Run") -> int:
        """The number of training groups to draw now; none if negative."""

    def launch(
        self, run: "Run", trajectory: Trajectory, purpose: Purpose
    ) -> tuple[int, int] | None:
        """Return version and publication id of the weights under which the trajectory
        is launched, and to which it may be bound; None if no engine takes it.
        """

    def takes_episodes(self, run: "Run") -> bool:
        """True if an engine takes episodes of the evaluation now."""
        return True

    def assign(self, run: "Run", trajectory: Trajectory, avoid: Sequence[EngineId]) -> bool:
        """Assign the trajectory to another engine if it cannot keep its own; False if
        it may have any engine.
        """
        return False

    def unassign_engine(self, run: "Run", engine: Engine) -> None:
        """Unassign trajectories that cannot stay with an engine that lost its
        weights.
        """
        return

    def may_drain(self, run: "Run", engine: Engine) -> bool:
        """True if a leaving engine may drain now."""
        return True

    def wanted_weights(self, run: "Run", engine: Engine) -> int | None:
        """The publication id of the weights that a suspended engine is to load; None if
        there are none.
        """

    def updates(self, run: "Run") -> Iterator[tuple[Engine, int | None]]:
        """The stale and serving engines that are to load other weights now."""

    def holds_back(self, run: "Run", publication_id: int | None) -> bool:
        """True if an evaluation that has started forbids engines to load these
        weights.
        """

    def can_still_evaluate(self, run: "Run", publication_id: int) -> bool:
        """True if engines can load these weights although newer ones are published."""
        return False

    def awaited_weights(self, run: "Run") -> int | None:
        """Older weights that a relay should fetch because they are waited for."""
        return None

    def bound_weights(self, run: "Run") -> set[int]:
        """Weights to which trajectories or an evaluation are bound."""
        return set()

    def needed_checkpoints(self, run: "Run") -> set[int]:
        """Steps of the checkpoints that engines read, or trajectories wait for."""
        return set()

    def begin_load(self, run: "Run", engine: Engine) -> None:
        """The engine begins to load other weights."""
        return

    def reassign(self, run: "Run") -> list[Trajectory]:
        """Assign trajectories to an engine that has loaded their weights. Return those
        whose weights can no longer be loaded anywhere.
        """
        return []

    def choose_batch(self, run: "Run", wanted: int) -> list[GroupId]:
        """The groups of the next (mini-)batch: `wanted` of them, or none."""

    def unmeasured(self, run: "Run", wanted: int) -> list[GroupId]:
        """The groups that the trainer measures before the next (mini-)batch."""
        return []

    def surplus(self, run: "Run") -> list[GroupId]:
        """The buffered groups that have no place."""
        return []


class Carrier:
    """Carries published weights to the engines: these load them from the memory in
    which the trainer publishes them, unless a mechanism brings them to their hosts.
    """

    def relayed(self, run: "Run") -> bool:
        """True if engines load weights from their own host's relay."""
        return False

    def reach(self, run: "Run", engine: Engine) -> list[int] | None:
        """Return the weights that the engine can load, ascending; None if these are all
        that are retained.
        """
        return None

    def needed(self, run: "Run") -> set[int]:
        """Return the weights that are on their way, or the newest somewhere."""
        return set()

    def held(self, run: "Run") -> set[int]:
        """Return the weights that survive the loss of the trainer."""
        return set()

    def accuse(self, run: "Run", engine: Engine, publication_id: int) -> None:
        """The engine cannot load these weights. It may be at fault, or the relay or
        trainer that has them.
        """


class Chooser(Protocol):
    """Chooses the engines of turns."""

    def place(
        self, run: "Run", trajectory: Trajectory, turn: Turn, former: Queued | None
    ) -> Queued:
        """Return the place in the queue for a turn that joins it, or moves from its
        `former` one.
        """

    def candidates(self, run: "Run", trajectory: Trajectory, turn: Turn) -> list[EngineLoad]:
        """Return the loads of the engines that could run the turn now."""

    def dispatch(self, run: "Run", waited_for: list[EngineId | None] | None) -> None:
        """Start queued turns: those that wait for one of these engines, or all."""


class RecordMove(enum.Enum):
    """A move of a record."""

    # moves are looked up at every event, and the hash of an Enum is slow
    __hash__ = object.__hash__


class TurnMove(RecordMove):
    """The moves of a turn. Followers get the trajectory and the turn, and what the move
    says.
    """

    REQUESTED = "requested"  # it is queued, unless its place is changed
    RANKED = "ranked"  # it joins a queue, or moves in one: its rank may be changed
    GIVEN = "given"  # an engine is about to get it
    BEGUN = "begun"  # its engine is about to begin it, since its prompt is over
    REFUSED = "refused"  # with the error: its prompt was not computed
    LEFT = "left"  # an engine is about to lose it
    DONE = "done"  # with the engine and the event: it is answered
    ACQUITTED = "acquitted"  # a suspect is answered
    CARRIED = "carried"  # with the engine and the tokens: the KV of its prompt has come
    REVISED = "revised"  # its trajectory is expected to have another length


class EngineMove(RecordMove):
    """The moves of an engine."""

    JOINED = "joined"  # with the event: it is ready
    FAILED = "failed"  # with its EngineFailure: its turns are about to fail
    SOUGHT = "sought"  # suspects are queued for engines of their own; passes no engine
    GIVEN_UP = "given up"  # with the reason: it has failed too often
    REMOVED = "removed"  # for good
    LOST = "lost"  # with the reason: it was removed, and not meant to go
    REPLACED = "replaced"  # with the former engines, by id: a new world has others
    FLEET_CHANGED = "fleet changed"  # other engines take turns than before
    REPRICED = "repriced"  # the costs of work on engines have changed


class HostMove(RecordMove):
    """The moves of a host. Followers get its number."""

    JOINED = "joined"
    GIVEN_UP = "given up"  # with the reason


class TrainerMove(RecordMove):
    """The moves of the trainer."""

    STARTING = "starting"  # with the reason: its process is about to start
    TRAINED = "trained"  # a step is trained, and its weights are not published yet
    PUBLISHED = "published"


Move = Stage | GroupStatus | TurnMove | EngineMove | HostMove | TrainerMove
"""A move of an attempt, a group, a turn, an engine, a host or the trainer."""

MOVES: tuple[Move, ...] = (*Stage, *GroupStatus, *TurnMove, *EngineMove, *HostMove, *TrainerMove)

Handler = Callable[["Run", Any], None]
"""Handles one kind of event."""

Step = Callable[["Run"], None]
"""Does what has become possible, or checks a deadline."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """An optional behavior, whole: its state and all that the kernel calls.

    A configuration that does not use it pays nothing for it. Hooks of several
    mechanisms are called in the order of `core/mechanisms.MECHANISMS`.
    """

    name: str
    """Key of its part of the snapshot, `State.mechanisms`."""
    used: Callable[[RunConfig], bool]
    """True if a run with this configuration has the mechanism."""
    state: type[msgspec.Struct] | None = None
    """Its part of the snapshot, if it needs more than the records of the kernel. The
    kernel removes the entry of a trajectory or an engine that is gone from its tables
    `trajectories` and `engines`, if it has them.
    """
    handlers: Mapping[type[Event], Handler] = field(default_factory=dict)
    """Handlers of events, each called before the kernel's handler, if it has one."""
    steps: Mapping[str, Step] = field(default_factory=dict)
    """The name of a kernel's step or deadline → the step that precedes it."""
    pacing: "Pacing | None" = None
    """Takes the place of the kernel's pacing in a training run."""
    carrier: "Carrier | None" = None
    """Takes the place of the trainer's memory, from which engines load weights."""
    choose_engine: "Callable[[RunConfig], Chooser | None]" = lambda _: None
    """Returns what takes the place of the kernel's choice of engines, if anything."""
    choose_worker: "Callable[[Run], str | None] | None" = None
    """Returns the worker for another attempt, "" for the controller; None if no worker
    can take it now. It takes the place of the controller, which runs all attempts.
    """
    follows: Mapping[Move, Callable[..., None]] = field(default_factory=dict)
    """The functions to call when a record has moved: an attempt or a group to a stage
    or status, a turn, an engine or the trainer in some way. They get the run, and what
    the move says.
    """
    waits: "Callable[[Run, Mapping[str, tuple[int, int]], float], Iterator[Wait]] | None" = None
    """Yields what the run waits for; it gets what `reading/waits.waits` gets."""
    check: Step | None = None
    """Raises AssertionError if an invariant of the mechanism is broken."""


Part = TypeVar("Part", bound=msgspec.Struct)


class Run:
    """The context of one event: `state`, which the sub-machines change, and `out`, to
    which they append commands.
    """

    def __init__(
        self,
        config: RunConfig,
        state: State,
        rules: Mapping[str, Rule],
        *,
        mechanisms: Iterable[Mechanism],
        pacing: Pacing,
        chooser: Chooser,
    ) -> None:
        self.config = config
        self.mechanisms = tuple(one for one in mechanisms if one.used(config))
        # the parts of the state of these mechanisms, by their type
        self.parts: dict[type, Any] = {
            one.state: _part(state, one.name, one.state)
            for one in self.mechanisms
            if one.state is not None
        }
        parts: list[Any] = list(self.parts.values())
        self._with_trajectories = [one for one in parts if hasattr(one, "trajectories")]
        self._with_engines = [one for one in parts if hasattr(one, "engines")]
        # move → the functions of the mechanisms that follow it
        self.followers: dict[Move, tuple[Callable[..., None], ...]] = {
            move: tuple(one.follows[move] for one in self.mechanisms if move in one.follows)
            for move in MOVES
        }
        self._serving_pacing = self._training_pacing = pacing
        self.chooser, self.carrier = chooser, Carrier()
        self.choose_worker: Callable[[Run], str | None] = lambda _: ""
        for one in self.mechanisms:
            self._training_pacing = one.pacing or self._training_pacing
            self.chooser = one.choose_engine(config) or self.chooser
            self.carrier = one.carrier or self.carrier
            self.choose_worker = one.choose_worker or self.choose_worker
        # what mechanisms derive from the state, by its type; no part of a snapshot
        self.derived: dict[type, Any] = {}
        self.rules = rules
        self.state = state
        self.now = 0.0
        self._fleet: Fleet | None = None
        self._fleet_before: Fleet | None = None  # until an engine changed
        self._turn_queues: TurnQueues | None = None
        self.deadlines: tuple[Step, ...] = ()
        self.out: list[Command] = []
        # facts on which core/lifecycle acts before the event is over
        self.over: deque[AttemptOver] = deque()
        # queues in which this event may have made a turn possible
        self.dirty_queues: list[EngineId | None] = []
        self.mode: Mode = preset(
            config.rollout.mode,
            config.rollout.alpha,
            early_updates="early_updates" not in config.ablation.without,
        )
        self.places = config.rollout.places
        self.scheduling: Scheduling = scheduling(config.rollout, config.ablation)
        self.tasks: dict[str, TaskConfig] = {task.name: task for task in config.tasks}
        self.task_weights = [(task.name, task.weight) for task in config.tasks]
        self.group_sizes = {name: config.group_size(name) for name in self.tasks}
        # task domains whose groups are complete only once their members are compared
        self.compared_domains = frozenset(
            name for name in self.tasks if any(one.pairwise for one in config.rewards_of(name))
        )
        self._pools = {task.name: config.pools_of(task.pool) for task in config.tasks}
        # pools by which turns wait for any engine; "" if it may be of any pool
        self.queue_pools: tuple[str, ...] = ("",)
        if not self.scheduling.assigns:
            owned = [pools[0] for pools in self._pools.values() if pools]
            if has_learned_pools(config):
                owned += [group.pool for group in config.engines if group.pool is not None]
            self.queue_pools = tuple(dict.fromkeys(["", *owned]))
        # A streamed step trains mini-batch by mini-batch as groups complete; any other
        # takes its batch whole.
        self.minibatches_per_step = (
            min(config.trainer.minibatches, config.rollout.groups_per_step)
            if self.mode.streamed
            else 1
        )

    def part(self, kind: type[Part]) -> Part:
        """The part of the state of the mechanism that has this kind of it."""
        part: Part = self.parts[kind]
        return part

    def follow(self, move: Move, *what: Any) -> None:
        """Tell the mechanisms that follow it of a move."""
        for follower in self.followers[move]:
            follower(self, *what)

    def forget_trajectory(self, trajectory_id: TrajectoryId) -> None:
        """Remove a trajectory from its table and from those of the mechanisms."""
        self.state.trajectories.pop(trajectory_id, None)
        for part in self._with_trajectories:
            part.trajectories.pop(trajectory_id, None)

    def forget_engine(self, engine_id: EngineId) -> None:
        """Remove an engine that is gone from the tables of the mechanisms."""
        for part in self._with_engines:
            part.engines.pop(engine_id, None)

    def with_steps(self, steps: Iterable[tuple[str, Step | None]]) -> Iterator[Step]:
        """Yield these steps of the kernel, each behind those of the mechanisms that
        precede it.
        """
        for name, step in steps:
            yield from (one.steps[name] for one in self.mechanisms if name in one.steps)
            if step is not None:
                yield step

    def emit(self, command: Command) -> None:
        self.out.append(command)

    def warn(self, component: str, message: str, *, count: str) -> None:
        """Warn the user, and count the warning under `count`."""
        watchdog = self.state.counters.watchdog
        watchdog[count] = watchdog.get(count, 0) + 1
        self.emit(Warn(component=component, message=message))

    def domain_of(self, trajectory: Trajectory) -> DomainStats:
        """The statistics of the trajectory's task domain."""
        name = self.state.groups[trajectory.group_id].name
        return self.state.domains.setdefault(name, DomainStats())

    def pools_of(self, trajectory: Trajectory) -> tuple[str, ...]:
        """Return the pools whose engines should run the trajectory's turns, the
        preferred one first; none if any engine may.
        """
        if trajectory.pool in self.config.pools:  # it may be gone since the run was resumed
            return self.config.pools_of(trajectory.pool)
        return self._pools.get(self.state.groups[trajectory.group_id].name, ())

    def preferred_pool(self, trajectory: Trajectory) -> str:
        """The first of these pools; "" if there is none."""
        return next(iter(self.pools_of(trajectory)), "")

    def next_version(self) -> int:
        """The step to which the next batch or mini-batch that is taken belongs: the
        trainer's, or the one after it if the trainer's has all its mini-batches.
        """
        trainer = self.state.trainer
        step_is_full = (
            trainer.parts_done + (trainer.status is TrainerStatus.TRAINING)
            >= self.minibatches_per_step
        )
        return trainer.step + step_is_full

    def taken_groups(self) -> int:
        """The number of groups that the batch of `next_version` already has, in
        mini-batches of a streamed step.
        """
        trainer = self.state.trainer
        if not self.mode.streamed or self.next_version() != trainer.step:
            return 0
        done = range(trainer.parts_done)
        return sum(self.groups_in_minibatch(part) for part in done) + len(trainer.batch)

    def open_version(self) -> int:
        """The step in which a group that completes now would be trained on, behind all
        that is buffered.
        """
        return trained_at(
            buffered=len(self.state.buffer),
            taken=self.taken_groups(),
            next_version=self.next_version(),
            groups_per_step=self.config.rollout.groups_per_step,
        )

    @property
    def colocated(self) -> bool:
        """True if the engines and the trainer take turns on the same devices."""
        return self.config.trainer.colocated and not self.state.serving

    @property
    def pacing(self) -> Pacing:
        """The pacing of the mode; a service always shares one pace."""
        return self._serving_pacing if self.state.serving else self._training_pacing

    @property
    def fleet(self) -> Fleet:
        """Aggregates over all engines."""
        if self._fleet is None:
            self._fleet = Fleet.of(self.state, self._fleet_before)
            self._fleet_before = None
        return self._fleet

    def fleet_changed(self) -> None:
        """Recompute the aggregates: an engine was added, removed, or changed otherwise
        than by its turns.
        """
        if self._fleet is not None:
            self._fleet, self._fleet_before = None, self._fleet

    @property
    def turn_queues(self) -> TurnQueues:
        """The queued turns by the engine that they wait for."""
        if self._turn_queues is None:
            self._turn_queues = TurnQueues.of(self.state)
        return self._turn_queues

    def rebuild_turn_queues(self) -> None:
        self._turn_queues = None

    def serving_origin(self) -> int:
        """The version from which the staleness of what is launched now counts."""
        assert self.fleet.oldest is not None, "a mode that admits training has weights"
        version, publication_id = self.fleet.oldest
        return origin(version, parted(self.state.publication.restores, version, publication_id))

    def admits_training(self) -> bool:
        """True if a later step could train on a trajectory that is launched now, under
        the engines' version.
        """
        return (
            self.training
            and self.fleet.oldest is not None
            and self.next_version() < self.config.run.steps
            and self.pacing.admits(self)
        )

    def groups_in_minibatch(self, part: int) -> int:
        """The number of groups in mini-batch `part`: the batch is split as evenly as
        whole groups allow.
        """
        total = self.config.rollout.groups_per_step
        return (
            total * (part + 1) // self.minibatches_per_step
            - total * part // self.minibatches_per_step
        )

    @property
    def training(self) -> bool:
        """True while more training steps are to come."""
        return self.state.phase is Phase.RUNNING


def _part(state: State, name: str, kind: type[Part]) -> Part:
    """Return the part of a mechanism's state; a snapshot has it as plain values."""
    part = state.mechanisms.get(name)
    if part is None:
        part = kind()
    elif not isinstance(part, kind):
        part = msgspec.convert(part, kind)
    state.mechanisms[name] = part
    return part
