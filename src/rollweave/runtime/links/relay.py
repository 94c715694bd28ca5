"""The link to one relay: it sends fetches of versions, and receives their results.

Invariants: those of `runtime/links/process.py`; every `fetch` has one result, at the
latest once the relay is lost; `on_suspected` is called with True and False in turn, and
never after the loss.

Silence is measured in missed heartbeats, on a clock that runs only while our own event
loop does: each tick is scheduled when the former one was handled, and frames that wait
in the socket are read before a tick is handled. However long our own loop was blocked,
it adds at most one heartbeat to a relay's silence.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.links.process import Link, ProcessLink
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import (
    HEARTBEAT_S,
    FetchReply,
    FetchVersion,
    RelayHeartbeat,
    RelayReady,
    RelayReply,
    RelaySpec,
    ServePart,
    StopRelay,
    VersionFailed,
    VersionFetched,
    VersionStalled,
)

T = TypeVar("T")

SUSPECT_BEATS = 3
"""Number of missed heartbeats in a row after which a relay is suspected.

A wrong suspicion only gives those that fetch from the relay another source.
"""

SILENT_S = 5.0
"""Seconds without a heartbeat after which a relay counts as lost, and is killed: more
than a busy machine delays it.
"""

START_S = 60.0
"""Maximum time for a relay to start an interpreter, import numpy and listen, in
seconds.
"""

CLOSE_S = 5.0
"""Maximum time for a relay to end by itself, in seconds."""

_decode = decoder_of(RelayReply)


class RelayLostError(WeightsError):
    """The relay's process has ended, or was killed because it was silent."""


class RelayLink(Link, Protocol):
    """The link to one relay."""

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes of the version that it fetches which have arrived, and the size of
        that version; zeros if it fetches none.
        """

    async def ready(self) -> RelayReady:
        """Wait until the relay listens, and return its address.

        Raises `RelayLostError`.
        """

    def fetch(self, command: FetchVersion) -> "asyncio.Future[FetchReply | None]":
        """Let the relay fetch a version, and return the result.

        The result is None if the relay is lost, or if a later fetch of the same version
        (the same bytes under one id) from another source replaces this one.
        """

    def serve_part(self, command: ServePart) -> None:
        """Let the relay serve what the trainer's ranks have published on its host."""


OnSuspected = Callable[[bool], None]
"""Receives True after `SUSPECT_BEATS` missed heartbeats, and False at the next
frame.
"""

OnStalled = Callable[[VersionStalled], None]
"""Receives the report that a fetch makes no progress."""

OpenRelay = Callable[[Spawn, RelaySpec, OnSuspected, OnStalled], RelayLink]
"""Start a relay by this `Spawn`. Raises OSError."""


def in_process(*, logs: Path, silent_s: float = SILENT_S, start_s: float = START_S) -> OpenRelay:
    """Run each relay as a process, whose output goes to `logs/<id>.log`."""

    def start(
        spawn: Spawn, spec: RelaySpec, on_suspected: OnSuspected, on_stalled: OnStalled
    ) -> ProcessRelay:
        return ProcessRelay(
            spec,
            on_suspected,
            on_stalled,
            spawn=spawn,
            log=logs / f"{spec.id}.log",
            silent_s=silent_s,
            start_s=start_s,
        )

    return start


class ProcessRelay(ProcessLink[RelayReady]):
    """`RelayLink` to a process, whose first frame is a `RelaySpec`."""

    def __init__(
        self,
        spec: RelaySpec,
        on_suspected: OnSuspected,
        on_stalled: OnStalled,
        *,
        spawn: Spawn,
        log: Path,
        silent_s: float,
        start_s: float = START_S,
    ) -> None:
        super().__init__(
            "relay",
            spec.id,
            spec,
            spawn=spawn,
            log=log,
            start_s=start_s,
            stop=StopRelay(),
            close_s=CLOSE_S,
            lost_error=RelayLostError,
        )
        self._silent_s = silent_s
        self._on_suspected, self._on_stalled = on_suspected, on_stalled
        self._missed = 0
        """Number of missed heartbeats in a row."""
        self._heartbeat = RelayHeartbeat()
        """The newest heartbeat."""
        self._fetches: dict[int, deque[tuple[str, asyncio.Future[FetchReply | None]]]] = {}
        """Unanswered fetches by version, with their digests.

        A relay answers all of them, those of one version in the order in which they
        were sent.
        """

    @property
    def progress(self) -> tuple[int, int]:
        return self._heartbeat.received, self._heartbeat.whole

    def fetch(self, command: FetchVersion) -> "asyncio.Future[FetchReply | None]":
        result: asyncio.Future[FetchReply | None] = self._loop.create_future()
        if self.lost.done():
            result.set_result(None)
            return result
        digest = command.manifest.digest
        fetches = self._fetches.setdefault(command.manifest.publication_id, deque())
        for other, replaced in fetches:
            if other == digest:
                _resolve(replaced, None)
        fetches.append((digest, result))
        self._child.send(encode(command))
        return result

    def serve_part(self, command: ServePart) -> None:
        if not self.lost.done():
            self._child.send(encode(command))

    def _on_frame(self, payload: bytes) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(HEARTBEAT_S, self._on_missed)
        missed, self._missed = self._missed, 0
        if missed >= SUSPECT_BEATS:
            self._on_suspected(False)
        match _decode(payload):
            case RelayReady() as ready:
                _resolve(self._ready, ready)
            case VersionFetched() as taken:
                self._on_result(taken.manifest.publication_id, taken)
            case VersionFailed() as failed:
                self._on_result(failed.publication_id, failed)
            case VersionStalled() as stalled:
                self._on_stalled(stalled)
            case RelayHeartbeat() as heartbeat:
                self._heartbeat = heartbeat

    def _on_missed(self) -> None:
        """Count a missed heartbeat."""
        self._missed += 1
        if self._missed * HEARTBEAT_S >= self._silent_s:
            self._give_up(f"sent nothing for {self._silent_s:g} s")
            return
        self._timer = self._loop.call_later(HEARTBEAT_S, self._on_missed)
        if self._missed == SUSPECT_BEATS:
            self._on_suspected(True)

    def _on_result(self, publication_id: int, result: FetchReply) -> None:
        fetches = self._fetches.get(publication_id)
        if fetches is None:
            return self._give_up(
                f"answered a fetch of weights {publication_id} that was never sent"
            )
        _resolve(fetches.popleft()[1], result)
        if not fetches:
            del self._fetches[publication_id]
        return None

    def _on_gone(self, reason: str) -> None:
        super()._on_gone(reason)
        while self._fetches:
            for _, result in self._fetches.popitem()[1]:
                _resolve(result, None)


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)
