"""Images: root file systems as folders, built once, stored by content, and fetched from
peers rather than built again.

A `Recipe` describes an image; the three modes of a build are those of ProRL §3.2.2.

Invariants: an image is named by the SHA-256 of its archive; its folder appears
atomically; an archive writes nothing outside its folder (`io/unpacking.py` of
Rollweave), is bounded, and nothing in it raises privileges; a command that fails makes
the build fail and leaves no image.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, cast

import msgspec

from rollweave.io.locked_folders import remove_leftovers, unfinished_folder
from rollweave.io.unpacking import Bounds, Refused, check_bytes, check_member
from rollweave.package import VERSION
from rollweave.sandbox.base import DIGEST, MIB, Backend, Limits, SandboxSpec
from rollweave.sandbox.references import Mode, Recipe
from rollweave.schema.errors import ConfigError, SandboxError
from rollweave_sandbox import confined_unpacking
from rollweave_sandbox.blobs import Blobs, BlobWriter, Cancellation, check_digest, digest_of
from rollweave_sandbox.confined_unpacking import DONE
from rollweave_sandbox.layers import Copy, closing_fd, opened_folder, remove
from rollweave_sandbox.sources import main_of
from rollweave_sandbox.stage import ensure_folder

RUN_LIMITS = Limits(
    processes=1024,
    memory_bytes=8192 * MIB,
    disk_bytes=8192 * MIB,
    wall_s=7200.0,
    cpu_s=14_400.0,
    files=4096,
)
"""Limits of the sandbox that runs a recipe's commands."""

OUTPUT_BYTES = 1000
"""Maximum bytes of the message from the process that unpacks. The message may quote the
archive.
"""

END_S = 10.0
"""Seconds within which the process that unpacks must end, with the process that it
started.
"""

FOLDER_BYTES = 1 << 40
"""Maximum number of bytes that a recipe copies: practically unlimited, since the files
are the user's own.
"""


