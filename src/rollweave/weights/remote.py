"""A store of versions in the memory of a host near the engines (RollArt §6.3; ROSE §4.2
and App. F).

Trainer ranks write a version once, in buckets, over the slow link between clusters,
each its own bytes; engines' hosts read what they need over fast links, whole versions
or their own shards, as soon as a bucket is there. Push and pull overlap, and both
overlap the rollout: what is left of the pull is what engines wait for.

Invariants: a version counts only once its whole payload has the digest of its manifest;
one that is torn, damaged or not made from the base that it names is dropped, tells so
to everybody who sends or reads it, and touches no other; a bucket that came is not
asked for again. A relay can take from a store as from a relay: it says `Ask`, and
verifies by itself.
"""

import asyncio

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.memory import Ranges, in_thread
from rollweave.weights.protocol import (
    Base,
    Complete,
    Delta,
    FetchError,
    KeepAlive,
    Message,
    Missing,
    Push,
    Range,
    Raw,
    Refused,
    Request,
    within,
)
from rollweave.weights.serve import Broadcast, DeltaPiece, ServedVersion, serve_version
from rollweave.weights.transport import Body, Channel, Listener, Transport
from rollweave.weights.version_store import (
    StoredVersion,
    VersionStore,
    VersionWriter,
    check_same,
    close_all,
)

BUCKET_BYTES = 64 << 20
"""Of the payload in one bucket: ROSE's size (§4.2)."""

MAX_BUCKET_BYTES = 1 << 30
"""Of a bucket that anybody sends."""

LINGER_S = 60.0
"""Seconds without a bucket after which a version that is not whole is dropped."""


class _Upload:
    """A version that is being pushed.

    `claimed` are bytes that have come or are coming.
    """

    def __init__(self, draft: VersionWriter, offer: ServedVersion) -> None:
        self.draft, self.offer = draft, offer
        self.claimed = Ranges()
        self.writing = asyncio.Lock()
        self.sending = 0
        """How many send buckets now; while nobody does, it waits for them only a while."""
        self.patience: asyncio.TimerHandle | None = None

    def claimed_by(self, word: Message, nbytes: int, base: StoredVersion | None) -> Range:
        """The bytes that a bucket claims, which nobody else has sent or sends.

        Raises TakeError (broken).
        """
        if self.offer.withdrawn:
            raise FetchError("broken", self.offer.withdrawn)
        if not isinstance(word, Raw | Delta) or not within(
            ((word.start, word.stop),), self.draft.manifest.nbytes
        ):
            raise FetchError("broken", f"{nbytes} bytes do not come with {word}")
        if (isinstance(word, Raw) and nbytes != word.stop - word.start) or (
            isinstance(word, Delta) and base is None
        ):
            raise FetchError("broken", f"{nbytes} bytes do not come with {word}")
        if self.claimed.touches(word.start, word.stop):
            raise FetchError(
                "broken", f"bytes {word.start} to {word.stop} come twice: senders must not overlap"
            )
        self.claimed.add(word.start, word.stop)
        return word.start, word.stop


