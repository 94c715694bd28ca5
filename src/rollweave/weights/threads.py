"""Work in threads, which write into memory that its owner may want to let go of."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(
    function: Callable[..., T], *arguments: Any, undo: Callable[[T], None] | None = None
) -> T:
    """As `asyncio.to_thread`, but it has ended when this returns, even where we are
    cancelled: it writes into memory of ours.

    `undo` gets a result that nobody takes any more.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise
