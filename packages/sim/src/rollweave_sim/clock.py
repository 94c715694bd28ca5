"""The virtual clock: scheduled actions, ordered by time and then by insertion.

No wall clock is read here.
"""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """`now` is in seconds since the run began. It moves only in `step`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int]] = []
        self._actions: dict[int, Action] = {}
        self._last_ticket = 0

    def at(self, when: float, action: Action) -> int:
        """Schedule `action` at `when`, or now if that is past.

        Returns a ticket for `cancel`.
        """
        self._last_ticket += 1
        self._actions[self._last_ticket] = action
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._last_ticket))
        return self._last_ticket

    def after(self, seconds: float, action: Action) -> int:
        return self.at(self.now + seconds, action)

    def cancel(self, ticket: int) -> None:
        """Cancel an action. One that has run or is already cancelled is ignored."""
        self._actions.pop(ticket, None)

    def step(self) -> bool:
        """Move to the next action and run it. Returns False where none is scheduled."""
        while self._heap:
            when, ticket = heapq.heappop(self._heap)
            action = self._actions.pop(ticket, None)
            if action is not None:
                self.now = when
                action()
                return True
        return False
