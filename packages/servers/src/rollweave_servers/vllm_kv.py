"""KV that moves between the caches of two vLLM servers by vLLM's NixlConnector
(RollArt §6.3).

Both ends are requests for one token, which is discarded. That of an export has its
prompt cached as a rule, and computes what was evicted; the server then holds the blocks
until another one has read them, or for `LEASE_S`. That of an import has the server read
them into its cache, under the salt of its weights (`servers/versions.py`), where the
turn finds them: what a turn samples depends on no request but its own.

Invariants: what was read after the lease of its blocks is not cached, and neither is
what an aborted import has read (vLLM itself would cache the former, hence the plug-in
`rollweave_vllm`); a lease ends early only if nothing can read under it any longer;
no import is under way while the server is paused, so that KV of former weights never
arrives after the cache was cleared; KV of other weights, another model or another vLLM
is refused before a request is sent.
"""

import array
import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from rollweave.engine.clients.responses import Usage, VllmChoice
from rollweave.schema.errors import EngineError, KvError
from rollweave.schema.serving import (
    EngineReply,
    EngineSpec,
    ExportKv,
    ImportKv,
    KvExported,
    KvHeld,
    KvImported,
    KvManifest,
    KvRefused,
)
from rollweave.weights.checkpoint import ModelShape
from rollweave_servers.control import Calls, RefusedError
from rollweave_servers.process import Server, max_context, settings_of
from rollweave_servers.versions import salt_of
from rollweave_servers.vllm_control import ABORT, GENERATE

TRANSFER_S = 10.0
"""Maximum seconds of an export or an import, each, as of a whole migration."""

LEASE_S = 15
"""Seconds for which a server holds exported KV that no other one reads: more than the
maximum of an import, since the lease begins before that does. An import that ends
later has failed.
"""

SETTLE_S = 2.0
"""Maximum seconds that a pause waits for the ends of transfers, before it aborts those
of this server. An export whose reader has given up delays it until its lease ends.
"""

RPC, RELEASE = "/collective_rpc", "rollweave_release_kv"
"""Route and name of the method of all ranks that ends all leases, as in the plug-in
`rollweave_vllm`.
"""

CACHED_THERE = "remote_prefill_cached_tokens"
"""Name of the parameter by which vLLM replaces its number of cached tokens, in the
answer to an import: with that of the exporting server.
"""

GRANULE = 32
"""Number of tokens of which a moved prefix is a multiple: whole blocks on a CPU, and on
a GPU unless blocks are larger, where the rest of the last one is computed again.
"""

PRIORITY = -(1 << 60)
"""Priority before all turns, of which transfers take one step each."""

LAYOUT = "of vLLM"


class _Held(msgspec.Struct):
    remote_request_id: str
    remote_blocks_expiry_time: float


class _UnansweredError(KvError):
    """The server has not answered a request."""


class _Answer(msgspec.Struct):
    choices: tuple[VllmChoice, ...] = ()
    usage: Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    def check_held(self) -> None:
        """Raise KvError unless the server holds KV, and says for how long."""
        try:
            msgspec.json.decode(self.kv_transfer_params, type=_Held)
        except msgspec.MsgspecError as error:
            raise KvError(f"vLLM's answer does not name the KV that it holds: {error}") from error


async def moved(mover: "NixlKv | None", command: ExportKv | ImportKv, *, name: str) -> EngineReply:
    """Export or import the KV of the server `name`, and return the reply."""
    try:
        if mover is None:
            raise KvError(f"{name}'s KV cannot be moved from here")
        if isinstance(command, ExportKv):
            return KvExported(
                id=command.id, manifest=await mover.export(command.id, command.tokens)
            )
        tokens = await mover.take(command.tokens, command.manifest)
        return KvImported(id=command.id, moved_tokens=tokens)
    except KvError as error:
        return KvRefused(id=command.id, error=str(error))


