"""Images by content: builds and their reuse, peers that send wrong bytes, and archives
that reach outside.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollweave.sandbox.base import SandboxSpec
from rollweave.sandbox.references import CopyStep, Mode, Recipe
from rollweave.schema.errors import SandboxError
from rollweave_sandbox import blobs
from rollweave_sandbox.blobs import Blobs, BlobServer, Source
from rollweave_sandbox.images import Images
from tests.support.sandboxes import image, needs, opened


def images_at(place: Path, mirror: str | None = None) -> Images:
    return Images(place, Blobs(place / "blobs", mirror=mirror))


def tree(place: Path) -> Path:
    folder = place / "tree"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\n")
    (folder / "bin" / "run").chmod(0o4755)
    (folder / "sh").symlink_to("/bin/sh")
    return folder


def test_equal_contents_have_equal_digests(tmp_path: Path) -> None:
    images = images_at(tmp_path / "a")
    folder = tree(tmp_path)
    os.utime(folder / "sh", (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    digest = images.add(folder)
    archive = tmp_path / "tree.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(folder, arcname="")
    assert images.add(archive) == digest
    root = Path(images.path(digest))
    assert (root / "bin" / "run").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(root / "sh") == "/bin/sh"
    assert images_at(tmp_path / "a").path(digest) == str(root)


class _Liar(BaseHTTPRequestHandler):
    """A peer that truncates a response, or sends wrong bytes."""

    torn = True
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"x" * (10 if self.torn else 100_000))

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(params=[True, False])
def liar(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(type("Handler", (_Liar,), {"torn": request.param})) as url:
        yield url


def test_fetches_from_a_mirror_and_keeps_no_wrong_bytes(tmp_path: Path, liar: str) -> None:
    digest = images_at(tmp_path / "a").add(tree(tmp_path))
    with BlobServer(tmp_path / "a" / "blobs") as honest:
        assert Path(images_at(tmp_path / "b", honest.url).path(digest), "bin", "run").is_file()
    with pytest.raises(SandboxError, match="no blob"):
        images_at(tmp_path / "d", liar).path(digest)
    assert os.listdir(tmp_path / "d" / "blobs") == []
    assert os.listdir(tmp_path / "d" / "roots") == []


class _Endless(BaseHTTPRequestHandler):
    """A source that keeps sending and never ends."""

    chunk, over = b"x", threading.Event()

    def do_GET(self) -> None:
        if self.chunk:
            self.send_response(200)
            self.end_headers()
        with contextlib.suppress(OSError):
            while not self.over.wait(0.001):
                self.wfile.write(self.chunk or b"X")

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("sent", "limit_s", "message"),
    [
        (b"x" * 4096, 3600.0, "must send at most limit_bytes = 65536, and sends more"),
        (b"x", 0.3, r"must send it within limit_s = 0\.3 s"),
        (b"", 0.3, "must send it within"),
    ],
)
def test_bounds_bytes_and_seconds_of_a_source(
    tmp_path: Path, sent: bytes, limit_s: float, message: str
) -> None:
    over = threading.Event()
    with serving(type("Handler", (_Endless,), {"chunk": sent, "over": over})) as mirror:
        fetching = Blobs(tmp_path, mirror=mirror, limit_bytes=1 << 16, limit_s=limit_s)
        with pytest.raises(SandboxError, match=message):
            fetching.get("0" * 64)
        over.set()
    assert os.listdir(tmp_path) == []
    infinite = {"limit_s": float("inf")}
    for wrong in ({"limit_bytes": 0}, {"limit_s": 0.0}, infinite, {"mirror": "ftp://x"}):
        with pytest.raises(ValueError, match="must be"):
            Blobs(tmp_path, **wrong)  # type: ignore[arg-type]


def test_a_damaged_local_blob_is_fetched_again(tmp_path: Path) -> None:
    digest = images_at(tmp_path / "a").add(tree(tmp_path))
    images = images_at(tmp_path / "b")
    torn = tmp_path / "b" / "blobs" / digest
    torn.write_bytes((tmp_path / "a" / "blobs" / digest).read_bytes()[:-100])
    with pytest.raises(SandboxError, match="no mirror to ask"):
        images.path(digest)
    torn.write_bytes(b"")
    with BlobServer(tmp_path / "a" / "blobs") as peer:
        assert Path(images_at(tmp_path / "b", peer.url).path(digest), "sh").is_symlink()


KILLED = """
import os, signal, sys
from pathlib import Path
from rollweave_sandbox.blobs import Blobs
from rollweave_sandbox.images import Images

