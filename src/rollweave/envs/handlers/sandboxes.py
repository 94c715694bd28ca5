"""The sandboxes of a world: one back end for all attempts, started when the first is
asked for, and some kept warm.

Invariant: when it is closed, no sandbox, process or folder of it is left.
"""

import asyncio
import shutil

import msgspec

from rollweave.sandbox.base import Backend, Sandbox, SandboxSpec, Snapshot
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.registry import backend
from rollweave.schema.errors import SandboxError

KINDS = 8
"""Specifications of which sandboxes are kept warm: the first that are asked for."""


class Sandboxes:
    """`name` is a back end's (`sandbox/registry.py`), None the default one.

    All calls belong to the event loop's thread.
    """

    def __init__(self, name: str | None = None, *, warm: int = 0) -> None:
        """`warm` sandboxes of each specification wait, so that taking one costs a
        message.
        """
        self._name, self._warm = name, warm
        self._backend: Backend | None = None
        self._pools: dict[bytes, Pool] = {}
        self._closed = False

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox, which is the caller's to stop.

        Raises SandboxError, ConfigError, ValueError.
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
        return await pool.take()

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        """A sandbox that begins where the snapshot was taken. Raises SandboxError."""
        return await self._started().branch(snapshot)

    async def close(self) -> None:
        """End all of them."""
        self._closed = True
        pools, self._pools = list(self._pools.values()), {}
        await asyncio.gather(*(pool.close() for pool in pools))
        boxes, self._backend = self._backend, None
        if boxes is not None:
            await boxes.close()

    def _started(self) -> Backend:
        if self._closed:
            raise SandboxError("the sandboxes are closed: the run is ending")
        if self._backend is None:
            self._backend = backend(self._name)
        return self._backend


def forget(snapshot: Snapshot) -> None:
    """Remove what a snapshot keeps, before its back end closes.

    No branch of it may be running.
    """
    shutil.rmtree(snapshot.layers[0], ignore_errors=True)
