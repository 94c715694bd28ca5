"""Injected failures occur at the configured rates, and repeat at the same calls."""

import asyncio
import math
import statistics

import pytest

from rollweave.envs.base import Observation, Step, new_task
from rollweave.envs.boundary import GuardedEnv, score_episode
from rollweave.envs.faults import Faulty
from rollweave.schema.config.run import Faults
from rollweave.schema.errors import EnvError, RewardError

from .worlds import HERE, Echo, episode

CALLS = 400


def faulty(seed: int, **rates: float) -> Faulty:
    return Faulty(Echo(), Faults.model_validate(rates), seed=seed, block=False)


async def outcome(env: Faulty) -> str:
    """Return the outcome of one call. A coroutine that awaits anything would wait
    forever, because nothing else runs.
    """
    call = asyncio.ensure_future(env.step("a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not call.done():
        call.cancel()
        return "hang"
    if call.exception() is not None:
        return "error"
    return "fine" if isinstance(call.result(), Step) else "garbage"


async def fates(seed: int) -> list[str]:
    env = faulty(seed, env_error=0.2, env_hang=0.1, env_garbage=0.3)
    return [await outcome(env) for _ in range(CALLS)]


async def test_rates_and_determinism() -> None:
    outcomes = await fates(1)
    assert outcomes == await fates(1)
    assert outcomes != await fates(2)
    shares = {name: outcomes.count(name) / CALLS for name in ("error", "hang", "garbage", "fine")}
    expected = {"error": 0.2, "hang": 0.1, "garbage": 0.3, "fine": 0.4}
    assert all(abs(shares[name] - expected[name]) < 0.08 for name in expected), shares


async def test_without_faults_nothing_happens() -> None:
    env = faulty(0)
    assert isinstance(await env.reset(new_task()), Observation)
    assert {await outcome(env) for _ in range(50)} == {"fine"}


async def test_a_reset_can_fail_too() -> None:
    with pytest.raises(RuntimeError, match=r"injected by faults\.env_error"):
        await faulty(0, env_error=1.0).reset(new_task())


async def latencies(seed: int) -> list[float]:
    slept: list[float] = []

    async def sleep(delay: float) -> None:
        slept.append(delay)

    env = Faulty(
        Echo(), Faults(latency_s=2.0, latency_sigma=0.5), seed=seed, block=False, sleep=sleep
    )
    await env.reset(new_task())
    assert not slept
    for _ in range(CALLS):
        await env.step("a")
    return slept


async def test_latency_is_log_normal_and_deterministic() -> None:
    slept = await latencies(3)
    logs = [math.log(delay / 2.0) for delay in slept]
    assert abs(statistics.fmean(logs)) < 0.1
    assert abs(statistics.stdev(logs) - 0.5) < 0.1
    assert slept == await latencies(3)
    assert slept != await latencies(4)


async def test_faults_are_attributed_at_the_boundary() -> None:
    env = GuardedEnv(f"{HERE}Echo", {}, faults=Faults(env_error=1.0), seed=0, block=False)
    with pytest.raises(EnvError, match=r"step raised InjectedError: injected by faults\.env_error"):
        await env.step("a")
    env = GuardedEnv(f"{HERE}Echo", {}, faults=Faults(env_garbage=1.0), seed=0, block=False)
    with pytest.raises(EnvError, match="step must return Step, got 'not an observation'"):
        await env.step("a")


async def test_reward_faults() -> None:
    outcomes: list[object] = []
    for seed in range(100):
        call = score_episode(
            f"{HERE}Echo", {}, episode(new_task()), faults=Faults(reward_error=0.3), seed=seed
        )
        outcomes += await asyncio.gather(call, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    assert 15 < len(errors) < 45
    assert all("injected by faults.reward_error" in str(error) for error in errors)