class Images:
    """The images of this host, in `folder`.

    Calls may come from several processes: images are renamed into place.
    """

    def __init__(self, folder: Path, blobs: Blobs, *, bounds: Bounds | None = None) -> None:
        """Open the images in `folder`.

        `bounds` apply to each archive that is unpacked.
        """
        self._folder, self._blobs, self._bounds = folder, blobs, bounds or Bounds()
        for name in ("roots", "built"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def path(self, digest: str, *, cancellation: Cancellation | None = None) -> str:
        """Return the folder of an image, for `SandboxSpec.image`. The image is fetched
        and unpacked if necessary. Raises SandboxError, ValueError.
        """
        root = self._folder / "roots" / check_digest(digest)
        if not root.is_dir():
            with self._new_folder() as folder:
                unpack(self._blobs.get(digest), folder, self._bounds, cancellation)
                _rename_into_place(folder, root)
        return str(root)

    def add(self, source: Path) -> str:
        """Store a folder or an archive as an image, and return its digest.

        Raises SandboxError.
        """
        if source.is_dir():
            with self._blobs.new() as blob:
                pack(source, blob, self._bounds)
                return blob.keep()
        with (
            self._new_folder() as folder
        ):  # unpacked first, so that equal contents have equal digests
            unpack(source, folder, self._bounds)
            return self.add(folder)

    async def build(
        self,
        recipe: Recipe,
        *,
        backend: Backend,
        mode: Mode = "versioned",
        relative_to: Path | None = None,
        run: str = "",
    ) -> str:
        """Build a recipe's image, unless it may be reused, and return its digest.
        `backend` runs its commands, and `run` names the run for mode `scratch`.

        Raises SandboxError if a command fails, ConfigError for an invalid recipe.
        """
        here = relative_to or Path.cwd()
        key = await asyncio.to_thread(self.key, recipe, mode, here, run)
        if key is not None and (known := self.built(key)):
            # If the image is lost everywhere, it is built again.
            with contextlib.suppress(SandboxError):
                await asyncio.to_thread(self.path, known)
                return known
        with self._new_folder() as folder:
            await asyncio.to_thread(self._assemble, recipe, here, folder)
            await _run(recipe, folder, backend)
            digest = await asyncio.to_thread(self.add, folder)
        if key is not None:
            self.remember(key, digest)
        return digest

    def built(self, key: str) -> str:
        """Return the digest of the image that was built for this key; "" without such
        an image.
        """
        record = self._folder / "built" / check_digest(key)
        with contextlib.suppress(FileNotFoundError, ValueError):
            return check_digest(record.read_text())
        return ""

    def remember(self, key: str, digest: str) -> None:
        """Store which image was built for a key."""
        write_atomically(self._folder / "built" / check_digest(key), digest)

    def key(self, recipe: Recipe, mode: Mode, here: Path, run: str = "") -> str | None:
        """Return the key that an existing image must have to be reused; None if no
        image may be reused, in mode scratch without a run. Raises ConfigError.
        """
        if mode == "scratch" and not run:
            return None
        if mode == "lock":
            if recipe.lock is None:
                raise ConfigError(
                    f"lock must name a file for mode lock, got none in recipe {recipe.name!r}"
                )
            return _sha256(["lock", recipe.name, _digest_of_path(here / recipe.lock)])
        copied = [_digest_of_path(here / step.source) for step in recipe.copy]
        text = msgspec.json.encode(recipe).decode()
        made_of = [text, self._base(recipe, here), VERSION, *copied]
        return _sha256([mode, *([run] if mode == "scratch" else []), *made_of])

    def _base(self, recipe: Recipe, here: Path) -> str:
        base = here / recipe.base
        return _digest_of_path(base) if base.exists() else _given_digest(recipe)

    def _assemble(self, recipe: Recipe, sources: Path, folder: Path) -> None:
        """Unpack the base into `folder`, and copy the recipe's files over it."""
        base = sources / recipe.base
        if base.is_dir():
            copy_folder(base, folder)
        else:
            unpack(
                base if base.exists() else self._blobs.get(_given_digest(recipe)),
                folder,
                self._bounds,
            )
        with opened_folder(folder) as top:
            try:
                for step in recipe.copy:
                    _copy(sources / step.source, step.target, top)
            except OSError as error:
                raise ConfigError(
                    f"copy.source must be a file or a folder that can be read: {error}"
                ) from error

    @contextlib.contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """Yield a folder that is removed afterwards unless it was renamed."""
        with unfinished_folder(self._folder) as folder:
            os.chmod(folder, 0o755)
            yield folder


def _given_digest(recipe: Recipe) -> str:
    """Return the digest that is the recipe's base. Raises ConfigError."""
    match = DIGEST.fullmatch(recipe.base)
    try:
        return match[1] if match else check_digest(recipe.base)
    except ValueError:
        raise ConfigError(
            f"base must be a folder or an archive that exists, or sha256:DIGEST, got "
            f"{recipe.base!r} in recipe {recipe.name!r}"
        ) from None


async def _run(recipe: Recipe, folder: Path, backend: Backend) -> None:
    """Run a recipe's commands over the folder, and merge their writes into it."""
    if not recipe.run:
        return
    spec = SandboxSpec(image=str(folder), fakeroot=True, network=recipe.network, limits=RUN_LIMITS)
    sandbox = await backend.start(spec)
    try:
        for command in recipe.run:
            result = await sandbox.exec(["sh", "-c", command], cwd="/", timeout_s=RUN_LIMITS.wall_s)
            if result.rc != 0:
                output = (result.stdout + result.stderr)[-2000:].decode(errors="replace")
                raise SandboxError(
                    f"recipe {recipe.name!r}: {command!r} ended with status {result.rc}:\n{output}"
                )
        snapshot = await sandbox.snapshot()
    finally:
        await sandbox.stop(grace_s=0.0)
    await asyncio.to_thread(copy_folder, Path(snapshot.layers[0]), folder)
    await asyncio.to_thread(shutil.rmtree, snapshot.layers[0])


def pack(folder: Path, out: BlobWriter, bounds: Bounds) -> None:
    """Write a folder as an archive whose bytes depend on names, content, modes and
    times alone. Owners are left out, and names are sorted.

    Raises SandboxError if the folder cannot be read, or exceeds the bounds within which
    the archive could be unpacked.
    """
    members = 0

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal members
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime)
        member.mode &= 0o1777
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        members += 1
        check_member(member.name, members, bounds)
        check_bytes(out.bytes + member.size, bounds)
        return member

    try:
        # tarfile only writes to `out`.
        with tarfile.open(
            fileobj=cast(IO[bytes], out), mode="w|", format=tarfile.PAX_FORMAT
        ) as archive:
            for name in sorted(os.listdir(folder)):
                # `add` sorts the names in subfolders, too.
                archive.add(folder / name, arcname=name, filter=plain)
        check_bytes(out.bytes, bounds)
    except (OSError, Refused) as error:
        raise SandboxError(f"image {folder} cannot be packed: {error}") from error


