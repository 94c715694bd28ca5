"""An oracle of the trainer's accounts: it follows the simulated trainer independently
of the core, so that the core cannot confirm its own mistakes.

Every method that detects a broken rule raises AssertionError: a group is delivered in
full and once in the surviving lineage, from trajectories in the store, within the
staleness bound; requested checkpoints exist.
"""

from rollweave.core.policy.modes import origin, preset
from rollweave.core.policy.redundancy import MIN_MEMBERS
from rollweave.record.summary import Summary
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave_sim.rollouts import Scored


class TrainerOracle:
    """Checks the trainer's commands and events. `scored` are the trajectories in the
    store.
    """

    def __init__(self, config: RunConfig, scored: dict[TrajectoryId, Scored]) -> None:
        self._config, self._scored = config, scored
        self._window = preset(config.rollout.mode, config.rollout.alpha).window
        self._training: c.TrainStep | None = None
        self._saving: c.SaveCheckpoint | None = None
        self._position = (0, 0)  # next step and part
        # step → groups trained in it
        self._lineage: dict[int, dict[GroupId, tuple[TrajectoryId, ...]]] = {}
        self._checkpoints: set[int] = set()

    @property
    def trained(self) -> int:
        """Return the number of trajectories trained in the surviving lineage."""
        return sum(len(members) for groups in self._lineage.values() for members in groups.values())

    def on_command(self, command: c.Command) -> None:
        """Check a command of the core to the trainer."""
        match command:
            case c.TrainStep():
                self._check_step(command)
            case c.MeasureGroups():
                self._check_measurement(command)
            case c.SaveCheckpoint():
                assert command.step == self._position[0], (
                    f"step {command.step} is saved at {self._position}"
                )
                self._saving = command
            case c.PublishWeights(from_checkpoint=step) if step is not None:
                assert step in self._checkpoints, f"checkpoint {step} to publish does not exist"
            case c.LoadWeights(from_checkpoint=step) if step is not None:
                assert step in self._checkpoints, f"checkpoint {step} to load does not exist"
            case c.MarkBest(step=step):
                assert step in self._checkpoints, (
                    f"checkpoint {step} to mark as best does not exist"
                )
            case c.RestartTrainer():
                assert command.step in {None, *self._checkpoints}, (
                    f"checkpoint {command.step} to restore does not exist"
                )
            case _:
                pass

    def _check_step(self, command: c.TrainStep) -> None:
        assert (command.step, command.part) == self._position, (
            f"{command.step}.{command.part} at {self._position}"
        )
        for group in command.groups:
            members, size = group.trajectory_ids, self._config.group_size(group.name)
            assert min(MIN_MEMBERS, size) <= len(set(members)) == len(members) <= size, (
                f"{group} is delivered in part"
            )
            for step, groups in self._lineage.items():
                assert group.id not in groups, (
                    f"{group.id} was trained in step {step} and again in {command.step}"
                )
            for member in members:
                assert member in self._scored, f"{member} to train on is not in the store"
                initiated = self._scored[member].initiated
                age = abs(command.step - origin(initiated, group.restored_to.get(member)))
                allowed = self._window is None or age <= self._window
                assert allowed, f"{member} is {age} steps old, at most {self._window} are allowed"
        ids = [group.id for group in command.groups]
        assert ids, f"step {command.step} is empty"
        assert len(ids) == len(set(ids)), f"a group occurs twice in step {command.step}"
        self._training = command

    def _check_measurement(self, command: c.MeasureGroups) -> None:
        assert self._training is None, f"groups are measured while {self._training} is trained on"
        assert (command.step, command.part) == self._position, (
            f"{command.step}.{command.part} at {self._position}"
        )
        trained = {group_id for groups in self._lineage.values() for group_id in groups}
        assert command.groups, "no group is to be measured"
        for group in command.groups:
            assert group.id not in trained, f"{group.id} to measure was trained on already"
            missing = [member for member in group.trajectory_ids if member not in self._scored]
            assert not missing, f"{missing} to measure are not in the store"

    def on_event(self, event: e.Event) -> None:
        """Record an event of the trainer. Call it before the message may be lost."""
        match event:
            case e.StepTrained():
                assert self._training is not None, f"{event} without a batch"
                step, part, parts = self._training.step, self._training.part, self._training.parts
                trained = self._lineage.setdefault(step, {})
                trained |= {group.id: group.trajectory_ids for group in self._training.groups}
                self._position, self._training = (
                    (step + 1, 0) if part + 1 == parts else (step, part + 1),
                    None,
                )
            case e.TrainFailed():
                self._training = None
            case e.CheckpointSaved(step=step):
                assert self._saving is not None, f"{event} without a command"
                self._checkpoints &= set(self._saving.keep)
                self._checkpoints.add(step)
            case e.TrainerReady(step=step):
                self._training, self._position = None, (step, 0)
                self._lineage = {
                    past_step: groups
                    for past_step, groups in self._lineage.items()
                    if past_step < step
                }
            case _:
                pass

    def close(self, summary: Summary) -> None:
        """Check the summary of a finished run against the recorded training."""
        staleness = summary.staleness_max
        allowed = self._window is None or staleness <= self._window
        assert allowed, f"staleness {staleness} is reported, at most {self._window} is allowed"
        ended, launched = sum(summary.stop_reasons.values()), sum(summary.attempts.values())
        assert ended == launched, (
            f"{launched} attempts were launched, {ended} have a stop reason: {summary.attempts}"
        )
        # A run that ends with an error does not wait for the trainer's last event.
        if not summary.error:
            trained = summary.account.trained
            assert trained == self.trained, (
                f"{trained} trajectories are counted as trained, got {self.trained}"
            )
