"""The Hugging Face hub: its models by name (`organization/name`, with an optional
`@revision`), downloads that are continued, and what is wrong when one fails.

A run fetches its model once, and from then on names it with the commit of that
download, so that a resumed run, and all processes of a run, read the same files from
the hub's cache without the network. The library `huggingface_hub` asks the hub, and
reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Its own download starts a file
anew in each process; ours puts a file, once it is complete, where the library looks for
it. Files whose place or size the hub does not tell, and all files on a file system
without locks, are left to the library.

Invariants: a file gets its name in the cache only when it is complete; two processes
never write to the same unfinished file.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlparse

from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_bytes

Kind = Literal["model", "dataset"]
T = TypeVar("T")

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
"""Form of the names of models on the hub, which relative paths may have too."""

PINNED = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)@([0-9a-f]{40})", re.ASCII)

WEIGHTS = "*.safetensors"

NEEDED = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files that a model has beside its weights: sizes, tokenizer, chat template."""

NOT_NEEDED = ("*/*", "consolidated*", "params.json")
"""Files that are not downloaded: folders with other formats, and Mistral's own form of
the weights.
"""

DOWNLOADS = 4
"""Number of files that are downloaded at one time."""

TRIES = 5
"""Maximum number of attempts in a row that bring nothing."""

PAUSE_S = 0.5
"""Seconds before the second attempt; each further pause is twice as long."""

NETWORK = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "socket", "ssl")
"""Modules whose exceptions say that a server cannot be reached."""

SUFFIX = ".rollweave"
"""End of the name of an unfinished file."""

DIGEST = re.compile(r"[0-9a-f]{64}")
"""Form of an ETag that is the SHA-256 of the file."""

FULL = (errno.ENOSPC, errno.EDQUOT)

WHAT = {"model": "a model", "dataset": "a data set"}


def is_hub_name(path: str) -> bool:
    """Return whether `path` names a model of the hub: no file has this name, and no
    folder the name of the organization, unless `path` has a commit.
    """
    match = NAME.fullmatch(path)
    if match is None or os.path.exists(path):
        return False
    return PINNED.fullmatch(path) is not None or not Path(match["name"]).parent.exists()


def folder(path: str) -> Path:
    """Return the folder of a model: `path` itself, or the place in the hub's cache of a
    name that has its commit.
    """
    match = PINNED.fullmatch(path)
    if match is None or os.path.exists(path):
        return Path(path)
    return _repository("model", match[1]) / "snapshots" / match[2]


def fetched(path: str, *, weights: bool = True, field: str = "model.path") -> str:
    """Fetch a model of the hub, of which the cache may have parts, and return its name
    with the commit; any other path as it is. `weights=False` leaves out the weights.

    Raises ConfigError.
    """
    match = NAME.fullmatch(path)
    if match is None or not is_hub_name(path):
        return path
    from huggingface_hub.utils.tqdm import disable_progress_bars

    hub = _hub()
    if not sys.stderr.isatty():
        disable_progress_bars()
    needed = [*NEEDED, *([WEIGHTS] if weights else [])]
    name, revision = match["name"], match["revision"]

    def snapshot(patterns: list[str], **how: Any) -> Any:
        ignored = list(NOT_NEEDED)
        return hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored, **how
        )

    try:
        # without the network, the library answers from the cache, or says what is wrong
        with contextlib.suppress(hub.errors.DryRunError):
            listed = snapshot([*NEEDED, WEIGHTS], dry_run=True)
            if not any(fnmatch(file.filename, WEIGHTS) for file in listed):
                raise ConfigError(
                    f"{field} must be a model whose weights are in model*.safetensors beside its "
                    f"config.json, got {path!r}, which has none"
                )
            missing = [
                (file.commit_hash, file.filename)
                for file in listed
                if file.will_download and (weights or not fnmatch(file.filename, WEIGHTS))
            ]
            download("model", name, missing)
        place = snapshot(needed)
    except ConfigError:
        raise
    except Exception as error:
        said = (
            problem(
                error, field=field, got=path, kind="model", name=name, revision=revision or "main"
            )
            or f"{field} must be readable, got {path!r}: {type(error).__name__}: {error}"
        )
        said = " ".join(said.split())
        raise ConfigError(f"{said} (nor is there a folder of this name)") from error
    return f"{name}@{Path(place).name}"


