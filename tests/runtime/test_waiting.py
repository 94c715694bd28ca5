"""Long waits are named while they last."""

import asyncio

from rollweave.core.policy.waiting import Wait
from rollweave.runtime.tasks import name_long_waits


async def test_a_long_wait_is_reported_with_its_line() -> None:
    lines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    task = asyncio.create_task(
        name_long_waits(
            lambda: [Wait(component="relay r1 on host b", what="starting", since=2.0)],
            clock=lambda: 43.0,
            report=lambda component, line: lines.put_nowait((component, line)),
        )
    )
    try:
        assert await asyncio.wait_for(lines.get(), 60) == (
            "relay r1 on host b",
            "waiting 41 s for relay r1 on host b: starting",
        )
    finally:
        task.cancel()
