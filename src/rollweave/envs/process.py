"""Environments in child processes: the messages between the run and a process that
holds one environment at a time, and a pool of such processes. Each command has one
reply.

Invariants: a process is idle, leased to exactly one environment or reward, or gone; a
call that is cancelled (it ran out of time) kills its process, because the state of the
process is unknown; a process that died fails the call in progress with `EnvError` and
is never leased again; after `close` no process is left.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rollweave.envs.base import Episode, Observation, Score, Step
from rollweave.io.child import Child, spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.errors import EnvError, RewardError, WireError
from rollweave.schema.work import Task

MODULE = "rollweave.envs.isolated"


class EnvSpec(Struct, frozen=True, kw_only=True):
    env: str
    options: dict[str, Any]


class Open(TaggedStruct, frozen=True, kw_only=True):
    """→ Done | Failed"""

    spec: EnvSpec


class Reset(TaggedStruct, frozen=True, kw_only=True):
    """→ Observed | Failed"""

    task: Task


class Act(TaggedStruct, frozen=True, kw_only=True):
    """→ Stepped | Failed"""

    action: str
    finish_reason: str = "stop"


class Close(TaggedStruct, frozen=True, kw_only=True):
    """→ Done | Failed. The process may then open another environment."""


class Evaluate(TaggedStruct, frozen=True, kw_only=True):
    """→ Scored | Failed"""

    spec: EnvSpec
    episode: Episode


EnvCommand = Open | Reset | Act | Close | Evaluate


class Done(TaggedStruct, frozen=True, kw_only=True):
    pass


class Observed(TaggedStruct, frozen=True, kw_only=True):
    observation: Observation


class Stepped(TaggedStruct, frozen=True, kw_only=True):
    step: Step


class Scored(TaggedStruct, frozen=True, kw_only=True):
    score: Score


class Failed(TaggedStruct, frozen=True, kw_only=True):
    """The environment or the reward failed; the process is healthy."""

    error: str


EnvReply = Done | Observed | Stepped | Scored | Failed

R = TypeVar("R", bound=EnvReply)

_decode = decoder_of(EnvReply)


class EnvProcess:
    """One child process, which handles one call at a time."""

    def __init__(self, name: str, log: Path, forget: Callable[["EnvProcess"], None]) -> None:
        """Start the process; `forget` is called once it is gone.

        Raises EnvError if it cannot be started.
        """
        self.lost = ""
        """The reason of the loss; empty while the process lives."""
        self._answer: asyncio.Future[EnvReply] | None = None
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

    async def ask(self, command: EnvCommand, kind: type[R]) -> R:
        """Send one command and return its reply. Raises EnvError; cancelling kills the
        process.
        """
        assert self._answer is None or self._answer.done(), "one command at a time"
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
        """Kill the process and its whole process group. Idempotent."""
        if not self.lost:
            with contextlib.suppress(ProcessLookupError):
                # The process leads a group (`start_new_session`).
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


class EnvProcesses:
    """A pool of processes for environments.

    The pool grows to the number of processes that are leased at the same time, which
    its users bound.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started = 0
        self._idle: list[EnvProcess] = []
        self._alive: dict[EnvProcess, None] = {}
        self._closed = False

    def lease(self) -> EnvProcess:
        """Return an idle process, or a new one. Raises EnvError."""
        if self._closed:
            raise EnvError("the run is ending")
        if self._idle:
            return self._idle.pop()
        name = f"env-{self._started}"
        process = EnvProcess(name, self._logs / f"{name}.log", self._forget)
        self._started += 1
        self._alive[process] = None
        return process

    def give_back(self, process: EnvProcess) -> None:
        """End a lease. A lost process is not used again."""
        if not process.lost:
            self._idle.append(process)

    def __len__(self) -> int:
        """Return the number of processes that are not known to be gone."""
        return len(self._alive)

    async def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        self._closed = True
        processes = list(self._alive)
        for process in processes:
            process.kill()
        await asyncio.gather(*(process.gone() for process in processes))

    def _forget(self, process: EnvProcess) -> None:
        self._alive.pop(process, None)
        if process in self._idle:
            self._idle.remove(process)


class ProcessEnv:
    """One environment in a leased process. `close` and `kill` end the lease."""

    def __init__(self, processes: EnvProcesses, spec: EnvSpec) -> None:
        """Lease a process. Raises EnvError."""
        self._processes, self._spec = processes, spec
        self._process: EnvProcess | None = processes.lease()

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
        """Close the environment; the process then serves the next environment.

        Raises EnvError if the environment's `close` does.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if not process.lost:
                await process.ask(Close(), Done)
        except EnvError:
            process.kill()
            raise
        finally:
            self._processes.give_back(process)

    def kill(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._processes.give_back(process)

    def _leased(self) -> EnvProcess:
        if self._process is None:
            raise EnvError("the environment is closed")
        return self._process


async def score_in_process(processes: EnvProcesses, spec: EnvSpec, episode: Episode) -> Score:
    """Return the reward, computed in a process. Raises RewardError."""
    try:
        process = processes.lease()
    except EnvError as error:
        raise RewardError(str(error)) from error
    try:
        return (await process.ask(Evaluate(spec=spec, episode=episode), Scored)).score
    except EnvError as error:
        raise RewardError(str(error)) from error
    finally:
        processes.give_back(process)