blobs = Blobs(Path(sys.argv[1]) / "blobs")
images = Images(Path(sys.argv[1]), blobs)
with images._new_folder() as folder, blobs.new() as blob:
    (folder / "sub").mkdir()
    blob.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_removes_leftovers_of_killed_processes_only(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    places = (tmp_path, tmp_path / "blobs")
    assert [len(list(place.glob(".new-*"))) for place in places] == [1, 1]
    store = Blobs(tmp_path / "blobs")
    images = Images(tmp_path, store)
    assert [len(list(place.glob(".new-*"))) for place in places] == [0, 0]
    with images._new_folder() as folder, store.new() as blob:
        blob.write(b"whole")
        assert images_at(tmp_path).add(tree(tmp_path)) in os.listdir(tmp_path / "blobs")
        assert folder.is_dir()
        digest = blob.keep()
    assert store.get(digest).read_bytes() == b"whole"


def test_a_peer_serves_blobs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "secret").write_text("secret")
    with BlobServer(tmp_path / "blobs") as peer:
        inner = (f"/blobs/sha256/{name}" for name in ("../../secret", "%2e%2e/secret", "0" * 64))
        for path in (*inner, "/secret", "/"):
            connection = http.client.HTTPConnection(peer.url.removeprefix("http://"))
            connection.request("GET", path)
            assert connection.getresponse().status == 404
            connection.close()


def _closed(sock: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    sock.settimeout(60)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1024):
            pass
    return True


def test_stalled_and_slow_peers_do_not_block_others_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = images_at(tmp_path / "a").add(tree(tmp_path))
    monkeypatch.setattr(blobs, "CONNECTIONS", 3)
    with BlobServer(tmp_path / "a" / "blobs") as peer:
        address = ("127.0.0.1", int(peer.url.rpartition(":")[2]))
        silent = [socket.create_connection(address) for _ in range(3)]
        with socket.create_connection(address) as beyond:
            assert _closed(beyond)
        for sock in silent:
            sock.close()
        fetching, source = Blobs(tmp_path / "b"), Source(url=peer.url)
        while fetching.fetch(digest, source):  # until a thread has seen that its peer is gone
            pass
        assert fetching.get(digest).is_file()
        monkeypatch.setattr(blobs, "REQUEST_S", 0.1)
        with socket.create_connection(address) as slow:
            slow.sendall(b"GET ")
            assert _closed(slow)


def test_refuses_a_target_outside_the_image() -> None:
    with pytest.raises(ValueError, match=r"copy\.target must be"):
        Recipe(name="a", base="b", copy=(CopyStep(source="x", target="/../y"),))


@pytest.mark.extended
async def test_a_recipe_is_built_in_a_sandbox_and_reused_if_unchanged(tmp_path: Path) -> None:
    needs("bubblewrap")
    base = image(tmp_path)
    (tmp_path / "lock").write_text("1")
    (tmp_path / "given").write_text("given")
    recipe = Recipe(
        name="a",
        base=base,
        run=(
            "cat /etc/given > /project/made; rm /project/gone; echo $$ > /project/when; id -u > "
            "/project/who",
        ),
        copy=(CopyStep(source="given", target="/etc/given"),),
        lock="lock",
    )
    images = images_at(tmp_path / "store")
    async with opened("bubblewrap") as backend:

        async def built(mode: Mode, changed: Recipe = recipe) -> str:
            return await images.build(changed, backend=backend, mode=mode, relative_to=tmp_path)

        first = await built("versioned")
        root = Path(images.path(first))
        assert (root / "project" / "made").read_text() == "given"
        assert (root / "project" / "who").read_text() == "0\n"
        assert not (root / "project" / "gone").exists()
        assert (Path(base) / "project" / "gone").exists()
        assert not (root / "run" / "rollweave" / "boot.py").exists()
        assert await built("versioned") == first
        locked = await built("lock")
        (tmp_path / "given").write_text("changed")
        assert await built("lock") == locked
        second = await built("versioned")
        assert second != first
        assert (Path(images.path(second)) / "project" / "made").read_text() == "changed"
        former = images.key(recipe, "lock", tmp_path)
        (tmp_path / "lock").write_text("2")
        assert images.key(recipe, "lock", tmp_path) != former
        sandbox = await backend.start(SandboxSpec(image=images.path(second), workdir="/project"))
        assert (await sandbox.exec(["cat", "made"])).stdout == b"changed"
        failing = Recipe(name="b", base=second, run=("echo why >&2; exit 3",))
        with pytest.raises(SandboxError, match=r"ended with status 3:\nwhy"):
            await built("scratch", failing)
    assert sorted(name for name in os.listdir(tmp_path / "store") if name.startswith(".new")) == []
