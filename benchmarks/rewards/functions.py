"""The function of bench `rewards`."""

import os
import time
from collections.abc import Sequence

from rollweave.schema.chat import Message
from rollweave.schema.work import Task

SECONDS = "ROLLWEAVE_BENCH_REWARD_S"
"""Environment variable with the seconds that the function takes."""


def slow(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Wait, as for a slow judge."""
    time.sleep(float(os.environ[SECONDS]))
    return 0.5
