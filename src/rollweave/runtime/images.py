"""The images of the sandboxes in one process of a run, and the messages about them
between a rollout worker and the controller.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from rollweave.sandbox.base import Backend
from rollweave.sandbox.blobs import BlobServer
from rollweave.sandbox.image_cache import ImageCache, Lease
from rollweave.sandbox.image_supply import ImageExchange, ImageSupply
from rollweave.schema.config.run import SandboxConfig
from rollweave.schema.errors import ImageError
from rollweave.schema.images import (
    AskImage,
    GrantImage,
    HoldImage,
    ImagePeer,
    ImageReport,
    ImageWait,
    MissImage,
)

CACHE_SHARE = 0.5
"""Maximum share of its file system that the images of a host have."""

TOKEN_BYTES = 32
"""Random bytes of the token that peers present."""


def cache_folder() -> Path:
    """Return this host's folder of images."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return Path(caches if caches.startswith("/") else Path.home() / ".cache", "rollweave", "images")


class RemoteExchange:
    """The exchange of images with other hosts: a worker asks the controller for
    sources, and serves its images on `address`, unless that is "".
    """

    def __init__(self, report: Callable[[ImageReport], None], *, host: str, address: str) -> None:
        self._report, self._host, self._address = report, host, address
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
        if not self._address:
            return
        token = secrets.token_hex(TOKEN_BYTES)
        try:
            self._server = cache.serve(self._address, token)
        except OSError as error:
            raise ImageError(
                f"the address of host {self._host} must be one on which it can listen, got "
                f"{self._address}: {error.strerror or error}"
            ) from error
        self._server.__enter__()
        self._peer = ImagePeer(host=self._host, url=self._server.url, token=token)

    async def close(self) -> None:
        """Stop serving."""
        server, self._server, self._peer = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.__exit__)


class Images:
    """The images of one process (an `ImagePort`). The cache is opened when the first
    image is needed.
    """

    def __init__(
        self,
        config: SandboxConfig,
        *,
        clock: Callable[[], float],
        exchange: RemoteExchange | None = None,
    ) -> None:
        self._config, self._clock, self._exchange = config, clock, exchange
        self._here = Path.cwd()
        self._supply: ImageSupply | None = None

    async def find(self, text: str) -> Lease | None:
        return await self._opened().find(text)

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        return await self._opened().take(text, backend)

    def waits(self) -> tuple[ImageWait, ...]:
        """Return the images that are being waited for."""
        return () if self._supply is None else self._supply.waits()

    async def close(self) -> None:
        """End all that is under way, and release all images."""
        if self._supply is not None:
            await self._supply.close()
        if self._exchange is not None:
            await self._exchange.close()

    def _opened(self) -> ImageSupply:
        """Return the supply. Raises ImageError if the cache cannot be opened."""
        if self._supply is None:
            folder, mirror = cache_folder(), self._config.mirror
            exchange: ImageExchange | None = self._exchange
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
                cache, mirror=mirror, exchange=exchange, clock=self._clock, here=self._here
            )
        return self._supply
