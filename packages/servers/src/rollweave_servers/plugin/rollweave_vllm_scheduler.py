"""Schedulers of vLLM that preempt by priority: a request that waits takes the slot of
the running request of the lowest priority, if its own is higher (Heddle §4.2, Alg. 1).

vLLM's scheduler orders by priority what waits, and preempts only where KV is short. The
blocks of a preempted request stay in the prefix cache as long as nothing else needs
them, so that it continues where it was. Invariants: equals never preempt each other; a
request for which another one was preempted in vain, because it did not run thereafter,
preempts none again. Priorities can change while requests wait or run.

Like `rollweave_vllm`, this module imports nothing of Rollweave.
"""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

PREFIX = "generate-tokens-"
"""Text that vLLM puts before the id of a request; a random suffix follows the id."""

READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""States of a waiting request that could run at once."""


class Preemption:
    """Adds preemption to either of vLLM's schedulers."""

    in_vain: set[str]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_vain = set()

    def schedule(self: Any, *args: Any, **options: Any) -> Any:
        urgent = self.make_room()
        output = super().schedule(*args, **options)  # type: ignore[misc]
        failed = [*(self.requests.get(id) for id in self.in_vain), *urgent]
        waits = [one for one in failed if one is not None and one.status in READY]
        self.in_vain = {one.request_id for one in waits}
        return output

    def make_room(self: Any) -> list[Any]:
        """Preempt running requests, and return the waiting requests that get their
        slots.
        """
        paused = self._pause_state != PauseState.UNPAUSED
        if not self.waiting or paused or self.kv_holding_waiting:
            return []
        if self.waiting.peek_request().request_id in self.in_vain:
            return []  # it waits for KV, and all others wait behind it
        # a stable order: of equals, the newest is preempted first
        running = sorted(self.running, key=_order)
        urgent: list[Any] = []
        held = len(running) + self.num_waiting_for_streaming_input
        spare = self.max_num_active_reqs - held
        for request in sorted(self.waiting, key=_order):
            if spare > 0:
                spare -= 1
                continue
            victim = running.pop() if running else None
            if victim is None or victim.priority <= request.priority:
                break
            if not self.may_preempt(request):
                break
            self.running.remove(victim)
            stale = self.requires_kv_delivery
            self._preempt_request(victim, time.monotonic(), drop_stale_output=stale)
            urgent.append(request)
        return urgent

    def may_preempt(self: Any, request: Any) -> bool:
        """True if the request could run at once, and has not failed to."""
        ready = request.status in READY and not request.num_stale_output_tokens
        return ready and request.request_id not in self.in_vain

    def rerank(self: Any, id: str, priority: int) -> bool:
        """Change the priority of a request; False if it has not come, or has ended."""
        found = False
        for request in list(self.requests.values()):
            if _is_named(request.request_id, id):
                queues = (self.waiting, self.kv_holding_waiting)
                waits = [queue for queue in queues if request in queue]
                for queue in waits:
                    queue.remove_request(request)
                request.priority = priority
                for queue in waits:
                    queue.add_request(request)
                found = True
        return found


class PreemptingScheduler(Preemption, AsyncScheduler):  # type: ignore[misc]
    """The scheduler of a vLLM that prepares a step during the one before."""


class SyncPreemptingScheduler(Preemption, Scheduler):  # type: ignore[misc]
    """The scheduler of a vLLM without that."""


def _order(request: Any) -> tuple[int, float]:
    return request.priority, request.arrival_time


def _is_named(internal: str, id: str) -> bool:
    return internal.removeprefix(PREFIX).rpartition("-")[0] == id or internal == id


def rerank(core: Any, id: str, priority: int) -> bool:
    """Change a priority, in the process of the engine's core."""
    return bool(core.scheduler.rerank(id, priority))


EngineCore.rollweave_rerank = rerank
