"""Reward functions that a run deploys on Ray Serve."""

import asyncio
import functools
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.record.store import TrajectoryReader
from rollweave.rollout.reward_sources import Finished, RewardCall
from rollweave.schema.base import TaskId, TrajectoryId
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.roles import DeployedFunction
from rollweave.schema.work import StopReason, Task
from rollweave_ray.applications import UNPROCESSABLE, Answers, RewardApp
from tests.support.real_runs import GROUPS, MEMBERS, lake, living, run_dir, summary

RAY_S = 500.0
"""Maximum seconds of a run that starts Ray and Ray Serve, which takes a minute on a
busy machine.
"""

calls: list[str] = []


def counted(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Return the length of the conversation, and note the call."""
    calls.append(task.id)
    return float(len(conversation))


def broken(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Fail."""
    raise KeyError("no such word")


def place(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Return the process that computes it."""
    return float(os.getpid())


def call(key: str) -> bytes:
    finished = Finished(
        trajectory_id=TrajectoryId("g0.0"),
        attempt=0,
        task=Task(id=TaskId("t"), env="frozenlake", seed=1, tag="lake"),
        conversation=(Message(role="user", content="?"), Message(role="assistant", content="!")),
        reward=0.5,
        success=None,
        stop_reason=StopReason.FINISHED,
    )
    return msgspec.json.encode(RewardCall(key=key, finished=finished))


def app(function: str) -> RewardApp:
    deployed = DeployedFunction(name="r", function=f"{__name__}:{function}", timeout_s=5.0)
    return RewardApp(deployed, b"", b"")


async def test_a_key_is_computed_once() -> None:
    calls.clear()
    instance = app("counted")
    answers = await asyncio.gather(*(instance.answer("", call(key)) for key in ("a", "a", "b")))
    assert [(status, msgspec.json.decode(body)) for status, body in answers] == [
        (200, {"reward": 2.0})
    ] * 3
    assert await instance.answer("", call("a")) == answers[0]
    assert calls == ["t", "t"]


async def test_a_failure_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = app("broken")
    status, body = await instance.answer("", call("a"))
    assert (status, b"KeyError: 'no such word'" in body) == (UNPROCESSABLE, True)
    assert (await instance.answer("", b'{"key": 1}'))[0] == 400
    monkeypatch.setattr("rollweave_ray.applications.PAYLOAD_BYTES", 10)
    assert (await instance.answer("", call("b")))[0] == 413


async def test_answers_are_bounded_by_number_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones are forgotten, except those that are still being computed."""
    monkeypatch.setattr("rollweave_ray.applications.REMEMBERED_BYTES", 10)
    answers, computed, slow = Answers(), list[str](), asyncio.Event()

    async def compute(key: str) -> tuple[int, bytes]:
        computed.append(key)
        if key == "slow":
            await slow.wait()
        return 200, b"four"

    waiting = asyncio.create_task(answers.of("slow", lambda: compute("slow")))
    await asyncio.sleep(0)
    for key in ("a", "b", "c", "c", "b", "a"):
        await answers.of(key, functools.partial(compute, key))
    assert computed == ["slow", "a", "b", "c", "a"]
    again = asyncio.create_task(answers.of("slow", lambda: compute("slow")))
    slow.set()
    assert await waiting == await again == (200, b"four")
    monkeypatch.setattr("rollweave_ray.applications.REMEMBERED", 1)
    await answers.of("d", lambda: compute("d"))
    await answers.of("d", lambda: compute("d"))
    await answers.of("slow", lambda: compute("slow"))
    assert computed == ["slow", "a", "b", "c", "a", "d", "slow"]


def deployed_run(directory: Path, function: str, **sections: Any) -> RunConfig:
    reward = {"name": "r", "weight": 0.0, "run": "serverless", "timeout_s": 100.0}
    return lake(
        directory,
        rewards=[{**reward, "function": f"{__name__}:{function}"}],
        eval={"every": 0, "final_episodes": 2},
        **sections,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or importlib.util.find_spec("starlette") is None,
    reason="Ray Serve is not installed",
)
def test_a_run_computes_rewards_on_ray_serve(tmp_path: Path) -> None:
    config = deployed_run(tmp_path, "place", workers={"count": 1})
    with living(config) as life:
        assert life.process.wait(RAY_S) == 0, life.output
        assert not life.children()
        ours = life.process.pid
    assert summary(config)["account"]["trained"] == GROUPS * MEMBERS * config.run.steps
    entries = TrajectoryReader(run_dir(config) / "trajectories").entries
    places = {entry.score.rewards["r"] for entry in entries if entry.score is not None}
    assert places
    assert ours not in places
    assert not [place for place in places if Path(f"/proc/{int(place)}").exists()]
