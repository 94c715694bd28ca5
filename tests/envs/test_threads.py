"""Environments that block delay only their own trajectory, and calls that do not return
are abandoned and counted.
"""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollweave.envs.base import Score, Step
from rollweave.envs.tasks import TaskSource
from rollweave.envs.threads import MAIN_THREAD, MAX_ABANDONED, EnvThreads, describe_error
from rollweave.schema.errors import EnvError, RewardError

from . import blocking
from .blocking import HERE, Gate
from .worlds import draw, episode, source

KINDS = ("Plain", "Mixed", "Quick", "Heir", "Async", "SlowToMake", "FailingInit", "Scored")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    new_gate = Gate()
    monkeypatch.setattr(blocking, "gate", new_gate)
    return new_gate


@pytest_asyncio.fixture
async def of(tmp_path: Path, gate: Gate) -> AsyncIterator[TaskSource]:
    tasks_of = source(tmp_path, *({"env": f"{HERE}{kind}", "tag": kind} for kind in KINDS))
    try:
        yield tasks_of
    finally:
        gate.opened.set()
        await tasks_of.close()


async def opened(of: TaskSource, kind: str) -> blocking.Plain:
    env = await of.provider(kind).open(draw(of, kind))
    await env.reset(draw(of, kind))
    return env  # type: ignore[return-value]


async def entered(gate: Gate) -> None:
    """Return once an environment has started to block."""
    await asyncio.to_thread(gate.entered.acquire)


async def abandoned(gate: Gate, of: TaskSource) -> blocking.Plain:
    env = await opened(of, "Plain")
    call = asyncio.create_task(env.step("block"))
    await entered(gate)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    return env


async def test_a_step_that_blocks_does_not_block_the_loop(of: TaskSource, gate: Gate) -> None:
    blocked, other = await opened(of, "Plain"), await opened(of, "Plain")
    call = asyncio.create_task(blocked.step("block"))
    await entered(gate)
    assert await other.step("a") == Step.of("on")
    assert not call.done()
    gate.opened.set()
    assert await call == Step.of("on")


async def test_environments_block_side_by_side(of: TaskSource) -> None:
    """Each waits for the other while it blocks."""
    first, second = await opened(of, "Plain"), await opened(of, "Plain")
    assert await asyncio.gather(first.step("meet"), second.step("meet")) == [Step.of("on")] * 2


async def test_an_environment_has_one_thread_from_its_constructor_to_its_close(
    of: TaskSource, gate: Gate
) -> None:
    env = await opened(of, "Plain")
    await env.step("a")
    await env.close()
    assert [what for what, _ in gate.calls] == ["made", "reset", "step", "close"]
    assert len(gate.threads) == 1
    assert threading.get_ident() not in gate.threads


async def test_async_methods_stay_on_the_loop(of: TaskSource, gate: Gate) -> None:
    env = await opened(of, "Mixed")
    await env.step("a")
    await env.close()
    places = {what: thread == threading.get_ident() for what, thread in gate.calls}
    assert places == {"made": False, "reset": False, "async a": True, "close": False}


@pytest.mark.parametrize(("kind", "on_loop"), [("Async", True), ("Quick", True), ("Heir", False)])
async def test_which_environments_need_a_thread(
    of: TaskSource, gate: Gate, kind: str, on_loop: bool
) -> None:
    env = await opened(of, kind)
    await env.step("a")
    await env.close()
    assert (gate.threads == {threading.get_ident()}) is on_loop


async def test_threads_are_reused_and_end_with_the_run(of: TaskSource) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        env = await opened(of, "Plain")
        await env.step("a")
        await env.close()
    (remaining,) = set(threading.enumerate()) - before
    await of.close()
    remaining.join(30)
    assert not remaining.is_alive()


async def test_an_abandoned_call_is_counted_and_its_environment_never_called_again(
    of: TaskSource, gate: Gate
) -> None:
    reports: list[str] = []
    of.threads.on_abandoned = reports.append
    env = await abandoned(gate, of)
    assert of.threads.abandoned == {f"step of environment {HERE}Plain": 1}
    assert reports[0].startswith(
        f"step of environment {HERE}Plain was abandoned and has not returned: its thread is lost"
    )
    with pytest.raises(EnvError, match="is not called again: a call of it has not returned"):
        await env.step("a")
    await env.close()
    assert [what for what, _ in gate.calls] == ["made", "reset", "step"]
    assert await (await opened(of, "Plain")).step("a") == Step.of("on")  # others continue


