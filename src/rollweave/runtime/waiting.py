"""Report long waits while they last: `core/policy/waiting` decides when each is
named.
"""

import asyncio
from collections.abc import Callable, Iterable

from rollweave.core.policy.waiting import LongWaits, Wait, wait_lines

CHECK_S = 1.0
"""Seconds between two checks of the waits."""


async def name_long_waits(
    waits: Callable[[], Iterable[Wait]],
    *,
    clock: Callable[[], float],
    report: Callable[[str, str], None],
) -> None:
    """Report the component and the line of each long wait, until this task is
    cancelled.
    """
    long_waits = LongWaits()
    while True:
        for component, line in wait_lines(long_waits.due(clock(), waits())):
            report(component, line)
        await asyncio.sleep(CHECK_S)
