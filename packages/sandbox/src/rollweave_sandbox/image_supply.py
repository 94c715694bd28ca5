"""Gets the images of a process's sandboxes: from the host's cache, from other hosts,
from the mirror, or by building them (RollArt §8). `core/policy/images.py` of Rollweave
decides which source is used.

Invariants: concurrent requests for an image cause one fetch, in a process and in all
processes of a host; an image with another digest is never used; if a source fails, the
next source is used; every failure is an `ImageError`.
"""

import asyncio
import contextlib
import functools
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollweave.core.policy.images import pause_s
from rollweave.sandbox.base import Backend
from rollweave.sandbox.references import Recipe, Reference, parse_reference
from rollweave.schema.errors import ConfigError, ImageError, SandboxError
from rollweave.schema.images import GrantImage, ImageWait
from rollweave_sandbox.blobs import ROUTE, Blobs, Cancellation, Source, digest_of, read_text
from rollweave_sandbox.image_cache import ImageCache, Lease
from rollweave_sandbox.images import write_atomically

T = TypeVar("T")

FETCHES = 4
"""Maximum number of images that a process fetches or unpacks at the same time."""

LOCK_S = 0.2
"""Seconds between two attempts to lock an image that another process obtains."""

TRIES = 3
"""Maximum number of attempts to obtain an image that is removed again immediately."""

MEGABYTE = 1_000_000

BUILT = "/built/"
"""Path of a mirror's records of recipes, which map a recipe's key to its image's
digest.
"""


class ImageExchange(Protocol):
    """The way to the other hosts of the run."""

    async def ask(self, key: str, *, alone: bool) -> GrantImage:
        """Ask where to get an image (`schema/images.AskImage`)."""

    def hold(self, key: str, digest: str) -> None:
        """Report that this host has the image."""

    def miss(self, key: str) -> None:
        """Report that this host could not obtain the image."""


class NoExchange:
    """The exchange of a run without other hosts: every image comes from outside."""

    async def ask(self, key: str, *, alone: bool) -> GrantImage:
        del alone
        return GrantImage(key=key, origin=True)

    def hold(self, key: str, digest: str) -> None:
        pass

    def miss(self, key: str) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _Image:
    reference: Reference
    key: str
    """Digest, or key of the recipe."""


@dataclass(slots=True, eq=False)
class _Wait:
    image: str
    since: float
    what: str = "looking for a source"
    behind: bool = False


