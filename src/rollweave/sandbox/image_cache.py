"""The images that a host keeps for its runs, and the references by which the settings
of a run name them: a digest, an archive or a recipe. A recipe is a TOML file with the
fields of `images.Recipe`.

A host keeps as many images as fit. The least recently used images make room for others.

Invariants: an image that a process holds is not removed; all processes of the host may
use one cache at the same time, and if a process is killed, the images that it held are
free; the folder of an image appears complete.
"""

import contextlib
import fcntl
import os
import shutil
import tarfile
import threading
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollweave.io.locked_folders import unfinished_folder
from rollweave.sandbox.base import ARCHIVES, DIGEST, HOST, RECIPE
from rollweave.sandbox.blobs import Blobs, BlobServer, Cancellation, OnProgress, Source
from rollweave.sandbox.images import Images, Mode, Recipe
from rollweave.schema.errors import ConfigError, ImageError
from rollweave.schema.text import did_you_mean

SHOWN = 12
"""Number of digits of a digest that a message shows."""

IMAGE_BACKENDS = ("bubblewrap", "apptainer")
"""Back ends whose sandboxes can have images other than the host's."""

GIGABYTE = 1_000_000_000

BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image as it was named. Exactly one of `digest`, `folder`, `archive` and
    `recipe` is given.
    """

    text: str
    digest: str = ""
    folder: Path | None = None
    archive: Path | None = None
    recipe: Recipe | None = None
    file: Path = Path()
    """The file of the recipe. Its paths are relative to the folder of the file."""

    @property
    def label(self) -> str:
        """The name of the image in messages."""
        return f"sha256:{self.digest[:SHOWN]}…" if self.digest else self.text

    @property
    def place(self) -> Path:
        """Folder to which the recipe's paths are relative."""
        return self.file.parent

    @property
    def mode(self) -> Mode:
        """The condition for reusing the image of the recipe."""
        if self.recipe is not None and self.recipe.rebuild:
            return "scratch"
        return "lock" if self.recipe is not None and self.recipe.lock else "versioned"

    def paths(self) -> Iterator[Path]:
        """Yield the files and folders that the image is made from."""
        if self.archive is not None:
            yield self.archive
        if self.recipe is not None:
            yield self.file
            for name in self.names():
                yield Path(os.path.normpath(self.place / name))

    def names(self) -> Iterator[str]:
        """Yield the files and folders of the recipe, under the recipe's own names."""
        if self.recipe is not None:
            yield from (step.source for step in self.recipe.copy)
            if self.recipe.lock:
                yield self.recipe.lock
            if not _names_digest(self.recipe.base):
                yield self.recipe.base


def parse_reference(text: str, here: Path) -> Reference:
    """Return the image that `text` names, which must not be `HOST`. Relative paths
    start at `here`. Raises ConfigError.
    """
    if match := DIGEST.fullmatch(text):
        return Reference(text=text, digest=match[1])
    if text.startswith("sha256:"):
        raise ConfigError(f"image must have 64 hexadecimal digits after sha256:, got {text!r}")
    path = Path(os.path.normpath(here / text))
    if text.endswith(RECIPE):
        return Reference(text=text, recipe=_recipe(path), file=path)
    if text.endswith(ARCHIVES):
        return Reference(text=text, archive=path)
    if not text.startswith("/"):
        raise ConfigError(
            f"image must be {HOST}, an absolute path, sha256:DIGEST, or the path of an archive "
            f"({', '.join(ARCHIVES)}) or of a recipe ({RECIPE}), got {text!r}"
        )
    return Reference(text=text, folder=path)


def check_reference(reference: Reference) -> str:
    """Return a description of what the image is made from. Raises ConfigError if its
    source is missing or cannot be an image.
    """
    for path in reference.paths():
        if not path.exists():
            raise ConfigError(f"image {reference.text} must have all its files, {path} is missing")
    if reference.folder is not None:
        if not reference.folder.exists():
            raise ConfigError(f"image must exist, got {reference.text!r}")
        return f"{reference.text} as it is"
    if reference.archive is not None:
        _check_archive(reference.archive)
        return f"the archive {reference.text}"
    if reference.recipe is None:
        return reference.label
    base = reference.place / reference.recipe.base
    if not _names_digest(reference.recipe.base) and not base.is_dir():
        _check_archive(base)
    return f"recipe {reference.recipe.name} ({reference.text})"


