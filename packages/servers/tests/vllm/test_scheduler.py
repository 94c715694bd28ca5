"""The scheduler that preempts by priority, on a stand-in for vLLM's own."""

import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollweave_servers.process import PLUGIN

Status = enum.Enum("Status", ["WAITING", "PREEMPTED", "RUNNING", "BLOCKED"])
Pause = enum.Enum("Pause", ["UNPAUSED", "PAUSED_ALL"])


class Queue(list[Any]):
    remove_request = list.remove
    add_request = list.append

    def peek_request(self) -> Any:
        return min(self, key=lambda one: (one.priority, one.arrival_time))


class Scheduler:
    """What the plug-in uses of vLLM's: `slots` for requests, and `room` for those that
    fit in the cache.
    """

    def __init__(self, slots: int) -> None:
        self.max_num_active_reqs, self.room = slots, slots
        self.num_waiting_for_streaming_input = 0
        self._pause_state, self.requires_kv_delivery = Pause.UNPAUSED, False
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting, self.kv_holding_waiting = Queue(), Queue()
        self.preempted: list[str] = []

    def schedule(self) -> list[str]:
        for request in sorted(self.waiting, key=lambda one: (one.priority, one.arrival_time)):
            full = len(self.running) >= min(self.max_num_active_reqs, self.room)
            if not full and request.status is not Status.BLOCKED:
                self.waiting.remove(request)
                self.running.append(request)
                request.status = Status.RUNNING
        return [one.request_id for one in self.running]

    def _preempt_request(self, request: Any, timestamp: float, *, drop_stale_output: bool) -> None:
        request.status = Status.PREEMPTED
        self.waiting.append(request)
        self.preempted.append(request.request_id)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    modules = {
        "core.sched.async_scheduler": {"AsyncScheduler": type("Async", (Scheduler,), {})},
        "core.sched.interface": {"PauseState": Pause},
        "core.sched.scheduler": {"Scheduler": Scheduler},
        "engine.core": {"EngineCore": type("EngineCore", (), {})},
        "request": {"RequestStatus": Status},
    }
    for name, content in modules.items():
        module = ModuleType(f"vllm.v1.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield importlib.import_module("rollweave_vllm_scheduler")
    del sys.modules["rollweave_vllm_scheduler"]


@pytest.fixture
def scheduler(plugin: ModuleType) -> Any:
    return plugin.SyncPreemptingScheduler(2)


def add(scheduler: Any, id: str, priority: int, status: Status = Status.WAITING) -> Any:
    request = scheduler.requests[id] = SimpleNamespace(
        request_id=f"generate-tokens-{id}-0a1b2c3d",
        priority=priority,
        arrival_time=float(len(scheduler.requests)),
        status=status,
        num_stale_output_tokens=0,
    )
    scheduler.requests[request.request_id] = scheduler.requests.pop(id)
    scheduler.waiting.append(request)
    return request


def names(ids: list[str]) -> set[str]:
    return {id.split("-")[2] for id in ids}


def test_the_lowest_priority_makes_room_and_continues_thereafter(scheduler: Any) -> None:
    add(scheduler, "old", 0)
    add(scheduler, "new", 0)
    assert names(scheduler.schedule()) == {"old", "new"}
    urgent = add(scheduler, "urgent", -5)
    assert names(scheduler.schedule()) == {"old", "urgent"}
    assert names(scheduler.preempted) == {"new"}
    scheduler.running.remove(urgent)
    assert names(scheduler.schedule()) == {"old", "new"}


@pytest.mark.parametrize("priority", [0, 3])
def test_equals_and_lower_ones_wait(scheduler: Any, priority: int) -> None:
    for id in ("a", "b"):
        add(scheduler, id, 0)
    scheduler.schedule()
    add(scheduler, "later", priority)
    assert names(scheduler.schedule()) == {"a", "b"}
    assert scheduler.preempted == []


@pytest.mark.parametrize("reason", ["paused", "blocked", "stale", "kv is coming"])
def test_nothing_is_preempted_for_what_could_not_run(scheduler: Any, reason: str) -> None:
    for id in ("a", "b"):
        add(scheduler, id, 0)
    scheduler.schedule()
    urgent = add(scheduler, "urgent", -5, Status.BLOCKED if reason == "blocked" else Status.WAITING)
    match reason:
        case "paused":
            scheduler._pause_state = Pause.PAUSED_ALL
        case "stale":
            urgent.num_stale_output_tokens = 1
        case "kv is coming":
            scheduler.kv_holding_waiting.append(urgent)
    scheduler.schedule()
    assert scheduler.preempted == []


def test_a_request_that_does_not_fit_preempts_once(scheduler: Any) -> None:
    for id in ("a", "b"):
        add(scheduler, id, 0)
    scheduler.schedule()
    scheduler.room = 1
    urgent = add(scheduler, "urgent", -5)
    for _ in range(3):
        scheduler.schedule()
    assert len(scheduler.preempted) == 1
    scheduler.room = 2
    scheduler.schedule()
    assert urgent.status is Status.RUNNING
    assert scheduler.in_vain == set()


def test_a_priority_may_change_while_a_request_waits_or_runs(plugin: ModuleType) -> None:
    scheduler = plugin.PreemptingScheduler(1)
    first, second = add(scheduler, "r1", 0), add(scheduler, "r-2", 0)
    scheduler.schedule()
    core = SimpleNamespace(scheduler=scheduler)
    sys.modules["vllm.v1.engine.core"].EngineCore.rollweave_rerank(core, "r-2", -1)
    assert second.priority == -1
    assert names(scheduler.schedule()) == {"r"}
    scheduler.rerank("r1", -2)
    assert not scheduler.rerank("gone", -9)
    scheduler.schedule()
    assert first.status is Status.RUNNING
