"""The ends of a run's trajectories: the steps that trained them, their account, and the
versions of their tokens.
"""

from collections.abc import Sequence
from typing import Any

from rollweave.record.journal import Replay
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Command, TrainStep
from rollweave.schema.events import Event, StepTrained
from rollweave.schema.work import SegmentKind, TokenSequence


class Lineage:
    """The trajectories of each step of the surviving lineage: a step that was trained
    again counts as trained the last time.
    """

    def __init__(self) -> None:
        self._requested: dict[tuple[int, int], tuple[TrajectoryId, ...]] = {}
        self._trained: dict[tuple[int, int], tuple[TrajectoryId, ...]] = {}
        self.differing = 0
        """Events that a replay decides differently."""

    def read(self, replay: Replay) -> None:
        """Read one journal, which continues the one before."""
        for _, event, commands in replay:
            self.record(event, commands)
        self.differing += replay.differing
        replay.core.check()

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        """Record one event and its commands."""
        if isinstance(event, StepTrained):
            self._trained[event.step, event.part] = self._requested[event.step, event.part]
        for command in commands:
            if isinstance(command, TrainStep):
                ids = tuple(member for group in command.groups for member in group.trajectory_ids)
                self._requested[command.step, command.part] = ids

    @property
    def steps(self) -> list[int]:
        """Return the trained steps, in order."""
        return sorted({step for step, _ in self._trained})

    @property
    def ids(self) -> list[TrajectoryId]:
        """Return the trajectories of all steps, in their order."""
        return [member for place in sorted(self._trained) for member in self._trained[place]]


def unaccounted(account: dict[str, Any], *, trained: int) -> int:
    """Return the number of started trajectories without a recorded end, plus those
    recorded as trained that were not.
    """
    ends = (
        account["trained"]
        + sum(account["dropped"].values())
        + account["cancelled"]
        + account["buffered"]
    )
    return int(abs(account["started"] - ends) + abs(account["trained"] - trained))


def versions_of(sequences: Sequence[TokenSequence]) -> set[int]:
    """Return the weight versions of these tokens."""
    segments = [segment for sequence in sequences for segment in sequence.segments]
    return {segment.version for segment in segments if segment.kind is SegmentKind.OUTPUT}
