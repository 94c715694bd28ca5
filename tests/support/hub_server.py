"""A Hugging Face hub on the loopback interface: as much of its protocol as
`huggingface_hub` and `datasets` need to find, list and download repositories.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal["models", "datasets"]
Repositories = Mapping[str, Mapping[str, Mapping[str, bytes]]]
"""The files of each revision of each repository."""

API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<folder>.+))?)?"
)
FILE = re.compile(
    r"/(?:(?P<kind>datasets)/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"
)


class Request(NamedTuple):
    """A request that the server has received. Headers are named as in
    `Content-Length`.
    """

    method: str
    path: str
    headers: dict[str, str]


def commit_of(files: Mapping[str, bytes]) -> str:
    """Return the commit that has these files."""
    digest = hashlib.sha1(usedforsecurity=False)
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


class HubServer:
    """A hub with the repositories that it is given, which may be changed while it
    serves. As a context manager it starts, and stops at the end.

    `gated` has the names of repositories that need a token. A file whose name is in
    `broken` is cut after half of the bytes of an answer, as many times as the value
    says; this is counted down. `requests` has all requests.
    """

    def __init__(
        self, *, datasets: Repositories | None = None, models: Repositories | None = None
    ) -> None:
        self.repositories: dict[str, dict[str, Mapping[str, Mapping[str, bytes]]]] = {
            "datasets": dict(datasets or {}),
            "models": dict(models or {}),
        }
        self.gated: set[str] = set()
        self.broken: dict[str, int] = {}
        self.status = 0
        """Status with which every request is answered, if it is not 0."""
        self.storage = ""
        """Address to which the hub refers for files, if it is not empty."""
        self.expired = set[str]()
        """Names of the files whose next request at the storage is refused."""
        self.requests: list[Request] = []
        self._is_closed = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, part: str) -> list[Request]:
        """Return the requests whose path has this part."""
        return [request for request in self.requests if part in request.path]

    def answer(self, request: Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer."""
        self.requests.append(request)
        if self.status:
            return self.status, {}, b""
        address = urlsplit(request.path)
        path = unquote(address.path)
        found = FILE.fullmatch(path) or API.fullmatch(path)
        if found is None:
            return 404, {}, b""
        parts = found.groupdict()
        kind, name = parts["kind"] or "models", parts["name"]
        revisions = self.repositories[kind].get(name)
        if revisions is None:
            return 404, _error("RepoNotFound", "Repository not found"), b""
        files = _files(revisions, parts["revision"] or "main")
        if files is None:
            return 404, _error("RevisionNotFound", "Invalid rev id"), b""
        if "file" in parts:
            closed = name in self.gated and "Authorization" not in request.headers
            if closed:
                return 403, _error("GatedRepo", "Access to this is restricted"), b""
            return self._file(request, files, parts["file"])
        if parts["what"] == "tree":
            recursive = parse_qs(address.query).get("recursive", ["false"])[0].lower() == "true"
            return _json(_tree(files, parts["folder"] or "", recursive=recursive))
        if parts["what"] == "paths-info":
            wanted = _paths_of(request, body)
            return _json([_entry(one, files[one]) for one in wanted if one in files])
        return _json(
            {
                "id": name,
                "sha": commit_of(files),
                "private": False,
                "gated": "manual" if name in self.gated else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": one} for one in files],
            }
        )

    def _file(
        self, request: Request, files: Mapping[str, bytes], file: str
    ) -> tuple[int, dict[str, str], bytes]:
        if file not in files:
            return 404, _error("EntryNotFound", "Entry not found"), b""
        content = files[file]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit_of(files),
            "Accept-Ranges": "bytes",
        }
        is_stored = request.headers.get("Host", "") in self.storage
        if self.storage and not is_stored:
            named = {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(content))}
            return 302, headers | named | {"Location": self.storage + request.path}, b""
        if Path(file).name in self.expired:
            self.expired.remove(Path(file).name)
            return 403, {}, b"expired"
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if wanted is None:
            return 200, headers, content
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        if first >= len(content):
            return 416, headers | {"Content-Range": f"bytes */{len(content)}"}, b""
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, headers, content[first : last + 1]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if hub._is_closed:  # a connection that is kept alive
                self.close_connection = True
                return
            named = {name.title(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, named)
            status, headers, content = hub.answer(request, body)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            file = unquote(urlsplit(self.path).path).rpartition("/")[2]
            if hub.broken.get(file, 0) and status in (200, 206):
                hub.broken[file] -= 1
                content, self.close_connection = content[: len(content) // 2], True
            self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _serve

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _files(
    revisions: Mapping[str, Mapping[str, bytes]], revision: str
) -> Mapping[str, bytes] | None:
    commits = {commit_of(files): files for files in revisions.values()}
    return revisions.get(revision) or commits.get(revision)


def _error(code: str, message: str) -> dict[str, str]:
    return {"X-Error-Code": code, "X-Error-Message": message}


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _paths_of(request: Request, body: bytes) -> list[str]:
    if "json" in request.headers.get("Content-Type", ""):
        paths = json.loads(body)["paths"]
        return [paths] if isinstance(paths, str) else list(paths)
    return parse_qs(body.decode()).get("paths", [])


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}


def _tree(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """List a folder's files and folders."""
    start = f"{folder}/" if folder else ""
    entries, folders = [], set[str]()
    for path, content in sorted(files.items()):
        if not path.startswith(start):
            continue
        inner = path.removeprefix(start).split("/")[:-1]
        for depth in range(1, len(inner) + 1):
            folders.add(start + "/".join(inner[:depth]))
        if recursive or not inner:
            entries.append(_entry(path, content))
    shown = sorted(one for one in folders if recursive or "/" not in one.removeprefix(start))
    oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
    return [{"type": "directory", "path": one, "size": 0, "oid": oid} for one in shown] + entries
