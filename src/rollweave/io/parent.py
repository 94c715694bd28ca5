"""The child's side of the socket that `io/child.py` opened: frames from and to the
parent process.

Invariant: this process does not outlive its parent (`io/boot.py`). Where the system
cannot ensure that, the end of the socket ends the process immediately, even while
threads compute.
"""

import contextlib
import gc
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterable

from rollweave.io.boot import ORPHANED
from rollweave.io.wire import CODE_BYTES, FRAME_BYTES, STATE, FrameDecoder, Seal, frame

RECEIVE_BYTES = 1 << 18


class Parent:
    """The connection to the parent process.

    `send` may be called from any thread; frames arrive on a separate thread.
    """

    def __init__(self, fd: int, seal: Seal | None = None) -> None:
        """`seal` continues the seal of the connection, if the connection has a seal."""
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        # a forked child that outlived this process would hide its end from the parent
        os.register_at_fork(after_in_child=self._socket.close)
        self._seal = seal
        self._decoder = FrameDecoder(FRAME_BYTES + (0 if seal is None else CODE_BYTES))
        self._received: list[bytes] = []
        self._lock = threading.Lock()

    @classmethod
    def from_arguments(cls) -> "Parent":
        """Connect as the command line of `spawn` says.

        The imports are done. From here on garbage is collected, except for the objects
        of the imports, which persist.
        """
        gc.freeze()
        gc.enable()
        connection, _, keys = sys.argv[1].partition(",")
        return cls(int(connection), _received_seal(int(keys)) if keys else None)

    def send(self, payload: bytes) -> None:
        """Write one frame, and wait while the parent does not read."""
        self.send_all((payload,))

    def send_all(self, payloads: Iterable[bytes]) -> None:
        """Write several frames in one step, as `send` does."""
        # without a parent, the listener ends this process
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(
                b"".join(part for payload in payloads for part in self._frame(payload))
            )

    def _frame(self, payload: bytes) -> tuple[bytes, ...]:
        return frame(payload, b"" if self._seal is None else self._seal.code(payload))

    def _payloads(self) -> list[bytes]:
        """Wait for further frames, and return their payloads."""
        sealed = self._decoder.feed(self._read())
        return sealed if self._seal is None else [self._seal.opened(payload) for payload in sealed]

    def receive(self) -> bytes:
        """Wait for the next frame and return it.

        Ends the process if the parent is gone.
        """
        while not self._received:
            self._received.extend(self._payloads())
        return self._received.pop(0)

    def queue(self) -> "queue.SimpleQueue[bytes]":
        """Return a queue that receives all further frames, so that the parent's end is
        detected even during computations.
        """
        frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.listen(frames.put)
        return frames

    def listen(self, on_frame: Callable[[bytes], None]) -> None:
        """Start a daemon thread that calls `on_frame` with each further frame."""
        threading.Thread(target=self._listen, args=(on_frame,), name="parent", daemon=True).start()

    def _listen(self, on_frame: Callable[[bytes], None]) -> None:
        try:
            for payload in self._received:
                on_frame(payload)
            while True:
                for payload in self._payloads():
                    on_frame(payload)
        except BaseException as error:
            print(f"cannot listen to the parent any longer: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(ORPHANED)
        return data


def _received_seal(fd: int) -> Seal:
    """Read the seal from a pipe, which the parent has filled."""
    with open(fd, "rb") as keys:
        return Seal.from_state(keys.read(STATE.size))


class Outbox:
    """Sends frames to the parent from a thread, so that an event loop need not wait for
    a parent that does not read.
    """

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._payloads: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def send(self, payload: bytes) -> None:
        """Queue one frame, from any thread."""
        self._payloads.put(payload)

    def close(self) -> None:
        """Return once all frames are written."""
        self._payloads.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (first := self._payloads.get()) is not None:
            payloads: list[bytes] = [first]
            with contextlib.suppress(queue.Empty):
                while (payload := self._payloads.get_nowait()) is not None:
                    payloads.append(payload)
                self._payloads.put(None)
            self._parent.send_all(payloads)
