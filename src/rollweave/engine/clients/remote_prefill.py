"""Brings the KV of prompts from another server of the same checkpoint, which computes
them, so that this server's engine only decodes (ROSE §4, prefill-decode
disaggregation).

The other server computes the prompt and offers its KV; the engine here imports it into
its prefix cache. The last block of a prompt never moves, so the engine samples every
token itself. Invariants: KV whose tokens, weights or bytes differ is refused
(`engine/exchange`); a prompt that is refused, or cannot be brought within `PROMPT_S`,
is computed here; a server that failed is left alone for `RETRY_S`, no prompt waits for
it any longer, and a single one tries it again; KV is released even if its request is
cancelled.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import aiohttp
import msgspec

from rollweave.core.policy.routing import LEAST_TOKENS
from rollweave.engine.clients.base import MovesKv
from rollweave.engine.clients.transport import read_bounded
from rollweave.schema.address import host_of
from rollweave.schema.base import Struct, as_json
from rollweave.schema.errors import EngineError, KvError
from rollweave.schema.serving import GenerateRequest, KvManifest, KvPort

PREFILL_PATH: Final = "/rollweave/v1/prefill"
RELEASE_PATH: Final = "/rollweave/v1/kv/release"
"""The paths of this at Rollweave's own engine server (`engine/clients/server`)."""

PROMPT_S = 30.0
"""Maximum seconds until the KV of a prompt is here."""

RETRY_S = 5.0
"""Seconds for which a server that failed computes no further prompts."""

MAX_TRANSFERS = 4
"""Maximum number of prompts that are computed and brought at once: as many as an engine
imports.
"""

ANSWER_BYTES = 16 << 20
"""Maximum number of bytes in an answer: a manifest has 8 bytes per 4 MiB of KV."""

REFUSED: Final = frozenset({400, 409, 413, 422, 429})
"""Statuses by which a server refuses one prompt, and still computes others."""


class Prefill(Struct, frozen=True, kw_only=True):
    """Compute the prompt `tokens` and offer the KV of its whole blocks, with the `rank`
    of the request that it belongs to. The answer is a KvManifest.
    """

    tokens: tuple[int, ...]
    rank: float = 0.0


class KvRelease(Struct, frozen=True, kw_only=True):
    """Free the KV that a manifest offers. Unknown ids are ignored."""

    id: str


class _RefusedError(EngineError):
    """The server refuses this prompt."""


class RemotePrefill:
    """The server at `url` that computes prompts for `engine`. It is an asynchronous
    context manager. `report` is called when it begins to fail, and when it works again.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        engine: MovesKv,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._url, self._engine, self._report = url.rstrip("/"), engine, report
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._transfers = asyncio.Semaphore(MAX_TRANSFERS)
        self._releases: set[asyncio.Task[None]] = set()
        self._under_way: set[asyncio.Future[None]] = set()
        self._fails = self._refuses = False
        self._rests_until = 0.0

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=PROMPT_S)
        self._session = aiohttp.ClientSession(
            self._url, connector=connector, timeout=timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._releases, return_exceptions=True)
        await self._session.close()

    async def bring(self, request: GenerateRequest) -> None:
        """Have the KV of the request's context computed and brought. The engine
        computes what is missing after that, which is all of it after a failure.
        """
        resumed = request.resumed.tokens if request.resumed is not None else ()
        tokens = (*request.tokens, *resumed)
        # a scored prompt is computed where its log-probs are read
        if len(tokens) < LEAST_TOKENS or request.prompt_logprobs:
            return
        # after a failure, a single prompt tries again
        if time.monotonic() < self._rests_until or (self._fails and self._under_way):
            return
        work = asyncio.ensure_future(self._bring(tokens, request.rank))
        self._under_way.add(work)
        try:
            async with asyncio.timeout(PROMPT_S):
                await work
        except _RefusedError as error:
            self._refused(str(error))
        except (aiohttp.ClientError, OSError, EngineError, KvError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
        except asyncio.CancelledError:
            # the failure of another prompt ends this transfer, but not its request
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        else:
            self._refuses = False
            if self._fails:
                self._fails = False
                self._report(f"prompts are computed at {self._url} again")
        finally:
            self._under_way.discard(work)

    async def _bring(self, tokens: Sequence[int], rank: float) -> None:
        async with self._transfers:
            answer = await self._post(PREFILL_PATH, Prefill(tokens=tuple(tokens), rank=rank))
            manifest = msgspec.json.decode(answer, type=KvManifest)
            try:
                await self._engine.import_kv(tokens, self._reachable(manifest))
            finally:
                release = asyncio.create_task(self._release(manifest.id))
                self._releases.add(release)
                release.add_done_callback(self._releases.discard)

    def _reachable(self, manifest: KvManifest) -> KvManifest:
        """Return the manifest with the server's address as it is reached from here: the
        one on which it listens may be that of all interfaces.
        """
        if not isinstance(manifest.where, KvPort):
            raise KvError(f"the KV must be offered at a port, got {type(manifest.where).__name__}")
        where = msgspec.structs.replace(manifest.where, host=host_of(self._url))
        return msgspec.structs.replace(manifest, where=where)

    async def _release(self, id: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, EngineError):
            await self._post(RELEASE_PATH, KvRelease(id=id))  # otherwise it expires

    async def _post(self, path: str, body: Any) -> bytes:
        """Return the answer. Raises _RefusedError where this request alone is refused,
        and EngineError for any other error of the server.
        """
        async with self._session.post(path, data=as_json(body), allow_redirects=False) as response:
            answer = await read_bounded(response, ANSWER_BYTES)
            if response.status == 200:
                return answer
            detail = answer[:300].decode(errors="replace")
            text = f"it answered {path} with status {response.status}: {detail}"
            raise (_RefusedError if response.status in REFUSED else EngineError)(text)

    def _refused(self, reason: str) -> None:
        if not self._refuses:
            self._refuses = True
            self._report(f"a prompt is computed here, not at {self._url}: {reason}")

    def _failed(self, reason: str) -> None:
        self._rests_until = time.monotonic() + RETRY_S
        for work in self._under_way:
            work.cancel()
        if not self._fails:
            self._fails = True
            self._report(f"prompts are computed here, not at {self._url}: {reason}")
