"""What a manager of rollouts tells the core and its callers, in virtual time, with a
real job database beside a world, a store and tasks that a test scripts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollweave.core.state import Stage
from rollweave.record.store import StoredAttempt
from rollweave.schema.base import DEPTH, TaskId, TrajectoryId
from rollweave.schema.commands import Deliver
from rollweave.schema.errors import ConfigError, CorruptJournalError, EnvError
from rollweave.schema.events import RolloutAcknowledged, RolloutCancelled, RolloutsSubmitted
from rollweave.schema.work import Decoding, Limits, Purpose, StopReason, Task
from rollweave_service import base
from rollweave_service import rollouts as module
from rollweave_service.jobs import JobStore
from rollweave_service.messages import RequestedLimits, RolloutRequest
from rollweave_service.rollouts import RolloutManager
from tests.support.virtual_time import run_virtually


def request(id: str, **fields: Any) -> RolloutRequest:
    return RolloutRequest(**{"handler": "game", "id": id, "index": 1, **fields})


def task(seed: int) -> Task:
    return Task(id=TaskId("t"), env="game", seed=seed, limits=Limits(max_turns=5, time_s=9.0))


class Scene:
    """A manager and what stands around it. `posted` has the events, `handled` what the
    core is to call once it has handled them.
    """

    def __init__(self, path: Path) -> None:
        pools = SimpleNamespace(queued=[])
        self.state = SimpleNamespace(groups={}, trajectories={}, pools=pools)
        self.closed = False
        self.posted: list[Any] = []
        self.handled: list[Callable[[], None]] = []
        self.stored: dict[str, list[StoredAttempt]] = {}
        self.segment, self.discards = 0, list[set[int]]()
        self.drawn: list[tuple[Any, ...]] = []
        self.on_draw: Callable[[], Any] = lambda: None
        self.jobs = JobStore(path / "jobs.sqlite")
        config = SimpleNamespace(
            tasks=[SimpleNamespace(name="game", env="g"), SimpleNamespace(name="more", env="m")]
        )
        mine = cast(Any, self)
        self.manager = RolloutManager(
            cast(Any, config), mine, jobs=self.jobs, source=mine, store=mine, waits_for=lambda: "!"
        )

    # The world.

    def post(self, event: Any, on_handled: Callable[[], None] = lambda: None) -> None:
        self.posted.append(event)
        self.handled.append(on_handled)

    # The tasks.

    def draw(self, *given: Any) -> Task:
        self.drawn.append(given)
        self.on_draw()
        return task(seed=given[1])

    def task_of(self, handler: str, *, payload: str, seed: int) -> Task:
        self.drawn.append((handler, payload))
        return task(seed)

    # The store.

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def find(self, names: list[str]) -> list[StoredAttempt]:
        return [entry for name in names for entry in self.stored[name]]

    def read(self, entries: list[StoredAttempt]) -> list[Any]:
        if entries[0].offset == 13:
            raise CorruptJournalError("damaged")
        return [cast(Any, None)]

    def discard(self, segments: set[int]) -> None:
        self.discards.append(segments)

    # What a test does.

    def end(self, name: str, attempt: int = 0, *, started: bool = True) -> None:
        reason = StopReason.FINISHED
        self.manager.record(
            Deliver(
                trajectory_id=TrajectoryId(name),
                attempt=attempt,
                stop_reason=reason,
                started=started,
            )
        )

    def store(self, name: str, *, offset: int = 0, attempts: int = 1, segment: int = 0) -> None:
        self.stored[name] = [
            StoredAttempt(
                TrajectoryId(name), number, Purpose.SERVE, 0, 0.0, segment, offset + number, 1
            )
            for number in range(attempts)
        ]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    async def here(call: Callable[[], Any], name: str) -> Any:
        assert name == "draw game"
        result = call()
        return await result if isinstance(result, Awaitable) else result

    monkeypatch.setattr(module, "on_thread", here)
    made = Scene(tmp_path)
    yield made
    made.jobs.close()


def submit(scene: Scene, *requests: RolloutRequest) -> list[Any]:
    return run_virtually(scene.manager.submit(requests))


def test_a_request_reaches_the_core_with_its_task_and_limits(scene: Scene) -> None:
    limits = RequestedLimits(max_turns=3, time_s=99.0)
    one = request("a", index=4, members=2, limits=limits, sampling=Decoding(seed=1))
    (status,) = submit(scene, one)
    expected = Task(id=TaskId("t"), env="game", seed=4, limits=Limits(max_turns=3, time_s=9.0))
    assert scene.drawn == [("game", 4, Purpose.SERVE)]
    event = RolloutsSubmitted(
        group_id="r1", name="game", task=expected, members=2, decoding=Decoding(seed=1)
    )
    assert scene.posted == [event]
    assert (status.id, status.state, status.waits_for) == ("a", "queued", "!")
    wanted = [("r1.0", "queued", 0), ("r1.1", "queued", 0)]
    assert [(m.id, m.stage, m.attempt) for m in status.members] == wanted
    (own,) = submit(scene, request("", index=None, payload={"x": [1]}, seed=7))
    assert (own.id[:5], len(own.id), scene.drawn[-1]) == ("auto-", 21, ("game", '{"x":[1]}'))
    assert scene.posted[-1].task.seed == 7
    assert scene.manager.environments() == {"game": "g", "more": "m"}


def test_a_payload_has_at_most_a_hundred_levels(scene: Scene) -> None:
    deep: dict[str, Any] = {}
    for _ in range(DEPTH - 1):
        deep = {"x": deep}
    submit(scene, request("a", index=None, payload=deep))
    with pytest.raises(ConfigError, match="payload must be at most 100 levels deep"):
        submit(scene, request("b", index=None, payload={"x": deep}))


def test_equal_requests_are_one_and_others_conflict(scene: Scene) -> None:
    assert [status.id for status in submit(scene, request("a"), request("a"))] == ["a", "a"]
    assert len(submit(scene, request("a"), request("b"))) == 2
    assert [event.group_id for event in scene.posted] == ["r1", "r2"]
    with pytest.raises(base.ConflictError, match=r"got 'a' again"):
        submit(scene, request("c"), request("a", index=2))
    with pytest.raises(base.ConflictError, match=r"got 'c' twice"):
        submit(scene, request("c"), request("c", index=2))
    with pytest.raises(base.UnknownError, match="handler must be one of game, more, got 'none'"):
        submit(scene, request("c"), request("d", handler="none"))
    assert (len(scene.posted), scene.manager._submitting) == (2, 2)


def test_a_closed_service_draws_no_task_and_stores_none(scene: Scene) -> None:
    scene.on_draw = lambda: setattr(scene, "closed", True)
    for drawn in (1, 1):  # the first closes while its task is drawn
        with pytest.raises(base.ClosedError, match="shutting down"):
            submit(scene, request("a"))
        assert (len(scene.drawn), scene.jobs.last_job_number(), scene.posted) == (drawn, 0, [])
    assert scene.manager._submitting == 0


def test_members_count_from_their_request_until_the_core_has_queued_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE", 10)
    scene.state.pools.queued = ["x"] * 3
    submit(scene, request("a", members=4))
    with pytest.raises(
        base.FullError, match="at most 10 rollouts may wait to begin; 3 more would fit"
    ):
        submit(scene, request("b", members=2), request("c", members=2))
    submit(scene, request("b", members=3))
    with pytest.raises(base.FullError, match="; 0 more would fit"):
        submit(scene, request("c"))
    scene.handled[0]()
    submit(scene, request("c", members=4))
    scene.state.pools.queued = ["x"] * 30
    with pytest.raises(base.FullError, match="; 0 more would fit"):
        submit(scene, request("d"))
    scene.state.pools.queued = []
    scene.on_draw = lambda: int("no data")
    with pytest.raises(ValueError, match="no data"):
        submit(scene, request("d"))
    assert scene.manager._submitting == 7, "a request that failed does not count"


def test_requests_are_bounded_in_bytes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MB", 1)
    large = {"x": "x" * 300_000}
    submit(scene, request("a", index=None, payload=large))
    with pytest.raises(base.FullError, match=r"may use at most 1 MiB; 0\.3 MiB are in use"):
        submit(scene, *(request(f"b{i}", index=None, payload=large) for i in range(3)))
    assert scene.jobs.last_job_number() == 1
    scene.end("r1.0")
    submit(scene, request("b", index=None, payload=large))


def test_a_draw_that_fails_or_never_ends_is_refused(scene: Scene) -> None:
    def fail() -> None:
        raise EnvError("no data")

    scene.on_draw = fail
    with pytest.raises(ConfigError, match=r"can be drawn, got 1: no data$"):
        submit(scene, request("a"))

    async def run() -> list[float]:
        times = []
        waiting = cast(Any, scene)
        waiting.draw = lambda *_: asyncio.sleep(1e4)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"is drawn within 60 s, got 1$"):
                await scene.manager.submit([request("a")])
            times.append(asyncio.get_running_loop().time())
        return times

    assert run_virtually(run()) == [60.0, 120.0]


def test_one_task_is_drawn_at_a_time_although_its_client_left(scene: Scene) -> None:
    async def run() -> list[float]:
        begun = []

        async def draw() -> Task:
            begun.append(asyncio.get_running_loop().time())
            await asyncio.sleep(10.0)
            return task(0)

        cast(Any, scene).draw = lambda *_: draw()
        left, stays = (
            asyncio.create_task(scene.manager.submit([request(name)])) for name in ("a", "b")
        )
        await asyncio.sleep(1.0)
        left.cancel()
        await stays
        assert not scene.manager._tasks._draws
        return begun

    assert run_virtually(run()) == [0.0, 10.0]
    assert [event.group_id for event in scene.posted] == ["r1"]


def test_unfinished_jobs_that_the_core_does_not_know_are_submitted_again(scene: Scene) -> None:
    submit(scene, request("a"), request("b"), request("c"))
    scene.end("r1.0")
    scene.state.groups = {"r2": None}
    scene.posted.clear()
    scene.manager.restore()
    assert [event.group_id for event in scene.posted] == ["r3"]


def test_cancelling_tells_the_core_once_of_members_that_are_not_done(scene: Scene) -> None:
    submit(scene, request("a", members=3))
    scene.end("r1.1")
    scene.posted.clear()
    scene.handled.clear()
    for _ in range(2):
        assert scene.manager.cancel("a").id == "a"
    expected = [RolloutCancelled(trajectory_id=TrajectoryId(f"r1.{i}")) for i in (0, 2)]
    assert scene.posted == expected
    for call in scene.handled:
        call()
    scene.manager.cancel("a")
    assert scene.posted == expected * 2
    scene.handled[-1]()
    for name in ("r1.0", "r1.2"):
        scene.end(name)
    scene.posted.clear()
    assert scene.manager.cancel("a").state == "done"
    assert scene.posted == []
    with pytest.raises(base.UnknownError, match="no rollout has the id 'none'"):
        scene.manager.cancel("none")


def test_a_result_is_stored_and_acknowledged_and_unused_segments_go(scene: Scene) -> None:
    submit(scene, request("a", members=4))
    scene.store("r1.0", attempts=3, segment=5)
    scene.store("r1.1", segment=6)
    scene.end("r1.0", 1)
    scene.end("r1.1", started=False)
    scene.segment = 1
    scene.end("r1.2")
    scene.end("r1.2")
    results = scene.jobs.results_of(1)
    wanted = [("r1.0", 1, 1), ("r1.1", 0, None), ("r1.2", 0, None)]
    assert [(one.member, one.attempt, one.entry and one.entry.offset) for one in results] == wanted
    names = ["r1.0", "r1.1", "r1.2", "r1.2"]
    assert scene.posted[1:] == [RolloutAcknowledged(trajectory_id=TrajectoryId(n)) for n in names]
    assert scene.discards == [{5}, {5}], "once for each segment that the store writes"


def test_a_status_has_the_stage_of_each_member(scene: Scene) -> None:
    stages = [*Stage]
    submit(scene, request("a", members=len(stages) + 1))
    for number, stage in enumerate(stages):
        scene.state.trajectories[f"r1.{number}"] = SimpleNamespace(stage=stage, attempt=number)
    status = scene.manager.status("a", results=False)
    known = ("queued", "init", "run", "run", "eval", "eval")
    expected = [*known, *["eval"] * (len(stages) - len(known)), "queued"]
    assert [member.stage for member in status.members] == expected
    assert [member.attempt for member in status.members] == [*range(len(stages)), 0]
    assert (status.state, status.waits_for) == ("running", "!")
    scene.state.trajectories = {"r1.0": SimpleNamespace(stage=Stage.QUEUED, attempt=0)}
    assert scene.manager.status("a", results=False).state == "queued"
    scene.end("r1.3", 2)
    status = scene.manager.status("a", results=False)
    member = status.members[3]
    assert (member.stage, member.attempt, member.stop_reason) == ("done", 2, "finished")
    assert status.state == "running"
    for number in range(len(stages) + 1):
        scene.end(f"r1.{number}")
    status = scene.manager.status("a", results=False)
    assert (status.state, status.waits_for) == ("done", "")


def test_a_result_that_cannot_be_read_is_gone(scene: Scene) -> None:
    submit(scene, request("a"))
    scene.store("r1.0", offset=13)
    scene.end("r1.0")
    assert scene.manager.status("a", results=False).state == "done"
    with pytest.raises(base.GoneError, match=r"trajectory of r1\.0 can no longer be read: damaged"):
        scene.manager.status("a", results=True)


def test_waiting_ends_with_the_last_member_or_at_its_time(scene: Scene) -> None:
    submit(scene, request("a", members=2))

    async def waited(do: Callable[[], Any], seconds: float, **later: str) -> float:
        async def ends() -> None:
            for name in later.values():
                await asyncio.sleep(2.0)
                scene.end(name)

        clock = asyncio.get_running_loop().time
        begin, ending = clock(), asyncio.create_task(ends())
        await do()
        took = clock() - begin
        await ending
        return took

    async def run() -> None:
        manager = scene.manager
        assert await waited(lambda: manager.wait("a", 0.0), 0.0) == 0.0
        assert await waited(lambda: manager.wait("a", 5.0), 5.0) == 5.0
        assert await waited(lambda: manager.wait("a", 9.0), 9.0, one="r1.0", two="r1.1") == 4.0
        assert await waited(lambda: manager.wait("a", 9.0), 9.0) == 0.0
        with pytest.raises(base.UnknownError):
            await manager.wait("none", 9.0)
        await manager.submit([request("b", members=2)])
        page = manager.completions(2, limit=5, seconds=9.0)
        assert await waited(lambda: page, 9.0, one="r2.0") == 2.0
        later = manager.completions(3, limit=5, seconds=9.0, rollout="a")
        assert await waited(lambda: later, 9.0) == 0.0, "all of it is done"
        own = manager.completions(3, limit=5, seconds=5.0, rollout="b")
        assert await waited(lambda: own, 5.0) == 5.0
        waiting = [
            asyncio.create_task(manager.wait("b", 50.0)),
            asyncio.create_task(manager.completions(3, limit=5, seconds=50.0)),
        ]
        await asyncio.sleep(1.0)
        manager.end()
        assert len((await asyncio.wait(waiting, timeout=1.0))[0]) == 2
        assert await waited(lambda: manager.completions(3, limit=5, seconds=9.0), 9.0) == 0.0

    run_virtually(run())


def test_waiting_for_many_members_wakes_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(scene, request("a", members=20))
    find, asked = scene.jobs.find, list[str]()
    monkeypatch.setattr(scene.jobs, "find", lambda job_id: (asked.append(job_id), find(job_id))[1])

    async def run() -> None:
        waiting = asyncio.create_task(scene.manager.wait("a", 30.0))
        for member in range(20):
            await asyncio.sleep(0)
            scene.end(f"r1.{member}")
        assert (await waiting).state == "done"

    run_virtually(run())
    assert len(asked) == 2, "once for the call, once for its answer"


def test_completions_are_numbered_and_of_one_rollout_or_all(scene: Scene) -> None:
    submit(scene, request("a", members=2), request("b"))
    for name in ("r1.1", "r2.0", "r1.0"):
        scene.end(name)

    def page(after: int, limit: int, rollout: str | None = None) -> tuple[list[Any], int]:
        answer = run_virtually(
            scene.manager.completions(after, limit=limit, seconds=0.0, rollout=rollout)
        )
        return [(one.number, one.rollout, one.member) for one in answer.completions], answer.next

    every = [(1, "a", "r1.1"), (2, "b", "r2.0"), (3, "a", "r1.0")]
    assert page(0, 5) == (every, 3)
    assert page(1, 1) == (every[1:2], 2)
    assert page(3, 5) == ([], 3)
    assert page(0, 5, "a") == ([every[0], every[2]], 3)
    assert scene.manager.last_completion() == 3
    with pytest.raises(base.UnknownError):
        page(0, 5, "none")


def test_pages_hold_a_bounded_number_of_members(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_MEMBERS", 5)
    submit(scene, *(request(f"j{i}", members=size) for i, size in enumerate((9, 3, 2, 1))))
    scene.end("r4.0")

    def page(after: int, limit: int = 9, *, unfinished: bool = False) -> tuple[str, int]:
        answer = run_virtually(scene.manager.page(after, limit=limit, unfinished=unfinished))
        return "".join(status.id for status in answer.rollouts), answer.next

    assert [page(0), page(1), page(3), page(4)] == [("j0", 1), ("j1j2", 3), ("j3", 4), ("", 4)]
    assert (page(1, 1), page(1, unfinished=True)) == (("j1", 2), ("j1j2", 3))
    assert page(3, unfinished=True) == ("", 3)
