"""Helpers of the tests of training."""

from pathlib import Path

import msgspec

from rollweave.schema.work import Batch

ROOT = Path(__file__).parents[2]


def poisoned(batch: Batch, value: float) -> Batch:
    """Return the batch with one log-prob of its last group replaced."""
    group = batch.groups[-1]
    trajectory = group.trajectories[0]
    sequence = trajectory.sequences[0]
    place = next(i for i, sampled in enumerate(sequence.output_mask()) if sampled)
    logprobs = (*sequence.logprobs[:place], value, *sequence.logprobs[place + 1 :])
    sequence = msgspec.structs.replace(sequence, logprobs=logprobs)
    trajectory = msgspec.structs.replace(trajectory, sequences=(sequence,), reward=5.0)
    group = msgspec.structs.replace(group, trajectories=(trajectory, *group.trajectories[1:]))
    return msgspec.structs.replace(batch, groups=(*batch.groups[:-1], group))
