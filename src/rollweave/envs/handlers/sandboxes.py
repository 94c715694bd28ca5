"""The sandboxes of a world: one back end for all attempts, started on demand, and a
pool of warm sandboxes. Also the base class of handlers with a sandbox.

Invariants: after `Sandboxes.close`, no sandbox, process or folder is left; the image of
a sandbox stays in the cache as long as the attempt that uses it.
"""

import asyncio
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from rollweave.envs.base import Options, Score
from rollweave.sandbox.base import Backend, ExecResult, Sandbox, SandboxSpec, Snapshot, is_reference
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.provider import Images, Lease, provider
from rollweave.schema.errors import (
    ConfigError,
    ImageError,
    SandboxError,
    SandboxLostError,
    SandboxSpoiledError,
    SandboxTimeoutError,
)
from rollweave.schema.images import GrantImage, ImageWait

KINDS = 8
"""Maximum number of specifications whose sandboxes are kept warm: the first requested
ones.
"""


CLOSED = "the sandboxes are closed: the run is ending"


class StartsSandboxes(Protocol):
    """Starts the sandboxes of one attempt."""

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox, which the caller must stop. Its image may be a digest, an
        archive or a recipe (`sandbox.base.is_reference`).

        Raises SandboxError, ConfigError, ValueError; ImageError if the image cannot be
        obtained.
        """

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        """Return a sandbox that starts from the snapshot. Raises SandboxError."""


class NotCachedError(ImageError):
    """The image is not in the cache, and must not be obtained."""


class Sandboxes:
    """The sandboxes of the back end `name` (`sandbox/provider.py`; None: the default).

    All calls belong to the event loop's thread.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        warm: int = 0,
        images: Callable[[], Images] | None = None,
        cached_only: bool = False,
    ) -> None:
        """Keep `warm` sandboxes of each specification ready, so that taking one costs
        only a message. `images` opens the source of the images for which `is_reference`
        is true, when the first is needed; with `cached_only`, only images in the cache
        are used.
        """
        self._name, self._warm = name, warm
        self._open_images, self._cached_only = images, cached_only
        self._images: Images | None = None
        self._leases: list[Lease] = []
        """The images of `start`, and of the warm sandboxes."""
        self._backend: Backend | None = None
        self._pools: dict[bytes, Pool] = {}
        self._closed = False

    async def image(self, text: str) -> Lease:
        """Return an image, which stays until its lease is closed.

        Raises ConfigError, ImageError; NotCachedError if the image must not be
        obtained.
        """
        if self._images is None:
            if self._open_images is None:
                raise ImageError(f"image must be a folder without a cache of images, got {text!r}")
            if self._closed:
                raise SandboxError(CLOSED)
            self._images = self._open_images()
        if not self._cached_only:
            return await self._images.take(text, self._started)
        lease = await self._images.find(text)
        if lease is None:
            raise NotCachedError(f"image {text} is not in the cache")
        return lease

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox, as `StartsSandboxes` does; its image stays until `close`."""
        if is_reference(spec.image):
            lease = await self.image(spec.image)
            self._leases.append(lease)
            spec = msgspec.structs.replace(spec, image=lease.path)
        return await self.start_with(spec)

    async def start_with(self, spec: SandboxSpec, lease: Lease | None = None) -> Sandbox:
        """Start a sandbox whose image is HOST or a folder. `lease` is the lease of an
        image that comes from the cache.
        """
        boxes = self._started()
        if not self._warm:
            return await boxes.start(spec)
        kind = msgspec.json.encode(spec, order="deterministic")
        pool = self._pools.get(kind)
        if pool is None:
            if len(self._pools) >= KINDS:
                return await boxes.start(spec)
            pool = self._pools[kind] = Pool(boxes, spec, size=self._warm)
            if lease is not None:
                self._leases.append(lease.copy())
        return await pool.take()

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        """Return a sandbox that starts from the snapshot. Raises SandboxError."""
        return await self._started().branch(snapshot)

    def image_waits(self) -> tuple[ImageWait, ...]:
        """Return the images that are being waited for."""
        return () if self._images is None else self._images.waits()

    def on_granted(self, message: GrantImage) -> None:
        """Take the controller's answer to a question about an image."""
        if self._images is not None:
            self._images.on_granted(message)

    async def close(self) -> None:
        """Stop all sandboxes and their back end, and release all images."""
        self._closed = True
        pools, self._pools = list(self._pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))
        boxes, self._backend = self._backend, None
        if boxes is not None:
            await boxes.close()
        for lease in self._leases:
            lease.close()
        if self._images is not None:
            await self._images.close()

    def _started(self) -> Backend:
        if self._closed:
            raise SandboxError(CLOSED)
        if self._backend is None:
            self._backend = provider(self._name).backend(self._name)
        return self._backend


