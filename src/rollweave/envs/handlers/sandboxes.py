"""The sandboxes of a world: one back end for all attempts, started on demand, and a
pool of warm sandboxes; and the base of the handlers that use one.

Invariant: when it is closed, no sandbox, process or folder of it is left.
"""

import asyncio
import shutil

import msgspec

from rollweave.envs.base import Score
from rollweave.sandbox.base import Backend, Sandbox, SandboxSpec, Snapshot
from rollweave.sandbox.pool import Pool
from rollweave.sandbox.registry import backend
from rollweave.schema.errors import SandboxError, SandboxSpoiledError

KINDS = 8
"""Maximum number of specifications whose sandboxes are kept warm: the first that are
requested.
"""


class Sandboxes:
    """`name` is that of a back end (`sandbox/registry.py`), None the default one.

    All calls belong to the event loop's thread.
    """

    def __init__(self, name: str | None = None, *, warm: int = 0) -> None:
        """Keep `warm` sandboxes of each specification ready, so that taking one costs
        only a message.
        """
        self._name, self._warm = name, warm
        self._backend: Backend | None = None
        self._pools: dict[bytes, Pool] = {}
        self._closed = False

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox, which the caller must stop.

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

    def _started(self) -> Backend:
        if self._closed:
            raise SandboxError("the sandboxes are closed: the run is ending")
        if self._backend is None:
            self._backend = backend(self._name)
        return self._backend


class SandboxHandler:
    """Base of the handlers with a sandbox, which it releases before the reward.

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
        """Return reward 0 if the agent's code spoiled the sandbox, otherwise None: other
        failures say nothing about the agent.
        """
        return Score(reward=0.0, success=False) if isinstance(error, SandboxSpoiledError) else None

    async def eval_exception(self, error: BaseException) -> Score | None:
        """Classify an exception as in `run`, because code that the agent left runs
        here, too.
        """
        return await self.run_exception(error)


def forget(snapshot: Snapshot) -> None:
    """Remove the files of a snapshot, before its back end closes.

    No branch of it may be running.
    """
    shutil.rmtree(snapshot.layers[0], ignore_errors=True)
