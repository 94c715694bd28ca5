"""A door to one HTTP service outside, for programs in a sandbox without a network.
Python 3.9, stdlib alone.

The programs speak HTTP with a listener on the sandbox's own loopback (`desk.py`). The
host asks with `tunnel_next`, a long poll, for what they want, and says with
`tunnel_answer` what they get. All sockets are served by the thread of the long poll:
there is no other one, and nothing is served unless the host asks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .calls import Call, Refused, Result
from .http_proxy import CONNECTIONS, HttpProxy, ResponsePart

BUSY_S = 30.0
"""Seconds for the long poll before to end: it does at once, if this machine has a
moment for it.
"""


class Tunnel:
    """The actions. One tunnel may be open at a time."""

    def __init__(self) -> None:
        self._turn, self._opening = threading.Lock(), threading.Lock()
        self._proxy: HttpProxy | None = None

    def open(self, call: Call) -> Result:
        """`tunnel_open`: listen; the `port`.

        At most `max_in_flight` requests are handed out and not answered.
        """
        max_in_flight = call.integer("max_in_flight", least=1, most=CONNECTIONS)
        with self._opening:
            if self._proxy is not None:
                raise Refused("a sandbox has one tunnel at a time, and one is open")
            self._proxy = HttpProxy(max_in_flight)
            return {"port": self._proxy.port}, b""

    def next(self, call: Call) -> Result:
        """`tunnel_next`: wait until there is something: numbers of requests that are
        `gone`, a part of a request.

        The first part of a request says its `method`, `target` and `headers`; `more`
        says that there is another one.
        """
        deadline = call.deadline()
        with self._exclusive():
            return self._opened().next(deadline, call.stop)

    def answer(self, call: Call) -> Result:
        """`tunnel_answer`: a part of the answer to request `number`, the first with
        `status` and `headers`.
        """
        self._opened().send(_response_part(call))
        return {}, b""

    def close(self, call: Call) -> Result:
        """`tunnel_close`: listen no more, and leave whoever waits."""
        with self._exclusive():
            self._opened().close()
            self._proxy = None
        return {}, b""

    def _opened(self) -> HttpProxy:
        if self._proxy is None:
            raise Refused("no tunnel is open")
        return self._proxy

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=BUSY_S):
            raise Refused("the tunnel is asked by one call at a time")
        try:
            yield
        finally:
            self._turn.release()


def _response_part(call: Call) -> ResponsePart:
    return ResponsePart(
        call.integer("number", least=1),
        status=None if call.absent("status") else call.integer("status", least=200, most=599),
        headers=call.mapping("headers") or {},
        body=call.body,
        last=call.flag("last"),
        abort=call.flag("abort"),
    )