def _check_archive(path: Path) -> None:
    try:
        readable = tarfile.is_tarfile(path)
    except (OSError, EOFError) as error:
        raise ConfigError(f"image must be a readable archive, got {path}: {error}") from error
    if not readable:
        raise ConfigError(f"image must be a tar archive, perhaps compressed, got {path}")


def _names_digest(base: str) -> bool:
    return DIGEST.fullmatch(base) is not None


def _recipe(path: Path) -> Recipe:
    try:
        fields = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"image must be a readable recipe, got {path}: {error}") from error
    known = Recipe.__struct_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"recipe {path} must have the fields {', '.join(known)}, got "
                f"{name!r}{did_you_mean(name, known)}"
            )
    try:
        return msgspec.convert(fields, Recipe)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error


class Lease:
    """An image that is held until `close`."""

    def __init__(self, path: str, cache: "ImageCache | None" = None, digest: str = "") -> None:
        self.path = path
        self._cache, self._digest = cache, digest

    def copy(self) -> "Lease":
        """Hold the image a second time, and return the new lease."""
        if self._cache is not None:
            self._cache.hold(self._digest)
        return Lease(self.path, self._cache, self._digest)

    def close(self) -> None:
        """Release the image, soon. A second call does nothing.

        The garbage collector may call this method, in the middle of any other code.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.dropped.append(self._digest)


class ImageCache:
    """The images in `folder`, at most `limit_bytes` in all. Calls may come from any
    thread.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, mirror: str | None = None) -> None:
        """Open the cache, or make it. Raises OSError."""
        self._folder, self._limit_bytes = folder, limit_bytes
        for name in ("locks", "used"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._blobs = Blobs(folder / "blobs", mirror=mirror, limit_bytes=limit_bytes)
        self.images = Images(folder, self._blobs)
        self._held: dict[str, tuple[int, int]] = {}
        """The descriptor that locks an image that this process holds, and the number of
        its holds, by image.
        """
        self._mutex = threading.Lock()
        self.dropped: deque[str] = deque()
        """Images that are to be released."""

    def find(self, digest: str) -> Lease | None:
        """Hold an image; return None if it is not in the cache. Raises OSError."""
        self._release_dropped()
        self.hold(digest)
        path = self._root(digest)
        if path.is_dir():
            return Lease(str(path), self, digest)
        self.release(digest)
        return None

    def hold(self, digest: str) -> None:
        """Prevent the removal of an image until `release`, even if it is not in the
        cache yet.
        """
        with self._mutex:
            if digest in self._held:
                fd, count = self._held[digest]
                self._held[digest] = fd, count + 1
                return
            while True:
                fd = os.open(self._folder / "used" / digest, os.O_RDWR | os.O_CREAT, 0o644)
                # on a file system without locks, nothing is removed
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_SH)
                if os.fstat(fd).st_nlink:
                    break
                os.close(fd)  # the file was removed at this moment
            os.utime(fd)
            self._held[digest] = fd, 1

    def release(self, digest: str) -> None:
        """Release an image that was held."""
        with self._mutex:
            fd, count = self._held.pop(digest)
            if count > 1:
                self._held[digest] = fd, count - 1
                return
            os.utime(fd)
            os.close(fd)

    def _release_dropped(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self.release(self.dropped.popleft())

    def close(self) -> None:
        """Release all images."""
        with self._mutex:
            for fd, _ in self._held.values():
                os.utime(fd)
                os.close(fd)
            self._held.clear()

    def try_lock(self, key: str) -> int | None:
        """Lock an image while it is obtained; return the descriptor, or None if another
        process has locked it. Raises OSError.
        """
        fd = os.open(self._folder / "locks" / key, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            pass  # no locks here: each process obtains the image by itself
        return fd

    def fetch(
        self, digest: str, source: Source, on_progress: OnProgress, cancellation: Cancellation
    ) -> str | None:
        """Fetch an archive; return the reason for a failure, or None. Raises
        SandboxError if it cannot be stored, because there is no room, for example.
        """
        known = False

        def on_bytes(done: int, whole: int) -> None:
            nonlocal known
            if not known and whole:
                known = True
                self.make_room(2 * whole)  # unpacked, it is as large again or larger
            on_progress(done, whole)

        return self._blobs.fetch(digest, source, on_progress=on_bytes, cancellation=cancellation)

    def add(self, archive: Path, digest: str) -> None:
        """Store a local archive under its digest. Raises SandboxError."""
        self.make_room(2 * archive.stat().st_size)
        with archive.open("rb") as file, self._blobs.new() as blob:
            shutil.copyfileobj(file, blob, 1 << 20)
            if blob.digest != digest:
                raise ImageError(f"image {archive} must not change while it is copied")
            blob.keep()

    def unpack(self, digest: str, cancellation: Cancellation) -> None:
        """Make the folder of an image from its archive. The image must be held. Raises
        SandboxError, also if there is no room for the folder.
        """
        self.images.path(digest, cancellation=cancellation)
        self._note_size(digest)
        self.make_room(0)

    def archive(self, digest: str) -> Path:
        """Return the path of an image's archive."""
        return self._blobs.path(digest)

    def serve(self, host: str, token: str) -> BlobServer:
        """Return a server of the archives. Raises OSError."""
        return BlobServer(self._folder / "blobs", host=host, token=token)

    def make_room(self, needed: int) -> None:
        """Remove the least recently used images until `needed` more bytes fit. Raises
        ImageError if they still do not fit.
        """
        self._release_dropped()
        with self._cleaning():
            entries = sorted(self._entries())
            total = sum(size for _, _, size in entries)
            for _, digest, size in entries:
                if total + needed <= self._limit_bytes:
                    break
                if self._remove(digest):
                    total -= size
        if total + needed > self._limit_bytes:
            raise ImageError(
                f"the cache of images must have room for {(total + needed) / GIGABYTE:.1f} GB, the "
                f"images in use and the next one, got {self._limit_bytes / GIGABYTE:g}"
            )

    def remove(self, digest: str) -> None:
        """Release an image, and remove it unless it is held elsewhere."""
        self.release(digest)
        self._remove(digest)

    @contextlib.contextmanager
    def _cleaning(self) -> Iterator[None]:
        fd = os.open(self._folder / "locks" / "clean", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _entries(self) -> Iterator[tuple[int, str, int]]:
        """Yield the time of the last use, the digest and the size of each image.

        An archive without a time of use was left by a process that was killed.
        """
        used = self._folder / "used"
        archives = {name for name in os.listdir(self._folder / "blobs") if name[0] != "."}
        for digest in archives | set(os.listdir(used)):
            last, size = 0, ""
            with contextlib.suppress(OSError):
                last = (used / digest).stat().st_mtime_ns
                size = (used / digest).read_text().strip()
            yield last, digest, int(size) if size.isdecimal() else self._size(digest)

    def _note_size(self, digest: str) -> None:
        with self._mutex:
            fd, _ = self._held[digest]
            os.pwrite(fd, f"{self._size(digest)}\n".encode(), 0)

    def _size(self, digest: str) -> int:
        """Return the bytes on the disk of an image and its archive."""
        blocks = 0
        with contextlib.suppress(OSError):
            blocks += self._blobs.path(digest).stat().st_blocks
        for folder, folders, files in os.walk(self._root(digest)):
            for name in (*folders, *files):
                with contextlib.suppress(OSError):
                    blocks += os.lstat(os.path.join(folder, name)).st_blocks
        return blocks * BLOCK_BYTES

    def _remove(self, digest: str) -> bool:
        """Remove an image; return False if it is held."""
        used = self._folder / "used" / digest
        with unfinished_folder(self._folder) as trash:
            try:
                fd = os.open(used, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self._root(digest), trash / "root")
                self._blobs.path(digest).unlink(missing_ok=True)
                used.unlink(missing_ok=True)
            except OSError:
                return False
            finally:
                os.close(fd)
            _make_removable(trash / "root")
        return True

    def _root(self, digest: str) -> Path:
        return self._folder / "roots" / digest


def _make_removable(root: Path) -> None:
    """Let the owner write to all folders, which an image may forbid."""
    for folder, folders, _ in os.walk(root):
        for name in folders:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
