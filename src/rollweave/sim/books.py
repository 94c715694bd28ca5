"""What the simulated trainer really did, written down beside the core, so that the core
cannot agree with its own mistakes.

Every method that finds a broken rule raises AssertionError: a group is delivered whole
and once in the lineage that survives, from trajectories that the store holds, within
the staleness bound; checkpoints that are asked for exist.
"""

from rollweave.core.policy.modes import preset
from rollweave.record.summary import Summary
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.sim.rollouts import Scored


class Books:
    """`scored` are the trajectories in the store."""

    def __init__(self, config: RunConfig, scored: dict[TrajectoryId, Scored]) -> None:
        self._config, self._scored = config, scored
        self._window = preset(
            config.rollout.mode, config.rollout.alpha, config.buffer.max_age
        ).window
        self._hand: c.TrainStep | None = None
        self._saving: c.SaveCheckpoint | None = None
        self._position = (0, 0)  # step and part that come next
        # step → what was trained in it
        self._lineage: dict[int, dict[GroupId, tuple[TrajectoryId, ...]]] = {}
        self._checkpoints: set[int] = set()

    @property
    def trained(self) -> int:
        """Trajectories trained in the lineage that survives."""
        return sum(len(members) for groups in self._lineage.values() for members in groups.values())

    def asked(self, command: c.Command) -> None:
        """The core asks the trainer for something."""
        match command:
            case c.TrainStep():
                self._begins(command)
            case c.MeasureRatios():
                self._measures(command)
            case c.SaveCheckpoint():
                assert command.step == self._position[0], (
                    f"step {command.step} is saved at {self._position}"
                )
                self._saving = command
            case c.PublishWeights(from_checkpoint=step) if step is not None:
                assert step in self._checkpoints, (
                    f"checkpoint {step} is to be published and does not exist"
                )
            case c.LoadWeights(from_checkpoint=step) if step is not None:
                assert step in self._checkpoints, (
                    f"checkpoint {step} is to be loaded and does not exist"
                )
            case c.MarkBest(step=step):
                assert step in self._checkpoints, (
                    f"checkpoint {step} is the best and does not exist"
                )
            case c.RestartTrainer():
                assert command.step in {None, *self._checkpoints}, (
                    f"checkpoint {command.step} is asked for and does not exist"
                )
            case _:
                pass

    def _begins(self, command: c.TrainStep) -> None:
        assert (command.step, command.part) == self._position, (
            f"{command.step}.{command.part} at {self._position}"
        )
        rollout = self._config.rollout
        for group in command.groups:
            members, size = group.trajectory_ids, self._config.group_size(group.name)
            assert min(rollout.min_members, size) <= len(set(members)) == len(members) <= size, (
                f"{group} is half delivered"
            )
            for step, groups in self._lineage.items():
                assert group.id not in groups, (
                    f"{group.id} was trained in step {step}, and is again in {command.step}"
                )
            for member in members:
                assert member in self._scored, (
                    f"{member} is to be trained on and is not in the store"
                )
                age = abs(command.step - self._scored[member].initiated)
                fresh = self._window is None or age <= self._window
                assert fresh, f"{member} is {age} steps old where {self._window} are allowed"
        ids = [group.id for group in command.groups]
        assert ids, f"step {command.step} is empty"
        assert len(ids) == len(set(ids)), f"a group comes twice in step {command.step}"
        self._hand = command

    def _measures(self, command: c.MeasureRatios) -> None:
        assert self._hand is None, f"ratios are asked for while {self._hand} is trained on"
        assert (command.step, command.part) == self._position, (
            f"{command.step}.{command.part} at {self._position}"
        )
        trained = {group_id for groups in self._lineage.values() for group_id in groups}
        assert command.groups, "ratios of nothing are asked for"
        for group in command.groups:
            assert group.id not in trained, f"{group.id} is to be measured, and was trained on"
            lacks = [member for member in group.trajectory_ids if member not in self._scored]
            assert not lacks, f"{lacks} are to be measured and not in the store"

    def said(self, event: e.Event) -> None:
        """The trainer says that it is done. Call it before the message may be lost."""
        match event:
            case e.StepTrained():
                assert self._hand is not None, f"{event} without a batch"
                step, part, parts = self._hand.step, self._hand.part, self._hand.parts
                trained = self._lineage.setdefault(step, {})
                trained |= {group.id: group.trajectory_ids for group in self._hand.groups}
                self._position, self._hand = (
                    (step + 1, 0) if part + 1 == parts else (step, part + 1),
                    None,
                )
            case e.TrainFailed():
                self._hand = None
            case e.CheckpointSaved(step=step):
                assert self._saving is not None, f"{event} without a command"
                self._checkpoints &= set(self._saving.keep)
                self._checkpoints.add(step)
            case e.TrainerReady(step=step):
                self._hand, self._position = None, (step, 0)
                self._lineage = {
                    kept: groups for kept, groups in self._lineage.items() if kept < step
                }
            case _:
                pass

    def close(self, summary: Summary) -> None:
        """The end of the run: what it says of itself is what happened."""
        staleness = summary.staleness_max
        fresh = self._window is None or staleness <= self._window
        assert fresh, f"staleness {staleness} is reported where {self._window} is allowed"
        over, begun = sum(summary.stop_reasons.values()), sum(summary.attempts.values())
        assert over == begun, (
            f"{begun} attempts were launched, {over} have a stop reason: {summary.attempts}"
        )
        # a run that ends with an error waits for nobody, and may not have heard the
        # trainer's last word
        if not summary.error:
            trained = summary.account.trained
            assert trained == self.trained, (
                f"{trained} trajectories are counted as trained, {self.trained} were"
            )