class RemoteStore:
    """Keeps the newest `keep` versions that are whole, in the memory of this process."""

    def __init__(self, transport: Transport, *, keep: int = 2, linger_s: float = LINGER_S) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._transport, self._keep, self._linger_s = transport, keep, linger_s
        self._depot = VersionStore()
        self._growing: dict[int, _Upload] = {}
        self._offers: dict[int, ServedVersion] = {}
        self._arrivals = Broadcast()
        self._beginning = asyncio.Lock()
        self._listener: Listener | None = None

    async def listen(self, host: str) -> RelayAddress:
        """Serve from now on. Raises OSError."""
        self._listener = await self._transport.listen(host, self._serve)
        return self._listener.address

    def ids(self) -> list[int]:
        """Of the versions that are whole."""
        return self._depot.ids()

    async def close(self) -> None:
        """Let go of everything."""
        if self._listener is not None:
            await self._listener.close()
        for weights_id in list(self._growing):
            self._drop(weights_id, "the store is closed")
        self._depot.close()

    async def _serve(self, channel: Channel) -> None:
        word, _ = await channel.receive()
        match word:
            case Request():
                await serve_version(
                    channel, word, lambda ask: self._offers.get(ask.weights_id), self._arrivals
                )
            case Push():
                try:
                    await self._receive(channel, word)
                except FetchError as error:
                    await channel.send(Refused(reason=error.reason, error=str(error)))
                    await _drain(channel)
            case _:
                await channel.send(
                    Refused(
                        reason="source",
                        error=f"a store answers Ask and Push, got {type(word).__name__}",
                    )
                )

    async def _receive(self, channel: Channel, push: Push) -> None:
        """One sender's part of a version; its end is answered once the version is
        whole. Raises TakeError.
        """
        manifest = push.manifest
        self._depot.check(manifest)
        if not within(push.ranges, manifest.nbytes):
            raise FetchError(
                "broken", f"ranges must be within {manifest.nbytes} bytes, got {push.ranges}"
            )
        base = self._base(push.base)
        if self._depot.get(manifest.weights_id) is not None:
            await channel.send(Missing(ranges=()))
            await _expect_end(channel)
            await channel.send(Complete())
            return
        growing = await self._begun(manifest)
        gaps = [
            gap for start, stop in push.ranges for gap in growing.draft.filled.missing(start, stop)
        ]
        await channel.send(Missing(ranges=tuple(gaps)))
        growing.sending += 1
        self._wait_on(growing)
        try:
            while not isinstance(await self._bucket(channel, growing, base), Complete):
                await channel.send(KeepAlive())
            self._finish(growing)
        finally:
            growing.sending -= 1
            self._wait_on(growing)
        while not growing.offer.verified:
            if growing.offer.withdrawn:
                raise FetchError("broken", growing.offer.withdrawn)
            if not await growing.offer.news.wait():
                await channel.send(KeepAlive())
        await channel.send(Complete())

    def _base(self, named: Base | None) -> StoredVersion | None:
        if named is None:
            return None
        base = self._depot.base(named.weights_id)
        if base.name != named:
            raise FetchError(
                "base",
                f"weights id {named.weights_id} is here with another content: {base.name.digest}",
            )
        return base

    async def _begun(self, manifest: WeightManifest) -> _Upload:
        async with self._beginning:
            growing = self._growing.get(manifest.weights_id)
            if growing is None:
                draft = await in_thread(self._depot.begin, manifest, undo=VersionWriter.close)
                growing = self._growing[manifest.weights_id] = _Upload(
                    draft, ServedVersion(manifest, draft.fd)
                )
                self._offers[manifest.weights_id] = growing.offer
                self._arrivals.wake()
        check_same(growing.draft.manifest, manifest)
        return growing

    async def _bucket(
        self, channel: Channel, growing: _Upload, base: StoredVersion | None
    ) -> Message:
        """Take one bucket, or the end. What breaks off can be sent again.

        Raises TakeError.
        """
        draft, offer = growing.draft, growing.offer
        change = bytearray()
        claim: Range | None = None
        refusal: FetchError | None = None

        def room(word: Message, nbytes: int) -> memoryview:
            nonlocal claim, change, refusal
            if nbytes > MAX_BUCKET_BYTES:
                raise FetchError("broken", f"a bucket of {nbytes} bytes is too long")
            try:
                claim = growing.claimed_by(word, nbytes, base)
            except FetchError as error:
                refusal = error  # read it first: who sends would not hear us before
            if claim is not None and isinstance(word, Raw):
                return draft.room(*claim)
            change = bytearray(nbytes)
            return memoryview(change)

        try:
            word, check = await channel.receive(room)
            if refusal is not None:
                raise refusal
            async with growing.writing:
                if offer.withdrawn:
                    raise FetchError("broken", offer.withdrawn)
                if isinstance(word, Raw) and claim is not None:
                    await in_thread(draft.fill, word.start, word.stop)
                    offer.add(word.start, word.stop, check)
                elif isinstance(word, Delta) and claim is not None and base is not None:
                    await in_thread(
                        draft.apply, word.start, word.stop, memoryview(change), word.sizes, base
                    )
                    changes = offer.expect(base.name)
                    assert changes is not None, "there is a base"
                    # nobody waits for one: whatever comes, comes with the bytes as they
                    # are
                    offer.end_changes(changes)
                    body = Body(len(change), check, memoryview(change))
                    offer.add_change(changes, word.start, DeltaPiece(word.stop, word.sizes, body))
                    offer.add(word.start, word.stop)
                elif not isinstance(word, Complete):
                    raise FetchError("broken", f"expected a bucket, got {type(word).__name__}")
        except BaseException:
            if claim is not None:
                growing.claimed.remove(*claim)
            raise
        return word

    def _finish(self, growing: _Upload) -> None:
        """Where this was the last part: verify the version, and keep it or drop it."""
        draft = growing.draft
        manifest = draft.manifest
        if draft.done < manifest.nbytes or self._growing.get(manifest.weights_id) is not growing:
            return
        try:
            held = draft.finish()
        except FetchError as error:
            self._drop(manifest.weights_id, str(error))
            raise
        self._end(growing)
        self._depot.admit(held)
        growing.offer.verify()
        gone = self._depot.keep(sorted(self._depot.ids())[-self._keep :])
        for old in gone:
            weights_id = old.manifest.weights_id
            self._offers.pop(weights_id).withdraw(f"weights id {weights_id} was let go")
        close_all(gone)

    def _wait_on(self, growing: _Upload) -> None:
        """Somebody has begun, or ended, to send."""
        weights_id = growing.draft.manifest.weights_id
        if growing.patience is not None:
            growing.patience.cancel()
        if growing.sending == 0 and self._growing.get(weights_id) is growing:
            reason = (
                f"nobody has sent weights id {weights_id} for {self._linger_s:g} s, and it is not "
                "whole"
            )
            growing.patience = asyncio.get_running_loop().call_later(
                self._linger_s, self._drop, weights_id, reason
            )

    def _end(self, growing: _Upload) -> None:
        if growing.patience is not None:
            growing.patience.cancel()
        self._growing.pop(growing.draft.manifest.weights_id, None)

    def _drop(self, weights_id: int, reason: str) -> None:
        growing = self._growing.get(weights_id)
        if growing is not None:
            self._end(growing)
            growing.draft.close()
            self._offers.pop(weights_id).withdraw(reason)


async def _expect_end(channel: Channel) -> None:
    word, _ = await channel.receive()
    if not isinstance(word, Complete):
        raise FetchError("broken", f"nothing was wanted, got {type(word).__name__}")


async def _drain(channel: Channel) -> None:
    """Read what was on its way, so that the refusal arrives before the end does."""
    try:
        while True:
            await channel.receive(lambda _, nbytes: memoryview(bytearray(nbytes)))
    except FetchError:
        return