class NixlKv:
    """The KV of one server. `publication_id` names the weights that it has; all methods
    belong to the event loop's thread.
    """

    def __init__(self, spec: EngineSpec, shape: ModelShape, server: Server) -> None:
        self._spec, self._shape = spec, shape
        self._most = max_context(spec, shape) - 1  # beside the token that is sampled
        routes = dict.fromkeys((GENERATE, ABORT, RPC), "POST")
        self._calls = Calls("vLLM", server.url, routes, token=server.token, limit_s=TRANSFER_S)
        self.publication_id = -1
        self._requests: dict[str, asyncio.Future[None]] = {}  # under way: their ends
        self._exports: dict[str, asyncio.Future[None]] = {}  # that may still be read
        self._held_until = -1.0  # by the loop's clock: no lease lasts longer
        self._paused = False

    async def close(self) -> None:
        await self._calls.close()

    async def export(self, id: str, tokens: Sequence[int]) -> KvManifest:
        """Have the server hold the KV of these tokens. Raises KvError."""
        tokens, publication_id = self._whole(tokens), self._current()
        loop = asyncio.get_running_loop()
        self._held_until = loop.time() + TRANSFER_S + LEASE_S
        answer = await self._request(tokens, {"do_remote_decode": True})
        self._check(publication_id)
        answer.check_held()
        self._exports[id] = loop.create_future()
        self._held_until = loop.time() + LEASE_S
        loop.call_later(LEASE_S, self.release, id)
        return KvManifest(
            id=id,
            tokens=len(tokens),
            key=_key(tokens),
            chunk_blocks=1,
            nbytes=0,
            digests=(),
            where=KvHeld(parameters=bytes(answer.kv_transfer_params).decode()),
            **self._compatibility(publication_id),
        )

    async def take(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        """Have the server read exported KV into its cache; return how many tokens are
        cached then. Raises KvError. In both cases the server does not read it any
        longer, or could not use it: if it does not answer, the error is raised only
        when the lease has ended.
        """
        publication_id = self._current()
        for name, expected in self._compatibility(publication_id).items():
            if (exported := getattr(manifest, name)) != expected:
                raise KvError(f"{name} of the KV must be this engine's {expected}, got {exported}")
        tokens = tuple(tokens[: manifest.tokens])
        if not isinstance(manifest.where, KvHeld) or _key(tokens) != manifest.key:
            raise KvError("the KV belongs to other tokens")
        parameters = msgspec.json.decode(manifest.where.parameters, type=dict[str, Any])
        parameters.pop(CACHED_THERE, None)
        loop = asyncio.get_running_loop()
        lease_end = loop.time() + LEASE_S  # at the latest
        try:
            answer = await self._request(tokens, parameters)
        except _UnansweredError as error:
            await asyncio.sleep(lease_end - loop.time())
            raise KvError(str(error)) from error
        self._check(publication_id)
        cached = answer.usage.cached if answer.usage is not None else 0
        if cached < len(tokens) - GRANULE:
            raise KvError(f"vLLM has read {cached} of {len(tokens)} tokens")
        return len(tokens)

    def release(self, id: str) -> None:
        """End an export that nothing reads any longer: its lease need not last until
        the next pause. Unknown ids are ignored.
        """
        if (export := self._exports.pop(id, None)) is not None:
            export.set_result(None)

    async def pause(self) -> None:
        """Refuse transfers from now on, wait for those under way, or abort them, and
        end all leases, which last at most `LEASE_S` more. A server that holds KV would
        not stop before.
        """
        self._paused = True
        await self._settle(SETTLE_S)
        for id in tuple(self._requests):
            await self._abort(id)
        await self._settle(None)  # each has a deadline
        if asyncio.get_running_loop().time() < self._held_until:
            await self._calls.text(RPC, {"method": RELEASE})
        self._held_until = -1.0

    async def _settle(self, timeout_s: float | None) -> None:
        if pending := [*self._requests.values(), *self._exports.values()]:
            await asyncio.wait(pending, timeout=timeout_s)

    def resume(self) -> None:
        self._paused = False

    def _whole(self, tokens: Sequence[int]) -> tuple[int, ...]:
        count = min(len(tokens), self._most) // GRANULE * GRANULE
        if not count:
            raise KvError(f"a prefix must have {GRANULE} tokens to be moved, got {len(tokens)}")
        return tuple(tokens[:count])

    def _current(self) -> int:
        if self._paused:
            raise KvError("the engine is paused")
        return self.publication_id

    def _check(self, publication_id: int) -> None:
        if publication_id != self.publication_id:
            raise KvError(
                f"the weights have changed from {publication_id} to {self.publication_id}"
            )

    async def _request(self, tokens: Sequence[int], parameters: dict[str, Any]) -> _Answer:
        """Return the server's answer to a request for one token. Raises KvError; one
        that is `_UnansweredError` if the request may still be under way.
        """
        id, ended = uuid.uuid4().hex, asyncio.get_running_loop().create_future()
        self._requests[id] = ended
        try:
            return await self._answer(id, tokens, parameters)
        finally:
            del self._requests[id]
            ended.set_result(None)

    async def _answer(self, id: str, tokens: Sequence[int], parameters: dict[str, Any]) -> _Answer:
        body: dict[str, Any] = {
            "request_id": id,
            "token_ids": tokens,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
            "stream": False,
            "priority": PRIORITY,
            "kv_transfer_params": parameters,
        }
        if salt := salt_of(self.publication_id):
            body["cache_salt"] = salt
        try:
            answer = msgspec.json.decode(await self._calls.text(GENERATE, body), type=_Answer)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(id))
            raise
        except RefusedError as error:
            raise KvError(str(error)) from error
        except EngineError as error:
            await self._abort(id)
            raise _UnansweredError(str(error)) from error
        except msgspec.MsgspecError as error:
            raise KvError(f"vLLM's answer cannot be read: {error}") from error
        reasons = [choice.finish_reason for choice in answer.choices if choice.token_ids]
        if reasons not in (["length"], ["stop"]):
            raise KvError(f"vLLM has not computed the request, which ended with {reasons}")
        return answer

    async def _abort(self, id: str) -> None:
        with contextlib.suppress(EngineError):
            await self._calls.text(ABORT, {"request_ids": [f"generate-tokens-{id}"]})

    def _compatibility(self, publication_id: int) -> dict[str, Any]:
        """Return the properties in which the KV of two engines must agree. The servers
        compare the rest themselves, such as their version and the layout of a block.
        """
        source = self._spec.model if publication_id < 0 else ""
        return {
            "publication_id": publication_id,
            "model": xxhash.xxh3_128_hexdigest(f"{self._shape!r} {source}".encode()),
            "layout": f"{LAYOUT} with degree {settings_of(self._spec).degree}",
            "dtype": self._spec.dtype,
            "layers": self._shape.layers,
            "kv_heads": self._shape.kv_heads,
            "head_dim": self._shape.head_dim,
            "block_tokens": GRANULE,
        }


def _key(tokens: Sequence[int]) -> bytes:
    return xxhash.xxh3_128_digest(array.array("q", tokens).tobytes())
