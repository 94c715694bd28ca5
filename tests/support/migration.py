"""A supervisor of two engines between which KV migrates."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollweave.record.trace import Trace
from rollweave.runtime.supervisors.engines import EngineSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import Migrate
from rollweave.schema.events import EngineJoined, EngineSlot, Event, MigrationDone

A, B = EngineId("a"), EngineId("b")


class Stage:
    """A supervisor of engines `a` and `b`, and its events. It lives in `staged`."""

    def __init__(self, make: Callable[[EngineSlot, int], Any], path: Path, **options: Any) -> None:
        self.events: list[Event] = []
        self._posted = asyncio.Event()
        self.tasks = Tasks()
        self._path = path / "trace.json"
        self.trace = Trace(self._path)
        clock = asyncio.get_running_loop().time
        self.engines = EngineSupervisor(
            make=make, tasks=self.tasks, post=self._post, clock=clock, trace=self.trace, **options
        )

    def _post(self, event: Event) -> None:
        self.events.append(event)
        self._posted.set()

    async def until(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Wait for that many events of this kind, and return all of them."""
        async with asyncio.timeout(60):
            while (
                len(events := [event for event in self.events if isinstance(event, kind)]) < count
            ):
                self._posted.clear()
                await self._posted.wait()
        return events

    async def migrate(
        self, tokens: Sequence[int] | None, source: EngineId = A, target: EngineId = B
    ) -> MigrationDone:
        """Run one migration, and return its one event."""
        number = sum(isinstance(event, MigrationDone) for event in self.events)
        command = Migrate(
            number=number, trajectory_id=TrajectoryId("t"), attempt=2, source=source, target=target
        )
        self.engines.migrate(command, tokens)
        done: MigrationDone = (await self.until(MigrationDone, number + 1))[-1]
        assert (done.number, done.trajectory_id, done.attempt) == (number, "t", 2)
        assert bool(done.error) is not bool(done.moved_tokens)
        return done

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans of the trace so far."""
        self.trace.flush()
        lines = self._path.read_text().splitlines()[1:]
        return [event for line in lines if (event := json.loads(line.rstrip(",")))["ph"] == "X"]


def shared_memory() -> list[str]:
    """Return the names in shared memory, except for semaphores, which engines do not
    use but other processes of this machine may.
    """
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))


@asynccontextmanager
async def staged(
    make: Callable[[EngineSlot, int], Any], path: Path, **options: Any
) -> AsyncIterator[Stage]:
    """Run a supervisor while its engines live, and check that engines in processes
    leave nothing behind.
    """
    files, shared = len(os.listdir("/proc/self/fd")), shared_memory()
    stage = Stage(make, path, **options)
    async with stage.tasks:
        try:
            stage.engines.start([EngineSlot(id=A), EngineSlot(id=B)])
            await stage.until(EngineJoined, 2)
            yield stage
        finally:
            await stage.engines.close()
            stage.tasks.cancel_all()
    stage.trace.close()
    assert shared_memory() == shared
    for _ in range(100):  # the tests' own connections take iterations of the event loop to close
        if len(os.listdir("/proc/self/fd")) <= files:
            break
        await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= files
