"""The current work of an engine's thread, and its duration: another thread answers
heartbeats with them, so that a long step is distinguished from a lost process.
"""

from collections.abc import Callable

from rollweave.schema.serving import Beating


class Activity:
    """The work of one thread, which alone calls `begin` and `end`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._current: tuple[str, float] | None = None

    def begin(self, doing: str) -> None:
        """Record that the thread begins to do this."""
        self._current = doing, self._clock()

    def end(self) -> None:
        """Record that the thread has nothing to do, or begins something else soon."""
        self._current = None

    def beating(self) -> Beating:
        """Return the answer to a heartbeat, on any thread."""
        current = self._current
        if current is None:
            return Beating()
        doing, since = current
        return Beating(doing=doing, for_s=self._clock() - since)
