"""Which of many equal servers a task's calls go to, and which servers a host's rollouts use (ProRL §3.3.2 and its client).

ProRL keeps a min-heap of servers by the number of tasks that each was ever given. Three things are better here. A task weighs
the tokens of its context, and gives them back when it ends, so a server with long tasks gets fewer. A server that does not
answer is passed over, and its tasks move when they call next. A newcomer, whose count would be the lowest by far, is given at
most every second task until it has caught up, so that it is not buried while its cache is cold.
"""

import heapq
from collections.abc import Mapping, Sequence

from rollweave.schema.base import Noun

DOWN_AFTER = 3
"""Failed checks in a row that make a server unhealthy: one may be a lost packet, two a pause."""

UP_AFTER = 2
"""Good checks in a row that make it healthy again: a server that flaps stays out."""


class Hysteresis:
    """Health by checks: it changes only after several in a row that say otherwise."""

    def __init__(self, *, healthy: bool = False, down_after: int = DOWN_AFTER, up_after: int = UP_AFTER) -> None:
        if down_after < 1 or up_after < 1:
            raise ValueError(f"down_after and up_after must be at least 1, got {down_after} and {up_after}")
        self.healthy = healthy
        self._needed = {True: up_after, False: down_after}
        self._against = 0

    def observe(self, good: bool) -> bool:
        """Take one check; whether the server is healthy now."""
        self._against = 0 if good is self.healthy else self._against + 1
        if self._against >= self._needed[good]:
            self.healthy, self._against = good, 0
        return self.healthy


Key = tuple[float, int, int]


class Seat:
    """One server of a balancer. `load` is the sum of its tasks' tokens; `last` numbers the last task that it was given.

    `order` is that of joining; of the entries that a heap holds of it, only the one with its `stamp` counts.
    """

    __slots__ = ("capacity", "healthy", "last", "load", "newcomer", "order", "stamp")

    def __init__(self, *, capacity: float, newcomer: bool, last: int, order: int) -> None:
        self.capacity, self.newcomer, self.last, self.order = capacity, newcomer, last, order
        self.healthy = True
        self.load = 0
        self.stamp = 0

    @property
    def key(self) -> Key:
        """Least load first; among equals who has waited longest, which is round-robin."""
        return (self.load / self.capacity, self.last, self.order)


class Balancer:
    """Servers by name, tasks by id. A choice costs O(log servers), amortised."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._tasks: dict[str, tuple[str, int]] = {}
        self._heaps: dict[bool, list[tuple[Key, int, str]]] = {False: [], True: []}
        self._given = self._joined = self._stamps = 0
        self._newcomer_last = False

    def add(self, server: str, *, capacity: float = 1.0) -> None:
        """A server may be used from now on. `capacity` is its speed relative to others: it holds so much more load."""
        if server in self._seats:
            raise ValueError(f"server must be new, got {server} again")
        if not capacity > 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._joined += 1
        self._seats[server] = Seat(capacity=capacity, newcomer=bool(self._seats), last=self._given, order=self._joined)
        self._changed(server)

    def remove(self, server: str) -> None:
        """The server is gone; its tasks go elsewhere when they call next. Unknown names are ignored."""
        if self._seats.pop(server, None) is not None:
            self._tasks = {task: seat for task, seat in self._tasks.items() if seat[0] != server}

    def mark(self, server: str, *, healthy: bool) -> None:
        """It answers, or does not. One that comes back is a newcomer. Unknown names are ignored."""
        seat = self._seats.get(server)
        if seat is not None and seat.healthy is not healthy:
            seat.healthy, seat.newcomer, seat.last = healthy, True, self._given
            self._changed(server)

    def choose(self, task: str, tokens: int) -> str | None:
        """The server for a call of `task`, whose context has `tokens` tokens now. None where no server is healthy.

        A task keeps its server, where its prefix is cached, as long as that is healthy.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        held = self._tasks.get(task)
        server = held[0] if held is not None and self._seats[held[0]].healthy else self._pick()
        if held is not None:
            self.finish(task)
        if server is None:
            return None
        seat = self._seats[server]
        seat.load += tokens
        self._tasks[task] = (server, tokens)
        self._changed(server)
        return server

    def finish(self, task: str) -> None:
        """The task is over: what it weighed is given back. Unknown tasks are ignored."""
        server, tokens = self._tasks.pop(task, ("", 0))
        if server:
            self._seats[server].load -= tokens
            self._changed(server)

    def loads(self) -> dict[str, int]:
        """Tokens of the tasks of each server."""
        return {server: seat.load for server, seat in self._seats.items()}

    def _pick(self) -> str | None:
        """The next server for a task that has none."""
        settled, newcomer = self._least(newcomer=False), self._least(newcomer=True)
        while newcomer is not None and (settled is None or self._key(newcomer) >= self._key(settled)):
            self._seats[newcomer].newcomer = False  # it has caught up
            self._changed(newcomer)
            settled, newcomer = self._least(newcomer=False), self._least(newcomer=True)
        # A newcomer that is left has less load than any settled server, and would take all tasks to come.
        chosen = settled if newcomer is None or self._newcomer_last else newcomer
        if chosen is None:
            return None
        self._newcomer_last = chosen == newcomer
        self._given += 1
        self._seats[chosen].last = self._given
        return chosen

    def _key(self, server: str) -> Key:
        return self._seats[server].key

    def _least(self, *, newcomer: bool) -> str | None:
        """The least loaded healthy server of a class. Entries of a heap that were changed since are dropped on the way."""
        heap = self._heaps[newcomer]
        while heap:
            _, stamp, server = heap[0]
            seat = self._seats.get(server)
            if seat is not None and seat.stamp == stamp:
                return server
            heapq.heappop(heap)
        return None

    def _changed(self, server: str) -> None:
        """Give the server a new entry, which makes the old one void; an unhealthy one gets none."""
        seat = self._seats[server]
        self._stamps += 1
        seat.stamp = self._stamps
        if not seat.healthy:
            return
        heap = self._heaps[seat.newcomer]
        heapq.heappush(heap, (seat.key, seat.stamp, server))
        if len(heap) > 4 * len(self._seats) + 16:  # void entries deep in the heap
            heap[:] = [entry for entry in heap if (known := self._seats.get(entry[2])) and known.stamp == entry[1]]
            heapq.heapify(heap)


class Host(Noun, frozen=True, kw_only=True):
    """A server and the host that it runs on, by address."""

    server: str
    host: str


def spread(llms: Sequence[Host], rollouts: Sequence[Host]) -> Mapping[str, tuple[str, ...]]:
    """The LLM servers that each rollout server uses: those of its host first, the rest round-robin (ProRL, RL trainers).

    Every LLM server is used by one rollout server. Where some rollout server would have none, it shares that of others:
    the least shared, so that no rollout server is idle while there is any LLM server.
    """
    uses: dict[str, list[str]] = {rollout.server: [] for rollout in rollouts}
    if not uses or not llms:
        return dict.fromkeys(uses, ())
    remote = []
    for llm in llms:
        near = [rollout.server for rollout in rollouts if rollout.host == llm.host]
        if near:
            uses[min(near, key=lambda server: len(uses[server]))].append(llm.server)
        else:
            remote.append(llm.server)
    for server in remote:
        uses[min(uses, key=lambda rollout: len(uses[rollout]))].append(server)
    shared = {llm.server: 1 for llm in llms}
    for own in uses.values():
        if not own:
            least = min(shared, key=lambda server: shared[server])
            shared[least] += 1
            own.append(least)
    return {server: tuple(own) for server, own in uses.items()}
