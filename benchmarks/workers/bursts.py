"""A controller under test: `python -m benchmarks.workers.bursts CONFIG ROLLOUTS GAP_S`.

It is a service that submits bursts of rollouts to itself, with a gap after each. Its
only line of output is a `Bursts` as JSON.
"""

import asyncio
import sys
import time

from benchmarks.workers.controller import Driver, serve
from rollweave.core.mechanisms.cluster.state import cluster_of
from rollweave.core.mechanisms.cluster.workers import processes
from rollweave.core.state import State, WorkerStatus
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import load
from rollweave.schema.service import RolloutRequest
from rollweave.schema.work import StopReason
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


class _InBursts(Driver[Bursts]):
    """Submits the bursts."""

    def __init__(self, rollouts: int, gap_s: float) -> None:
        super().__init__()
        self._rollouts, self._gap_s = rollouts, gap_s
        self._counts: set[int] = set()

    async def measure(self, service: Service, state: State) -> Bursts:
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
        return Bursts(
            burst_s=burst_s,
            first_s=first_s,
            worker_s=clock.seconds,
            lost=BURSTS * self._rollouts - finished,
            starts=cluster_of(state).scaling.starts,
            largest=max(self._counts),
            least=min(self._counts),
        )

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


def main() -> None:
    serve(load(sys.argv[1], []), _InBursts(int(sys.argv[2]), float(sys.argv[3])))


if __name__ == "__main__":
    main()