def unpack(
    archive: Path, folder: Path, bounds: Bounds, cancellation: Cancellation | None = None
) -> None:
    """Unpack an archive into an empty folder, in a confined process. A failure leaves
    the folder empty, and so does a cancellation.

    Raises SandboxError if the archive is torn, reaches outside, or exceeds its bounds.
    """
    try:
        with archive.open("rb") as file:
            error_text = _unpacked(file, folder, bounds, cancellation or Cancellation())
    except OSError as error:
        error_text = str(error)
    if error_text:
        _clear(folder)
        raise SandboxError(f"image {archive} cannot be unpacked: {error_text}")


def _unpacked(archive: IO[bytes], folder: Path, bounds: Bounds, cancellation: Cancellation) -> str:
    """Unpack in a child process. Return the reason for a failure, or ""."""
    with subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            main_of(confined_unpacking.__name__),
            str(folder.absolute()),
            json.dumps(asdict(bounds)),
            str(os.getpid()),
        ],
        stdin=archive,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            with cancellation.calling(process.kill):
                output, in_time = _read(process.stdout.fileno(), time.monotonic() + bounds.seconds)
        finally:
            _end(process)
    if not in_time:
        return f"it must unpack within bounds.seconds = {bounds.seconds:g} s, and takes longer"
    if output == DONE:
        return ""
    return (
        output.decode("ascii", "backslashreplace").strip()
        or "the process that unpacks it ended without a message"
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _read(fd: int, ends_at: float) -> tuple[bytes, bool]:
    """Read the stream to its end and return at most `OUTPUT_BYTES` bytes, and whether
    the end came before the time `ends_at`.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    output = b""
    while len(output) < OUTPUT_BYTES:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            return output, False
        if poll.poll(left_s * 1000):
            data = os.read(fd, OUTPUT_BYTES - len(output))
            if not data:
                break
            output += data
    return output, True


def _clear(folder: Path) -> None:
    with opened_folder(folder) as top:
        for name in os.listdir(top):
            remove(name, top)


def copy_folder(source: Path, target: Path) -> None:
    """Merge a folder's content into another folder, as an upper layer over a lower
    layer.

    Raises OSError.
    """
    with opened_folder(source) as inner, opened_folder(target) as outer:
        Copy(limit_bytes=FOLDER_BYTES, flatten=True).run(inner, outer)


def _copy(source: Path, target: str, top: int) -> None:
    """Copy a file or folder below the open folder `top`, without following the image's
    links.
    """
    folder, _, name = target.strip("/").rpartition("/")
    if source.is_dir():
        with closing_fd(ensure_folder(top, target)) as to, opened_folder(source) as from_:
            Copy(limit_bytes=FOLDER_BYTES, flatten=True).run(from_, to)
        return
    with closing_fd(ensure_folder(top, folder) if folder else os.dup(top)) as to:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=to)
        target_fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=to)
        with source.open("rb") as data, os.fdopen(target_fd, "wb") as out:
            shutil.copyfileobj(data, out)
            os.fchmod(out.fileno(), stat.S_IMODE(os.fstat(data.fileno()).st_mode) & 0o755)


def _digest_of_path(path: Path) -> str:
    """Return the digest of a file's bytes, or of a folder's names, kinds, modes and
    bytes.

    Raises ConfigError.
    """
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return digest_of(file)
        entries = []
        for folder, folders, files in os.walk(path):
            folders.sort()
            for name in sorted([*folders, *files]):
                entry = Path(folder, name)
                mode = entry.lstat().st_mode
                content = (
                    os.readlink(entry)
                    if stat.S_ISLNK(mode)
                    else _digest_of_path(entry)
                    if stat.S_ISREG(mode)
                    else ""
                )
                entries.append(f"{entry.relative_to(path)}\0{mode}\0{content}")
        return _sha256(entries)
    except OSError as error:
        raise ConfigError(f"a recipe's files must exist and be readable: {error}") from error


def _sha256(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _rename_into_place(folder: Path, root: Path) -> None:
    try:
        os.rename(folder, root)
    except OSError:
        if not root.is_dir():  # otherwise another process was faster, with the same content
            raise


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as out:
        out.write(text)
    os.rename(out.name, path)
