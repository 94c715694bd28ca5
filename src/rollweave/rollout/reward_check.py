"""The check of a URL or judge before a run: it is asked about invented attempts."""

import asyncio
import uuid

from rollweave.envs.threads import EnvThreads
from rollweave.io.loop_thread import run_apart
from rollweave.rollout.reward_sources import Finished, source_of
from rollweave.rollout.rewards import compare
from rollweave.schema.base import TaskId, TrajectoryId
from rollweave.schema.chat import Message
from rollweave.schema.config.rewards import RewardConfig
from rollweave.schema.packing import as_json
from rollweave.schema.work import StopReason, Task

QUESTION = Message(role="user", content="What is 2 + 2?")

ANSWERS = "4", "5"
"""Answers of the invented attempts. A pairwise judge compares both."""


def check_reward(reward: RewardConfig, *, domain: str, limit_s: float) -> float:
    """Ask a URL or judge for the reward of an invented attempt, within `limit_s`, and
    return it.

    Raises FieldError for a token or rubric that cannot be read, and EpisodeStopError if
    there is no reward.
    """
    brief = reward.model_copy(update={"timeout_s": min(limit_s, reward.timeout_s)})
    key = reward.judge.reference if reward.judge is not None else None
    payload = as_json({} if key is None else {key: "4"}).decode()
    right, wrong = (
        Finished(
            trajectory_id=TrajectoryId(f"dry-run.{number}"),
            attempt=0,
            task=Task(id=TaskId("dry-run"), env="", seed=0, tag=domain, payload=payload),
            conversation=(QUESTION, Message(role="assistant", content=answer)),
            reward=0.0,
            success=None,
            stop_reason=StopReason.FINISHED,
        )
        for number, answer in enumerate(ANSWERS)
    )
    run_id = f"dry-run-{uuid.uuid4().hex}"

    async def ask() -> float:
        clock = asyncio.get_running_loop().time
        source = source_of(brief, run_id=run_id, threads=EnvThreads(), clock=clock)
        try:
            return await (compare(source, right, wrong) if brief.pairwise else source.reward(right))
        finally:
            await source.close()

    return run_apart(ask())
