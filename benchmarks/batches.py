"""Batches of random tokens for benches of the trainer."""

import torch

from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.work import (
    Batch,
    Blame,
    ScoredGroup,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
    TurnSpan,
)


def random_batch(step: int, *, vocab: int, length: int, groups: int, members: int) -> Batch:
    """Return groups of sequences of `length` tokens, half of each sampled. The members
    of a group differ in their rewards.
    """
    generator = torch.Generator().manual_seed(step)
    half = length // 2
    made = []
    for number in range(groups):
        trajectories = []
        for member in range(members):
            tokens = torch.randint(1, vocab, (length,), generator=generator).tolist()
            sequence = TokenSequence(
                tokens=tuple(tokens),
                logprobs=tuple([0.0] * half + [-5.0] * (length - half)),
                segments=(
                    Segment(start=0, end=half, kind=SegmentKind.PROMPT, version=-1),
                    Segment(start=half, end=length, kind=SegmentKind.OUTPUT, version=step),
                ),
                turns=(TurnSpan(start=half, end=length),),
            )
            trajectories.append(
                Trajectory(
                    id=TrajectoryId(f"{step}.{number}.{member}"),
                    group_id=GroupId(f"{step}.{number}"),
                    task=Task(id=TaskId("t"), env="none", seed=0),
                    attempt=0,
                    initiated_version=step,
                    sequences=(sequence,),
                    reward=float(member),
                    stop_reason=StopReason.FINISHED,
                    blame=Blame.NONE,
                    engine="bench",
                )
            )
        made.append(
            ScoredGroup(
                id=GroupId(f"{step}.{number}"), env="none", trajectories=tuple(trajectories)
            )
        )
    return Batch(step=step, version=step, part=0, parts=1, groups=tuple(made))
