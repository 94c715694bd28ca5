"""Exports KV of the prefix cache to other engines and imports theirs (Heddle §5.3),
while the engine computes.

Between two turns the KV of a trajectory lies in the indexed blocks of the cache. An
export copies the longest cached prefix; an import writes blocks and indexes them under
this engine's keys, so that the next turn hits them as if this engine had computed them.
Invariants: KV of other weights, another model or layout, or whose bytes differ from the
exported ones is never indexed; blocks that requests hold are neither evicted nor
written, and no block is held from one step to the next.

Each transfer is a coroutine on the side thread (`transfer.py`). It accesses the ledger
and the pool only through `_between_steps`: on the engine's thread, between two steps.
Only copying from and to the pool costs the engine time.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from rollweave.engine.blocks import BlockLedger, Key
from rollweave.engine.kv import LAYOUT, PagedPool
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
from rollweave.weights.checkpoint import ModelShape, fingerprint

T = TypeVar("T")

CHUNK_BYTES = 1 << 22
"""Number of bytes that one digest covers, but at least a block: large enough to be
hashed at full speed, small compared with a transfer.
"""
MAX_EXPORTS = 8
"""Maximum number of open exports: an engine has one or two unless their requesters fail
to release them. Together they hold at most as many bytes as the pool, so the engine's
memory at most doubles.
"""
MAX_IMPORTS = 4
"""Maximum number of concurrent imports.

