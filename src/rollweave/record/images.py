"""The images of a run: one file for each, named by the digest of its bytes.

Invariants: a file is complete before a record refers to it, and is written once,
however many records refer to it. Readers compare its bytes with its name, so they find
a damaged file. If a file is damaged or missing, only that image is lost.
"""

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from rollweave.io.disk import replace_file, sync, writing
from rollweave.io.reading import whole
from rollweave.schema.chat import Message
from rollweave.schema.media import IMAGE_BYTES, SUFFIXES, Image

UNUSED_S: Final = 86_400.0
"""Minimum seconds for which an image that no record refers to is kept, since an attempt
that is under way may need it.
"""


class ImageError(Exception):
    """An image cannot be read; the message is one line."""


class ImageStore:
    """The images in `directory`, which need not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, float] = {}
        """The names of files that exist, and when their use was last noted."""
        self._unsynced = set[Path]()

    def add(self, image: Image) -> None:
        """Write an image unless its file exists. It then survives the death of this
        process and, after `sync`, a power loss. Raises DiskError.
        """
        now = time.time()
        noted = self._known.get(image.name, -math.inf)
        if not image.data or abs(now - noted) < UNUSED_S / 2:
            return
        path = self.directory / image.name
        with writing(path):
            self.directory.mkdir(parents=True, exist_ok=True)
        if _is_complete(path, image):
            with contextlib.suppress(OSError):
                os.utime(path, (now, now))  # it is in use again
        else:
            replace_file(path, image.data, synced=False)
            self._unsynced.add(path)
        self._known[image.name] = now

    def sync(self) -> None:
        """Force all written images to the disk. Raises DiskError."""
        unsynced, self._unsynced = self._unsynced, set()
        for path in unsynced:
            with writing(path), contextlib.suppress(FileNotFoundError):
                sync(path)
        if unsynced:
            with contextlib.suppress(OSError):  # some file systems cannot sync a directory
                sync(self.directory)

    def remove_unused(self, used: Collection[str]) -> None:
        """Delete all images except those with a digest in `used`, and those written
        less than `UNUSED_S` ago. Raises DiskError.
        """
        before = time.time() - UNUSED_S
        for path in self.directory.glob("*"):
            if path.name.partition(".")[0] in used:
                continue
            with writing(path), contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()
                    self._known.pop(path.name, None)


def _is_complete(path: Path, image: Image) -> bool:
    with contextlib.suppress(OSError):
        return whole(path, len(image.data)) == image.data
    return False


def images_of(trajectories: Path) -> ImageStore:
    """Return the images of the trajectory store in this directory."""
    return ImageStore(trajectories / "images")


def read_image(directory: Path, image: Image) -> Image:
    """Return an image of the store in `directory` with its data. Raises ImageError."""
    path = directory / image.name
    try:
        found = Image.of(whole(path, IMAGE_BYTES))
    except OSError as error:
        raise ImageError(f"image {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ImageError(f"image {path} is damaged: {error}") from error
    if found.digest != image.digest:
        raise ImageError(f"image {path} is damaged: its bytes do not have this digest")
    return found


def with_images(directory: Path, messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages of a record with the data of their images. Raises ImageError."""
    return tuple(
        msgspec.structs.replace(
            message, images=tuple(read_image(directory, image) for image in message.images)
        )
        if message.images
        else message
        for message in messages
    )


def find_image(directory: Path, digest: str) -> Image:
    """Return the image with this digest, with its data. Raises ImageError, also if
    `digest` is not a SHA-256.
    """
    for kind, suffix in SUFFIXES.items():
        try:
            image = Image(digest=digest, media_type=kind)
        except ValueError as error:
            raise ImageError(str(error)) from error
        if (directory / f"{digest}.{suffix}").exists():
            return read_image(directory, image)
    raise ImageError(f"image {digest} is not in {directory}")
