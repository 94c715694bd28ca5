"""Batches of which the controller sends only references, and which the trainer's ranks
read from the run's store. Every host sees the store, so no tokens go through the
controller (RollArt §6.3).

A reference has the place of a trajectory's record in the store, and the trajectory's
score without texts: about 50 bytes. Another host may not see a record as soon as the
controller has written it. A rank waits for a record for at most `SEEN_S`.
"""

import time
from pathlib import Path

import msgspec

from rollweave.record.store import StoredAttempt, read_unscored
from rollweave.schema.base import GroupId, Struct, TaggedStruct, TrajectoryId
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.training import Measure, TrainerCommand, TrainFailed, TrainOn
from rollweave.schema.work import Batch, Blame, ScoredGroup, StopReason, Trajectory

SEEN_S = 20.0
"""Maximum seconds until a record that was written is seen on another host: NFS caches
the attributes of files for some seconds.
"""

RETRY_S = 0.1
"""Seconds between two attempts to read a record."""


class StoredMember(Struct, frozen=True, kw_only=True, array_like=True):
    """The place of a trajectory in the store, and what training needs of its score."""

    segment: int
    offset: int
    nbytes: int
    reward: float | None
    success: bool | None
    stop_reason: StopReason
    blame: Blame
    rewards: dict[str, float]


class StoredGroup(Struct, frozen=True, kw_only=True):
    """A group, and its trajectories that are trained on."""

    id: GroupId
    env: str
    members: tuple[StoredMember, ...]
    restored_to: dict[TrajectoryId, int] = msgspec.field(default_factory=dict)


class StoredBatch(TaggedStruct, frozen=True, kw_only=True):
    """Train on mini-batch `part` of `parts` of step `step`, or `measure` its groups.
    The trajectories are in the store at `directory`; the host of a rank sees them
    within `seen_s` seconds. Answered as `TrainOn` and `Measure` are.
    """

    directory: str
    step: int
    part: int
    parts: int
    groups: tuple[StoredGroup, ...]
    measure: bool = False
    seen_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """The bytes of the batch's records in the store."""
        return sum(member.nbytes for group in self.groups for member in group.members)


RankCommand = TrainerCommand | StoredBatch


def member_of(entry: StoredAttempt) -> StoredMember:
    """Return the reference to a trajectory that has a score."""
    assert entry.score is not None, "only scored trajectories are trained on"
    return StoredMember(
        segment=entry.segment,
        offset=entry.offset,
        nbytes=entry.nbytes,
        reward=entry.score.reward,
        success=entry.score.success,
        stop_reason=entry.score.stop_reason,
        blame=entry.score.blame,
        rewards=entry.score.rewards,
    )


def executed(command: RankCommand) -> TrainerCommand | TrainFailed:
    """Return the command that a rank executes: for a stored batch, the command with the
    trajectories, which this function reads. If they cannot be read, return the reply
    `TrainFailed`.
    """
    if not isinstance(command, StoredBatch):
        return command
    try:
        groups = _groups_of(command)
    except CorruptJournalError as error:
        return TrainFailed(error=str(error), groups=tuple(group.id for group in command.groups))
    step, part = command.step, command.part
    if command.measure:
        return Measure(step=step, part=part, groups=groups)
    return TrainOn(
        batch=Batch(step=step, version=step, part=part, parts=command.parts, groups=groups)
    )


def _groups_of(stored: StoredBatch) -> tuple[ScoredGroup, ...]:
    """Read the trajectories of a batch. Raises CorruptJournalError for a damaged
    record, and for a record that this host does not see in time.
    """
    directory, until = Path(stored.directory), time.monotonic() + stored.seen_s
    return tuple(
        ScoredGroup(
            id=group.id,
            env=group.env,
            trajectories=tuple(_read(directory, member, until) for member in group.members),
            restored_to=group.restored_to,
        )
        for group in stored.groups
    )


def _read(directory: Path, member: StoredMember, until: float) -> Trajectory:
    while True:
        try:
            trajectory = read_unscored(directory, member.segment, member.offset, member.nbytes)
        except CorruptJournalError:
            if time.monotonic() > until:
                raise
        else:
            return msgspec.structs.replace(
                trajectory,
                reward=member.reward,
                success=member.success,
                stop_reason=member.stop_reason,
                blame=member.blame,
                rewards=member.rewards,
            )
        time.sleep(RETRY_S)
