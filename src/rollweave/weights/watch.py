"""Notices that nothing comes from a source any more, long before it counts as gone: the
link may be dead, and another's not.

Invariant: as with relays (runtime/links/relay), what is counted is ticks of a clock
that goes on only while our loop does, and bytes that have come are seen before a tick
is; how long a piece takes does not matter, as long as any of its bytes come.
"""

import asyncio
from collections.abc import Callable

from rollweave.schema.weights import BEAT_S
from rollweave.weights.transport import Channel

STALL_BEATS = 3
"""Ticks in a row that see one and the same wait: a source with nothing to send says so
more often (offers.ALIVE_S).
"""


class Watch:
    """Calls `stalled`, again and again as long as it lasts, while nothing comes over
    `channel`, or it cannot be opened.
    """

    def __init__(self, stalled: Callable[[], None]) -> None:
        self.channel: Channel | None = None
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.time()
        self._since: float | None = None
        self._ticks = 0
        self._timer = self._loop.call_later(BEAT_S, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(BEAT_S, self._tick)
        since = self.channel.waits_since if self.channel is not None else self._opening
        self._ticks = self._ticks + 1 if since is not None and since == self._since else 0
        self._since = since
        if self._ticks == STALL_BEATS:
            self._ticks = 0
            self._stalled()
