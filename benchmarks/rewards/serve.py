"""The part of bench `rewards` on Ray Serve: a function that scales to zero, from its
first call to the end of its last instance.
"""

import asyncio
import contextlib
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure
from rollweave.envs.threads import EnvThreads
from rollweave.io.extras import how_to_install, missing_from
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.reward_sources import Finished, Source, source_of
from rollweave.runtime.hosts.on_serve import IDLE_S
from rollweave.runtime.hosts.serverless import deployed
from rollweave.schema.base import Struct, TaskId, TrajectoryId
from rollweave.schema.chat import Message
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import StopReason, Task

FIGURES = (
    "cold_start_s",
    "overhead_ms_serverless",
    "lost_serverless",
    "utilisation",
    "utilisation_dedicated",
    "instances_at_end",
)

SAMPLE_S = 0.2
"""Seconds between two counts of the instances."""


class ServePlan(Struct, frozen=True, kw_only=True):
    """Bursts of calls, `at_once` at a time, each computed in `reward_s`, with `gap_s`
    between two bursts.
    """

    bursts: int
    calls: int
    at_once: int
    reward_s: float
    gap_s: float


FULL = ServePlan(bursts=3, calls=60, at_once=2, reward_s=0.5, gap_s=2 * IDLE_S)
QUICK = ServePlan(bursts=1, calls=8, at_once=1, reward_s=0.2, gap_s=0.0)


def measure_serverless(
    plan: ServePlan, config: RunConfig, progress: Callable[[str], None]
) -> tuple[dict[str, Figure], dict[str, str]]:
    """Return the figures and their conditions. `config` has one reward, which is
    deployed.
    """
    if missing_from("serverless"):
        reason = f"not measured: Ray Serve is not installed ({how_to_install('serverless')})"
        return dict.fromkeys(FIGURES), dict.fromkeys(FIGURES, reason)
    figures = asyncio.run(_measure(plan, config, progress))
    return figures, {
        "cold_start_s": "the first call of a burst less the seconds that its reward waits: an "
        "instance starts, imports and answers; median over the bursts, before each of which there "
        "was no instance",
        "overhead_ms_serverless": f"a call less its {plan.reward_s:g} s, {plan.at_once} at once, "
        "median over the calls after the first of each burst, on a Ray of this machine",
        "utilisation": f"seconds of rewards over seconds of instances: {plan.bursts} bursts of "
        f"{plan.calls} calls, {plan.gap_s:g} s apart; an instance ends after {IDLE_S:g} s without "
        "a call",
        "utilisation_dedicated": f"the same with {plan.at_once} instances all the time",
        "instances_at_end": "instances when the bench gave up waiting, or 0",
    }


async def _measure(
    plan: ServePlan, config: RunConfig, progress: Callable[[str], None]
) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        log = Path(scratch) / "serverless.log"
        async with deployed(
            config, run_id="bench", log=log, on_status=progress, on_lost=progress
        ) as urls:
            reward, loop = config.rewards[0], asyncio.get_running_loop()
            threads = EnvThreads()
            source = source_of(
                reward, run_id="b", threads=threads, clock=loop.time, deployed=urls[reward.name]
            )
            instances = await asyncio.to_thread(_Instances)
            counting = asyncio.create_task(instances.count())
            try:
                return await _bursts(plan, source, instances, progress)
            finally:
                counting.cancel()
                await source.close()
                threads.close()
                await asyncio.to_thread(instances.close)


async def _bursts(
    plan: ServePlan, source: Source, instances: "_Instances", progress: Callable[[str], None]
) -> dict[str, Figure]:
    cold: list[float] = []
    warm: list[float] = []
    lost, began = 0, time.monotonic()
    for burst in range(plan.bursts):
        if burst:
            await asyncio.sleep(plan.gap_s)
            await instances.none_left()
        first = await _call(source, f"{burst}.first")
        cold += [] if first is None else [first - plan.reward_s]
        slots = asyncio.Semaphore(plan.at_once)

        async def one(name: str, slots: asyncio.Semaphore = slots) -> float | None:
            async with slots:
                return await _call(source, name)

        seconds = await asyncio.gather(*(one(f"{burst}.{n}") for n in range(plan.calls - 1)))
        done = [second for second in seconds if second is not None]
        warm += [1e3 * (second - plan.reward_s) for second in done]
        lost += plan.calls - len(done) - (first is not None)
        progress(f"serverless, burst {burst + 1}: the first call took {first or 0.0:.1f} s")
    await instances.none_left()
    busy = plan.reward_s * (plan.bursts * plan.calls - lost)
    dedicated = plan.at_once * (time.monotonic() - began)
    return {
        "cold_start_s": statistics.median(cold) if cold else None,
        "overhead_ms_serverless": statistics.median(warm) if warm else None,
        "lost_serverless": lost,
        "utilisation": busy / instances.seconds,
        "utilisation_dedicated": busy / dedicated,
        "instances_at_end": instances.now,
    }


async def _call(source: Source, name: str) -> float | None:
    """Return the seconds that a reward took; None if it was lost."""
    finished = Finished(
        trajectory_id=TrajectoryId(name),
        attempt=0,
        task=Task(id=TaskId("t"), env="frozenlake", seed=0, tag="frozenlake"),
        conversation=(Message(role="user", content="?"), Message(role="assistant", content="!")),
        reward=0.0,
        success=None,
        stop_reason=StopReason.FINISHED,
    )
    began = time.monotonic()
    try:
        await source.reward(finished)
    except EpisodeStopError:
        return None
    return time.monotonic() - began


class _Instances:
    """Counts the instances, as a second driver of Ray."""

    def __init__(self) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._serve: Any = importlib.import_module("ray.serve")
        self._ray.init(address="auto", logging_level="warning", log_to_driver=False)
        self.seconds, self.now, self._none = 0.0, 0, asyncio.Event()

    async def count(self) -> None:
        """Add up the instances' seconds until it is cancelled."""
        before = time.monotonic()
        while True:
            self.now = await asyncio.to_thread(self._alive)
            (self._none.clear if self.now else self._none.set)()
            now = time.monotonic()
            self.seconds += self.now * (now - before)
            before = now
            await asyncio.sleep(SAMPLE_S)

    async def none_left(self) -> None:
        """Wait until there is no instance, for at most three times what one may
        idle.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3 * IDLE_S):
                await self._none.wait()

    def _alive(self) -> int:
        applications = self._serve.status().applications.values()
        return sum(
            count
            for application in applications
            for deployment in application.deployments.values()
            for count in deployment.replica_states.values()
        )

    def close(self) -> None:
        """Disconnect."""
        self._ray.shutdown()
