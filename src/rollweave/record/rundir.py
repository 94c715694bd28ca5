"""The directory of one run, the right to write to it, and the identity of the run and
of its initial model: the file `run.json`.

Invariants: at most one controller holds a run directory, by advisory locks that end
with the controller's process. One lock is on the directory itself, which cannot be
deleted or replaced without its content; the other lock is on the file `lock` in the
directory, for file systems that lock only files. A fresh run never writes into a
directory with content; the names of all files inside are defined only here. The id in
`run.json` is the id in the journal's first event, so a journal of another run is
recognized; `runtime/recover` compares the digests of the model's files whenever the run
is resumed.
"""

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import msgspec
import xxhash

from rollweave.io.disk import replace_file, writing
from rollweave.io.reading import kind_at, named, whole
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import FILE_BYTES, dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

LOCK_BYTES = 32
"""Maximum size of the file `lock`, which has a process id."""

MAX_LOCK_ATTEMPTS = 100
"""Maximum number of attempts to lock a file that other processes keep replacing."""

Kind = Literal["training", "service", "simulation"]

IDENTITY_BYTES = 64 << 20
"""Maximum size of `run.json`: a digest for each file of a large model is far less."""


class RunDir:
    """Paths below `runs/<name>`. `claim` takes the lock; `release` frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.identity = path / "run.json"
        self.journal = path / "journal.bin"
        self.trajectories = path / "trajectories"
        self.turns = path / "turns"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.summary = path / "summary.json"
        self.status = path / "status.json"
        self.lock = path / "lock"
        self.control = path / "control.sock"
        self.token = path / "token"
        self.address = path / "address"
        self.engine_tokens = path / "engine-tokens.json"
        self.report = path / "report.html"
        self.host_secret = path / "host.secret"
        self.host_mark = path / "host.mark"
        self._fds: list[int] = []

    @classmethod
    def claim(
        cls, config: RunConfig, *, resume: bool, replace: Sequence[str] = (), to_clear: bool = False
    ) -> Self:
        """Create or take over the run's directory; the files `replace` of a former run
        are deleted once the lock is held.

        Raises `ConfigError` if the directory is in use, read-only, or not as `resume`
        expects, or has a directory or a named pipe in a file's place (which `to_clear`
        allows, except for the lock); `DiskError` if the directory cannot be written.
        """
        # The working directory may change later.
        run = cls((Path(config.run.dir) / config.run.name).absolute())
        if resume and not run.config.exists():
            raise ConfigError(f"--resume: {run.path} must hold a run, found no config.toml")
        if file := next(
            (path for path in (run.path, *run.path.parents) if path.exists() and not path.is_dir()),
            None,
        ):
            raise ConfigError(
                f"run.dir and run.name must be of a directory, or of none yet, got the file {file}"
            )
        _must_be_writable(next(path for path in (run.path, *run.path.parents) if path.exists()))
        if run.lock.is_symlink():
            raise ConfigError(f"{run.lock} must be a file, got a symbolic link; move it away")
        if to_clear:
            _must_be(run.lock, "file")
        else:
            run.must_fit()
            for file in run._appended():
                _must_be_writable(file)
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            for name in replace:
                (run.path / name).unlink(missing_ok=True)
        if not resume and run.has_content():
            run.release()
            if run.config.exists():
                raise ConfigError(
                    f"run.name: {run.path} holds a run already; continue it with "
                    "--resume, or choose another name"
                )
            raise ConfigError(
                f"run.name: {run.path} must be empty or hold a run, found other "
                "files and no config.toml"
            )
        with writing(run.path):
            run.logs.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
        return run

    def has_content(self) -> bool:
        """Return whether a run has written here: anything except the lock, a token and
        empty directories.
        """
        own_files = (self.lock, self.token)
        return self.path.exists() and any(
            entry not in own_files and not _empty_directory(entry) for entry in self.path.iterdir()
        )

    def must_fit(self) -> None:
        """Raise ConfigError if a directory, a named pipe, a socket, a device or a link
        to nothing stands in the place of one of a run's files, or a file in the place
        of a directory.
        """
        for directory in (
            self.trajectories,
            self.turns,
            self.checkpoints,
            self.logs,
            self.model,
        ):
            _must_be(directory, "directory")
        _must_be(self.control, "socket", "file")
        replaced = (
            self.config,
            self.identity,
            self.summary,
            self.status,
            self.report,
            self.token,
            self.address,
            self.host_secret,
            self.host_mark,
        )
        stored = (*self.trajectories.glob("*.bin"), self.trajectories / "floor")
        for file in (*replaced, self.engine_tokens, *self._appended(), *stored):
            _must_be(file, "file")

    def configuration(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Read `config.toml` with `overrides`, as `load` does. Raises ConfigError, also
        if a named pipe or a device has taken its place.
        """
        try:
            text = whole(self.config, FILE_BYTES).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            reason = named(error) if isinstance(error, OSError) else f"{self.config}: {error}"
            raise ConfigError(f"{reason}; it must be the configuration of a run") from error
        return loads(text, overrides, name=str(self.config))

    def must_be_writable(self) -> None:
        """Raise ConfigError if files cannot be created here."""
        _must_be_writable(self.path)

    def _appended(self) -> Iterator[Path]:
        """Yield the existing files that grow with the run."""
        # the logs of a worker's environments are one folder below; other files may be
        # there too
        logs = (*self.logs.glob("*.log"), *self.logs.glob("*/*.log"))
        files = (self.lock, self.journal, self.metrics, self.trace, *logs)
        return (file for file in files if os.path.lexists(file))

    def write_config(self, config: RunConfig) -> None:
        """Write `config.toml`, whole or not at all. Raises DiskError."""
        replace_file(self.config, dumps(config).encode())

    def release(self) -> None:
        """Release the locks. A second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def _take_lock(self) -> None:
        try:
            self._fds.append(_locked(self.path, os.O_RDONLY | os.O_DIRECTORY, optional=True))
            # the lock is overwritten, and a link could lead to any file
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fds.append(_locked(self.lock, flags))
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"run.name: {self.path} is in use by another controller, process {self._holder()}"
            ) from None
        except OSError:
            self.release()
            raise
        with contextlib.suppress(OSError):  # on a full disk the lock holds without our process id
            os.ftruncate(self._fds[-1], 0)
            os.pwrite(self._fds[-1], f"{os.getpid()}\n".encode(), 0)

    def _holder(self) -> str:
        try:
            return whole(self.lock, LOCK_BYTES).decode(errors="replace").strip() or "unknown"
        except OSError:
            return "unknown"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked(path: Path, flags: int, *, optional: bool = False) -> int:
    """Open what `path` names now, and lock it exclusively; return the descriptor.

    Raises BlockingIOError if another process has the lock, and OSError. With
    `optional`, the descriptor has no lock where the file system cannot lock such files.
    """
    for _ in range(MAX_LOCK_ATTEMPTS):
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                if not optional:
                    raise
            if _is_same_file(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        # The file was replaced between opening and locking, so the lock would be on a
        # file without a name.
        os.close(fd)
    raise OSError(errno.ESTALE, "was replaced repeatedly while it was being locked", str(path))


def _is_same_file(path: Path, fd: int) -> bool:
    """Return whether `path` is still the file behind `fd`."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _must_be(path: Path, *kinds: str) -> None:
    """Raise ConfigError if a file of another kind has this name: opening a named pipe,
    for example, waits for its other end.
    """
    try:
        kind = kind_at(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return  # no file can have this name
        raise ConfigError(f"{named(error)}; a run's files must be accessible") from error
    if kind and kind not in kinds:
        raise ConfigError(f"{path} must be a {kinds[0]}, got a {kind}; move it away")


def _must_be_writable(path: Path) -> None:
    directory = path.is_dir()
    if not os.access(path, os.R_OK | os.W_OK | (os.X_OK if directory else 0)):
        what = "a directory to write to" if directory else "a file to write to"
        raise ConfigError(
            f"{path} must be {what}, got one that is read-only or whose permissions refuse it"
        )


def _empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


class Identity(Struct, frozen=True, kw_only=True):
    """A run's id, its model and its configuration.

    `model` has the size in bytes and the xxh3-128 of each of the model's files; None
    until the model exists. `config` is `config.toml` as the run wrote it last; None in
    runs of earlier versions. `digest` is the xxh3-64 of all other fields, in hex; "" in
    runs of earlier versions.
    """

    id: str
    kind: Kind
    model: dict[str, tuple[int, str]] | None = None
    config: str | None = None
    digest: str = ""


def new_identity(kind: Kind) -> Identity:
    return Identity(id=uuid.uuid4().hex, kind=kind)


def read_identity(path: Path) -> Identity | None:
    """Return the file's content; None if it does not exist. Raises ConfigError."""
    try:
        identity = msgspec.json.decode(whole(path, IDENTITY_BYTES), type=Identity)
        if identity.digest not in ("", _digest(identity)):
            raise ValueError("its content does not match its checksum")
        return identity
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} must be readable and as the run wrote it: {reason}; bring it back, or "
            "delete it to resume without checking the journal and the model's files"
        ) from error


def run_id(path: Path) -> str:
    """Return the id in the file at `path`; the name of the run's directory if the user
    has deleted the file. Raises ConfigError.
    """
    identity = read_identity(path)
    return path.parent.name if identity is None else identity.id


def write_identity(path: Path, identity: Identity) -> None:
    """Write the file atomically. Raises DiskError."""
    identity = msgspec.structs.replace(identity, digest=_digest(identity))
    replace_file(path, msgspec.json.format(msgspec.json.encode(identity), indent=1) + b"\n")


def _digest(identity: Identity) -> str:
    content = msgspec.json.encode(msgspec.structs.replace(identity, digest=""))
    return f"{xxhash.xxh3_64_intdigest(content):016x}"