def problem(
    error: Exception, *, field: str, got: str, kind: Kind, name: str, revision: str
) -> str | None:
    """Say in one line why a repository cannot be had; None for a problem of the disk's
    or the hub's that this function does not know. Without a `name`, only the disk is
    to blame.
    """
    chain = list(causes(error))
    kinds = {type_.__name__ for each in chain for type_ in type(each).__mro__}
    refused = next((str(each) for each in chain if "DatasetNotFound" in type(each).__name__), "")
    site, what, shown = endpoint(), WHAT[kind], f"got {got!r}"
    page = f"{site}/datasets/{name}" if kind == "dataset" else f"{site}/{name}"
    if name and ("GatedRepoError" in kinds or "gated" in refused):
        return (
            f"{field} must be {what} that your token may read, {shown}, which is gated: ask for "
            f"access at {page}, and set HF_TOKEN"
        )
    if name and ("RevisionNotFoundError" in kinds or refused.startswith("Revision")):
        return (
            f"{field} must name a revision that exists, {shown}: {page} has no revision "
            f"{revision!r}"
        )
    if name and ("RepositoryNotFoundError" in kinds or refused):
        return (
            f"{field} must be {what} of {site}, {shown}: it has none of this name, or none that "
            "your token (HF_TOKEN) may read"
        )
    if any(isinstance(each, OSError) and _is_full(each) for each in chain):
        return (
            f"{field} must fit on the disk of HF_HOME ({cache_home()}, {_free()} free), {shown}: "
            "no space is left; the next attempt continues what was downloaded"
        )
    if name and ("OfflineModeIsEnabled" in kinds or is_offline()):
        return (
            f"{field} must be in the cache in offline mode (HF_HUB_OFFLINE), {shown}, which is not"
        )
    verb, details = _failure(chain)
    if name and verb:
        return f"{field} must be downloaded from {site}, which {verb}, {shown}{details}"
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and the errors that led to it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: OSError) -> bool:
    return error.errno in FULL or "Not enough disk space" in str(error)


def _failure(chain: list[BaseException]) -> tuple[str, str]:
    """Return what a server did, and what the user should know of it; "" for a problem
    that is not a server's.
    """
    again = "; the next attempt continues what was downloaded"
    for each in chain:
        text = " ".join(str(each).split())[:160]
        if status := _status(each):
            return f"answered with status {status}", again if _may_pass(each) else f" ({text})"
        if is_network(each):
            return "cannot be reached", f" ({type(each).__name__}: {text}){again}"
    return "", ""


def _status(error: BaseException) -> int:
    """Return the status of the answer that an error reports; 0 for another error."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def cache_home() -> Path:
    """Return the folder of the hub's libraries, as they determine it."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(caches, "huggingface"))
    return Path(os.path.expandvars(os.path.expanduser(home)))


def _free() -> str:
    with contextlib.suppress(OSError):
        return human_bytes(shutil.disk_usage(cache_home()).free)
    return "unknown"


