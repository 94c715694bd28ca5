"""A controller under test: `python -m benchmarks.workers.controller CONFIG ROLLOUTS`.

It is a service that submits the rollouts to itself, all at once. Its only line of
output is a `Load` as JSON.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec

from rollweave.core.state import State, WorkerStatus
from rollweave.engine.clients.transport import OnRetry
from rollweave.io.http.access import Access
from rollweave.schema.base import Struct
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs
from rollweave.schema.service import EngineRequest, RolloutRequest
from rollweave.service import launch
from rollweave.service.service import Service

Measured = TypeVar("Measured", bound=Struct)

SAMPLE_S = 0.05
"""Seconds between two samples of the core's state."""

SHARES = 0.2, 0.8
"""Shares of all turns between which CPU time is measured: while no rollouts are
submitted, and none end.
"""

SUBMITTED = 64
"""Rollouts in one request."""


class Load(Struct, frozen=True, kw_only=True):
    """The measurements: turns, the elapsed time and the controller's CPU time for them,
    in seconds, the CPU time of all workers, and the maximum number of attempts under
    way.
    """

    turns: int
    wall_s: float
    controller_s: float
    workers_s: float
    at_once: int


class Driver(Generic[Measured]):
    """Submits rollouts to the service of this process, measures, and stops it."""

    def __init__(self) -> None:
        self._stop: Callable[[bool], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None
        self.measured: Measured | None = None

    async def measure(self, service: Service, state: State) -> Measured:
        """Submit, and return the measurements, once engine and workers are ready."""
        raise NotImplementedError

    def on_service(self, service: Service) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drive(service))

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self._stop = stop

    def on_warning(self, command: Warn) -> None:
        print(f"{command.component}: {command.message}", file=sys.stderr, flush=True)

    def on_stopping(self, drain: bool) -> None:
        """Do nothing: no caller needs it."""

    async def _drive(self, service: Service) -> None:
        self.measured = await self.measure(service, await _up(service))
        self._stop(False)


class _AllAtOnce(Driver[Load]):
    """Submits all rollouts at once."""

    def __init__(self, rollouts: int, turns: int) -> None:
        super().__init__()
        self._rollouts, self._turns = rollouts, rollouts * turns

    async def measure(self, service: Service, state: State) -> Load:
        for first in range(0, self._rollouts, SUBMITTED):
            numbers = range(first, min(first + SUBMITTED, self._rollouts))
            await service.rollouts.submit(
                [RolloutRequest(handler="waiting", index=number) for number in numbers]
            )
        at_once, began = 0, None
        while state.counters.turns < SHARES[1] * self._turns:
            await asyncio.sleep(SAMPLE_S)
            at_once = max(at_once, len(state.pools.init) + len(state.pools.run))
            if began is None and state.counters.turns >= SHARES[0] * self._turns:
                began = _Clocks(state.counters.turns)
        assert began is not None, "the first share precedes the second"
        now = _Clocks(state.counters.turns)
        return Load(
            turns=now.turns - began.turns,
            wall_s=now.wall_s - began.wall_s,
            controller_s=now.controller_s - began.controller_s,
            workers_s=now.workers_s - began.workers_s,
            at_once=at_once,
        )


class _Clocks:
    def __init__(self, turns: int) -> None:
        self.turns, self.wall_s, self.controller_s = turns, time.monotonic(), time.process_time()
        self.workers_s = sum(map(_cpu_s, _workers()))


async def _up(service: Service) -> State:
    """Wait until the engine and all workers that there should be are ready, and return
    the core's state.
    """
    while True:
        world = service._world.world
        if world is not None:
            state = world.core.state
            serving = [engine.version >= 0 for engine in state.engines.values()]
            here = (WorkerStatus.READY, WorkerStatus.STOPPED)
            ready = [worker.status in here for worker in state.workers.values()]
            if serving and all(serving + ready):
                return state
        await asyncio.sleep(SAMPLE_S)


def _workers() -> list[int]:
    """Return the processes of the workers."""
    own = Path(f"/proc/self/task/{_own_pid()}/children").read_text().split()
    module = b"rollweave.runtime.entrypoints.worker"
    return [int(pid) for pid in own if module in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _own_pid() -> int:
    return int(Path("/proc/self").readlink().name)


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _no_backend(request: EngineRequest, name: str, failed: OnRetry) -> NoReturn:
    raise AssertionError(f"no engine registers in this bench: {name} at {request.address}")


def serve(config: RunConfig, driver: Driver[Measured]) -> None:
    """Serve until the driver has measured, and print what it has as JSON."""
    launch.serve(
        config,
        observer=driver,
        make_backend=_no_backend,
        programs=Programs(engine="benchmarks.workers.world"),
        on_service=driver.on_service,
        access=Access(port=0, no_token=True),
    )
    assert driver.measured is not None, "the service ends once it is measured"
    print(msgspec.json.encode(driver.measured).decode(), flush=True)


def main() -> None:
    config = load(sys.argv[1], [])
    serve(config, _AllAtOnce(int(sys.argv[2]), int(config.tasks[0].options["turns"])))


if __name__ == "__main__":
    main()
