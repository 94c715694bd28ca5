"""Folders of the host whose files are in a sandbox from its start.

A folder is copied once for all sandboxes of a back end, into a layer below their
writes. A program of hundreds of megabytes thus costs a sandbox neither time nor memory
until code inside changes it. Modes and symbolic links stay as they are.

Invariant: a folder that cannot be copied completely is refused, with the path of the
first file that cannot be copied; `check_folder` refuses the folder before a run.
"""

import asyncio
import functools
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollweave.sandbox.base import Sandbox
from rollweave.schema.errors import ConfigError, SandboxError
from rollweave_sandbox.layers import Copy, closing_fd, leads_out, opened_folder
from rollweave_sandbox.stage import ensure_folder

FILES = 100_000
"""Maximum number of files and links: a folder with more should be an image."""

FOLDER_BYTES = 4 << 30
"""Maximum size of all files together."""


LINK = """
import json, os, sys
for path, to in json.load(sys.stdin).items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(to, path)
"""
"""A program that makes the symbolic links of a JSON object on standard input."""


@functools.lru_cache(64)
def check_folder(folder: str) -> None:
    """Raise ConfigError for a folder that sandboxes cannot have, because it exceeds
    FILES or FOLDER_BYTES, or has an unreadable file, a link that leads out, a device, a
    socket or a FIFO.
    """
    if not os.path.isdir(folder):
        raise ConfigError(f"folder must be a folder, got {folder!r}")
    size = 0
    for count, (path, status) in enumerate(_files(folder), start=1):
        kind, depth = stat.S_IFMT(status.st_mode), os.path.relpath(path, folder).count("/")
        size += status.st_size
        if kind == stat.S_IFLNK:
            to = os.readlink(path)
            if leads_out(to, depth):
                raise ConfigError(f"folder must have only links within it, got {path} -> {to}")
        elif kind != stat.S_IFREG:
            raise ConfigError(f"folder must have only files, folders and links, got {path}")
        elif not os.access(path, os.R_OK):
            raise ConfigError(f"folder must have only files that are readable, got {path}")
        if count > FILES or size > FOLDER_BYTES:
            raise ConfigError(
                f"folder must have at most {FILES} files and {FOLDER_BYTES} bytes, {folder} has "
                f"more, as of {path} with {status.st_size} bytes: make an image of it"
            )


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and status of everything in the folder except folders."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(f"{parent}/{name}")]
        for name in sorted((*names, *links)):
            path = os.path.join(parent, name)
            yield path, os.lstat(path)


async def put_folder(sandbox: Sandbox, folder: str, at: str) -> None:
    """Write the content of `folder` to the path `at` of a sandbox that has no layers.

    Raises SandboxError.
    """
    links: dict[str, str] = {}
    for path, status in await asyncio.to_thread(lambda: list(_files(folder))):
        target = f"{at}{path.removeprefix(folder)}"
        if stat.S_ISLNK(status.st_mode):
            links[target] = os.readlink(path)
        else:
            data = await asyncio.to_thread(Path(path).read_bytes)
            await sandbox.write(target, data, mode=stat.S_IMODE(status.st_mode))
    command = ["python3", "-I", "-S", "-c", LINK]
    linked = await sandbox.exec(command, stdin=json.dumps(links).encode())
    if linked.rc:
        raise SandboxError(f"the links of {folder} cannot be made: {linked.stderr[-200:]!r}")


def copy_folder(folder: str, target: str, at: str) -> None:
    """Copy the content of `folder` to the path `at` in the folder `target`.

    Raises ConfigError as `check_folder` does, and SandboxError.
    """
    check_folder(folder)
    try:
        with (
            opened_folder(target) as top,
            closing_fd(ensure_folder(top, at)) as to,
            opened_folder(folder) as source,
        ):
            Copy(limit_bytes=FOLDER_BYTES).run(source, to)
    except OSError as error:
        raise SandboxError(f"folder {folder} cannot be copied to {target}: {error}") from error
