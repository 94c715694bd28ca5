"""The child's side of the socket that `io/child.py` opened: frames from and to the
process that started us.

Invariant: this process does not outlive its parent (`io/boot.py`). Where the system
does not see to that, the end of the socket ends it at once, whatever its threads
compute.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable

from rollweave.io.boot import ORPHANED
from rollweave.io.wire import FrameDecoder, frame

RECEIVE_BYTES = 1 << 18


class Parent:
    """The connection to our parent.

    `send` may be called from any thread; frames come on a thread of their own.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._decoder = FrameDecoder()
        self._received: list[bytes] = []
        self._lock = threading.Lock()

    @classmethod
    def from_arguments(cls) -> "Parent":
        """From the command line that `spawn` made."""
        return cls(int(sys.argv[1]))

    def send(self, payload: bytes) -> None:
        """Write one frame; waits while the parent does not read."""
        with self._lock, contextlib.suppress(OSError):  # the parent is gone: the listener ends us
            self._socket.sendall(b"".join(frame(payload)))

    def receive(self) -> bytes:
        """The next frame, waiting for it. Ends the process where the parent is gone."""
        while not self._received:
            data = self._read()
            self._received.extend(self._decoder.feed(data))
        return self._received.pop(0)

    def queue(self) -> "queue.SimpleQueue[bytes]":
        """From now on frames gather here, so that the parent's end is noticed while we
        compute.
        """
        frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.listen(frames.put)
        return frames

    def listen(self, on_frame: Callable[[bytes], None]) -> None:
        """From now on call `on_frame` with each frame, on a daemon thread."""
        threading.Thread(target=self._listen, args=(on_frame,), name="parent", daemon=True).start()

    def _listen(self, on_frame: Callable[[bytes], None]) -> None:
        try:
            for payload in self._received:
                on_frame(payload)
            while True:
                for payload in self._decoder.feed(self._read()):
                    on_frame(payload)
        except BaseException as error:
            print(f"cannot go on listening to the parent: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            os._exit(ORPHANED)
        return data
