"""A relay: takes versions into this host's memory, and passes on what it has of them
while more is still coming (Laminar §4).

Invariants: every `Take` is answered once, those of one version in their order; a
version is seen by engines only when it is whole and verified; one that fails has
changed nothing, and what has come of it waits a while for a `Take` from another source,
which goes on after the last whole piece: no piece comes twice. Several versions may
come at once, each into its own memory; those that the newest `Take` does not keep are
let go. Memory is bounded by the versions kept, those coming, and the changes of the
newest two.
"""

import asyncio
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rollweave.schema.weights import (
    FetchReply,
    FetchVersion,
    RelayAddress,
    RelayReply,
    VersionFailed,
    VersionFetched,
    VersionStalled,
    WeightManifest,
)
from rollweave.weights.memory import in_thread
from rollweave.weights.protocol import Delta, FetchError, KeepAlive, Message, Raw, Refused, Request
from rollweave.weights.serve import (
    Broadcast,
    DeltaPiece,
    ServedVersion,
    VersionDelta,
    serve_version,
)
from rollweave.weights.transport import Body, Channel, Listener, StallDetector, Transport
from rollweave.weights.version_store import (
    StoredVersion,
    VersionStore,
    VersionWriter,
    check_same,
    chunks_of,
    close_all,
    encode_spans,
)

LINGER_S = 60.0
"""Seconds that what has come of a version waits for another source: long after a
controller has found one.
"""

MAX_PIECE_BYTES = 1 << 30
"""Of the payload in the longest piece that is taken at once."""

DELTA_VERSIONS = 2
"""Newest versions of which the changes are kept: the one that is on its way, and the
one before, for who is late.
"""

ENCODERS = 4
"""Threads that encode changes, on a machine that has so many cores."""

_SUPERSEDED = "another Take of the same version has overtaken this one"


@dataclass
class _PendingVersion:
    """A version that is wanted and not here yet."""

    manifest: WeightManifest
    commands: deque[FetchVersion] = field(default_factory=deque)
    draft: VersionWriter | None = None
    nbytes: int = 0
    began: float = field(default_factory=time.monotonic)
    worker: "asyncio.Task[None] | None" = None
    work: "asyncio.Task[StoredVersion] | None" = None
    patience: asyncio.TimerHandle | None = None
    why: str = _SUPERSEDED
    """Said of work that is cancelled."""
    abandoned: bool = False


