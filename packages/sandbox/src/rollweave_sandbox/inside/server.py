"""The action server: it receives request frames over one connected stream socket, runs
the actions, and sends reply frames. Needs Python 3.9 and its standard library alone.

Threads take turns at reading: a thread that has read a request lets the next thread
read and answers its own request, so that no request is passed between threads.
Invariants: each request but `cancel` gets exactly one reply; an exception in an action
becomes a reply; at most `CALLS` calls run at the same time, and further calls are
refused; when the other end closes, or sends invalid data, every program that was
started here is killed and the process ends.

Programs in a sandbox without a network reach one HTTP service outside through a tunnel.
They speak HTTP with a listener on the sandbox's own loopback (`http_proxy.py`). The
host receives their requests by `tunnel_next`, a long poll, and sends responses by
`tunnel_answer`. The thread of the long poll serves all sockets, so nothing is served
unless the host polls.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .cells import Cells
from .files import Editor, read, write
from .frames import Call, Failed, Frame, FrameDecoder, FrameError, Refused, Result, Stop, pack
from .http_proxy import CONNECTIONS, HttpProxy, ResponsePart
from .processes import execute, kill_all, reset_signals
from .shell import Bash
from .streams import BackgroundReader

TUNNEL_BUSY_S = 30.0
"""Maximum seconds until the previous long poll has ended; it ends immediately unless
the machine is overloaded.
"""

CALLS = 64
"""Maximum number of concurrent calls. Each call takes a thread."""

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from the socket."""

Action = Callable[[Call], Result]


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
        if not self._turn.acquire(timeout=TUNNEL_BUSY_S):
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


def ping(call: Call) -> Result:
    """Reply with the body of the request."""
    return {"pid": os.getpid()}, call.body


def actions(idle: BackgroundReader) -> dict[str, Action]:
    """Return the server's actions by name. Actions of tools get new state."""
    editor, tunnel = Editor(), Tunnel()
    return {
        "ping": ping,
        "exec": execute,
        "read": read,
        "write": write,
        "bash": Bash(idle),
        "ipython": Cells(idle),
        "view": editor.view,
        "create": editor.create,
        "replace": editor.replace,
        "insert": editor.insert,
        "undo": editor.undo,
        "tunnel_open": tunnel.open,
        "tunnel_next": tunnel.next,
        "tunnel_answer": tunnel.answer,
        "tunnel_close": tunnel.close,
    }


class Server:
    """Serves one socket until its end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._idle = BackgroundReader()
        self._idle.watch(sock.fileno(), lambda: None)
        self._actions = actions(self._idle)
        self._decoder = FrameDecoder()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._running: dict[int, Stop] = {}
        self._over = threading.Event()

    def run(self) -> None:
        """Serve until the other end closes, and then kill all programs."""
        self._hire()
        self._over.wait()
        kill_all()

    def _hire(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        stop = Stop()
        while not self._over.is_set():
            with self._counting:
                self._waiting += 1
            with self._reading:
                call = self._next(stop)
                with self._counting:
                    self._waiting -= 1
                    no_calls_waiting = not self._waiting
                if call is None:
                    break
            if no_calls_waiting:
                # If no thread can be started, this thread reads again after its answer.
                with contextlib.suppress(RuntimeError):
                    self._hire()
            self._answer(call)
        stop.close()

    def _next(self, stop: Stop) -> Call | None:
        """Return the next call to answer, or None at the end.

        Cancellations and requests that are refused immediately are handled here.
        """
        while not self._over.is_set():
            frame = self._receive()
            if frame is None:
                self._over.set()
                break
            header, body = frame
            call_id = header["id"]
            with self._counting:
                running = self._running.get(call_id)
                if header.get("action") == "cancel":
                    if running is not None:
                        running.set()
                    continue
                if running is None and len(self._running) < CALLS:
                    stop.clear()
                    self._running[call_id] = stop
                    return Call(header, body, stop)
            why = (
                f"at most {CALLS} calls may run at once"
                if running is None
                else f"call {call_id} is running already"
            )
            self._reply({"id": call_id, "ok": False, "kind": "refused", "error": why})
        return None

    def _receive(self) -> Frame | None:
        try:
            while (frame := self._decoder.take()) is None:
                self._idle.wait(self._socket.fileno())
                data = self._socket.recv(RECEIVE_BYTES)
                if not data:
                    return None
                self._decoder.feed(data)
        except (OSError, FrameError):
            return None
        return frame

    def _answer(self, call: Call) -> None:
        header, body = self._outcome(call)
        header["id"] = call.id
        with self._counting:
            del self._running[call.id]
        self._reply(header, body)

    def _outcome(self, call: Call) -> Result:
        try:
            name = call.text("action")
            action = self._actions.get(name)
            if action is None:
                raise Refused(
                    f"action must be one of {', '.join(sorted(self._actions))}, got {name!r:.100}"
                )
            header, body = action(call)
        except Refused as error:
            return {"ok": False, "kind": "refused", "error": str(error)}, b""
        except Failed as error:
            return {"ok": False, "kind": "failed", "error": str(error)}, b""
        except OSError as error:
            path = "" if error.filename is None else f": {error.filename}"
            return {"ok": False, "kind": "failed", "error": f"{error.strerror}{path}"}, b""
        except Exception as error:  # a bug of ours ends the call, not the sandbox
            return {"ok": False, "kind": "failed", "error": f"{type(error).__name__}: {error}"}, b""
        header["ok"] = True
        return header, body

    def _reply(self, header: dict[str, Any], body: bytes = b"") -> None:
        try:
            frame = pack(header, body)
        except FrameError as error:
            frame = pack({"id": header["id"], "ok": False, "kind": "failed", "error": str(error)})
        try:
            with self._writing:
                self._socket.sendall(frame)
        except OSError:
            self._over.set()


def main(argv: list[str]) -> None:
    """Serve the socket that `--fd` names, then end the process even if threads still
    run.

    With `--cells`, run the interpreter of cells instead.
    """
    reset_signals()
    # Importing argparse takes 3 ms.
    fd, cells = int(argv[argv.index("--fd") + 1]), "--cells" in argv
    os.set_inheritable(fd, False)
    with socket.socket(fileno=fd) as sock:
        if cells:
            from .worker import serve

            serve(sock)
        else:
            Server(sock).run()
            os._exit(0)
