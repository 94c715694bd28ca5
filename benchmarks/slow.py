"""Answers of environments that take a log-normal time, as those of tools do."""

import asyncio
import math
import random

LAKE = "examples.slow_lake:SlowLake"
"""The frozen lake whose moves take such a time."""


def slow_lake(latency_s: float, latency_sigma: float = 1.0) -> tuple[str, ...]:
    """Return the overrides by which an example's frozen lake is slow."""
    return (
        f"tasks.0.env={LAKE}",
        "tasks.0.tag=frozenlake",
        f"tasks.0.options.latency_s={latency_s}",
        f"tasks.0.options.latency_sigma={latency_sigma}",
    )


async def pause(latency_s: float, latency_sigma: float = 1.0) -> None:
    """Wait for `latency_s` seconds in the median."""
    await asyncio.sleep(random.lognormvariate(math.log(latency_s), latency_sigma))
