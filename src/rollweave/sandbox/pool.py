"""A pool starts sandboxes in advance, so that no episode waits.

Invariants: each sandbox is returned once; never more than `size` are waiting or being
started; a sandbox that ended while it waited is not returned; sandboxes that wait when
the pool closes are killed.
"""

import asyncio
from collections import deque

from rollweave.sandbox.base import Backend, Sandbox, SandboxSpec
from rollweave.schema.errors import SandboxError


class Pool:
    """Warm sandboxes of one specification. All calls belong to the event loop's thread.

    The back end stays the caller's.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, *, size: int) -> None:
        """Begin to start `size` sandboxes. Raises ValueError."""
        if size < 1:
            raise ValueError(f"size must be at least 1 for a pool of sandboxes, got {size}")
        self._backend, self._spec, self._size = backend, spec, size
        self._warm: deque[Sandbox] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._refill()

    def __len__(self) -> int:
        """Return the number of waiting sandboxes."""
        return len(self._warm)

    async def take(self) -> Sandbox:
        """Return a waiting sandbox, or start one; the pool starts another.

        Raises SandboxError.
        """
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")
        while self._warm:
            sandbox = self._warm.popleft()
            self._refill()
            if not sandbox.ended:
                return sandbox
        return await self._backend.start(self._spec)

    async def filled(self) -> None:
        """Wait until no sandbox is being started: every sandbox is ready, or has failed
        to start.
        """
        while self._starting:
            await asyncio.wait(list(self._starting))

    async def close(self) -> None:
        """Kill the waiting sandboxes."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(sandbox.stop(grace_s=0.0) for sandbox in self._warm))
        self._warm.clear()

    def _refill(self) -> None:
        while not self._closed and len(self._warm) + len(self._starting) < self._size:
            task = asyncio.get_running_loop().create_task(self._start(), name="warm a sandbox")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        try:
            self._warm.append(await self._backend.start(self._spec))
        except SandboxError:
            return  # the next caller of `take` starts a sandbox, and gets the error
