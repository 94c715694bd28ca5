"""Gives KV of the prefix cache to other engines and takes theirs (Heddle §5.3), while
the engine computes.

Between two turns the KV of a trajectory lies in the indexed blocks of the cache. An
export copies the longest prefix that is there; an import writes blocks and indexes them
under this engine's own keys, where the next turn finds them as if it had computed them.
Invariants: KV under other weights, of another model or layout, or of other bytes than
were exported is never indexed; blocks that requests hold are neither evicted nor
written, and none is held from one step to the next.

Each transfer is a coroutine on the side thread (`transfer.py`). What it does to ledger
and pool it does through `_between`: on the engine's thread, between two steps. Only
copying from and to the pool costs the engine time.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash

from rollweave.engine.kv import LAYOUT, PagedPool
from rollweave.engine.planner.blocks import BlockLedger, Key
from rollweave.engine.transfer import TRANSFER_S, Payload, Server, SideThread, fetch
from rollweave.schema.errors import KvError
from rollweave.schema.serving import (
    EngineReply,
    EngineSpec,
    ExportKv,
    ImportKv,
    KvExported,
    KvImported,
    KvManifest,
    KvPort,
    KvRefused,
)
from rollweave.weights.checkpoint import ModelShape

T = TypeVar("T")

CHUNK_BYTES = 1 << 22
"""Bytes that one digest covers, at least a block: large enough to be hashed at full
speed, small against what is moved.
"""
OPEN_EXPORTS = 8
"""Exports at once: an engine has one or two, unless whoever asked for them does not
release them. All together have no more bytes than the pool: the engine's memory at most
doubles.
"""
OPEN_IMPORTS = 4
"""Imports at once.

