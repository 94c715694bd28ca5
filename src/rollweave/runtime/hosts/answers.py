"""The parts that instances of serverless functions share: the user's modules, and the
answers that an instance remembers.

Invariant: requests with the same key are computed once by one instance, whether the
first is answered or not.
"""

import asyncio
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


def unpacked(archive: bytes, digest: bytes) -> Path:
    """Unpack the user's modules, make them importable, and return their folder. Raises
    HostError.
    """
    folder = Path(tempfile.mkdtemp(prefix="rollweave-function-"))
    unpack(archive, digest, folder)
    sys.path.insert(0, str(folder))
    return folder


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