def endpoint() -> str:
    """Return the address of the hub."""
    return str(_hub().constants.ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Return whether the user has forbidden to ask the hub."""
    return bool(_hub().constants.HF_HUB_OFFLINE)


def _hub() -> Any:
    """Return the hub's library, which is imported for the first time here: most runs
    need none of it.
    """
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    return huggingface_hub


def is_network(error: BaseException) -> bool:
    """Return whether the error says that a server cannot be reached, or was lost."""
    module = type(error).__module__.partition(".")[0]
    return module in NETWORK or isinstance(error, ConnectionError | TimeoutError)


def _repository(kind: Kind, name: str) -> Path:
    """Return a repository's folder in the hub's cache."""
    from huggingface_hub import constants  # the rest of the library is larger

    parts = [f"{kind}s", *name.split("/")]
    return Path(constants.HF_HUB_CACHE, constants.REPO_ID_SEPARATOR.join(parts)).absolute()


def download(kind: Kind, name: str, files: Iterable[tuple[str, str]]) -> None:
    """Download files of a repository, each of a commit, into the hub's cache, and go on
    where an earlier attempt stopped. The first failure, or Ctrl-C, ends all downloads.

    Passes the errors of the library and of the operating system through.
    """
    downloads = _Downloads(kind, name, files)
    # an executor's threads would keep the process alive
    threads = [threading.Thread(target=downloads.work, daemon=True) for _ in range(DOWNLOADS)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        downloads.ended.set()
    if downloads.failures:
        raise downloads.failures[0]


class _Downloads:
    """Downloads of files of one repository, by several threads."""

    def __init__(self, kind: Kind, name: str, files: Iterable[tuple[str, str]]) -> None:
        self._kind, self._name, self._left = kind, name, iter(list(files))
        self._begun: dict[str, str] = {}
        """File by its ETag: of files with equal contents, one is downloaded."""
        self.failures: list[Exception] = []
        self.ended = threading.Event()

    def work(self) -> None:
        """Download one file after the other."""
        try:
            while not self.ended.is_set() and (wanted := next(self._left, None)) is not None:
                self._download(*wanted)
        except Exception as error:
            self.failures.append(error)
            self.ended.set()

    def _download(self, commit: str, file: str) -> None:
        """Download one file, unless it is there, or only the library can."""
        hub = _hub()
        of_kind = {"revision": commit, "repo_type": self._kind}
        if isinstance(hub.try_to_load_from_cache(self._name, file, **of_kind), str):
            return
        url = hub.hf_hub_url(self._name, file, endpoint=hub.constants.ENDPOINT, **of_kind)
        about = self._tried(lambda: hub.get_hf_file_metadata(url))
        if not about.etag or not about.size or not re.fullmatch(r"[\w.-]+", about.etag):
            return
        blob = _repository(self._kind, self._name) / "blobs" / about.etag
        blob.parent.mkdir(parents=True, exist_ok=True)
        if blob.exists() or self._begun.setdefault(about.etag, file) != file:
            return
        unfinished = blob.with_name(blob.name + SUFFIX)
        with open(unfinished, "ab") as opened:
            if not self._locked(opened, file) or blob.exists():
                if not opened.tell():
                    unfinished.unlink(missing_ok=True)
                return
            self._complete(about, url, opened, shown=file)
            opened.flush()
            os.fsync(opened.fileno())
            if DIGEST.fullmatch(about.etag) and _digest(unfinished) != about.etag:
                opened.truncate(0)
                raise ConnectionError(f"{file} was received with another digest than the hub tells")
            unfinished.rename(blob)

    def _locked(self, unfinished: Any, file: str) -> bool:
        """Wait until no other process downloads this file, which the user is told.
        Return False if all downloads end before, or if the file system has no locks.
        """
        has_waited = False
        while not self.ended.is_set():
            try:
                fcntl.flock(unfinished, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_waited:
                    print(f"waiting for another process, which downloads {file}", file=sys.stderr)
                has_waited = True
                self.ended.wait(PAUSE_S)
            except OSError:
                return False
            else:
                return True
        return False

    def _tried(self, action: Callable[[], T], advanced: Callable[[], bool] = lambda: False) -> T:
        """Return the action's result; repeat it after a failure that may pass."""
        fruitless = 0
        while True:
            try:
                return action()
            except Exception as error:
                fruitless = 0 if advanced() else fruitless + 1
                if fruitless == TRIES or not _may_pass(error):
                    raise
                if self.ended.wait(PAUSE_S * 2**fruitless):
                    raise

    def _complete(self, about: Any, url: str, unfinished: Any, *, shown: str) -> None:
        """Append what an unfinished file lacks, and go on if a connection breaks, with
        a new address: that of a storage expires.
        """
        begun, location = unfinished.seek(0, os.SEEK_END), about.location

        def append() -> None:
            nonlocal begun, location
            begun = unfinished.seek(0, os.SEEK_END)
            if begun > about.size:
                unfinished.truncate(0)
            location, known = "", location or _hub().get_hf_file_metadata(url).location
            self._append(known, url, unfinished, progress)

        def advanced() -> bool:
            unfinished.flush()
            return bool(unfinished.seek(0, os.SEEK_END) > begun)

        with _hub().utils.tqdm(
            total=about.size, initial=begun, unit="B", unit_scale=True, desc=shown, leave=False
        ) as progress:
            while unfinished.seek(0, os.SEEK_END) != about.size:
                self._tried(append, advanced)
                if self.ended.is_set():
                    raise InterruptedError(f"the download of {shown} was ended")

    def _append(self, location: str, url: str, unfinished: Any, progress: Any) -> None:
        """Append what the server sends. The token is sent to the hub alone, and not to
        the storage to which it refers.
        """
        hub = _hub()
        begun = unfinished.seek(0, os.SEEK_END)
        is_hub = urlparse(location).netloc == urlparse(url).netloc
        headers = hub.utils.build_hf_headers() if is_hub else {}
        headers |= {"Accept-Encoding": "identity"}
        headers |= {"Range": f"bytes={begun}-"} if begun else {}
        limit_s, session = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT, hub.get_session()
        with session.stream("GET", location, headers=headers, timeout=limit_s) as response:
            if response.status_code == 403 and not is_hub:
                raise ConnectionError("the storage refused its address, which may have expired")
            hub.utils.hf_raise_for_status(response)
            if begun and response.status_code != 206:
                unfinished.truncate(0)
            received = False
            for chunk in response.iter_bytes():
                received = True
                progress.update(unfinished.write(chunk))
                if self.ended.is_set():
                    return
        if not received:
            raise ConnectionError("the server sent nothing")


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    status = _status(error)
    return status in (408, 429) or status >= 500 or (not status and is_network(error))


def _digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
