"""A door to one HTTP service outside, for programs in a sandbox without a network.
Python 3.9, stdlib alone.

The programs speak HTTP with a listener on the sandbox's own loopback (`desk.py`). The
host asks with `relay_next`, a long poll, for what they want, and says with
`relay_answer` what they get. All sockets are served by the thread of the long poll:
there is no other one, and nothing is served unless the host asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .calls import Call, Refused, Result
from .desk import CONNECTIONS, Answer, Desk

BUSY_S = 30.0
"""Seconds for the long poll before to end: it does at once, if this machine has a
moment for it.
"""


class Relay:
    """The actions. One relay may be open at a time."""

    def __init__(self) -> None:
        self._turn, self._opening = threading.Lock(), threading.Lock()
        self._desk: Desk | None = None

    def open(self, call: Call) -> Result:
        """`relay_open`: listen; the `port`.

        At most `at_once` requests are handed out and not answered.
        """
        at_once = call.integer("at_once", least=1, most=CONNECTIONS)
        with self._opening:
            if self._desk is not None:
                raise Refused("a sandbox has one relay at a time, and one is open")
            self._desk = Desk(at_once)
            return {"port": self._desk.port}, b""

    def next(self, call: Call) -> Result:
        """`relay_next`: wait until there is something: numbers of requests that are
        `gone`, a part of a request.

        The first part of a request says its `method`, `target` and `headers`; `more`
        says that there is another one.
        """
        deadline = call.deadline()
        with self._alone():
            return self._there().next(deadline, call.stop)

    def answer(self, call: Call) -> Result:
        """`relay_answer`: a part of the answer to request `number`, the first with
        `status` and `headers`.
        """
        self._there().tell(_answer(call))
        return {}, b""

    def close(self, call: Call) -> Result:
        """`relay_close`: listen no more, and leave whoever waits."""
        with self._alone():
            self._there().close()
            self._desk = None
        return {}, b""

    def _there(self) -> Desk:
        if self._desk is None:
            raise Refused("no relay is open")
        return self._desk

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=BUSY_S):
            raise Refused("the relay is asked by one call at a time")
        try:
            yield
        finally:
            self._turn.release()


def _answer(call: Call) -> Answer:
    return Answer(
        call.integer("number", least=1),
        status=None if call.absent("status") else call.integer("status", least=200, most=599),
        headers=call.mapping("headers") or {},
        body=call.body,
        last=call.flag("last"),
        abort=call.flag("abort"),
    )
