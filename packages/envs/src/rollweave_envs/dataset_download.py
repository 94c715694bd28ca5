"""Download the files of a data set into the cache of `huggingface_hub`, and continue
where an earlier attempt stopped.

The library's own download starts a file anew in each process. A file that is complete
here lies where the library looks for it, and the library then only links it. Files
whose place or size the hub does not tell are left to the library.

Invariants: a file gets its name in the cache only when it is complete; two processes
never write to the same unfinished file.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

TRIES = 5
"""Maximum number of attempts in a row that bring nothing."""

PAUSE_S = 0.5
"""Seconds before the second attempt; each further pause is twice as long."""

NETWORK = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "socket", "ssl")
"""Modules whose exceptions say that a server cannot be reached."""

SUFFIX = ".rollweave"
"""End of the name of an unfinished file."""

FILE = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<commit>[^/]+)/(?P<file>.+)")
"""The form in which the library lists the files of a data set."""

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Form of an ETag that is the SHA-256 of the file."""


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Return whether the user has forbidden to ask the hub."""
    return bool(_hub().constants.HF_HUB_OFFLINE)


def _hub() -> Any:
    """Return the hub's library, which is imported for the first time here."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.utils

    return huggingface_hub


def is_network(error: BaseException) -> bool:
    """Return whether the error says that a server cannot be reached, or was lost."""
    module = type(error).__module__.partition(".")[0]
    return module in NETWORK or isinstance(error, ConnectionError | TimeoutError)


def download(builder: Any) -> None:
    """Download the data files of a builder that are not in the cache.

    Passes the errors of the library and of the operating system through.
    """
    if is_offline():
        return
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if found := FILE.fullmatch(str(file)):
                _fetch(found["name"], found["commit"], found["file"])


def _fetch(name: str, commit: str, file: str) -> None:
    hub = _hub()
    kept = hub.try_to_load_from_cache(name, file, revision=commit, repo_type="dataset")
    if isinstance(kept, str):
        return
    url = hub.hf_hub_url(
        name, file, revision=commit, repo_type="dataset", endpoint=hub.constants.ENDPOINT
    )
    about = hub.get_hf_file_metadata(url)
    if not about.etag or not about.size or not re.fullmatch(r"[\w.-]+", about.etag):
        return
    folder = hub.constants.HF_HUB_CACHE
    blobs = Path(folder, hub.constants.REPO_ID_SEPARATOR.join(["datasets", *name.split("/")]))
    blob = blobs / "blobs" / about.etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    if blob.exists():
        return
    with open(blob.with_name(blob.name + SUFFIX), "ab") as unfinished:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(unfinished, fcntl.LOCK_EX)
        if blob.exists():
            return
        _complete(about.location, url, unfinished, about.size)
        unfinished.flush()
        os.fsync(unfinished.fileno())
        if DIGEST.fullmatch(about.etag) and _digest(unfinished.name) != about.etag:
            unfinished.truncate(0)
            raise ConnectionError(f"{file} was received with another digest than the hub tells")
        Path(unfinished.name).rename(blob)


def _complete(location: str, url: str, unfinished: Any, size: int) -> None:
    """Append what an unfinished file lacks, and go on if a connection breaks."""
    fruitless = 0
    while (begun := unfinished.seek(0, os.SEEK_END)) != size:
        if begun > size:
            unfinished.truncate(0)
        try:
            _append(location, url, unfinished)
        except Exception as error:
            unfinished.flush()
            fruitless = 0 if unfinished.seek(0, os.SEEK_END) > begun else fruitless + 1
            if fruitless == TRIES or not is_network(error):
                raise
            time.sleep(PAUSE_S * 2**fruitless)


def _append(location: str, url: str, unfinished: Any) -> None:
    """Append what the server sends. The token is sent to the hub alone, and not to the
    storage to which it refers.
    """
    hub = _hub()
    begun = unfinished.seek(0, os.SEEK_END)
    is_hub = urlparse(location).netloc == urlparse(url).netloc
    headers = hub.utils.build_hf_headers() if is_hub else {}
    headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begun}-"} if begun else {})
    timeout_s = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with hub.get_session().stream("GET", location, headers=headers, timeout=timeout_s) as response:
        hub.utils.hf_raise_for_status(response)
        if begun and response.status_code != 206:
            unfinished.truncate(0)
        received = False
        for chunk in response.iter_bytes():
            received = True
            unfinished.write(chunk)
    if not received:
        raise ConnectionError("the server sent nothing")


def _digest(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
