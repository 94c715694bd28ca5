"""Write the run's present state to `status.json` while it lives.

Invariants: the file is replaced atomically, on a thread, and never synced, so that
neither a reader nor a slow or full disk delays the run or ends it. The last state of a
life says that it ended.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollweave.io.disk import replace_file
from rollweave.schema.errors import DiskError
from rollweave.schema.packing import as_json
from rollweave.schema.status import STATUS_S, RunStatus


class StatusFile:
    """The file at `path` with what `state` returns."""

    def __init__(self, path: Path, state: Callable[[], RunStatus]) -> None:
        self._path, self._state = path, state
        self._lock = threading.Lock()
        self._ended = False

    async def keep(self) -> None:
        """Write the state every `STATUS_S` seconds, until this task is cancelled."""
        while True:
            await asyncio.to_thread(self._write, self._state())
            await asyncio.sleep(STATUS_S)

    def end(self) -> None:
        """Write the last state of this life."""
        self._write(self._state(), ended=True)

    def _write(self, status: RunStatus, *, ended: bool = False) -> None:
        stamped = msgspec.structs.replace(
            status,
            written_at=round(time.time(), 3),
            machine=socket.gethostname(),
            pid=os.getpid(),
            ended=ended,
        )
        # a thread of `keep` may still write when the life ends; on a full disk, the
        # former state stays
        with self._lock, contextlib.suppress(DiskError):
            if ended or not self._ended:
                self._ended = ended
                replace_file(self._path, as_json(stamped), synced=False)
