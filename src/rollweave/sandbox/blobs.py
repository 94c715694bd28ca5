"""Image archives by content: a folder here, in front of the folders of peers, in front of a mirror (RollArt §8).

A blob is a file named by the SHA-256 of its bytes, so a copy from anywhere is as good as any other, and is trusted from
nowhere: what arrives is hashed while it is written and kept only if it is what was asked for. Invariants: a file under its name
is whole; a source that is slow, gone, torn or wrong costs time, never a wrong image.
"""

import contextlib
import hashlib
import http.client
import os
import re
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from typing import IO

from rollweave.schema.errors import SandboxError

CHUNK_BYTES = 1 << 20

FETCH_S = 30.0
"""Seconds of silence after which a source is given up."""

ROUTE = "/blobs/sha256/"

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> str:
    """The digest. Raises ValueError where it is none, so that it can be a file's name."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest must be 64 hexadecimal digits (SHA-256), got {digest!r}")
    return digest


def digest_of(file: BufferedReader) -> str:
    """SHA-256 of what is left of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


class Blobs:
    """The local folder and what is behind it. Calls may come from any thread and any process: files are renamed into place."""

    def __init__(self, folder: Path, *, peers: Sequence[str] = (), mirror: str | None = None) -> None:
        """`peers` and `mirror` are base URLs, as `http://host:port`; the mirror is asked last."""
        for url in (*peers, *([mirror] if mirror else [])):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"peers and mirror must be http or https URLs, got {url!r}")
        self._folder = folder
        self._sources = [*peers, *([mirror] if mirror else [])]
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where a blob is, if it is here."""
        return self._folder / check_digest(digest)

    @contextlib.contextmanager
    def new(self) -> Iterator["Writing"]:
        """A blob to be written; `Writing.keep` gives it its name, without that nothing is left of it."""
        file = tempfile.NamedTemporaryFile(dir=self._folder, prefix=".new-", delete=False)  # noqa: SIM115
        try:
            with file:
                yield Writing(file, self._folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)

    def get(self, digest: str) -> Path:
        """The path of a blob that is whole, fetched if need be; a local one is hashed too. Raises SandboxError."""
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            with path.open("rb") as file:
                if digest_of(file) == digest:
                    return path
            path.unlink(missing_ok=True)  # torn by a crash or a disk: it is fetched again
        failures = []
        for source in self._sources:
            why = self._fetch(source, digest)
            if why is None:
                return path
            failures.append(f"{source}: {why}")
        raise SandboxError(f"no blob {digest}: {'; '.join(failures) or 'it is not here, and there is no peer to ask'}")

    def _fetch(self, source: str, digest: str) -> str | None:
        """Why it failed; None where the blob is here now."""
        try:
            with urllib.request.urlopen(source.rstrip("/") + ROUTE + digest, timeout=FETCH_S) as reply, self.new() as blob:
                while chunk := reply.read(CHUNK_BYTES):
                    blob.write(chunk)
                got = blob.digest
                if got != digest:
                    return f"sent other bytes ({blob.bytes}, SHA-256 {got})"
                blob.keep()
                return None
        except (OSError, http.client.HTTPException, urllib.error.URLError) as error:
            return f"{type(error).__name__}: {error}"


class Writing:
    """A blob that has no name yet."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self._folder = file, folder
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def keep(self) -> str:
        """Give it its name, once it is on the disk. Returns the digest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.chmod(self._file.name, 0o644)
        os.rename(self._file.name, self._folder / self.digest)
        return self.digest


class BlobServer:
    """Serves a folder's blobs to peers: GET /blobs/sha256/DIGEST, and nothing else. A context manager."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        class Handler(_Handler):
            blobs = folder

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="blob-server")

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> "BlobServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    blobs: Path
    timeout = FETCH_S

    def do_GET(self) -> None:
        digest = self.path.removeprefix(ROUTE)
        try:
            if not self.path.startswith(ROUTE):
                raise ValueError(f"path must start with {ROUTE}, got {self.path!r}")
            file = (self.blobs / check_digest(digest)).open("rb")
        except (ValueError, OSError):
            self.send_error(404)
            return
        with file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            with contextlib.suppress(ConnectionError, TimeoutError):  # the peer went away
                while chunk := file.read(CHUNK_BYTES):
                    self.wfile.write(chunk)

    def log_message(self, *_: object) -> None:
        """Nothing: who fetches says what failed."""
