"""The sandbox's end of a tunnel to one HTTP service outside, for programs in a sandbox
without a network. Needs Python 3.9 and its standard library alone.

The programs speak HTTP with a listener on the sandbox's own loopback (`http_proxy.py`).
The host receives their requests by `tunnel_next`, a long poll, and sends responses by
`tunnel_answer`. The thread of the long poll serves all sockets, so nothing is served
unless the host polls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .calls import Call, Refused, Result
from .http_proxy import CONNECTIONS, HttpProxy, ResponsePart

BUSY_S = 30.0
"""Maximum seconds until the previous long poll has ended; it ends immediately unless
the machine is overloaded.
"""


class Tunnel:
    """The actions of this module. One tunnel may be open at a time."""

    def __init__(self) -> None:
        self._turn, self._opening = threading.Lock(), threading.Lock()
        self._proxy: HttpProxy | None = None

    def open(self, call: Call) -> Result:
        """`tunnel_open`: start to listen, and return the `port`.

        At most `max_in_flight` requests are passed on and not yet answered.
        """
        max_in_flight = call.integer("max_in_flight", least=1, most=CONNECTIONS)
        with self._opening:
            if self._proxy is not None:
                raise Refused("a sandbox has one tunnel at a time, and one is open")
            self._proxy = HttpProxy(max_in_flight)
            return {"port": self._proxy.port}, b""

    def next(self, call: Call) -> Result:
        """`tunnel_next`: wait for an event and return it. An event is the numbers of
        requests that are `disconnected`, or a part of a request.

        The first part of a request has its `method`, `target` and `headers`; `more`
        says that another part follows.
        """
        deadline = call.deadline()
        with self._exclusive():
            return self._opened().next(deadline, call.stop)

    def answer(self, call: Call) -> Result:
        """`tunnel_answer`: send a part of the response to request `number`. The first
        part has `status` and `headers`.
        """
        self._opened().send(_response_part(call))
        return {}, b""

    def close(self, call: Call) -> Result:
        """`tunnel_close`: stop listening, and close all connections."""
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
            raise Refused("the tunnel takes one call at a time")
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