class AttemptSandboxes:
    """The sandboxes of one attempt. Their images stay in the cache until this object is
    collected, with the attempt.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`waiting` is entered while an image is waited for."""
        self._sandboxes, self._waiting = sandboxes, waiting
        self.image_error: ImageError | None = None
        """The error of an image that could not be obtained."""
        self._leases: list[Lease] = []
        weakref.finalize(self, _close_all, self._leases)

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if not is_reference(spec.image):
            return await self._sandboxes.start(spec)
        try:
            with self._waiting():
                lease = await self._sandboxes.image(spec.image)
        except ImageError as error:
            self.image_error = error
            raise
        self._leases.append(lease)
        return await self._sandboxes.start_with(
            msgspec.structs.replace(spec, image=lease.path), lease
        )

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        return await self._sandboxes.branch(snapshot)


def _close_all(leases: list[Lease]) -> None:
    for lease in leases:
        lease.close()


class SandboxHandler:
    """Base of the handlers with a sandbox, which is released before the reward.

    The agent is to blame if the sandbox is spoiled. A subclass assigns `_sandbox`.
    """

    _sandbox: Sandbox | None = None

    async def close(self) -> None:
        """Stop the sandbox."""
        if self._sandbox is not None:
            await self._sandbox.stop(grace_s=0.0)

    def kill(self) -> None:
        """Kill the sandbox."""
        if self._sandbox is not None:
            self._sandbox.kill()

    async def run_exception(self, error: BaseException) -> Score | None:
        """Return reward 0 if the agent's code spoiled the sandbox, else None, since
        other failures say nothing about the agent.
        """
        return Score(reward=0.0, success=False) if isinstance(error, SandboxSpoiledError) else None

    async def eval_exception(self, error: BaseException) -> Score | None:
        """Classify an exception as in `run`, because code that the agent left also runs
        in `eval`.
        """
        return await self.run_exception(error)


async def exec_after_agent(
    sandbox: Sandbox, command: list[str], *, stdin: bytes = b"", timeout_s: float
) -> ExecResult:
    """Run a command in a sandbox in which code of the agent has run.

    Raises SandboxSpoiledError if the agent's code prevents the command from starting,
    because it has removed the work folder, for example.
    """
    try:
        return await sandbox.exec(command, stdin=stdin, timeout_s=timeout_s)
    except (SandboxLostError, SandboxTimeoutError):
        raise
    except SandboxError as error:
        raise SandboxSpoiledError(f"what the agent left prevents {command[0]}: {error}") from error


def check_seen(options: Options) -> None:
    """Raise ConfigError if `packages` or `folder` of a handler's options cannot be in a
    sandbox. Must be called for every task that is drawn, and so before a run.
    """
    packages, folder = options.get("packages") or (), options.get("folder") or ""
    if not (packages or folder):
        return
    check = provider().check_contents
    try:
        check(packages=packages, folder=os.path.abspath(folder) if folder else "")
    except ConfigError as error:
        raise ConfigError(f"options.{error}") from error


def forget(snapshot: Snapshot) -> None:
    """Remove the files of a snapshot, before its back end closes.

    No branch of it may be running.
    """
    for folder in snapshot.layers[:1]:
        shutil.rmtree(folder, ignore_errors=True)
