"""A host agent in a process of its own that has joined a listener of the test."""

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rollweave.runtime.hosts.listener import HostListener
from rollweave.runtime.hosts.remote import RemoteHost
from rollweave.runtime.tasks import Tasks
from rollweave.schema.hosts import HostAccepted, JoinHost
from tests.runtime.hosts.started import PROGRAM
from tests.support.forking import forked

SECRET = b"correct horse"
ROOT = Path(__file__).parents[3]


class Listening:
    """A listener that records what it reports."""

    def __init__(
        self,
        directory: Path,
        tasks: Tasks,
        *,
        silent_s: float,
        lease_s: float,
        enter_s: float = 60.0,
        archive: bytes = b"",
        refusal: Callable[[JoinHost], str] = lambda _: "",
        **accepted: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mark = directory / "mark"
        mark.write_text("this run")
        self.joined: asyncio.Queue[RemoteHost] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.cut: asyncio.Queue[str] = asyncio.Queue()
        self.listener = HostListener(
            secret=SECRET,
            accepted=HostAccepted(
                lease_s=lease_s,
                mark_path=str(mark),
                mark="this run",
                archive_bytes=len(archive),
                digest=hashlib.sha256(archive).digest(),
                **accepted,
            ),
            archive=archive,
            tasks=tasks,
            on_joined=self.joined.put_nowait,
            on_lost=lambda host, reason: self.lost.put_nowait((host.name, reason)),
            on_refused=self.refused.put_nowait,
            on_wrong_secret=self.refused.put_nowait,
            on_cut=self.cut.put_nowait,
            refusal=refusal,
            silent_s=silent_s,
            enter_s=enter_s,
        )
        self.listener.listen("127.0.0.1", 0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.port}"


@contextlib.asynccontextmanager
async def listening(
    directory: Path, *, silent_s: float = 4.0, lease_s: float = 10.0, **options: Any
) -> AsyncIterator[Listening]:
    async with Tasks() as tasks:
        here = Listening(directory, tasks, silent_s=silent_s, lease_s=lease_s, **options)
        try:
            yield here
        finally:
            await here.listener.close()
            tasks.cancel_all()


@contextlib.asynccontextmanager
async def agent(
    address: str, *options: str, secret: bytes = SECRET, name: str = "b", role: str = PROGRAM
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `rollweave host` with the small program in place of roles, and kill it in the
    end.
    """
    process = await forked(
        *(sys.executable, "-c", f"from tests.support.agent_main import main; main(role={role!r})"),
        *("host", "--join", address, "--name", name, *options),
        env={**os.environ, "ROLLWEAVE_HOST_SECRET": secret.decode(), "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def joined_host(
    directory: Path, *, silent_s: float = 4.0, lease_s: float = 10.0
) -> AsyncIterator[tuple[RemoteHost, asyncio.subprocess.Process]]:
    async with (
        listening(directory, silent_s=silent_s, lease_s=lease_s) as here,
        agent(here.address, "--user-code") as process,
    ):
        yield await asyncio.wait_for(here.joined.get(), 60), process