class Relay:
    """Everything of a relay but its process. `say` takes its answers."""

    def __init__(
        self, transport: Transport, say: Callable[[RelayReply], None], *, linger_s: float = LINGER_S
    ) -> None:
        self._transport, self._say, self._linger_s = transport, say, linger_s
        self._depot = VersionStore()
        self._offers: dict[int, ServedVersion] = {}
        self._coming: dict[int, _PendingVersion] = {}
        self._keep: set[int] = set()
        self._arrivals = Broadcast()
        self._encoding: dict[int, asyncio.Task[None]] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(
            min(ENCODERS, os.cpu_count() or 1), thread_name_prefix="encode"
        )
        self._listener: Listener | None = None

    async def listen(self, host: str) -> RelayAddress:
        """Serve other relays from now on. Raises OSError."""
        self._listener = await self._transport.listen(host, self._serve)
        return self._listener.address

    def take(self, command: FetchVersion) -> None:
        """Begin. The answer is said once there is one."""
        weights_id = command.manifest.weights_id
        self._keep = {*command.keep, weights_id}
        for other, coming in list(self._coming.items()):
            if other not in self._keep:
                self._abandon(
                    coming, f"let go: the Take of weights id {weights_id} does not keep it"
                )
        coming = self._coming.setdefault(weights_id, _PendingVersion(command.manifest))
        coming.why, coming.abandoned = _SUPERSEDED, False
        if coming.patience is not None:
            coming.patience.cancel()
        coming.commands.append(command)
        if coming.work is not None and _supersedes(command, coming.commands[0]):
            coming.work.cancel()
        if coming.worker is None:
            coming.worker = asyncio.get_running_loop().create_task(
                self._obey(coming), name=f"take {weights_id}"
            )

    def manifest(self, weights_id: int) -> WeightManifest | None:
        """Of a version that is here."""
        held = self._depot.get(weights_id)
        return held.manifest if held is not None else None

    async def close(self) -> None:
        """Let go of everything. What is under way gets no answer any more."""
        if self._listener is not None:
            await self._listener.close()
        tasks: list[asyncio.Task[Any]] = [*self._encoding.values()]
        for coming in self._coming.values():
            if coming.patience is not None:
                coming.patience.cancel()
            tasks.extend(task for task in (coming.worker, coming.work) if task is not None)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for coming in self._coming.values():
            if coming.draft is not None:
                coming.draft.close()
        if self._freeing:
            await asyncio.wait(self._freeing)
        self._pool.shutdown(cancel_futures=True)
        self._depot.close()

    # Taking.

    async def _obey(self, coming: _PendingVersion) -> None:
        """Work through the commands of one version, of which the last counts."""
        weights_id = coming.manifest.weights_id
        while coming.commands:
            command = coming.commands[0]
            if coming.abandoned or any(
                _supersedes(other, command) for other in list(coming.commands)[1:]
            ):
                answer: FetchReply = VersionFailed(
                    weights_id=weights_id, reason="source", error=coming.why
                )
            else:
                coming.work = asyncio.get_running_loop().create_task(self._taken(command, coming))
                await asyncio.wait([coming.work])
                answer, coming.work = self._answer(coming, coming.work), None
            coming.commands.popleft()
            self._say(answer)
        coming.worker = None
        if self._depot.get(weights_id) is not None:
            del self._coming[weights_id]
        elif coming.draft is None or coming.abandoned:
            self._remove(coming)
        else:
            reason = f"nobody has named another source within {self._linger_s:g} s"
            coming.patience = asyncio.get_running_loop().call_later(
                self._linger_s, self._abandon, coming, reason
            )

    def _answer(self, coming: _PendingVersion, work: "asyncio.Task[StoredVersion]") -> FetchReply:
        weights_id = coming.manifest.weights_id
        if work.cancelled():
            return VersionFailed(weights_id=weights_id, reason="source", error=coming.why)
        error = work.exception()
        if error is None:
            seconds = time.monotonic() - coming.began
            return VersionFetched(
                manifest=work.result().manifest, nbytes=coming.nbytes, seconds=seconds
            )
        if isinstance(error, FetchError):
            return VersionFailed(weights_id=weights_id, reason=error.reason, error=str(error))
        traceback.print_exception(error, file=sys.stderr)
        return VersionFailed(
            weights_id=weights_id, reason="broken", error=f"{type(error).__name__}: {error}"
        )

    async def _taken(self, command: FetchVersion, coming: _PendingVersion) -> StoredVersion:
        """The version, here. Raises TakeError."""
        manifest = command.manifest
        check_same(coming.manifest, manifest)
        self._depot.check(manifest)
        held = self._depot.get(manifest.weights_id)
        if held is not None:
            self._settle()
            return held
        base = self._depot.base(command.base_id) if command.base_id is not None else None
        draft = await self._memory(command, coming)
        offer = self._offers[manifest.weights_id]
        changes = offer.expect(base.name if base is not None else None)
        if command.source is None:
            await self._load(coming, draft, offer, command.chunk_bytes)
        else:
            await self._fetch(command.source, coming, draft, offer, base, changes)
        coming.draft = None  # whole or broken, it is none any more
        try:
            held = draft.finish()
        except FetchError as error:
            self._withdraw(manifest.weights_id, str(error))
            raise
        self._depot.admit(held)
        offer.verify()
        if changes is not None and base is not None and command.source is None:
            encoding = self._encode(offer, changes, base, held, command.chunk_bytes)
            self._encoding[manifest.weights_id] = asyncio.get_running_loop().create_task(encoding)
        self._settle()
        return held

    async def _memory(self, command: FetchVersion, coming: _PendingVersion) -> VersionWriter:
        """Memory for the version: what has come of it already, or new.

        Raises TakeError.
        """
        if coming.draft is not None and command.source is not None:
            return coming.draft
        make = self._depot.begin if command.source is not None else self._depot.adopt
        try:
            draft = await in_thread(make, command.manifest, undo=VersionWriter.close)
        except FetchError as error:
            base = set() if command.base_id is None else {command.base_id}
            if error.reason != "room":
                raise
            self._let_go(self._keep | base)
            if not self._freeing:
                raise
            await asyncio.wait(self._freeing)
            draft = await in_thread(make, command.manifest, undo=VersionWriter.close)
        weights_id = command.manifest.weights_id
        offer = self._offers.get(weights_id)
        if offer is not None and not draft.copies:
            offer.fd = draft.fd  # the same bytes, in the memory of who has published them
        else:
            self._withdraw(weights_id, "it comes anew")
            self._offers[weights_id] = ServedVersion(command.manifest, draft.fd)
            self._arrivals.wake()
        if coming.draft is not None:
            coming.draft.close()
        coming.draft = draft
        return draft

    async def _load(
        self, coming: _PendingVersion, draft: VersionWriter, offer: ServedVersion, chunk_bytes: int
    ) -> None:
        """From this host's memory."""
        try:
            for start in range(0, draft.manifest.nbytes, chunk_bytes):
                stop = min(start + chunk_bytes, draft.manifest.nbytes)
                offer.add(start, stop, await in_thread(draft.load, start, stop))
        except BaseException:
            # nothing else can go on with memory that is not ours
            self._discard(coming, "it could not be read from memory")
            raise

    async def _fetch(
        self,
        source: RelayAddress,
        coming: _PendingVersion,
        draft: VersionWriter,
        offer: ServedVersion,
        base: StoredVersion | None,
        changes: VersionDelta | None,
    ) -> None:
        """From another relay: what is missing, piece by piece."""
        manifest = draft.manifest
        change = bytearray()

        def room(word: Message, nbytes: int) -> memoryview:
            nonlocal change
            if (
                not isinstance(word, Raw | Delta)
                or word.start != draft.done
                or word.stop - word.start > MAX_PIECE_BYTES
            ):
                raise FetchError(
                    "broken", f"expected the piece from byte {draft.done} on, got {word}"
                )
            view = draft.room(word.start, word.stop)
            if isinstance(word, Raw) and nbytes == len(view):
                return view
            if (
                not isinstance(word, Delta)
                or base is None
                or nbytes > 2 * len(view) + MAX_PIECE_BYTES // 1024
            ):
                raise FetchError("broken", f"{nbytes} bytes do not come with {word}")
            change = bytearray(nbytes)
            return memoryview(change)

        watch = StallDetector(
            lambda: self._say(VersionStalled(weights_id=manifest.weights_id, source=source))
        )
        channel: Channel | None = None
        try:
            channel = watch.channel = await self._transport.connect(source)
            missing = ((draft.done, manifest.nbytes),) if manifest.nbytes > draft.done else ()
            named = base.name if base is not None else None
            ask = Request(
                weights_id=manifest.weights_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                ranges=missing,
                base=named,
            )
            await channel.send(ask)
            while draft.done < manifest.nbytes:
                word, check = await channel.receive(room)
                match word:
                    case Raw(start=start, stop=stop):
                        draft.fill(start, stop)
                        coming.nbytes += stop - start
                        if changes is not None:
                            offer.end_changes(changes)
                        offer.add(start, stop, check)
                    case Delta(start=start, stop=stop, sizes=sizes) if (
                        base is not None and changes is not None
                    ):
                        await in_thread(draft.apply, start, stop, memoryview(change), sizes, base)
                        coming.nbytes += len(change)
                        body = Body(len(change), check, memoryview(change))
                        changes.open = True
                        offer.add_change(changes, start, DeltaPiece(stop, sizes, body))
                        offer.add(start, stop)
                    case Refused(reason=reason, error=error):
                        raise FetchError(reason, f"{source.host}:{source.port} refuses: {error}")
                    case KeepAlive():
                        pass
                    case _:
                        raise FetchError(
                            "broken", f"{source.host}:{source.port} said {type(word).__name__}"
                        )
        finally:
            watch.close()
            if channel is not None:
                channel.close()

    async def _encode(
        self,
        offer: ServedVersion,
        changes: VersionDelta,
        base: StoredVersion,
        held: StoredVersion,
        chunk_bytes: int,
    ) -> None:
        """Make the changes since `base` that have not come from elsewhere, once for all
        who ask.
        """
        old, new = base.view(), held.view()  # they stay while we read, even if they are let go
        try:
            for cut in chunks_of(offer.manifest, chunk_bytes):
                rest = tuple(span for span in cut.spans if span.start >= changes.stop)
                if not rest:
                    continue
                blocks = await in_thread(
                    encode_spans, rest, old.__getitem__, new.__getitem__, self._pool
                )
                if offer.withdrawn or not changes.open:
                    return
                sizes = tuple(len(block) for block in blocks)
                offer.add_change(
                    changes,
                    rest[0].start,
                    DeltaPiece(rest[-1].stop, sizes, Body.of(b"".join(blocks))),
                )
        finally:
            offer.end_changes(changes)

    # Letting go.

    def _settle(self) -> None:
        """A version has come: let go of what nobody needs any more."""
        self._let_go(self._keep)
        for weights_id in sorted(self._depot.ids())[:-DELTA_VERSIONS]:
            self._offers[weights_id].forget_changes()
        for weights_id, encoding in list(self._encoding.items()):
            if encoding.done():
                del self._encoding[weights_id]

    def _let_go(self, keep: set[int]) -> None:
        """Memory of gigabytes is freed in a thread: whoever is served goes on, and so
        do our beats.
        """
        gone = self._depot.keep(keep)
        for held in gone:
            weights_id = held.manifest.weights_id
            self._withdraw(weights_id, f"weights id {weights_id} was let go")
        if gone:
            freeing = asyncio.get_running_loop().create_task(
                in_thread(close_all, gone), name="free memory"
            )
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)

    def _abandon(self, coming: _PendingVersion, reason: str) -> None:
        """Nobody wants this version any more.

        Whoever is at work on it sees to the rest.
        """
        coming.why, coming.abandoned = reason, True
        if coming.work is not None:
            coming.work.cancel()
        if coming.worker is None:
            self._remove(coming)

    def _remove(self, coming: _PendingVersion) -> None:
        if coming.patience is not None:
            coming.patience.cancel()
        del self._coming[coming.manifest.weights_id]
        self._discard(coming, coming.why)

    def _discard(self, coming: _PendingVersion, reason: str) -> None:
        """Remove what has come."""
        if coming.draft is not None:
            coming.draft.close()
            coming.draft = None
            self._withdraw(coming.manifest.weights_id, reason)

    def _withdraw(self, weights_id: int, reason: str) -> None:
        offer = self._offers.pop(weights_id, None)
        if offer is not None:
            offer.withdraw(reason)

    # Giving.

    async def _serve(self, channel: Channel) -> None:
        word, _ = await channel.receive()
        if isinstance(word, Request):
            await serve_version(
                channel, word, lambda ask: self._offers.get(ask.weights_id), self._arrivals
            )
        else:
            await channel.send(
                Refused(reason="source", error=f"a relay answers Ask, got {type(word).__name__}")
            )


def _supersedes(later: FetchVersion, command: FetchVersion) -> bool:
    """Whether `later`, said after `command`, makes it needless: they want the same
    bytes.
    """
    return later.manifest.digest == command.manifest.digest
