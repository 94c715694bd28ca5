"""Checks grammars before their texts are given to an engine, so that a client learns at
once which of its fields is wrong.

They are compiled as an engine does, by a process that starts with the first of them
(`engine/matchers`).
"""

import asyncio
import contextlib
import itertools
import re
from collections import OrderedDict
from typing import Final

from rollweave.engine.matchers import (
    CANNOT,
    REMEMBERED,
    MaskReply,
    Matchers,
    key_of,
    refused_text,
)
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import Constraint

MOST_CHECKS: Final = 64
"""Maximum number of grammars that wait to be checked."""


_TOKEN = re.compile(r"<\[(\^?)[0-9]+\]>")


class BusyError(EngineError):
    """Too many grammars wait to be checked."""


class GrammarCheck:
    """Checks grammars before their texts are given to an engine. All calls belong to
    one event loop.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[MaskReply]] = {}
        self._numbers = itertools.count()
        self._matchers: Matchers | None = None

    async def why_not(self, constraint: Constraint) -> str:
        """Return why nothing can be constrained by this grammar, "" if it can.

        Raises BusyError.
        """
        if why := refused_text(constraint):
            return why
        if constraint.kind == "lark":  # which names tokens of the model
            text = _TOKEN.sub(r"<[\g<1>0]>", constraint.text)
            constraint = Constraint(kind="lark", text=text)
        key = key_of(constraint)
        if key in self._verdicts:
            return self._verdicts[key]
        reply = await self._compiled(constraint)
        verdict = reply.error.removeprefix(CANNOT)
        if not reply.passing:
            self._verdicts[key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compiled(self, constraint: Constraint) -> MaskReply:
        if len(self._waiting) >= MOST_CHECKS:
            raise BusyError(
                f"grammars that wait to be compiled must be at most {MOST_CHECKS}: try again later"
            )
        loop, id = asyncio.get_running_loop(), str(next(self._numbers))
        waiter: asyncio.Future[MaskReply] = loop.create_future()
        self._waiting[id] = waiter
        if self._matchers is None:

            def on_reply(id: str, reply: MaskReply) -> None:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self._resolve, id, reply)

            self._matchers = Matchers(None, reply=on_reply)
        self._matchers.begin(id, constraint)
        try:
            return await waiter
        finally:
            del self._waiting[id]
            if self._matchers is not None:
                self._matchers.end(id)

    def _resolve(self, id: str, reply: MaskReply) -> None:
        waiter = self._waiting.get(id)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def close(self) -> None:
        """End the process, if there is one. Checks under way are refused."""
        if self._matchers is not None:
            self._matchers.close()
            self._matchers = None
        for id in list(self._waiting):
            self._resolve(id, MaskReply(error="the run is ending", passing=True))
