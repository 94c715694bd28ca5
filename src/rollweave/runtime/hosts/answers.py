"""The parts that instances of serverless functions share: the user's modules, and the
answers that an instance remembers.

Invariant: requests with the same key are computed once by one instance, whether the
first is answered or not.
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

KEY = "Idempotency-Key"
"""Header with the key of a request."""

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
        self._answers: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()

    async def of(self, key: str, compute: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a key, which is computed if it is not known."""
        known = self._answers.get(key)
        if known is None:
            known = self._answers[key] = asyncio.ensure_future(compute())
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return await asyncio.shield(known)
