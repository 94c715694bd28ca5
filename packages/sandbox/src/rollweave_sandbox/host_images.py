"""The images of one process of a run, in the cache of its host, and the messages about
them between a rollout worker and the controller.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

from rollweave.sandbox.base import Backend
from rollweave.sandbox.provider import Peers
from rollweave.schema.errors import ConfigError, ImageError
from rollweave.schema.images import (
    AskImage,
    GrantImage,
    HoldImage,
    ImagePeer,
    ImageWait,
    MissImage,
)
from rollweave_sandbox.blobs import ROUTE, BlobServer, Source, read_text
from rollweave_sandbox.image_cache import ImageCache, Lease
from rollweave_sandbox.image_supply import ImageSupply

CACHE_SHARE = 0.5
"""Maximum share of its file system that the images of a host have."""

TOKEN_BYTES = 32
"""Random bytes of the token that peers present."""


def cache_folder() -> Path:
    """Return this host's folder of images."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if caches.startswith("/") else Path.home() / ".cache", "rollweave", "images")


def locate_image(digest: str, mirror: str | None) -> str:
    """Implements `Provider.locate_image`."""
    folder, text = cache_folder(), f"sha256:{digest}"
    if (folder / "roots" / digest).is_dir():
        return f"{text} is in {folder}"
    if mirror is None:
        raise ConfigError(f"must be in {folder}, or in a sandbox.mirror, got {text}")
    try:
        found = read_text(Source(url=mirror), ROUTE + digest)
    except HTTPError as error:
        phrase = HTTPStatus(error.code).phrase
        raise ConfigError(f"sandbox.mirror {mirror} answered {error.code} {phrase}") from error
    except OSError as error:
        raise ConfigError(f"sandbox.mirror {mirror} must be reachable, got {error}") from error
    if found is None:
        raise ImageError(f"must be in the mirror {mirror}, got {text}")
    return f"{text} from {mirror}"


class RemoteExchange:
    """The exchange of images with other hosts: a worker asks the controller for
    sources, and serves its images on its address, unless that is "".
    """

    def __init__(self, peers: Peers) -> None:
        self._peers, self._report = peers, peers.report
        self._asked: dict[str, asyncio.Future[GrantImage]] = {}
        self._server: BlobServer | None = None
        self._peer: ImagePeer | None = None

    async def ask(self, key: str, *, alone: bool) -> GrantImage:
        answer: asyncio.Future[GrantImage] = asyncio.get_running_loop().create_future()
        self._asked[key] = answer
        self._report(AskImage(key=key, alone=alone))
        try:
            return await answer
        finally:
            del self._asked[key]

    def hold(self, key: str, digest: str) -> None:
        self._report(HoldImage(key=key, digest=digest, peer=self._peer))

    def miss(self, key: str) -> None:
        self._report(MissImage(key=key))

    def on_granted(self, message: GrantImage) -> None:
        """Pass on the controller's answer; one that comes too late is given back."""
        answer = self._asked.get(message.key)
        if answer is not None and not answer.done():
            answer.set_result(message)
        elif message.origin:
            self._report(MissImage(key=message.key))

    def serve(self, cache: ImageCache) -> None:
        """Serve the images of the cache to other hosts. Raises ImageError."""
        host, address = self._peers.host, self._peers.address
        if not address:
            return
        token = secrets.token_hex(TOKEN_BYTES)
        try:
            self._server = cache.serve(address, token)
        except OSError as error:
            raise ImageError(
                f"the address of host {host} must be one on which it can listen, got "
                f"{address}: {error.strerror or error}"
            ) from error
        self._server.__enter__()
        self._peer = ImagePeer(host=host, url=self._server.url, token=token)

    async def close(self) -> None:
        """Stop serving."""
        server, self._server, self._peer = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.__exit__)


class HostImages:
    """Implements `Images` of Rollweave's `sandbox/provider.py`."""

    def __init__(
        self,
        mirror: str | None,
        *,
        clock: Callable[[], float],
        here: Path,
        peers: Peers | None,
        run: str,
    ) -> None:
        """Open the cache. Raises ImageError if it cannot be opened."""
        folder = cache_folder()
        self._exchange = None if peers is None else RemoteExchange(peers)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            limit_bytes = int(CACHE_SHARE * shutil.disk_usage(folder).total)
            cache = ImageCache(folder, limit_bytes=limit_bytes, mirror=mirror)
            if self._exchange is not None:
                self._exchange.serve(cache)
        except OSError as error:
            raise ImageError(
                f"XDG_CACHE_HOME must have a directory to write to, got {folder}: "
                f"{error.strerror or error}"
            ) from error
        self._supply = ImageSupply(
            cache, mirror=mirror, exchange=self._exchange, clock=clock, here=here, run=run
        )

    async def find(self, text: str) -> Lease | None:
        return await self._supply.find(text)

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        return await self._supply.take(text, backend)

    def waits(self) -> tuple[ImageWait, ...]:
        return self._supply.waits()

    def on_granted(self, message: GrantImage) -> None:
        if self._exchange is not None:
            self._exchange.on_granted(message)

    async def close(self) -> None:
        await self._supply.close()
        if self._exchange is not None:
            await self._exchange.close()
