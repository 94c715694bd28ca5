"""Brings the KV of prompts from another server of the same checkpoint, which computes
them, so that this server's engine only decodes (ROSE §4, prefill-decode
disaggregation).

The other server computes the prompt as a request of one token, which is discarded, and
exports its KV; the engine here imports it into its prefix cache. The last block of a
prompt never moves, so the engine samples every token itself. Invariants: KV whose
tokens, weights or bytes differ is refused (`engine/exchange`); a prompt that cannot be
brought within `PROMPT_S` is computed here, and a server that failed is left alone for
`RETRY_S`; an export is released even if its request is cancelled.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Self
from uuid import uuid4

import aiohttp
import msgspec

from rollweave.core.policy.disaggregation import LEAST_TOKENS
from rollweave.engine.clients.base import EngineBackend
from rollweave.engine.clients.protocol import (
    EXPORT_PATH,
    GENERATE_PATH,
    RELEASE_PATH,
    KvExport,
    KvRelease,
)
from rollweave.engine.clients.transport import read_bounded
from rollweave.schema.address import host_of
from rollweave.schema.errors import EngineError, KvError
from rollweave.schema.packing import as_json
from rollweave.schema.serving import GenerateRequest, KvManifest, KvPort, Sampling

PROMPT_S = 30.0
"""Maximum seconds until the KV of a prompt is here."""

RETRY_S = 5.0
"""Seconds for which a server that failed computes no further prompts."""

MAX_TRANSFERS = 4
"""Maximum number of prompts whose KV moves at once: as many as an engine imports."""

ANSWER_BYTES = 16 << 20
"""Maximum number of bytes in an answer: a manifest has 8 bytes per 4 MiB of KV."""


class RemotePrefill:
    """The server at `url` that computes prompts for `engine`. It is an asynchronous
    context manager. `report` is called when it begins to fail, and when it works again.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        engine: EngineBackend,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._url, self._engine, self._report = url.rstrip("/"), engine, report
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._transfers = asyncio.Semaphore(MAX_TRANSFERS)
        self._releases: set[asyncio.Task[None]] = set()
        self._fails, self._rests_until = False, 0.0

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
        if time.monotonic() < self._rests_until:
            return
        try:
            async with asyncio.timeout(PROMPT_S):
                await self._bring(tokens, request.rank)
        except (aiohttp.ClientError, OSError, EngineError, KvError, ValueError) as error:
            self._failed(str(error) or type(error).__name__)
        else:
            if self._fails:
                self._fails = False
                self._report(f"prompts are computed at {self._url} again")

    async def _bring(self, tokens: Sequence[int], rank: float) -> None:
        prompt = GenerateRequest(
            id=uuid4().hex, tokens=tuple(tokens), sampling=Sampling(max_tokens=1), rank=rank
        )
        await self._post(GENERATE_PATH, prompt)
        async with self._transfers:
            answer = await self._post(EXPORT_PATH, KvExport(tokens=tuple(tokens)))
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
        """Return the answer. Raises EngineError for a refusal."""
        async with self._session.post(path, data=as_json(body), allow_redirects=False) as response:
            answer = await read_bounded(response, ANSWER_BYTES)
            if response.status != 200:
                detail = answer[:300].decode(errors="replace")
                raise EngineError(f"it answered {path} with status {response.status}: {detail}")
            return answer

    def _failed(self, reason: str) -> None:
        self._rests_until = time.monotonic() + RETRY_S
        if not self._fails:
            self._fails = True
            self._report(f"prompts are computed here, not at {self._url}: {reason}")