Each holds its content, in memory of this engine or of the source.
"""


@dataclasses.dataclass(slots=True)
class _Export:
    payload: Payload
    port: KvPort | None = None
    expiry: asyncio.TimerHandle | None = None
    """Timer that drops the export; set once it is complete."""


class KvExchange:
    """One engine's exports and imports. `call_between_steps` runs a function between
    two steps and `reply` sends a reply, both from any thread.

    `is_finite` returns whether all of the engine's KV is finite; exports that are not
    released are kept for `keep_s` seconds. All methods belong to the engine's thread.
    """

    def __init__(
        self,
        spec: EngineSpec,
        shape: ModelShape,
        *,
        pool: PagedPool,
        ledger: BlockLedger,
        call_between_steps: Callable[[Callable[[], None]], None],
        reply: Callable[[EngineReply], None],
        is_finite: Callable[[], bool],
        keep_s: float = TRANSFER_S,
    ) -> None:
        self._spec, self._shape, self._pool, self._ledger = spec, shape, pool, ledger
        self._call_between_steps, self._reply, self._is_finite, self._keep_s = (
            call_between_steps,
            reply,
            is_finite,
            keep_s,
        )
        self._block_shape = (shape.layers, pool.block_tokens * pool.width)
        self._block_nbytes = (
            shape.layers * pool.block_tokens * pool.width * pool.data.element_size()
        )
        self._chunk_blocks = max(1, CHUNK_BYTES // self._block_nbytes)
        self._checkpoint = fingerprint(Path(spec.model))
        self._side = SideThread(f"kv-{spec.id}")
        # The following belong to the side thread.
        self._server = Server(spec.kv_host)
        self._exports: dict[str, _Export] = {}
        self._imports = 0

    def start_export(self, command: ExportKv) -> None:
        """Export the KV, and reply to `command` with a manifest or a refusal."""
        self._side.spawn(lambda: self._reply_to(command.id, self._export(command)))

    def start_import(self, command: ImportKv) -> None:
        """Import the KV, and reply to `command` once it is cached or refused."""
        self._side.spawn(lambda: self._reply_to(command.id, self._import(command)))

    def release(self, id: str) -> None:
        """Free an export."""

        async def drop() -> None:
            export = self._exports.get(id)
            # an incomplete export is dropped by the task that completes it
            if export is not None and export.expiry is not None:
                self._drop(id)

        if self._side.started:
            self._side.spawn(drop)

    def close(self) -> None:
        """End all transfers, and free every export."""
        self._side.close()
        for export in self._exports.values():
            export.payload.close()
        self._exports.clear()

    # On the side thread

    async def _reply_to(self, id: str, job: Coroutine[Any, Any, EngineReply]) -> None:
        try:
            reply: EngineReply = await job
        except KvError as error:
            reply = KvRefused(id=id, error=str(error))
        except Exception as error:  # no memory, or not an address of this host
            reply = KvRefused(id=id, error=f"{type(error).__name__}: {error}")
        await self._between_steps(partial(self._reply, reply))

    async def _between_steps(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two steps, and return its
        result.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._call_between_steps(partial(_run_for, answer, function))
        try:
            return await answer
        finally:
            del answer  # see `_run_for`

    async def _export(self, command: ExportKv) -> EngineReply:
        id, exports = command.id, self._exports
        keys = self._ledger.keys(command.tokens)
        blocks = await self._between_steps(lambda: len(self._ledger.match(keys)))
        nbytes, most = blocks * self._block_nbytes, self._pool.data.nbytes
        if not blocks:
            raise KvError("no part of the context is cached")
        if id in exports:
            raise KvError(f"id must be unique among open exports, got {id!r} again")
        if len(exports) >= MAX_EXPORTS:
            raise KvError(f"{MAX_EXPORTS} exports are open already")
        if nbytes + sum(export.payload.nbytes for export in exports.values()) > most:
            raise KvError(f"open exports must stay within the {most} bytes of the cache")
        export = exports[id] = _Export(Payload(nbytes))
        try:
            manifest = await self._copy_and_seal(command, keys[:blocks], export)
        except BaseException:
            self._drop(id)
            raise
        export.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._drop, id)
        return KvExported(id=id, manifest=manifest)

    async def _copy_and_seal(
        self, command: ExportKv, keys: Sequence[Key], export: _Export
    ) -> KvManifest:
        payload, size = export.payload, self._block_nbytes
        blocks, publication_id = await self._between_steps(lambda: self._copy_out(keys, payload))
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
            **self._compatibility(publication_id),
        )

    def _drop(self, id: str) -> None:
        export = self._exports.pop(id)
        if export.expiry is not None:
            export.expiry.cancel()
        if export.port is not None:
            self._server.withdraw(export.port)
        export.payload.close()

    async def _import(self, command: ImportKv) -> EngineReply:
        if self._imports >= MAX_IMPORTS:
            raise KvError(f"{MAX_IMPORTS} imports are under way already")
        self._imports += 1
        try:
            return KvImported(
                id=command.id,
                moved_tokens=await self._fetch_and_place(command.tokens, command.manifest),
            )
        finally:
            self._imports -= 1

    async def _fetch_and_place(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        blocks = self._block_count(manifest, len(tokens))
        keys = self._ledger.keys(tokens[: manifest.tokens])
        if keys[-1] != manifest.key:
            raise KvError("the KV belongs to other tokens")
        present, room = await self._between_steps(lambda: self._present_and_free(keys))
        end_block = min(blocks, present + room)
        if not end_block:
            raise KvError("no block of the cache is free")
        size, chunk = self._pool.block_tokens, manifest.chunk_blocks
        if present == end_block:
            return present * size
        first, last = present // chunk, -(-end_block // chunk)
        payload = await fetch(
            manifest, chunk_bytes=chunk * self._block_nbytes, first=first, last=last
        )
        content = torch.frombuffer(payload, dtype=self._pool.data.dtype).view(
            -1, *self._block_shape
        )
        moved = await self._between_steps(
            lambda: self._copy_in(
                manifest.publication_id, keys[: last * chunk], content, first * chunk
            )
        )
        if not moved:
            raise KvError("the cache has changed, and has no room left")
        return moved * size

    def _block_count(self, manifest: KvManifest, tokens: int) -> int:
        """Return the number of blocks in the KV. Raises KvError if this engine cannot
        use it.
        """
        for name, expected in self._compatibility(self._ledger.publication_id).items():
            exported = getattr(manifest, name)
            if exported != expected:
                raise KvError(f"{name} of the KV must be this engine's {expected}, got {exported}")
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
                f"{blocks} blocks in chunks of {manifest.chunk_blocks} do not have "
                f"{len(manifest.digests)} digests"
            )
        return blocks

    def _compatibility(self, publication_id: int) -> dict[str, Any]:
        """Return the properties in which the KV of two engines must agree."""
        # published weights are known by their id, and others by their checkpoint
        source = self._checkpoint if publication_id < 0 else ""
        return {
            "publication_id": publication_id,
            "model": xxhash.xxh3_128_hexdigest(f"{self._shape!r} {source}".encode()),
            "layout": f"{LAYOUT}; in tiles" if self._spec.deterministic else LAYOUT,
            "dtype": self._spec.dtype,
            "layers": self._shape.layers,
            "kv_heads": self._shape.kv_heads,
            "head_dim": self._shape.head_dim,
            "block_tokens": self._pool.block_tokens,
        }

    # On the engine's thread, between two steps

    def _copy_out(self, keys: Sequence[Key], payload: Payload) -> tuple[int, int]:
        """Copy the blocks that are still cached.

        Return their number, and the id of the weights that computed them.
        """
        blocks = self._ledger.match(keys)
        if not blocks:
            raise KvError("the context has been evicted, or the weights have changed")
        if not self._is_finite():
            raise KvError("the engine has computed values that are not finite")
        self._pool.read(
            blocks,
            torch.frombuffer(payload.buffer, dtype=self._pool.data.dtype).view(
                -1, *self._block_shape
            ),
        )
        return len(blocks), self._ledger.publication_id

    def _present_and_free(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Return how many blocks of the prefix are cached already, and how many more
        fit.
        """
        present = self._ledger.match(keys)
        return len(present), self._ledger.free - self._ledger.unused(present)

    def _copy_in(
        self, publication_id: int, keys: Sequence[Key], content: torch.Tensor, start: int
    ) -> int:
        """Write and index the blocks of the prefix from `start` on that are not cached
        yet, as far as there is room; return how many blocks are cached then.
        """
        ledger = self._ledger
        if ledger.publication_id != publication_id:
            raise KvError(
                f"the weights have changed from {publication_id} to {ledger.publication_id}"
            )
        blocks_held = ledger.match(keys)
        present = len(blocks_held)
        if present < start:
            return present  # the blocks that precede the new ones have been evicted
        ledger.share(blocks_held)
        try:
            new = ledger.allocate(min(len(keys) - present, ledger.free))
            blocks_held += new
            if new:
                self._pool.write(new, content[present - start : present - start + len(new)])
                for block, key in zip(new, keys[present:], strict=False):
                    ledger.commit(block, key)
        finally:
            ledger.release(blocks_held)
        return len(blocks_held)


def _run_for(answer: asyncio.Future[T], function: Callable[[], T]) -> None:
    """Run `function`, and settle `answer` on the other thread that awaits it."""
    try:
        settle = partial(answer.set_result, function())
    except Exception as error:
        settle = partial(answer.set_exception, error)
    answer.get_loop().call_soon_threadsafe(_settle_unless_done, answer, settle)
    # An error keeps these frames alive, and they must not keep the error in turn: that
    # cycle would keep the payload's memory.
    del answer, settle


def _settle_unless_done(answer: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    if not answer.done():
        settle()
