"""The messages between the bench and TRL's process.

The bench writes a `TrlSpec` to a file. After every `save_every` steps the process
writes a checkpoint and a line, a `TrlCheckpoint`; then it waits, with its clock
stopped, for a line that lets it continue.
"""

from typing import Any

from rollweave.schema.base import Struct
from rollweave.schema.work import Task


class TrlSpec(Struct, frozen=True, kw_only=True):
    """A training of TRL: `tasks` are those of all steps in order, one for each
    group.
    """

    model: str
    directory: str
    tasks: tuple[Task, ...]
    options: dict[str, Any]
    steps: int
    save_every: int
    groups_per_step: int
    group_size: int
    temperature: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    clip_low: float
    clip_high: float
    threads: int
    seed: int


class TrlCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint in directory `path`: the seconds from the start of the training, and
    wall-clock and processor seconds of each step since the last checkpoint.
    """

    step: int
    seconds: float
    step_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    path: str
