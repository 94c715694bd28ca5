"""The way to one relay: versions to take, and what came of each.

Invariants: every `take` has one result; `ready`'s and `take`'s futures are done once
the relay is lost; `lost` is done, with the reason, after death, silence, `kill` and
`close` alike, and only once the process is reaped: nothing of it is left then;
`suspected` is called with True and False in turn, and not after that.

Silence is counted in beats that have not come, on a clock that goes on only while our
own event loop does: a tick is set when the one before it has been served, and what
waits in the socket is read before a tick is. So however long we were held up ourselves,
nobody was silent for more than a beat of it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from rollweave.io.child import spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import (
    HEARTBEAT_S,
    FetchReply,
    FetchVersion,
    RelayHeartbeat,
    RelayReady,
    RelayReply,
    RelaySpec,
    StopRelay,
    VersionFailed,
    VersionFetched,
    VersionStalled,
)

T = TypeVar("T")

SUSPECT_BEATS = 3
"""Beats that have not come in a row until a relay is suspected: it costs no more than
another source for who takes from it.
"""

SILENT_S = 5.0
"""Seconds without a beat after which a relay counts as lost, and is killed: more than a
busy machine delays it.
"""

START_S = 60.0
"""Seconds that a relay has to start: an interpreter, numpy, and an address to listen
on.
"""

CLOSE_S = 5.0
"""Seconds that a relay has to end by itself."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of its process: cores belong to engines and trainer."""

_decode = decoder_of(RelayReply)


class RelayLostError(WeightsError):
    """The relay's process is gone, or does not answer and was killed."""


class RelayLink(Protocol):
    """What effects see of one relay.

    All calls belong to the event loop's thread; none blocks.
    """

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, once the relay is gone."""

    async def ready(self) -> RelayReady:
        """Wait until it listens, and say where. Raises `RelayLostError`."""

    def take(self, command: FetchVersion) -> "asyncio.Future[FetchReply | None]":
        """Have it get a version, and say what came of it.

        The result is None where there is no answer: the relay is lost, or another
        `FetchVersion` of the same version (the same bytes under one id), said later, has
        overtaken this one, since it names another source, and its answer counts.
        """

    def kill(self) -> None:
        """End it now, without waiting. `lost` follows."""

    async def close(self) -> None:
        """Ask it to end, kill it if it does not, and return when it is gone."""


Suspected = Callable[[bool], None]
"""Told True when nothing has been heard of a relay for SUSPECT_BEATS, and False when it
is heard again.
"""

OnStalled = Callable[[VersionStalled], None]

OpenRelay = Callable[[RelaySpec, Suspected, OnStalled], RelayLink]
"""Starts a relay. Raises OSError where no process can be made."""


def in_process(
    *,
    logs: Path,
    env: Mapping[str, str] = ONE_THREAD,
    silent_s: float = SILENT_S,
    module: str = "rollweave.runtime.entrypoints.relay",
) -> OpenRelay:
    """Each relay as a child process, `python -m module`; its output goes to
    `logs/<id>.log`.
    """

    def start(spec: RelaySpec, suspected: Suspected, stalled: OnStalled) -> ProcessRelay:
        return ProcessRelay(
            spec,
            suspected,
            stalled,
            log=logs / f"{spec.id}.log",
            env=env,
            silent_s=silent_s,
            module=module,
        )

    return start


class ProcessRelay:
    """`RelayLink` to a child process, which takes a `RelaySpec` as its first frame."""

    def __init__(
        self,
        spec: RelaySpec,
        suspected: Suspected,
        stalled: OnStalled,
        *,
        log: Path,
        env: Mapping[str, str],
        silent_s: float,
        module: str,
    ) -> None:
        self._id, self._silent_s = spec.id, silent_s
        self._suspected, self._stalled = suspected, stalled
        self._missed = 0  # beats in a row
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._ready: asyncio.Future[RelayReady] = self._loop.create_future()
        # A relay answers every FetchVersion, those of one version in the order in which they
        # came.
        self._waiting: dict[int, deque[tuple[str, asyncio.Future[FetchReply | None]]]] = {}
        self._reason = ""
        self._child = spawn(
            name=spec.id,
            module=module,
            log=log,
            env=env,
            on_frame=self._on_frame,
            on_gone=self._on_gone,
        )
        self._patience = self._loop.call_later(
            START_S, self._give_up, f"was not ready within {START_S:g} s"
        )
        self._child.send(encode(spec))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> RelayReady:
        return await asyncio.shield(self._ready)

    def take(self, command: FetchVersion) -> "asyncio.Future[FetchReply | None]":
        answer: asyncio.Future[FetchReply | None] = self._loop.create_future()
        if self.lost.done():
            answer.set_result(None)
            return answer
        digest = command.manifest.digest
        waiting = self._waiting.setdefault(command.manifest.weights_id, deque())
        for other, overtaken in waiting:
            if other == digest:
                _give(overtaken, None)
        waiting.append((digest, answer))
        self._child.send(encode(command))
        return answer

    def kill(self) -> None:
        self._give_up("was killed")

    async def close(self) -> None:
        self._reason = self._reason or "was closed"
        self._child.send(encode(StopRelay()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._child.gone()
        self._child.kill()
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        self._patience.cancel()
        self._patience = self._loop.call_later(HEARTBEAT_S, self._miss)
        missed, self._missed = self._missed, 0
        if missed >= SUSPECT_BEATS:
            self._suspected(False)
        match _decode(payload):
            case RelayReady() as ready:
                _give(self._ready, ready)
            case VersionFetched() as taken:
                self._answer(taken.manifest.weights_id, taken)
            case VersionFailed() as failed:
                self._answer(failed.weights_id, failed)
            case VersionStalled() as word:
                self._stalled(word)
            case RelayHeartbeat():
                pass

    def _miss(self) -> None:
        """A beat has not come."""
        self._missed += 1
        if self._missed * HEARTBEAT_S >= self._silent_s:
            self._give_up(f"said nothing for {self._silent_s:g} s")
            return
        self._patience = self._loop.call_later(HEARTBEAT_S, self._miss)
        if self._missed == SUSPECT_BEATS:
            self._suspected(True)

    def _answer(self, weights_id: int, word: FetchReply) -> None:
        waiting = self._waiting.get(weights_id)
        if waiting is None:
            return self._give_up(f"answered for version id {weights_id}, which nobody asked for")
        _give(waiting.popleft()[1], word)
        if not waiting:
            del self._waiting[weights_id]
        return None

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._child.kill()

    def _on_gone(self, reason: str) -> None:
        self._patience.cancel()
        reason = (
            f"relay {self._id} {self._reason}: {reason}"
            if self._reason
            else f"relay {self._id}: {reason}"
        )
        _give(self.lost, reason)
        if not self._ready.done():
            self._ready.set_exception(RelayLostError(reason))
            self._ready.exception()  # whoever still waits sees it; nobody has to
        while self._waiting:
            for _, answer in self._waiting.popitem()[1]:
                _give(answer, None)


def _give(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)
