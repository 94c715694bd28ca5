"""A controller under test: `python -m benchmarks.workers.bursts CONFIG ROLLOUTS GAP_S`.

It is a service that submits bursts of rollouts to itself, with a gap after each. Its
only line of output is a `Bursts` as JSON.
"""

import asyncio
import sys
import time
from collections.abc import Callable

import msgspec

from benchmarks.workers.controller import no_backend, print_warning
from rollweave.core.state import State, WorkerStatus
from rollweave.core.workers import processes
from rollweave.io.http.access import Access
from rollweave.runtime.processes import Programs
from rollweave.schema.base import Struct
from rollweave.schema.commands import Warn
from rollweave.schema.config.loading import load
from rollweave.schema.service import RolloutRequest
from rollweave.schema.work import StopReason
from rollweave.service import launch
from rollweave.service.service import Service

BURSTS = 2
SAMPLE_S = 0.01
"""Seconds between two samples of the core's state."""


class Bursts(Struct, frozen=True, kw_only=True):
    """The measurements.

    `burst_s` are the seconds from the submission of each burst to its last rollout,
    `first_s` those until a worker was ready in the bursts that began without any.
    `worker_s` are the seconds of all workers from the first submission to the end of
    the last gap; `lost` the rollouts that were not finished; `largest` and `least` the
    greatest and the least number of workers.
    """

    burst_s: list[float]
    first_s: list[float]
    worker_s: float
    lost: int
    starts: int
    largest: int
    least: int


class _Driver:
    """Submits the bursts, and measures."""

    def __init__(self, rollouts: int, gap_s: float) -> None:
        self._rollouts, self._gap_s = rollouts, gap_s
        self._stop: Callable[[bool], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None
        self._counts: set[int] = set()
        self.measured: Bursts | None = None

    def on_service(self, service: Service) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drive(service))

    def on_ready(self, address: str, token: str | None, stop: Callable[[bool], None]) -> None:
        self._stop = stop

    def on_warning(self, command: Warn) -> None:
        print_warning(command)

    def on_stopping(self, drain: bool) -> None:
        """Do nothing: no caller needs it."""

    async def _drive(self, service: Service) -> None:
        state = await _up(service)
        clock = _WorkerClock(state)
        burst_s, first_s = [], []
        for number in range(BURSTS):
            began, at_zero, first = time.monotonic(), not processes(state), None
            await service.rollouts.submit(
                [
                    RolloutRequest(handler="waiting", index=number * self._rollouts + one)
                    for one in range(self._rollouts)
                ]
            )
            while sum(state.counters.delivered.values()) < (number + 1) * self._rollouts:
                await self._sample(state, clock)
                if first is None and _ready(state):
                    first = time.monotonic() - began
            burst_s.append(time.monotonic() - began)
            first_s += [first] if at_zero and first is not None else []
            until = time.monotonic() + self._gap_s
            while time.monotonic() < until:
                await self._sample(state, clock)
        finished = state.counters.delivered.get(StopReason.FINISHED, 0)
        self.measured = Bursts(
            burst_s=burst_s,
            first_s=first_s,
            worker_s=clock.seconds,
            lost=BURSTS * self._rollouts - finished,
            starts=state.scaling.starts,
            largest=max(self._counts),
            least=min(self._counts),
        )
        self._stop(False)

    async def _sample(self, state: State, clock: "_WorkerClock") -> None:
        await asyncio.sleep(SAMPLE_S)
        clock.sample()
        self._counts.add(processes(state))


class _WorkerClock:
    """Sums the seconds of workers by samples, in the same way for any number."""

    def __init__(self, state: State) -> None:
        self._state, self._at, self.seconds = state, time.monotonic(), 0.0

    def sample(self) -> None:
        now = time.monotonic()
        self.seconds += processes(self._state) * (now - self._at)
        self._at = now


def _ready(state: State) -> bool:
    return any(worker.status is WorkerStatus.READY for worker in state.workers.values())


async def _up(service: Service) -> State:
    """Wait until the engine and the first workers are ready, and return the core's
    state.
    """
    while True:
        world = service._world.world
        if world is not None:
            state = world.core.state
            serving = [engine.version >= 0 for engine in state.engines.values()]
            starting = any(one.status is WorkerStatus.STARTING for one in state.workers.values())
            if serving and all(serving) and not starting:
                return state
        await asyncio.sleep(SAMPLE_S)


def main() -> None:
    driver = _Driver(int(sys.argv[2]), float(sys.argv[3]))
    launch.serve(
        load(sys.argv[1], []),
        observer=driver,
        make_backend=no_backend,
        programs=Programs(engine="benchmarks.workers.world"),
        on_service=driver.on_service,
        access=Access(port=0, no_token=True),
    )
    assert driver.measured is not None, "the service ends once it is measured"
    print(msgspec.json.encode(driver.measured).decode(), flush=True)


if __name__ == "__main__":
    main()
