"""The server of a peer: it is started, awaited within a limit, sent requests, and ended
with all its children in every case.
"""

import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.engine.vllm_server import PeerError, VllmServer
from rollweave.schema.serving import GenerateRequest, Sampling

from .fakes import fake_python

pytestmark = pytest.mark.extended

REQUESTS = [
    GenerateRequest(id=str(i), tokens=(1, 2, 3), sampling=Sampling(max_tokens=5)) for i in range(4)
]

KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks.engine.vllm_server import VllmServer
with VllmServer(sys.argv[1], sys.argv[2], kv_bytes=1, eager=True, scratch=Path(sys.argv[2]), concurrency=1) as server:
    server.wait_ready()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def server(tmp_path: Path, behavior: str = "") -> VllmServer:
    return VllmServer(
        fake_python(tmp_path, behavior),
        str(tmp_path),
        kv_bytes=1,
        eager=True,
        scratch=tmp_path,
        concurrency=4,
    )


def await_gone(*locks: Path) -> None:
    """Return once these locks are free: a process that ends releases them."""
    for lock in locks:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def assert_gone(tmp_path: Path, peer: VllmServer) -> None:
    """The guard is reaped, and the server and its child have ended."""
    with pytest.raises(ChildProcessError):
        os.waitpid(peer.pid, 0)
    await_gone(tmp_path / "server.lock", tmp_path / "child.lock")


def test_a_server_starts_responds_and_ends(tmp_path: Path) -> None:
    with server(tmp_path) as peer:
        assert peer.wait_ready() == "0.0-fake"
        peer.generate(REQUESTS)
        peer.generate(REQUESTS)
    assert_gone(tmp_path, peer)


def test_leaving_the_context_ends_running_requests(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "asked")
    with ThreadPoolExecutor(1) as pool:
        with server(tmp_path, "hangs") as peer:
            peer.wait_ready()
            answers = pool.submit(peer.generate, REQUESTS[:1])
            (tmp_path / "asked").read_bytes()  # the request has arrived
        with pytest.raises(PeerError, match="did not answer /inference/v1/generate"):
            answers.result()
    assert_gone(tmp_path, peer)


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, fake_python(tmp_path), str(tmp_path)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    await_gone(tmp_path / "server.lock", tmp_path / "child.lock")


def test_a_crash_at_the_start_is_reported_with_its_last_output(tmp_path: Path) -> None:
    with (
        pytest.raises(
            PeerError,
            match=r"exit status 1 before it was ready.*\nno kernel for heads of 16",
        ),
        server(tmp_path, "crashes") as peer,
    ):
        peer.wait_ready()


def test_the_wait_for_a_server_has_a_limit(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match=r"was not ready in 0\.5 s"),
        server(tmp_path, "never_ready") as peer,
    ):
        peer.wait_ready(0.5)
    with pytest.raises(ChildProcessError):
        os.waitpid(peer.pid, 0)


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        ("dies", "did not answer"),
        ("refuses", "status 400.*no such thing"),
        ("short", "gave 4 tokens instead of 5"),
    ],
)
def test_requests_that_fail_are_a_reason(tmp_path: Path, behavior: str, reason: str) -> None:
    with server(tmp_path, behavior) as peer:
        peer.wait_ready()
        with pytest.raises(PeerError, match=reason):
            peer.generate(REQUESTS)
    assert_gone(tmp_path, peer)


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    server = VllmServer(
        str(tmp_path / "none"),
        str(tmp_path),
        kv_bytes=1,
        eager=True,
        scratch=tmp_path,
        concurrency=1,
    )
    with pytest.raises(PeerError, match="not a program"), server:
        pass
