"""Environments in processes: equal to inline ones, and survivable if they hang, die or
block.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollweave.envs.base import Observation, Score, Step
from rollweave.envs.process import ProcessEnv
from rollweave.envs.tasks import OpenedEnv, TaskSource
from rollweave.schema.errors import EnvError, RewardError
from rollweave.schema.work import Purpose
from tests.support.processes import alive

from .worlds import HERE, draw, episode, source

ECHO = {"env": f"{HERE}Echo", "tag": "echo", "isolation": "process"}
SCORED = {"env": f"{HERE}Scored", "tag": "scored", "isolation": "process"}


@pytest.fixture
async def of(tmp_path: Path) -> AsyncIterator[TaskSource]:
    tasks_of = source(
        tmp_path,
        ECHO,
        SCORED,
        {"env": f"{HERE}AsyncEcho", "tag": "async", "isolation": "process"},
        {"env": f"{HERE}Listener", "tag": "listener", "isolation": "process"},
        {"env": f"{HERE}BadConstructor", "tag": "bad", "isolation": "process"},
        {"env": f"{HERE}BadClose", "tag": "bad close", "isolation": "process"},
        {"env": f"{HERE}Alarmed", "tag": "alarmed", "isolation": "process"},
        {"env": f"{HERE}AsyncAlarmed", "tag": "async alarmed", "isolation": "process"},
        {"env": f"{HERE}Alarmed", "tag": "inline alarmed"},
        {"env": "frozenlake", "tag": "inline lake"},
        {"env": "frozenlake", "tag": "lake", "isolation": "process"},
    )
    yield tasks_of
    await tasks_of.close()
    assert len(tasks_of.processes) == 0


async def opened(of: TaskSource, name: str = "echo") -> OpenedEnv:
    env = await of.provider(name).open(draw(of, name))
    await env.reset(draw(of, name))
    return env


def pid(env: OpenedEnv) -> int:
    assert isinstance(env, ProcessEnv)
    assert env._process is not None
    return env._process.pid


async def test_code_of_the_users_runs_on_the_main_thread(of: TaskSource) -> None:
    """Signal handlers work in every method, and plain ones may run event loops."""
    task = draw(of, "alarmed")
    env = await of.provider("alarmed").open(task)
    assert (await env.reset(task)).messages[0].content == "rung"
    assert (await env.step("a")).messages[0].content == "rung"
    await env.close()
    assert (await of.provider("alarmed").score(episode(task, "a"))).reward == 1.0
    env = await opened(of, "async alarmed")
    await env.close()


async def test_inline_the_error_of_an_alarm_names_the_remedy(of: TaskSource) -> None:
    remedy = 'with isolation = "process", environments and the reward function of env jsonl run'
    task = draw(of, "inline alarmed")
    with pytest.raises(EnvError, match=f"signal only works in main thread.*; .*{remedy} there"):
        await of.provider("inline alarmed").open(task)
    with pytest.raises(RewardError, match=f"RuntimeError: no limit of time; .*{remedy} there"):
        await of.provider("inline alarmed").score(episode(task, "a"))


async def test_two_environments_run_one_after_another_in_one_process(of: TaskSource) -> None:
    task = draw(of, "echo")
    env = await of.provider("echo").open(task)
    assert await env.reset(task) == Observation.of(f"hello {task.seed}")
    assert await env.step("a") == Step.of("you said a", reward=0.25)
    first = pid(env)
    assert await env.step("end") == Step.of("you said end", reward=0.25, done=True, success=True)
    await env.close()
    await env.close()
    env.kill()
    other = await opened(of, "async")
    assert pid(other) == first
    assert await other.step("x") == Step.of("alive: True")
    await other.close()
    assert len(of.processes) == 1
    assert first != os.getpid()


async def test_equals_inline_isolation(of: TaskSource) -> None:
    inline = of.provider("inline lake")
    for index in range(3):
        task = of.draw("inline lake", index, Purpose.TRAIN)
        here, there = await inline.open(task), await of.provider("lake").open(task)
        assert await here.reset(task) == await there.reset(task)
        for action in ("<down>", "nonsense", "<right>", "<right>"):
            step = await here.step(action)
            assert step == await there.step(action)
            if step.done:
                break
        await here.close()
        await there.close()


async def test_passes_the_finish_reason(of: TaskSource) -> None:
    env = await opened(of, "listener")
    assert await env.step("a", finish_reason="length") == Step.of("a: length")
    assert await env.step("a") == Step.of("a: stop")
    await env.close()


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("raise", "step raised KeyError"),
        ("none", "step must return Step, got None"),
        ("exit", "step raised SystemExit: 3"),
    ],
)
async def test_a_failure_is_attributed_and_the_process_survives(
    of: TaskSource, action: str, problem: str
) -> None:
    env = await opened(of)
    with pytest.raises(EnvError, match=problem):
        await env.step(action)
    assert await env.step("a") == Step.of("you said a", reward=0.25)
    await env.close()


async def test_a_process_that_dies_fails_its_call_and_is_replaced(of: TaskSource) -> None:
    env = await opened(of)
    first = pid(env)
    with pytest.raises(EnvError, match=r"process is gone.*exit status 7"):
        await env.step("die")
    with pytest.raises(EnvError, match="exit status 7"):
        await env.step("a")
    await env.close()
    again = await opened(of)
    assert pid(again) != first
    os.kill(pid(again), signal.SIGKILL)
    with pytest.raises(EnvError, match="SIGKILL"):
        await again.step("block")
    await again.close()


async def test_survives_a_blocking_call(of: TaskSource) -> None:
    env = await opened(of)
    blocked = pid(env)
    call = asyncio.create_task(env.step("block"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await env.close()
    other = await opened(of)
    assert pid(other) != blocked
    await has_ended(blocked)
    await other.close()


async def test_kill_ends_the_process_and_fails_the_call_in_progress(of: TaskSource) -> None:
    env = await opened(of)
    killed = pid(env)
    call = asyncio.create_task(env.step("block"))
    await asyncio.sleep(0)
    env.kill()
    env.kill()
    with pytest.raises(EnvError, match="was killed"):
        await call
    with pytest.raises(EnvError, match="is closed"):
        await env.step("a")
    await has_ended(killed)


async def test_child_processes_end_with_the_environment(of: TaskSource) -> None:
    env = await opened(of)
    grandchild = int((await env.step("spawn")).messages[0].content)
    assert alive(grandchild)
    env.kill()
    await has_ended(grandchild)


async def test_a_cancelled_start_leaves_no_process(of: TaskSource) -> None:
    task = draw(of, "echo")
    env = await of.provider("echo").open(task)
    started = pid(env)
    call = asyncio.create_task(env.reset(task))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    env.kill()
    await has_ended(started)


async def test_environments_that_cannot_start_or_close(of: TaskSource) -> None:
    task = draw(of, "bad")
    env = await of.provider("bad").open(task)
    with pytest.raises(EnvError, match="making the environment raised RuntimeError: no database"):
        await env.reset(task)
    await env.close()
    env = await opened(of, "bad close")
    with pytest.raises(EnvError, match="close raised RuntimeError: cannot close"):
        await env.close()


async def test_computes_rewards_in_the_process(of: TaskSource) -> None:
    worlds, task = of.provider("scored"), draw(of, "scored")
    assert await worlds.score(episode(task, "score")) == Score(reward=2.0, success=True)
    with pytest.raises(RewardError, match="score raised ValueError: bad"):
        await worlds.score(episode(task, "raise"))
    assert len(of.processes) == 1
    call = asyncio.create_task(worlds.score(episode(task, "block")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await worlds.score(episode(task, "x")) == Score(reward=0.75)


async def test_a_reward_without_a_hook_needs_no_process(of: TaskSource) -> None:
    score = await of.provider("echo").score(episode(draw(of, "echo"), rewards=(1.0, 0.5)))
    assert score == Score(reward=1.5)
    assert len(of.processes) == 0


async def test_survives_a_hanging_start_and_a_closed_pool_starts_nothing(tmp_path: Path) -> None:
    hanging = {
        **ECHO,
        "env": "tests.support.faulty:FaultyGame",
        "options": {"faults": {"hangs": 1.0}},
    }
    of = source(tmp_path, hanging)
    env = await of.provider("echo").open(draw(of, "echo"))
    first = pid(env)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await env.reset(draw(of, "echo"))
    await env.close()
    await has_ended(first)
    await of.close()
    with pytest.raises(EnvError, match="the run is ending"):
        await of.provider("echo").open(draw(of, "echo"))


def test_processes_do_not_outlive_a_parent_that_is_killed_while_they_hang(tmp_path: Path) -> None:
    """A second process opens an environment that blocks, sends its process id, and is
    killed.
    """
    program = f"""
import asyncio, pathlib, sys
from tests.envs.worlds import HERE, draw, source
async def main():
    of = source(pathlib.Path({str(tmp_path)!r}), {{"env": "tests.envs.worlds:Echo", "tag": "echo", "isolation": "process"}})
    env = await of.provider("echo").open(draw(of, "echo"))
    await env.reset(draw(of, "echo"))
    call = asyncio.create_task(env.step("block"))
    await asyncio.sleep(0)
    print(env._process.pid, flush=True)
    await call
asyncio.run(main())
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_for(child)


async def has_ended(process: int) -> None:
    """Return once the process has ended; only the test's time limit bounds the wait."""
    await asyncio.to_thread(wait_for, process)


def wait_for(process: int) -> None:
    while alive(process):
        time.sleep(0.01)
