"""The scheduler of a vLLM that lends, on a stand-in for vLLM's own."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from packages.servers.tests.lending_processes import WAIT_S, until
from rollweave_servers import lending
from rollweave_servers.baton import Baton
from rollweave_servers.lending.rollweave_lending import Snapshot

CHUNK = 8


class Request:
    """A request of which vLLM's scheduler computes up to `CHUNK` tokens a step."""

    def __init__(self, id: str, prompt: int, cached: int = 0) -> None:
        self.request_id, self.arrival_time = id, time.time()
        self.num_tokens, self.num_computed_tokens, self.num_output_tokens = prompt, cached, 0
        self.finished = False

    def is_finished(self) -> bool:
        return self.finished


class Scheduler:
    """What the plug-in uses of vLLM's."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.max_num_running_reqs, self.block_size = 2, 16
        self.kv_cache_config = SimpleNamespace(num_blocks=4)
        self.requests: dict[str, Request] = {}
        self.ended = False

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        scheduled = {}
        for id, request in list(self.requests.items())[: self.max_num_running_reqs]:
            scheduled[id] = min(CHUNK, request.num_tokens - request.num_computed_tokens)
            request.num_computed_tokens += scheduled[id]
        return SimpleNamespace(num_scheduled_tokens=scheduled)

    def update_from_output(self, output: SimpleNamespace, ended: tuple[str, ...] = ()) -> str:
        for id in output.num_scheduled_tokens:
            request = self.requests[id]
            if request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                request.num_output_tokens += 1
        for id in ended:
            del self.requests[id]
        return "outputs"

    def get_request_counts(self) -> tuple[int, int]:
        running = min(len(self.requests), self.max_num_running_reqs)
        return running, len(self.requests) - running

    def get_kv_cache_usage(self) -> float:
        return 0.25 * bool(self.requests)

    def shutdown(self) -> None:
        self.ended = True


def config(
    *, asynchronous: bool = False, stages: int = 1, ranks: int = 1, rank: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m"),
        scheduler_config=SimpleNamespace(
            async_scheduling=asynchronous, max_num_batched_tokens=CHUNK
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages, data_parallel_size=ranks, data_parallel_index=rank
        ),
    )


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    modules = ["vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"]
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "vllm.v1.core.sched.scheduler"
    module = ModuleType(name)
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(Path(lending.__file__).parent))
    monkeypatch.setenv("ROLLWEAVE_LENDING", str(tmp_path / "s"))
    yield importlib.import_module("rollweave_vllm_lending")
    for name in ("rollweave_vllm_lending", "rollweave_lending"):
        sys.modules.pop(name, None)


@pytest.fixture
def scheduler(plugin: ModuleType) -> Iterator[Any]:
    scheduler = plugin.LendingScheduler(config())
    yield scheduler
    scheduler.shutdown()
    assert scheduler.ended


@pytest.fixture
def baton(scheduler: Any, tmp_path: Path) -> Iterator[Baton]:
    baton = Baton(str(tmp_path / "s"), patience_s=WAIT_S, wake=threading.Condition())
    until(baton.snapshot, "the lender must be admitted")
    if baton.take() is not None:  # from now on it wants the baton
        baton.release()
    baton.look_away()
    yield baton
    baton.close()


def step(scheduler: Any, baton: Baton, *ended: str) -> Snapshot:
    """Compute a step, and return what was published after it."""
    output = scheduler.schedule(False)
    assert scheduler.update_from_output(output, ended) == "outputs"
    snapshot = baton.snapshot()
    assert snapshot is not None
    return snapshot


def test_a_snapshot_has_the_requests_and_the_last_step(scheduler: Any, baton: Baton) -> None:
    before = time.monotonic_ns()
    scheduler.requests["a"] = Request("a", 12)
    snapshot = step(scheduler, baton)
    ((took, *work),) = snapshot.steps
    assert 0 < took < time.monotonic_ns() - before
    assert work == [8, 0, 12]
    assert snapshot.counts[:4] == (1, 0, 16, 64)
    assert snapshot.rows is not None
    (row,) = snapshot.rows
    assert abs(row.arrived - before) < 10**9
    assert row[1:] == (4, 0, 0, 0)
    scheduler.requests["b"] = Request("b", 5, cached=3)
    scheduler.requests["c"] = Request("c", 6)
    snapshot = step(scheduler, baton)
    assert snapshot.steps[-1][1:] == (6, 0, 12)  # 12 of a's, of which it computed the rest
    assert snapshot.counts[:4] == (2, 1, 16, 64)
    assert snapshot.rows is not None
    a, b, c = snapshot.rows
    assert (a.missing, a.tokens, a.first) == (1, 1, a.newest)
    assert (b.missing, b.tokens) == (1, 1)
    assert (c.missing, c.tokens) == (6, 0)
    later = step(scheduler, baton, "b")
    assert later.steps[-1][1:] == (0, 2, 0)
    assert later.rows is not None
    assert (later.rows[0].first, later.rows[0].tokens) == (a.first, 2)
    assert later.rows[0].newest > a.newest
    assert set(scheduler.sampled) == set(scheduler.cached) == {"a"}


def test_a_request_that_lost_its_kv_computes_a_prompt_again(scheduler: Any, baton: Baton) -> None:
    scheduler.requests["a"] = Request("a", 4)
    for _ in range(3):
        step(scheduler, baton)
    scheduler.requests["a"].num_computed_tokens = 0
    snapshot = step(scheduler, baton)
    assert snapshot.steps[-1][1:] == (7, 0, 7)
    assert snapshot.rows is not None
    assert snapshot.rows[0].tokens == 4


def test_a_request_that_has_ended_is_not_listed(scheduler: Any, baton: Baton) -> None:
    scheduler.requests |= {id: Request(id, 1) for id in "ab"}
    scheduler.requests["a"].finished = True
    rows = step(scheduler, baton).rows
    assert rows is not None
    assert [(row.missing, row.tokens) for row in rows] == [(1, 1)]


def test_requests_without_room_and_steps_without_work(scheduler: Any, baton: Baton) -> None:
    assert step(scheduler, baton).steps == []
    for number in range(2 + 256 + 1):
        scheduler.requests[str(number)] = Request(str(number), 4)
    assert step(scheduler, baton).rows is None
    del scheduler.requests["0"]
    rows = step(scheduler, baton).rows
    assert rows is not None
    assert len(rows) == 258
    scheduler.requests.clear()  # they are aborted between two steps
    for number in range(300):
        scheduler.requests = {"x": Request("x", 4), str(number): Request(str(number), 4)}
        step(scheduler, baton)
    assert len(scheduler.cached) <= 2 * 2 + 256 + 2
    assert scheduler.cached.keys() >= {"299", "x"}


def test_an_idle_server_and_one_that_steps_make_offers(scheduler: Any, baton: Baton) -> None:
    until(baton.take, "an idle server makes an offer")
    scheduler.requests["a"] = Request("a", 4)
    stepping = threading.Thread(target=scheduler.schedule)
    stepping.start()
    assert scheduler.requests["a"].num_computed_tokens == 0  # it waits for the rollout step
    baton.release()
    stepping.join(WAIT_S)
    assert scheduler.requests["a"].num_computed_tokens == 4
    assert baton.take() is None
    scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens={"a": 4}))
    taken = baton.take()
    assert taken is not None
    assert taken.rows is not None
    assert [row.tokens for row in taken.rows] == [1]
    assert taken.counts.waited > 0
    baton.release()


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("scheduler", name) for name in ("work_of", "note_tokens", "rows")),
        *(("lending", name) for name in ("begin_step", "end_step")),
    ],
)
def test_an_error_in_lending_ends_lending_and_not_the_server(
    scheduler: Any,
    baton: Baton,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    name: str,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a")

    monkeypatch.setattr(scheduler if place == "scheduler" else scheduler.lending, name, fail)
    scheduler.requests["a"] = Request("a", 12)
    for _ in range(3):
        assert scheduler.update_from_output(scheduler.schedule()) == "outputs"
    assert scheduler.requests["a"].num_tokens == 14
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "ROLLWEAVE_LENDING: nothing is lent any more, after an error: KeyError: 'a'"
    until(lambda: baton.snapshot() is None, "the lender must be dropped")
    assert not scheduler.lending.lends


@pytest.mark.parametrize(
    ("settings", "path", "rule"),
    [
        ({}, "", "ROLLWEAVE_LENDING must be the path of a socket for lenders, got nothing"),
        ({"asynchronous": True}, "s", "async_scheduling must be false .*, got true"),
        ({"stages": 2}, "s", "pipeline_parallel_size must be 1 to lend, got 2"),
        ({"ranks": 2}, "s", "data_parallel_size must be 1 to lend, got at least 2"),
        ({"rank": 1}, "s", "data_parallel_size must be 1 to lend, got at least 2"),
        ({"ranks": 4}, "s", "data_parallel_size must be 1 to lend, got at least 4"),
        ({"rank": 2}, "s", "data_parallel_size must be 1 to lend, got at least 3"),
    ],
)
def test_a_server_that_cannot_lend_does_not_start(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: Any, path: str, rule: str
) -> None:
    monkeypatch.setenv("ROLLWEAVE_LENDING", path)
    with pytest.raises(ValueError, match=rule):
        plugin.LendingScheduler(config(**settings))