async def test_an_abandoned_call_that_returns_is_not_counted(of: TaskSource, gate: Gate) -> None:
    before = {*threading.enumerate()}  # of them, earlier tests' calls never return
    await abandoned(gate, of)
    gate.opened.set()
    for thread in {*threading.enumerate()} - before:
        if thread.name == "environment":
            await asyncio.to_thread(thread.join, 10)
    await asyncio.sleep(0)  # what they handed over to the loop
    assert of.threads.abandoned.total() == 0


async def test_the_end_of_a_run_does_not_wait_for_abandoned_calls(
    of: TaskSource, gate: Gate
) -> None:
    env = await abandoned(gate, of)
    env.kill()  # type: ignore[attr-defined]
    await of.close()
    with pytest.raises(EnvError, match="the run is ending"):
        await opened(of, "Plain")
    assert not gate.opened.is_set()


async def test_a_kill_abandons_the_call_in_progress(of: TaskSource, gate: Gate) -> None:
    env = await opened(of, "Plain")
    call = asyncio.create_task(env.step("block"))
    await entered(gate)
    env.kill()  # type: ignore[attr-defined]
    env.kill()  # type: ignore[attr-defined]
    assert of.threads.abandoned.total() == 1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert of.threads.abandoned.total() == 1


async def test_bounds_the_abandoned_calls(of: TaskSource, gate: Gate) -> None:
    for _ in range(MAX_ABANDONED):
        await abandoned(gate, of)
    with pytest.raises(
        EnvError,
        match=rf"at most {MAX_ABANDONED} calls .* got {MAX_ABANDONED}, most of them in step "
        r"of environment",
    ):
        await opened(of, "Plain")
    with pytest.raises(RewardError, match=f"at most {MAX_ABANDONED} calls"):
        await of.provider("Scored").score(episode(draw(of, "Scored")))
    await opened(of, "Async")  # has none


async def test_a_constructor_that_blocks_or_fails(of: TaskSource, gate: Gate) -> None:
    with pytest.raises(EnvError, match="making the environment raised RuntimeError: no database"):
        await opened(of, "FailingInit")
    call = asyncio.create_task(opened(of, "SlowToMake"))
    await entered(gate)
    assert await (await opened(of, "Plain")).step("a") == Step.of("on")
    gate.opened.set()
    assert await (await call).step("a") == Step.of("on")
    assert of.threads.abandoned.total() == 0


async def test_a_reward_has_a_thread_and_can_be_abandoned(of: TaskSource, gate: Gate) -> None:
    worlds, seen = of.provider("Scored"), episode(draw(of, "Scored"))
    call = asyncio.create_task(worlds.score(seen))
    await entered(gate)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert of.threads.abandoned == {f"score of environment {HERE}Scored": 1}
    gate.opened.set()
    assert await worlds.score(seen) == Score(reward=1.0)


def test_an_error_names_the_last_line_of_the_users_code() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value
    assert re.search(
        r"^step raised JSONDecodeError: .*test_threads\.py:\d+", describe_error("step", error)
    )
    assert error.__traceback__ is not None
    in_library = error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    assert re.search(r"json/decoder\.py:\d+", describe_error("step", in_library))
    assert describe_error("step", EnvError("no map")) == "step: no map"
    assert "step raised KeyError" in describe_error("step", KeyError("x"))
    cause, outer = ValueError("signal only works in main thread"), RuntimeError("outer")
    outer.__context__ = cause
    for each, needs in ((cause, True), (outer, True), (ValueError("signal"), False)):
        assert (MAIN_THREAD in describe_error("step", each)) is needs


async def test_a_thread_that_is_given_back_serves_the_next_environment() -> None:
    threads = EnvThreads()
    first, second = threads.lease("a"), threads.lease("b")
    idents = [await each.run("step", threading.get_ident) for each in (first, second)]
    assert idents[0] != idents[1]
    first.release()
    first.release()
    with pytest.raises(EnvError, match=r"^a is not called again: a call of it has not returned$"):
        await first.run("step", threading.get_ident)
    assert await threads.lease("c").run("step", threading.get_ident) == idents[0]
    threads.close()
    with pytest.raises(EnvError, match=r"^the run is ending$"):
        threads.lease("e")