class ImageSupply:
    """Images for the sandboxes of one process.

    All calls belong to the event loop's thread.
    """

    def __init__(
        self,
        cache: ImageCache,
        *,
        mirror: str | None = None,
        exchange: ImageExchange | None = None,
        clock: Callable[[], float] = time.monotonic,
        here: Path | None = None,
        run: str = "",
    ) -> None:
        """`mirror` is an http or https URL, or the absolute path of a directory, which
        receives the images that are built here. Relative paths of images start at
        `here`, by default the working directory. A recipe in mode `scratch` is built
        once for each `run`, by default for this object.
        """
        self._run = run or secrets.token_hex(8)
        self._cache, self._exchange = cache, exchange or NoExchange()
        self._mirror = None if mirror is None else Source(url=mirror)
        self._clock, self._here = clock, here or Path.cwd()
        self._images: dict[str, asyncio.Task[_Image]] = {}
        self._obtaining: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[str, _Wait] = {}
        self._reported: set[str] = set()
        """Keys of images that this process has reported to hold."""
        self._executor = ThreadPoolExecutor(FETCHES, thread_name_prefix="images")
        self._cancellation = Cancellation()

    def waits(self) -> tuple[ImageWait, ...]:
        """Return the images for which sandboxes are waiting."""
        return tuple(
            ImageWait(image=wait.image, what=wait.what, since=wait.since, behind=wait.behind)
            for wait in self._waits.values()
        )

    async def find(self, text: str) -> Lease | None:
        """Hold an image of this host's cache; return None if the cache lacks it.

        Raises ConfigError, ImageError.
        """
        with _image_errors(text):
            return await self._in_cache(await self._resolved(text))

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        """Return an image, which stays until its lease is closed. `backend` returns the
        back end that builds.

        Raises ImageError; ConfigError for a name that no image can have.
        """
        with _image_errors(text):
            image = await self._resolved(text)
            for _ in range(TRIES):
                lease = await self._in_cache(image)
                if lease is not None:
                    return lease
                await self._obtained(image, backend)
            raise ImageError(f"image {text} was removed at once, {TRIES} times")

    async def close(self) -> None:
        """End all fetches and builds, and release all images."""
        self._cancellation.cancel()
        tasks = [*self._images.values(), *self._obtaining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    async def _in_cache(self, image: _Image) -> Lease | None:
        reference = image.reference
        if reference.folder is not None:
            return Lease(str(reference.folder))
        digest = await self._digest(image)
        lease = await asyncio.to_thread(self._cache.find, digest) if digest else None
        if lease is not None:
            self._report_held(image.key, digest)
        return lease

    async def _digest(self, image: _Image) -> str:
        """Return the image's digest; "" if it is not known here."""
        if image.reference.recipe is None:
            return image.key
        return await asyncio.to_thread(self._cache.images.built, image.key)

    async def _resolved(self, text: str) -> _Image:
        """Return the image to which the name refers. It is read only once, since it
        must stay the same during the run.
        """
        task = self._images.get(text)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._call(self._resolve, text), name=f"image {text}")
            self._images[text] = task
        return await asyncio.shield(task)

    def _resolve(self, text: str) -> _Image:
        reference = parse_reference(text, self._here)
        key = reference.digest
        if reference.archive is not None:
            with reference.archive.open("rb") as file:
                key = digest_of(file)
        elif reference.recipe is not None:
            key = self._key_of(reference.recipe, reference)
        return _Image(reference=reference, key=key)

    def _key_of(self, recipe: Recipe, reference: Reference) -> str:
        images = self._cache.images
        return images.key(recipe, reference.mode, reference.place, self._run) or ""

    async def _obtained(self, image: _Image, backend: Callable[[], Backend]) -> None:
        """Wait until the image is obtained. If this wait is cancelled, obtaining the
        image continues.
        """
        task = self._obtaining.get(image.key)
        if task is None:
            task = asyncio.create_task(
                self._obtain(image, backend), name=f"obtain image {image.reference.label}"
            )
            self._obtaining[image.key] = task
            task.add_done_callback(lambda task: self._forget(image.key, task))
        await asyncio.shield(task)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        del self._obtaining[key]
        if not task.cancelled():
            task.exception()  # each caller has it; there may be none

    async def _obtain(self, image: _Image, backend: Callable[[], Backend]) -> None:
        wait = self._waits[image.key] = _Wait(image.reference.label, self._clock())
        try:
            async with self._locked(image, wait):
                if (lease := await self._in_cache(image)) is not None:  # by another process
                    lease.close()
                    return
                if image.reference.archive is not None:
                    wait.what = "copying it into the cache"
                    add = functools.partial(self._cache.add, image.reference.archive, image.key)
                    await self._store(image.key, add)
                    self._report_held(image.key, image.key)
                else:
                    await self._from_elsewhere(image, wait, backend)
        finally:
            del self._waits[image.key]

    async def _from_elsewhere(
        self, image: _Image, wait: _Wait, backend: Callable[[], Backend]
    ) -> None:
        """Try all sources, again and again with growing pauses."""
        failures = 0
        while True:
            wait.what = "no host has it yet, and another one obtains it"
            self._reported.discard(image.key)
            grant = await self._exchange.ask(image.key, alone=failures > 0)
            digest, errors = "", ["no source has it"]
            try:
                digest, errors = await self._from_sources(image, grant, wait, backend)
            finally:
                if not digest:
                    self._exchange.miss(image.key)
            if digest:
                self._report_held(image.key, digest)
                return
            failures += 1
            pause = pause_s(failures, random.random())
            if pause is None:
                raise ImageError(f"image {image.reference.text}: {'; '.join(errors)}")
            wait.what = f"trying again in {pause:.0f} s: {errors[-1]}"
            await asyncio.sleep(pause)

    async def _from_sources(
        self, image: _Image, grant: GrantImage, wait: _Wait, backend: Callable[[], Backend]
    ) -> tuple[str, list[str]]:
        """Return the digest of the obtained image, or "" if no source had it, and the
        reasons why sources failed.
        """
        errors: list[str] = []
        digest = grant.digest or image.reference.digest
        sources = [
            (f"host {peer.host}", Source(url=peer.url, token=peer.token)) for peer in grant.peers
        ]
        if self._mirror is not None:
            sources.append(("the mirror", self._mirror))
        for name, source in sources:
            try:
                if not digest:
                    digest = await self._mirrored(image.key)
            except OSError as error:
                errors.append(f"{name}: {error}")
                continue
            if not digest:
                errors.append(f"{name}: has no image of this recipe")
                continue
            error_text = await self._fetch(image, digest, name, source, wait)
            if error_text is None:
                return digest, errors
            errors.append(f"{name}: {error_text}")
        if grant.origin and image.reference.recipe is not None:
            return await self._built(image, wait, backend), errors
        return "", errors or ["no host of the run has it, and there is no mirror"]

    async def _mirrored(self, key: str) -> str:
        """Return the digest of a recipe's image on the mirror; "" if the mirror has
        none. Raises OSError.
        """
        assert self._mirror is not None, "it is a source"
        return await self._call(read_text, self._mirror, f"{BUILT}{key}") or ""

    async def _fetch(
        self, image: _Image, digest: str, name: str, source: Source, wait: _Wait
    ) -> str | None:
        wait.what = f"fetching from {name}"

        def on_progress(done: int, whole: int) -> None:
            of = f" of {whole / MEGABYTE:,.0f}" if whole else ""
            wait.what = f"fetching from {name}, {done / MEGABYTE:,.0f}{of} MB"

        def fetch() -> str | None:
            error = self._cache.fetch(digest, source, on_progress, self._cancellation)
            if error is None:
                wait.what = "unpacking it"
                self._cache.unpack(digest, self._cancellation)
                if image.reference.recipe is not None:
                    self._cache.images.remember(image.key, digest)
            return error

        return await self._call(self._holding, digest, fetch)

    async def _built(self, image: _Image, wait: _Wait, backend: Callable[[], Backend]) -> str:
        """Build the image of a recipe, unpack it, and give it to the mirror."""
        wait.what = "building it"
        reference = image.reference
        assert reference.recipe is not None, "there is something to build"
        digest = await self._cache.images.build(
            reference.recipe,
            backend=backend(),
            mode=reference.mode,
            relative_to=reference.place,
            run=self._run,
        )
        wait.what = "unpacking it"
        await self._store(digest, lambda: None)
        if self._mirror is not None and self._mirror.is_directory:
            # a mirror that this user cannot write serves as well
            with contextlib.suppress(OSError, SandboxError):
                await self._call(self._publish, self._mirror.url, image.key, digest)
        return digest

    def _publish(self, mirror: str, key: str, digest: str) -> None:
        blobs = Blobs(Path(mirror + ROUTE))
        with self._cache.archive(digest).open("rb") as file, blobs.new() as blob:
            while chunk := file.read(1 << 20):
                blob.write(chunk)
            blob.keep()
        Path(mirror + BUILT).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(mirror + BUILT + key), digest)

    async def _store(self, digest: str, prepare: Callable[[], object]) -> None:
        """Unpack an image, after `prepare` has stored its archive."""

        def store() -> None:
            prepare()
            self._cache.unpack(digest, self._cancellation)

        await self._call(self._holding, digest, store)

    def _holding(self, digest: str, call: Callable[[], T]) -> T:
        """Call `call` while the image is held; if the call fails, nothing of the image
        stays.
        """
        self._cache.hold(digest)
        try:
            value = call()
        except BaseException:
            self._cache.remove(digest)
            raise
        self._cache.release(digest)
        return value

    def _report_held(self, key: str, digest: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self._exchange.hold(key, digest)

    @contextlib.asynccontextmanager
    async def _locked(self, image: _Image, wait: _Wait) -> AsyncIterator[None]:
        """Keep this host's other processes from obtaining the image meanwhile."""
        while (lock := await asyncio.to_thread(self._cache.try_lock, image.key)) is None:
            wait.what, wait.behind = "another process of this host obtains it", True
            await asyncio.sleep(LOCK_S)
        wait.behind = False
        try:
            yield
        finally:
            os.close(lock)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that may take long on a thread of its own pool, so that it
        delays no quick call.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, functools.partial(function, *arguments))


@contextlib.contextmanager
def _image_errors(text: str) -> Iterator[None]:
    """Turn other failures in this context into an `ImageError`."""
    try:
        yield
    except (ImageError, ConfigError):
        raise
    except SandboxError as error:
        raise ImageError(f"image {text}: {error}") from error
    except OSError as error:
        raise ImageError(f"image {text}: {error.strerror or error}") from error
