"""What the sub-machines share: the settings, the state, the time, the facts posted and
the commands emitted while one event is handled.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rollweave.core.fleet import Fleet
from rollweave.core.length_index import LengthIndex
from rollweave.core.policy.experience import Rule
from rollweave.core.policy.modes import Mode, preset
from rollweave.core.policy.scheduling import Scheduling, scheduling
from rollweave.core.policy.staleness import acceptable
from rollweave.core.state import DomainStats, Phase, State, TrainerStatus, Trajectory
from rollweave.core.turn_queues import TurnQueues
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import Command, Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import TaskConfig
from rollweave.schema.work import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOver:
    """The fact that an attempt is over: scored, or ended for `reason`."""

    trajectory_id: TrajectoryId
    reason: StopReason
    scored: bool = False
    repeated: bool = False


class Run:
    """Handling an event walks over `state`, and appends the commands that follow to
    `out`.
    """

    def __init__(self, config: RunConfig, state: State, rules: Mapping[str, Rule]) -> None:
        self.config = config
        self.rules = rules
        self.state = state
        self.now = 0.0
        self._fleet: Fleet | None = None
        self._lanes: TurnQueues | None = None
        self._order: LengthIndex | None = None
        self.out: list[Command] = []
        # facts on which core/lifecycle acts before the event is over
        self.over: deque[AttemptOver] = deque()
        # queues in which this event may have made a turn possible
        self.dirty_queues: list[EngineId | None] = []
        self.mode: Mode = preset(config.rollout.mode, config.rollout.alpha, config.buffer.max_age)
        self.scheduling: Scheduling = scheduling(config.rollout)
        self.tasks: dict[str, TaskConfig] = {task.name: task for task in config.tasks}
        self.task_weights = [(task.name, task.weight) for task in config.tasks]
        self.group_sizes = {name: config.group_size(name) for name in self.tasks}
        # A streamed step trains mini-batch by mini-batch as groups complete; any other
        # takes its batch whole.
        self.minibatches_per_step = (
            min(config.trainer.minibatches, config.rollout.groups_per_step)
            if self.mode.streamed
            else 1
        )

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

    def next_version(self) -> int:
        """The version at which the next mini-batch to be taken will be trained: the
        step that follows a running one.

        While a streamed step still lacks mini-batches, groups that complete now belong
        to it.
        """
        trainer = self.state.trainer
        step_is_full = (
            trainer.parts_done + (trainer.status is TrainerStatus.TRAINING)
            >= self.minibatches_per_step
        )
        return trainer.step + step_is_full

    @property
    def independent_updates(self) -> bool:
        """True in training if each engine updates its weights independently
        (`core/version_affinity`).
        """
        return self.mode.alone and not self.state.serving

    @property
    def fleet(self) -> Fleet:
        """Aggregates over all engines."""
        if self._fleet is None:
            self._fleet = Fleet.of(self.state)
        return self._fleet

    def fleet_changed(self) -> None:
        """Recompute the aggregates: an engine was added, removed, or changed otherwise
        than by its turns.
        """
        self._fleet = None

    @property
    def turn_queues(self) -> TurnQueues:
        """The queued turns by the engine that they wait for."""
        if self._lanes is None:
            self._lanes = TurnQueues.of(self.state)
        return self._lanes

    def rebuild_turn_queues(self) -> None:
        self._lanes = None

    @property
    def length_index(self) -> LengthIndex:
        """The trajectories under way by their estimates.

        Maintained only while trajectories are assigned to engines.
        """
        if self._order is None:
            self._order = LengthIndex.of(
                self.state, by_level=self.scheduling.priority == "longest_first"
            )
        return self._order

    def reindex(self, trajectory: Trajectory) -> None:
        """Index the trajectory again after its estimate, engine or stage has changed."""
        if self._order is not None:
            self._order.update(trajectory)

    def serving_version(self) -> int | None:
        """The oldest version among engines that have weights; None if no engine has
        any.
        """
        return self.fleet.version

    def admits_training(self) -> bool:
        """True if a later step could train on a trajectory that is launched now, under
        the engines' version.
        """
        version, next_version = self.serving_version(), self.next_version()
        return (
            self.training
            and version is not None
            and next_version < self.config.run.steps
            and (self.independent_updates or acceptable(version, next_version, self.mode.window))
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
