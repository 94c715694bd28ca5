"""Processes beside the engines of a simulated run: the rollout workers of a run whose
number of workers changes, and the instances that compute rewards.

A worker starts in some seconds, and its loss ends its attempts. Invariants: commands
and answers are those of `runtime/supervisors/workers.py`; a task is drawn as soon as a
worker is up. A fixed number of workers starts beside the engines, and is not simulated.

An instance computes one reward at a time: on a serverless platform instances start on
demand and stop after an idle period; dedicated instances are always there.

"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from rollweave.record.trace import WORKERS, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave_sim.clock import Clock

START_S = 5.0
"""Seconds until a worker takes attempts. Assumption: the start of an interpreter that
imports environments.
"""


@dataclass(slots=True)
class Node:
    """One worker process."""

    id: str
    host: int
    epoch: int
    up: bool = False
    ticket: int = 0


class SimWorkers:
    """All workers. `on_gone` is called with the name of each process that ends, and
    returns the trajectories whose attempts there have recorded turns.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        on_gone: Callable[[str], tuple[TrajectoryId, ...]],
        trace: Trace | None,
    ) -> None:
        self._clock, self._post, self._on_gone, self._trace = clock, post, on_gone, trace
        self._draws: list[e.GroupSubmitted] = []
        self.nodes: dict[str, Node] = {}

    def start(self, slots: Iterable[e.WorkerSlot]) -> None:
        """Start epoch 0 of each worker, at the beginning of a life."""
        for slot in slots:
            self._begin(Node(slot.id, slot.host, 0))

    def restart(self, command: c.RestartWorker) -> None:
        self._end(command.worker_id)
        self._begin(Node(command.worker_id, command.host, command.epoch))

    def remove(self, command: c.RemoveWorker) -> None:
        self._end(command.worker_id)

    def draw(self, event: e.GroupSubmitted) -> None:
        """Report the task as soon as a worker is up, which draws it."""
        self._draws.append(event)
        self._send_draws()

    def lose(self, name: str, error: str) -> None:
        """Kill a worker."""
        node = self.nodes[name]
        recorded = self._end(name)
        self._post(e.WorkerLost(worker_id=name, epoch=node.epoch, error=error, recorded=recorded))

    def lose_host(self, number: int, error: str) -> None:
        """Kill the workers of a host."""
        for node in list(self.nodes.values()):
            if node.host == number:
                self.lose(node.id, error)

    def drop_all(self) -> None:
        """Drop all workers and draws, which are lost with the controller."""
        for node in self.nodes.values():
            self._clock.cancel(node.ticket)
        self.nodes.clear()
        self._draws.clear()

    def _begin(self, node: Node) -> None:
        self.nodes[node.id] = node
        began = self._clock.now
        node.ticket = self._clock.after(START_S, lambda: self._started(node, began))

    def _started(self, node: Node, began: float) -> None:
        node.up = True
        if self._trace is not None:
            self._trace.span(WORKERS, node.id, "start", began, self._clock.now, epoch=node.epoch)
        self._post(e.WorkerJoined(worker_id=node.id, epoch=node.epoch))
        self._send_draws()

    def _end(self, name: str) -> tuple[TrajectoryId, ...]:
        node = self.nodes.pop(name, None)
        if node is None:
            return ()
        self._clock.cancel(node.ticket)
        return self._on_gone(name)

    def _send_draws(self) -> None:
        if any(node.up for node in self.nodes.values()):
            draws, self._draws = self._draws, []
            for event in draws:
                self._post(event)


COLD_S = 2.7
"""Seconds that a first call waits for its instance: 2.2 to 3.2 s measured with Ray
Serve 2.60 from zero, without a model to load.
"""

WARM_S = 0.0045
"""Seconds that a call to a running instance takes beyond its work: 4 to 5 ms measured
there.
"""

KEEP_S = 60.0
"""Seconds for which an idle instance is kept. Assumption: the shortest period that
common platforms offer.
"""


class Judges(Protocol):
    """Instances that compute rewards; issue `call`s in the order of time."""

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """

    def utilization(self) -> float:
        """Return the share of the instances' time in which they worked."""


class Dedicated:
    """A fixed number of instances; calls wait for a free one in the order of time."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self._busy_s = 0.0

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """
        end = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        self._busy_s += seconds
        return end - now

    def utilization(self) -> float:
        """Return the share of the time until the last answer in which they worked."""
        until = max(self._free_at)
        return self._busy_s / (until * len(self._free_at)) if until else 0.0


class Serverless:
    """A pool of instances; issue `call`s in the order of time.

    `busy_s` over `alive_s` is the utilization of the instances.
    """

    def __init__(self) -> None:
        self._idle: list[float] = []  # start of each instance's idleness, ascending
        self._ends: list[float] = []  # end times of running calls
        self.busy_s = self.alive_s = 0.0
        self.cold = self.warm = 0

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """
        for end in [end for end in self._ends if end <= now]:
            self._ends.remove(end)
            self._idle.append(end)
        self._idle.sort()
        while self._idle and now - self._idle[0] > KEEP_S:
            del self._idle[0]
            self.alive_s += KEEP_S
        if self._idle:
            self.alive_s += now - self._idle.pop()
            self.warm += 1
            wait = WARM_S + seconds
        else:
            self.cold += 1
            wait = COLD_S + seconds
        self.busy_s += seconds
        self.alive_s += wait
        self._ends.append(now + wait)
        return wait

    def utilization(self) -> float:
        """Return the share of the instances' time in which they worked; each is kept
        for `KEEP_S` after its last call.
        """
        alive = self.alive_s + KEEP_S * (len(self._idle) + len(self._ends))
        return self.busy_s / alive if alive else 0.0
