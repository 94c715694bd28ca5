"""A content-addressed store of image archives: a local folder, the folders of peers,
and a mirror (RollArt §8).

A blob is a file named by the SHA-256 of its bytes, so copies from all sources are
equivalent and no source is trusted: received bytes are hashed while they are written,
and kept only if the digest is right. Invariants: a file with its final name is
complete; a source that is slow, gone, truncated or wrong costs time, but never yields a
wrong image, and its cost is bounded in bytes and seconds.
"""

import contextlib
import hashlib
import hmac
import http.client
import math
import os
import re
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from rollweave.io.locked_folders import remove_leftovers, unfinished_file
from rollweave.schema.errors import SandboxError
from rollweave.schema.text import whole

CHUNK_BYTES = 1 << 20

FETCH_S = 30.0
"""Seconds without data after which a source counts as failed."""

REQUEST_S = 30.0
"""Seconds within which a peer must send its whole request."""

CONNECTIONS = 64
"""Maximum number of peers that a server answers at a time. It closes the connections of
further peers, which then use other sources.
"""

ROUTE = "/blobs/sha256/"

TEXT_BYTES = 4096
"""Maximum bytes of a small text of a mirror, such as the digest of a recipe's image."""

_DIGEST = re.compile(r"[0-9a-f]{64}")

OnProgress = Callable[[int, int], None]
"""Receives the number of bytes that have arrived, and the size of the blob, 0 if
unknown.
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of blobs: an http or https URL, or the absolute path of a directory with
    the same paths below it.

    A peer requires its `token`, which is sent directly to the peer: not through a
    proxy, and not to an address to which the peer redirects.
    """

    url: str
    token: str = ""

    @property
    def is_directory(self) -> bool:
        return self.url.startswith("/")


class Cancellation:
    """Ends fetches from another thread."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._callbacks: set[Callable[[], None]] = set()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """End all fetches that use this object, now and later."""
        with self._lock:
            self.is_cancelled = True
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` upon cancellation within this context."""
        with self._lock:
            self._callbacks.add(callback)
            cancelled = self.is_cancelled
        if cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)


def check_digest(digest: str) -> str:
    """Return the digest, which is safe as a file's name.

    Raises ValueError if it is invalid.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"digest must be 64 hexadecimal digits (SHA-256), got {digest!r}")
    return digest


def digest_of(file: BufferedReader) -> str:
    """Return the SHA-256 of the rest of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


