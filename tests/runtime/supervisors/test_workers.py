"""Rollout workers ask for images, wait for them, and are lost."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from rollweave.record.trace import Trace
from rollweave.rollout.pipeline import Pipeline
from rollweave.runtime.supervisors.workers import OnReport, WorkerSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.events import Event, WorkerJoined, WorkerLost, WorkerSlot
from rollweave.schema.images import AskImage, GrantImage, HoldImage, ImagePeer, ImageWait, MissImage
from rollweave.schema.rollouts import WorkerBeat, WorkerReady

PEER = ImagePeer(host="a", url="http://a:1", token="t")


class Link:
    """A worker that is ready at once."""

    def __init__(self, report: OnReport) -> None:
        self.report = report
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failure: Exception | None = None
        self.sent: list[Any] = []

    async def ready(self) -> WorkerReady:
        return WorkerReady(now=3.0)

    def send(self, command: Any) -> None:
        self.sent.append(command)

    def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("killed")

    async def close(self) -> None:
        self.kill()


class NoAttempts:
    def lose_worker(self, worker: object, error: str) -> None: ...


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path / "trace.json")


async def test_images_are_passed_between_workers(trace: Trace) -> None:
    links: dict[str, Link] = {}
    events: asyncio.Queue[Event] = asyncio.Queue()

    def make(name: str, host: int, report: OnReport) -> Link:
        links[name] = Link(report)
        return links[name]

    async with Tasks() as tasks:
        workers = WorkerSupervisor(
            make=make,
            pipeline=cast(Pipeline, NoAttempts()),
            tasks=tasks,
            post=events.put_nowait,
            warn=lambda _: None,
            clock=lambda: 100.0,
            trace=trace,
        )
        workers.start(WorkerSlot(id=f"w{n}", host=n // 2) for n in range(4))
        for _ in range(4):
            assert isinstance(await events.get(), WorkerJoined)
        one, two, three, four = links.values()
        for link in (one, two, three):
            link.report(AskImage(key="k"))
        assert one.sent == [GrantImage(key="k", origin=True)]
        assert two.sent == three.sent == []
        one.lost.set_result("killed")
        assert isinstance(await events.get(), WorkerLost)
        assert two.sent == [GrantImage(key="k", origin=True)]
        two.report(MissImage(key="k"))
        assert three.sent == [GrantImage(key="k", origin=True)]
        four.report(AskImage(key="k"))
        three.report(HoldImage(key="k", digest="d", peer=PEER))
        assert four.sent == [GrantImage(key="k", digest="d", peers=(PEER,))]

        # each image is named once a host, by the process that obtains it, at the run's
        # time
        behind = ImageWait(image="i", what="another process", since=5.0, behind=True)
        three.report(WorkerBeat(images=(behind,)))
        four.report(WorkerBeat(images=(ImageWait(image="i", what="fetching", since=5.0),)))
        (wait,) = workers.image_waits(lambda number: f"h{number}")
        assert (wait.component, wait.what, wait.since) == ("image i on host h1", "fetching", 102.0)
        four.report(WorkerBeat())
        await workers.close()
        tasks.cancel_all()
