"""The child's side of its connection."""

import socket

from rollweave.io.parent import Outbox, Parent
from rollweave.io.wire import FrameDecoder


def test_an_outbox_does_not_wait_for_a_parent_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    payloads = [bytes([number]) * (1 << 20) for number in range(16)]
    parent = Parent(theirs.detach())
    with ours, parent._socket:
        outbox = Outbox(parent)
        for payload in payloads:
            outbox.send(payload)  # far more than a socket holds
        decoder, received = FrameDecoder(), list[bytes]()
        while len(received) < len(payloads):
            received += decoder.feed(ours.recv(1 << 20))
        assert received == payloads
        outbox.close()