class Blobs:
    """The local folder of blobs, and the mirror from which missing blobs are fetched.

    Calls may come from any thread and any process: files are renamed into place.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mirror: str | None = None,
        limit_bytes: int = 32 << 30,
        limit_s: float = 3600.0,
    ) -> None:
        """Open the store in `folder`. `mirror` is a base URL such as
        `http://host:port`, or an absolute path.

        `limit_bytes` bounds the bytes that a source may send, and `limit_s` the time
        that it may take for one blob.
        """
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be at least 1, got {limit_bytes}")
        if not 0 < limit_s < math.inf:
            raise ValueError(f"limit_s must be positive and finite, got {limit_s}")
        if mirror and not mirror.startswith(("http://", "https://", "/")):
            raise ValueError(
                f"mirror must be an http or https URL, or an absolute path, got {mirror!r}"
            )
        self._folder = folder
        self._mirror = Source(url=mirror) if mirror else None
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def path(self, digest: str) -> Path:
        """Return the path at which a blob is stored locally, if it is."""
        return self._folder / check_digest(digest)

    @contextlib.contextmanager
    def new(self) -> Iterator["BlobWriter"]:
        """Yield the writer of a new blob, which is removed unless `BlobWriter.keep` is
        called. Raises SandboxError.
        """
        with contextlib.ExitStack() as stack:
            with storing(self._folder):
                file = stack.enter_context(unfinished_file(self._folder))
            yield BlobWriter(file, self._folder)

    def get(self, digest: str) -> Path:
        """Return the path of a verified blob, which is fetched if necessary. A local
        blob is hashed, too. Raises SandboxError.
        """
        if (path := self.find(digest)) is not None:
            return path
        if self._mirror is None:
            raise SandboxError(
                f"no blob {digest}: it is not stored here, and there is no mirror to ask"
            )
        error = self.fetch(digest, self._mirror)
        if error is not None:
            raise SandboxError(f"no blob {digest}: {self._mirror.url}: {error}")
        return self.path(digest)

    def find(self, digest: str) -> Path | None:
        """Return the path of a local blob; None if there is none. A damaged blob is
        removed.
        """
        path = self.path(digest)
        with contextlib.suppress(FileNotFoundError):
            with path.open("rb") as file:
                if digest_of(file) == digest:
                    return path
            path.unlink(missing_ok=True)  # damaged by a crash or a disk: fetch it again
        return None

    def fetch(
        self,
        digest: str,
        source: Source,
        *,
        on_progress: OnProgress | None = None,
        cancellation: Cancellation | None = None,
    ) -> str | None:
        """Fetch a blob from one source; return the reason for a failure, or None if the
        blob is now stored. Raises SandboxError if the blob cannot be written.
        """
        timeout_text = f"must send it within limit_s = {self._limit_s:g} s"
        watch, cancellation = _Watch(self._limit_s), cancellation or Cancellation()
        try:
            with (
                watch,
                cancellation.calling(watch.shut),
                _opened(source, ROUTE + digest, watch) as (read, size),
                self.new() as blob,
            ):
                while chunk := read(CHUNK_BYTES):
                    blob.write(chunk)
                    if on_progress is not None:
                        on_progress(blob.bytes, size)
                    if blob.bytes > self._limit_bytes:
                        return (
                            f"must send at most limit_bytes = {self._limit_bytes}, and sends more"
                        )
                    if watch.is_over:
                        return "cancelled" if cancellation.is_cancelled else timeout_text
                got = blob.digest
                if watch.is_over:
                    return timeout_text
                if got != digest:
                    return f"sent other bytes ({blob.bytes}, SHA-256 {got})"
                blob.keep()
                return None
        except (OSError, http.client.HTTPException, urllib.error.URLError) as error:
            return timeout_text if watch.is_over else f"{type(error).__name__}: {error}"


def read_text(source: Source, path: str) -> str | None:
    """Return a small text of a mirror; None if the mirror has no such text. Raises
    OSError.
    """
    watch = _Watch(FETCH_S)
    try:
        with watch, _opened(source, path, watch) as (read, _):
            return read(TEXT_BYTES).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return None
        raise
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _opened(
    source: Source, path: str, watch: "_Watch"
) -> Iterator[tuple[Callable[[int], bytes], int]]:
    """Open the content that a source has at `path`; yield a function that reads it, and
    its size in bytes, 0 if unknown.
    """
    if source.is_directory:
        with Path(source.url + path).open("rb") as file:
            yield file.read, os.fstat(file.fileno()).st_size
        return
    request = urllib.request.Request(source.url.rstrip("/") + path)
    if source.token:
        request.add_unredirected_header("Authorization", f"Bearer {source.token}")
    opener = watch.opener(direct=bool(source.token))
    with opener.open(request, timeout=FETCH_S) as reply:
        yield reply.read1, whole(reply.headers.get("Content-Length", "")) or 0


class _Watch:
    """Shuts down the connections that were opened in its context when the time is over.
    A timeout of each read would not stop a source that sends single bytes.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self.shut)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for sock in self._sockets:
            sock.close()

    def connect(self, *args: Any, **kwargs: Any) -> socket.socket:
        """Connect as `socket.create_connection` does, and watch a copy of the
        descriptor, since TLS takes over the original.
        """
        sock = socket.create_connection(*args, **kwargs)
        with self._lock:
            self._sockets.append(sock.dup())
        if self.is_over:
            self.shut()
        return sock

    def opener(self, *, direct: bool = False) -> urllib.request.OpenerDirector:
        """Return an opener of http and https URLs that follows redirects to such URLs
        only. A `direct` opener uses no proxy, and follows no redirects.
        """
        watch = self

        class Plain(http.client.HTTPConnection):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._create_connection = watch.connect

        class Secure(http.client.HTTPSConnection):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._create_connection = watch.connect

        class PlainHandler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Plain, req)

        class SecureHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
                return self.do_open(Secure, req)

        opener = urllib.request.OpenerDirector()
        indirect = (urllib.request.ProxyHandler(), urllib.request.HTTPRedirectHandler())
        for handler in (
            *(() if direct else indirect),
            PlainHandler(),
            SecureHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        return opener

    def shut(self) -> None:
        """Shut the connections down, now and later."""
        self.is_over = True
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class BlobWriter:
    """A blob that is being written and has no name yet."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self._folder = file, folder
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        """Append data. Raises SandboxError."""
        self._hash.update(data)
        self.bytes += len(data)
        with storing(self._folder):
            return self._file.write(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def keep(self) -> str:
        """Sync the blob to the disk and give it its name. Returns the digest. Raises
        SandboxError.
        """
        with storing(self._folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.chmod(self._file.name, 0o644)
            os.rename(self._file.name, self._folder / self.digest)
        return self.digest


@contextlib.contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turn an OSError in this context into a `SandboxError` about `folder`."""
    try:
        yield
    except OSError as error:
        raise SandboxError(f"cannot write to {folder}: {error.strerror or error}") from error


class BlobServer:
    """Serves a folder's blobs to peers, by GET /blobs/sha256/DIGEST and nothing else.
    If there is a `token`, peers must present it. A context manager.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", token: str = "") -> None:
        """Listen on a free port. Raises OSError."""

        class Handler(_Handler):
            blobs, authorization = folder, f"Bearer {token}" if token else ""

        self._server = _Server((host, 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="blob-server"
        )

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def __enter__(self) -> "BlobServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Serves at most `CONNECTIONS` connections at a time, each on a thread."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type["_Handler"]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)
        self._free = threading.BoundedSemaphore(CONNECTIONS)

    def server_bind(self) -> None:
        """Bind without looking up a name of the address, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Handler(BaseHTTPRequestHandler):
    blobs: Path
    authorization: str
    timeout = FETCH_S

    def handle(self) -> None:
        self._waiting = threading.Timer(REQUEST_S, self._give_up)
        self._waiting.daemon = True
        self._waiting.start()
        try:
            super().handle()
        except ConnectionError:
            pass  # the peer went away
        finally:
            self._waiting.cancel()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._waiting.cancel()
        given = self.headers.get("Authorization", "")
        if self.authorization and not hmac.compare_digest(
            given.encode("latin-1", "replace"), self.authorization.encode()
        ):
            self.send_error(http.HTTPStatus.UNAUTHORIZED)
            return
        try:
            digest = self.path.removeprefix(ROUTE) if self.path.startswith(ROUTE) else ""
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
        """Log nothing: the peer that fetches reports failures."""