Each holds what it imports, in memory of this engine or of the source.
"""


@dataclasses.dataclass(slots=True)
class _Export:
    payload: Payload
    port: KvPort | None = None
    expiry: asyncio.TimerHandle | None = None
    """Set once it is complete."""


class KvExchange:
    """One engine's exports and imports. `call` runs a function between two steps,
    `reply` answers, both from any thread.

    `sound` says whether the engine's KV is made of finite numbers; exports that nobody
    releases are kept for `keep_s`. All methods belong to the engine's thread.
    """

    def __init__(
        self,
        spec: EngineSpec,
        shape: ModelShape,
        *,
        pool: PagedPool,
        ledger: BlockLedger,
        call: Callable[[Callable[[], None]], None],
        reply: Callable[[EngineReply], None],
        sound: Callable[[], bool],
        keep_s: float = TRANSFER_S,
    ) -> None:
        self._spec, self._shape, self._pool, self._ledger = spec, shape, pool, ledger
        self._call, self._reply, self._sound, self._keep_s = call, reply, sound, keep_s
        self._block_shape = (shape.layers, pool.block_tokens * pool.width)
        self._block_nbytes = (
            shape.layers * pool.block_tokens * pool.width * pool.data.element_size()
        )
        self._chunk_blocks = max(1, CHUNK_BYTES // self._block_nbytes)
        self._side = SideThread(f"kv-{spec.id}")
        # From here on, what belongs to the side thread.
        self._server = Server(spec.kv_host)
        self._exports: dict[str, _Export] = {}
        self._imports = 0

    def export(self, command: ExportKv) -> None:
        """Answer `command` with a manifest, or refuse."""
        self._side.spawn(lambda: self._answer(command.id, self._export(command)))

    def take(self, command: ImportKv) -> None:
        """Answer `command` once the KV is in the cache, or refuse."""
        self._side.spawn(lambda: self._answer(command.id, self._import(command)))

    def release(self, id: str) -> None:
        """Let an export go."""

        async def drop() -> None:
            export = self._exports.get(id)
            # an incomplete one is dropped by who completes it
            if export is not None and export.expiry is not None:
                self._drop(id)

        if self._side.started:
            self._side.spawn(drop)

    def close(self) -> None:
        """End all transfers, and let every export go."""
        self._side.close()
        for export in self._exports.values():
            export.payload.close()
        self._exports.clear()

    # On the side thread.

    async def _answer(self, id: str, job: Coroutine[Any, Any, EngineReply]) -> None:
        try:
            word = await job
        except KvError as error:
            word = KvRefused(id=id, error=str(error))
        except Exception as error:  # memory that is not there, an address that is not ours
            word = KvRefused(id=id, error=f"{type(error).__name__}: {error}")
        await self._between(partial(self._reply, word))

    async def _between(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two steps."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._call(partial(_run_for, answer, function))
        try:
            return await answer
        finally:
            del answer  # see `_run_for`

    async def _export(self, command: ExportKv) -> EngineReply:
        id, exports = command.id, self._exports
        keys = self._ledger.keys(command.tokens)
        blocks = await self._between(lambda: len(self._ledger.match(keys)))
        nbytes, most = blocks * self._block_nbytes, self._pool.data.nbytes
        if not blocks:
            raise KvError("nothing of the context is in the cache")
        if id in exports:
            raise KvError(f"id must be unique among open exports, got {id!r} again")
        if len(exports) >= OPEN_EXPORTS:
            raise KvError(f"{OPEN_EXPORTS} exports are open already")
        if nbytes + sum(export.payload.nbytes for export in exports.values()) > most:
            raise KvError(f"open exports must stay within the {most} bytes of the cache")
        export = exports[id] = _Export(Payload(nbytes))
        try:
            manifest = await self._exported(command, keys[:blocks], export)
        except BaseException:
            self._drop(id)
            raise
        export.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._drop, id)
        return KvExported(id=id, manifest=manifest)

    async def _exported(
        self, command: ExportKv, keys: Sequence[Key], export: _Export
    ) -> KvManifest:
        payload, size = export.payload, self._block_nbytes
        blocks, weights_id = await self._between(lambda: self._copy_out(keys, payload))
        digests = payload.seal(blocks * size, self._chunk_blocks * size)
        if command.over == "tcp":
            export.port = await self._server.offer(payload)
        return KvManifest(
            id=command.id,
            tokens=blocks * self._pool.block_tokens,
            key=keys[blocks - 1],
            chunk_blocks=self._chunk_blocks,
            nbytes=payload.nbytes,
            digests=digests,
            where=export.port if export.port is not None else payload.memory,
            **self._own(weights_id),
        )

    def _drop(self, id: str) -> None:
        export = self._exports.pop(id)
        if export.expiry is not None:
            export.expiry.cancel()
        if export.port is not None:
            self._server.withdraw(export.port)
        export.payload.close()

    async def _import(self, command: ImportKv) -> EngineReply:
        if self._imports >= OPEN_IMPORTS:
            raise KvError(f"{OPEN_IMPORTS} imports are under way already")
        self._imports += 1
        try:
            return KvImported(
                id=command.id, moved_tokens=await self._imported(command.tokens, command.manifest)
            )
        finally:
            self._imports -= 1

    async def _imported(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        blocks = self._check(manifest, len(tokens))
        keys = self._ledger.keys(tokens[: manifest.tokens])
        if keys[-1] != manifest.key:
            raise KvError("the KV is that of other tokens")
        present, room = await self._between(lambda: self._room(keys))
        wanted = min(blocks, present + room)
        if not wanted:
            raise KvError("no block of the cache is free")
        size, chunk = self._pool.block_tokens, manifest.chunk_blocks
        if present == wanted:
            return present * size
        first, last = present // chunk, -(-wanted // chunk)
        payload = await fetch(
            manifest, chunk_bytes=chunk * self._block_nbytes, first=first, last=last
        )
        content = torch.frombuffer(payload, dtype=self._pool.data.dtype).view(
            -1, *self._block_shape
        )
        moved = await self._between(
            lambda: self._place(manifest.weights_id, keys[: last * chunk], content, first * chunk)
        )
        if not moved:
            raise KvError("the cache has changed meanwhile, and has no room")
        return moved * size

    def _check(self, manifest: KvManifest, tokens: int) -> int:
        """Whether the KV could be ours; how many blocks it has. Raises KvError."""
        for name, ours in self._own(self._ledger.weights_id).items():
            theirs = getattr(manifest, name)
            if theirs != ours:
                raise KvError(f"{name} of the KV must be this engine's {ours}, got {theirs}")
        if not self._ledger.caching:
            raise KvError("this engine has no prefix cache")
        blocks, rest = divmod(manifest.tokens, self._pool.block_tokens)
        if rest or not 0 < manifest.tokens <= tokens:
            raise KvError(
                f"tokens of the KV must be whole blocks of the {tokens} of the context, "
                f"got {manifest.tokens}"
            )
        if manifest.nbytes != blocks * self._block_nbytes:
            raise KvError(
                f"{blocks} blocks have {blocks * self._block_nbytes} bytes, got {manifest.nbytes}"
            )
        if manifest.chunk_blocks < 1 or len(manifest.digests) != -(
            -blocks // manifest.chunk_blocks
        ):
            raise KvError(
                f"{blocks} blocks in chunks of {manifest.chunk_blocks} have not "
                f"{len(manifest.digests)} digests"
            )
        return blocks

    def _own(self, weights_id: int) -> dict[str, Any]:
        """What the KV of two engines must have in common."""
        # Without published weights the checkpoint is the weights, and its directory all
        # that is known of it.
        source = self._spec.model if weights_id < 0 else ""
        return {
            "weights_id": weights_id,
            "model": xxhash.xxh3_128_hexdigest(f"{self._shape!r} {source}".encode()),
            "layout": f"{LAYOUT}; in tiles" if self._spec.deterministic else LAYOUT,
            "dtype": self._spec.dtype,
            "layers": self._shape.layers,
            "kv_heads": self._shape.kv_heads,
            "head_dim": self._shape.head_dim,
            "block_tokens": self._pool.block_tokens,
        }

    # On the engine's thread, between two steps.

    def _copy_out(self, keys: Sequence[Key], payload: Payload) -> tuple[int, int]:
        """Copy the blocks that are still there.

        Returns how many, and the weights that computed them.
        """
        found = self._ledger.match(keys)
        if not found:
            raise KvError("the context was evicted meanwhile, or the weights have changed")
        if not self._sound():
            raise KvError("the engine has computed numbers that are not finite")
        self._pool.read(
            found,
            torch.frombuffer(payload.buffer, dtype=self._pool.data.dtype).view(
                -1, *self._block_shape
            ),
        )
        return len(found), self._ledger.weights_id

    def _room(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many blocks of the prefix are there already, and how many more could be."""
        present = self._ledger.match(keys)
        return len(present), self._ledger.free - self._ledger.unused(present)

    def _place(
        self, weights_id: int, keys: Sequence[Key], content: torch.Tensor, start: int
    ) -> int:
        """Index blocks `start` and following of the prefix, as far as they are not
        there and there is room.
        """
        ledger = self._ledger
        if ledger.weights_id != weights_id:
            raise KvError(
                f"the weights have changed meanwhile, from {weights_id} to {ledger.weights_id}"
            )
        held = ledger.match(keys)
        present = len(held)
        if present < start:
            return present  # what the new blocks would follow was evicted meanwhile
        ledger.share(held)
        try:
            new = ledger.allocate(min(len(keys) - present, ledger.free))
            held += new
            if new:
                self._pool.write(new, content[present - start : present - start + len(new)])
                for block, key in zip(new, keys[present:], strict=False):
                    ledger.commit(block, key)
        finally:
            ledger.release(held)
        return len(held)


def _run_for(answer: asyncio.Future[T], function: Callable[[], T]) -> None:
    """Run `function` for who waits for `answer` on another thread."""
    try:
        settle = partial(answer.set_result, function())
    except Exception as error:
        settle = partial(answer.set_exception, error)
    answer.get_loop().call_soon_threadsafe(_unless_done, answer, settle)
    # An error keeps these frames alive, which must not keep the error: the memory of a
    # payload would stay with them.
    del answer, settle


def _unless_done(answer: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    if not answer.done():
        settle()
