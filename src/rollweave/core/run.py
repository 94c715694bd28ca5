"""What the sub-machines share: the settings, the state, the moment, and the commands
gathered for this event.
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
from rollweave.core.state import Phase, State, TrainerStatus, Trajectory
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
    """One handling of one event is a walk over `state`; what it decides is appended to
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
        # lanes in which this event may have made a turn possible
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
        """Tell the user and count it under `count`."""
        watchdog = self.state.counters.watchdog
        watchdog[count] = watchdog.get(count, 0) + 1
        self.emit(Warn(component=component, message=message))

    def next_version(self) -> int:
        """The version that the next mini-batch to be taken will be trained at: the step
        that follows a running one.

        While a streamed step still lacks mini-batches, what completes now belongs to
        it.
        """
        trainer = self.state.trainer
        step_is_full = (
            trainer.parts_done + (trainer.status is TrainerStatus.TRAINING)
            >= self.minibatches_per_step
        )
        return trainer.step + step_is_full

    @property
    def independent_updates(self) -> bool:
        """Training, each engine at its own pace (`core/version_affinity`)."""
        return self.mode.alone and not self.state.serving

    @property
    def fleet(self) -> Fleet:
        """All engines together."""
        if self._fleet is None:
            self._fleet = Fleet.of(self.state)
        return self._fleet

    def fleet_changed(self) -> None:
        """An engine came, went, or changed in another way than by its turns."""
        self._fleet = None

    @property
    def turn_queues(self) -> TurnQueues:
        """Queued turns, by whom they wait for."""
        if self._lanes is None:
            self._lanes = TurnQueues.of(self.state)
        return self._lanes

    def rebuild_turn_queues(self) -> None:
        self._lanes = None

    @property
    def length_index(self) -> LengthIndex:
        """Trajectories under way by their estimates.

        Kept only where they have engines of their own.
        """
        if self._order is None:
            self._order = LengthIndex.of(
                self.state, by_level=self.scheduling.priority == "longest_first"
            )
        return self._order

    def reindex(self, trajectory: Trajectory) -> None:
        """The trajectory's estimate, home or stage has changed."""
        if self._order is not None:
            self._order.update(trajectory)

    def serving_version(self) -> int | None:
        """The oldest version among engines that have weights; None if no engine has
        any.
        """
        return self.fleet.version

    def admits_training(self) -> bool:
        """True if a trajectory that is launched now, under the engines' version, could
        be trained on by a step to come.
        """
        version, next_version = self.serving_version(), self.next_version()
        return (
            self.training
            and version is not None
            and next_version < self.config.run.steps
            and (self.independent_updates or acceptable(version, next_version, self.mode.window))
        )

    def groups_in_minibatch(self, part: int) -> int:
        """Groups in mini-batch `part`: the batch split as evenly as whole groups allow."""
        total = self.config.rollout.groups_per_step
        return (
            total * (part + 1) // self.minibatches_per_step
            - total * part // self.minibatches_per_step
        )

    @property
    def training(self) -> bool:
        """True while more training steps are to come."""
        return self.state.phase is Phase.RUNNING
