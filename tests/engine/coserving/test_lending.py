"""The socket at which an engine lends."""

import threading
from pathlib import Path
from unittest.mock import Mock

from rollweave.engine.coserving.lending import LendingSocket


def test_a_closed_socket_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    path = tmp_path / "lend.sock"
    listener = LendingSocket(str(path), Mock())
    assert set(threading.enumerate()) - before
    listener.close()
    assert not set(threading.enumerate()) - before
    assert not path.exists()
