"""Environments in worker processes: a pool of workers, each of which holds one
environment at a time.

Invariants: a worker is idle, leased to exactly one environment or reward, or gone; a
call that is cancelled (it ran out of time) kills its worker, because the state of the
worker is unknown; a worker that died fails the call in progress with `EnvError` and is
never leased again; after `close` no worker is left.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollweave.envs.base import Episode, Observation, Score, Step
from rollweave.envs.protocol import (
    Act,
    Close,
    Done,
    EnvSpec,
    Evaluate,
    Failed,
    Observed,
    Open,
    Reset,
    Scored,
    Stepped,
    WorkerCommand,
    WorkerReply,
)
from rollweave.io.child import Child, spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import EnvError, RewardError, WireError
from rollweave.schema.work import Task

MODULE = "rollweave.envs.worker"

R = TypeVar("R", bound=WorkerReply)

_decode = decoder_of(WorkerReply)


class Worker:
    """One child process, which handles one call at a time."""

    def __init__(self, name: str, log: Path, forget: Callable[["Worker"], None]) -> None:
        """Start the process; `forget` is called once it is gone.

        Raises EnvError if it cannot be started.
        """
        self.lost = ""
        """Why the worker is gone; empty while it lives."""
        self._answer: asyncio.Future[WorkerReply] | None = None
        self._forget = forget
        try:
            self._child: Child = spawn(
                name=name,
                module=MODULE,
                log=log,
                env={},
                on_frame=self._on_frame,
                on_gone=self._on_gone,
            )
        except OSError as error:
            raise EnvError(f"no process for the environment: {error}") from error

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, command: WorkerCommand, kind: type[R]) -> R:
        """Send one command and return its reply. Raises EnvError; cancelling kills the
        worker.
        """
        assert self._answer is None or self._answer.done(), "a worker takes one command at a time"
        if self.lost:
            raise EnvError(self.lost)
        self._answer = asyncio.get_running_loop().create_future()
        self._child.send(encode(command))
        try:
            reply = await self._answer
        except asyncio.CancelledError:
            self.kill()
            raise
        if isinstance(reply, Failed):
            raise EnvError(reply.error)
        if not isinstance(reply, kind):
            self.kill()
            raise EnvError(
                f"the environment's process must answer {kind.__name__}, got {type(reply).__name__}"
            )
        return reply

    def kill(self) -> None:
        """Kill the process and those that the environment started. Idempotent."""
        if not self.lost:
            with contextlib.suppress(ProcessLookupError):
                # It leads a process group (`start_new_session`).
                os.killpg(self.pid, signal.SIGKILL)
        self._lose("the environment's process was killed")
        self._child.kill()

    async def gone(self) -> None:
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        try:
            reply = _decode(payload)
        except WireError as error:
            self._lose(f"the environment's process sent a malformed frame: {error}")
            self._child.kill()
            return
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)

    def _on_gone(self, reason: str) -> None:
        self._lose(f"the environment's process is gone: {reason}")
        self._forget(self)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(EnvError(self.lost))
            self._answer.exception()  # an exception that nothing awaits is not reported


class WorkerPool:
    """A pool of workers.

    It grows to as many workers as are leased at the same time, which its users bound.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started = 0
        self._idle: list[Worker] = []
        self._alive: dict[Worker, None] = {}
        self._closed = False

    def lease(self) -> Worker:
        """Return an idle worker, or a new one. Raises EnvError."""
        if self._closed:
            raise EnvError("the run is ending")
        if self._idle:
            return self._idle.pop()
        name = f"env-{self._started}"
        worker = Worker(name, self._logs / f"{name}.log", self._forget)
        self._started += 1
        self._alive[worker] = None
        return worker

    def give_back(self, worker: Worker) -> None:
        """End a lease. A lost worker is not used again."""
        if not worker.lost:
            self._idle.append(worker)

    def __len__(self) -> int:
        """Return the number of workers whose processes are not known to be gone."""
        return len(self._alive)

    async def close(self) -> None:
        """Kill all workers and wait until they are gone."""
        self._closed = True
        workers = list(self._alive)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in workers))

    def _forget(self, worker: Worker) -> None:
        self._alive.pop(worker, None)
        if worker in self._idle:
            self._idle.remove(worker)


class ProcessEnv:
    """One environment in a leased worker. `close` and `kill` end the lease."""

    def __init__(self, workers: WorkerPool, spec: EnvSpec) -> None:
        """Lease a worker. Raises EnvError."""
        self._workers, self._spec = workers, spec
        self._worker: Worker | None = workers.lease()

    async def reset(self, task: Task) -> Observation:
        """Start the environment and begin the task. Raises EnvError."""
        await self._leased().ask(Open(spec=self._spec), Done)
        return (await self._leased().ask(Reset(task=task), Observed)).observation

    async def step(self, action: str, *, finish_reason: str = "stop") -> Step:
        """Apply the agent's message. Raises EnvError."""
        return (
            await self._leased().ask(Act(action=action, finish_reason=finish_reason), Stepped)
        ).step

    async def close(self) -> None:
        """Close the environment; the worker serves the next one.

        Raises EnvError if the environment's `close` does.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if not worker.lost:
                await worker.ask(Close(), Done)
        except EnvError:
            worker.kill()
            raise
        finally:
            self._workers.give_back(worker)

    def kill(self) -> None:
        """Kill the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            self._workers.give_back(worker)

    def _leased(self) -> Worker:
        if self._worker is None:
            raise EnvError("the environment is closed")
        return self._worker


async def score_in_process(workers: WorkerPool, spec: EnvSpec, episode: Episode) -> Score:
    """Return the reward, computed in a worker. Raises RewardError."""
    try:
        worker = workers.lease()
    except EnvError as error:
        raise RewardError(str(error)) from error
    try:
        return (await worker.ask(Evaluate(spec=spec, episode=episode), Scored)).score
    except EnvError as error:
        raise RewardError(str(error)) from error
    finally:
        workers.give_back(worker)
