"""The parts that instances of serverless functions share: the user's modules, and the
answers that an instance remembers.

Invariant: while an instance remembers a key, it computes a request with that key once,
whether the first request is answered or not.
"""

import asyncio
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rollweave.runtime.hosts.user_files import unpack

REMEMBERED = 10_000
"""Maximum number of answers that an instance remembers by their keys."""

REMEMBERED_BYTES = 64 << 20
"""Maximum size in bytes of the remembered answers. The newest is always remembered."""

Answer = tuple[int, bytes]
"""Status and body."""


class UserModules:
    """The user's modules in a folder of the instance, which can import them."""

    def __init__(self, archive: bytes, digest: bytes) -> None:
        """Unpack them. Raises HostError."""
        self.folder = Path(tempfile.mkdtemp(prefix="rollweave-function-"))
        unpack(archive, digest, self.folder)
        sys.path.insert(0, str(self.folder))

    def remove(self) -> None:
        """Remove the folder: the instance ends."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Answers:
    """The answers of an instance, by the keys of their requests."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        """Tasks of answers that are being computed, and answers, the oldest first."""
        self._bytes = 0

    async def of(self, key: str, compute: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a key, which is computed if it is not known."""
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = asyncio.create_task(compute())
            known.add_done_callback(self._computed)
        return await asyncio.shield(known)

    def _computed(self, task: asyncio.Task[Answer]) -> None:
        """Count an answer, and forget the oldest ones beyond the limits."""
        self._bytes += _size(task)
        finished = [key for key, one in self._answers.items() if one.done()]
        for key in finished[:-1]:
            if len(self._answers) <= REMEMBERED and self._bytes <= REMEMBERED_BYTES:
                break
            self._bytes -= _size(self._answers.pop(key))


def _size(task: asyncio.Task[Answer]) -> int:
    """Return the size in bytes of a computed answer; 0 if its computation failed."""
    if task.cancelled() or task.exception() is not None:
        return 0
    return len(task.result()[1])
