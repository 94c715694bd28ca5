import asyncio
import itertools

import pytest

from rollweave.sandbox.base import Sandbox, SandboxSpec, Snapshot
from rollweave.sandbox.pool import Pool
from rollweave.schema.errors import SandboxError
from tests.support.sandboxes import SPEC, opened


class _FakeSandbox:
    def __init__(self, name: str) -> None:
        self.id, self.ended = name, ""

    async def stop(self, grace_s: float = 2.0) -> None:
        self.ended = "stopped"


class _FakeBackend:
    """A back end that starts one more sandbox for each `go`."""

    name = "fake"

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.started: list[_FakeSandbox] = []
        self.failing = False
        self._ids = itertools.count()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        await self.go.acquire()
        if self.failing:
            raise SandboxError("no")
        self.started.append(_FakeSandbox(str(next(self._ids))))
        return self.started[-1]  # type: ignore[return-value]

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        raise NotImplementedError

    async def close(self) -> None: ...


def _let(backend: _FakeBackend, count: int) -> None:
    for _ in range(count):
        backend.go.release()


async def test_each_sandbox_is_taken_once_and_replaced() -> None:
    backend = _FakeBackend()
    pool = Pool(backend, SPEC, size=3)
    _let(backend, 100)
    await pool.filled()
    assert len(pool) == 3
    ids = []
    for _ in range(10):
        ids.append((await pool.take()).id)
        await pool.filled()
        assert len(pool) == 3
    assert len(set(ids)) == 10
    await pool.close()
    assert [sandbox.id for sandbox in backend.started if not sandbox.ended] == ids
    with pytest.raises(SandboxError):
        await pool.take()


async def test_a_sandbox_that_ended_while_waiting_is_not_taken() -> None:
    backend = _FakeBackend()
    pool = Pool(backend, SPEC, size=2)
    _let(backend, 100)
    await pool.filled()
    backend.started[0].ended = "killed"
    assert (await pool.take()).id == "1"
    await pool.filled()
    assert len(pool) == 2
    await pool.close()


async def test_take_raises_the_back_ends_failure() -> None:
    backend = _FakeBackend()
    backend.failing = True
    pool = Pool(backend, SPEC, size=2)
    _let(backend, 100)
    await pool.filled()
    with pytest.raises(SandboxError, match="no"):
        await pool.take()
    await pool.close()


async def test_closing_during_starts_leaves_no_sandbox() -> None:
    backend = _FakeBackend()
    pool = Pool(backend, SPEC, size=4)
    _let(backend, 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(pool) == 2
    await pool.close()
    assert [sandbox.ended for sandbox in backend.started] == ["stopped"] * 2


async def test_real_sandboxes_wait_and_serve() -> None:
    async with opened("plain") as backend:
        pool = Pool(backend, SPEC, size=2)
        await pool.filled()
        sandbox = await pool.take()
        assert (await sandbox.exec(["echo", "hi"])).stdout == b"hi\n"
        await pool.close()
    with pytest.raises(ValueError, match="size must be at least 1"):
        Pool(backend, SPEC, size=0)
