"""The sandboxes of a world: one back end for all attempts, started on demand, and a
pool of warm sandboxes. Also the base class of handlers with a sandbox.

Invariants: after `Sandboxes.close`, no sandbox, process or folder is left; the image of
a sandbox stays in the cache as long as the attempt that uses it.
"""

import asyncio
import functools
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from rollweave.envs.base import Options, Score
from rollweave.sandbox.base import Backend, ExecResult, Sandbox, SandboxSpec, Snapshot, is_reference
from rollweave.sandbox.folders import check_folder
from rollweave.sandbox.image_cache import Lease
from rollweave.sandbox.packages import distributions
from rollweave.sandbox.registry import backend
from rollweave.sandbox.running import Pool
from rollweave.schema.errors import (
    ConfigError,
    ImageError,
    SandboxError,
    SandboxLostError,
    SandboxSpoiledError,
    SandboxTimeoutError,
)

KINDS = 8
"""Maximum number of specifications whose sandboxes are kept warm: the first requested
ones.
"""


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


class ImagePort(Protocol):
    """Gets images (`sandbox/image_supply.py`)."""

    async def find(self, text: str) -> Lease | None:
        """Hold an image of the cache; return None if the image is not in the cache."""

    async def take(self, text: str, backend: Callable[[], Backend]) -> Lease:
        """Return an image, from any source that has it."""


class NotCachedError(ImageError):
    """The image is not in the cache, and must not be obtained."""


class Sandboxes:
    """The sandboxes of the back end `name` (`sandbox/registry.py`; None: the default).

    All calls belong to the event loop's thread.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        warm: int = 0,
        images: ImagePort | None = None,
        cached_only: bool = False,
    ) -> None:
        """Keep `warm` sandboxes of each specification ready, so that taking one costs
        only a message. `images` gets the images for which `is_reference` is true; with
        `cached_only`, only images in the cache.
        """
        self._name, self._warm = name, warm
        self._images, self._cached_only = images, cached_only
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
            raise ImageError(f"image must be a folder without a cache of images, got {text!r}")
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

    async def close(self) -> None:
        """Stop all sandboxes and their back end."""
        self._closed = True
        pools, self._pools = list(self._pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))
        boxes, self._backend = self._backend, None
        if boxes is not None:
            await boxes.close()
        for lease in self._leases:
            lease.close()

    def _started(self) -> Backend:
        if self._closed:
            raise SandboxError("the sandboxes are closed: the run is ending")
        if self._backend is None:
            self._backend = backend(self._name)
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
    for option, check in (("packages", _check_packages), ("folder", check_folder)):
        if value := options.get(option):
            try:
                check(os.path.abspath(value) if option == "folder" else tuple(value))
            except ConfigError as error:
                raise ConfigError(f"options.{error}") from error


@functools.lru_cache(64)
def _check_packages(names: tuple[str, ...]) -> None:
    distributions(names)


def forget(snapshot: Snapshot) -> None:
    """Remove the files of a snapshot, before its back end closes.

    No branch of it may be running.
    """
    shutil.rmtree(snapshot.layers[0], ignore_errors=True)
