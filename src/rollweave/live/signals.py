"""SIGINT and SIGTERM, for whoever runs in the main thread: no other can take signals."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_ending_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle`, on the running loop, for each of them that comes while the context is open. Elsewhere: do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
