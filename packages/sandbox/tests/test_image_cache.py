"""The cache of images as a machine: two processes of a host hold, obtain and release
images, make room and are killed; a list of last uses says what must be there.
"""

import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.io.locked_folders import unfinished_folder
from rollweave.schema.errors import ImageError
from rollweave_sandbox.blobs import ROUTE, Cancellation, Source
from rollweave_sandbox.image_cache import ImageCache, Lease
from tests.support.properties import checked_every, examples

KB = 1 << 10
SIZES = [16 * KB, 48 * KB, 64 * KB]
UNPACKED = [16 * KB, 48 * KB, 128 * KB]
"""Bytes of the archives, and of the images that are in them, which also have a
folder.
"""
LIMIT = 238 * KB
SLACK = 6 * KB
"""Bytes by which a file system may count an image otherwise: no sum is nearer to the
limit.
"""


class Machine:
    """The caches of two processes in one folder, and what is to be in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.archives: list[Path] = []
        for number, size in enumerate(SIZES):
            content = random.Random(number).randbytes(size)
            path = place.parent / f"mirror{ROUTE}{hashlib.sha256(content).hexdigest()}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self.archives.append(path)
        self.caches = [self.opened(), self.opened()]
        self.leases: list[list[Lease]] = [[], []]
        self.held: list[Counter[str]] = [Counter(), Counter()]
        self.dropped: list[list[str]] = [[], []]
        self.last_use: dict[str, int] = {}
        self.present: dict[str, int] = {}
        self.now = 0

    def opened(self) -> ImageCache:
        """Open a cache that unpacks without another process."""
        cache = ImageCache(self.place, limit_bytes=LIMIT)

        def path(digest: str, **_: object) -> str:
            root = cache._root(digest)
            if not root.is_dir():
                files = [file for file in self.place.rglob("*") if file.is_file()]
                nbytes = sum(file.stat().st_size for file in files)
                room = LIMIT - nbytes - cache.archive(digest).stat().st_size
                assert room >= 0, "the cache never has more than its limit"
                with unfinished_folder(self.place) as new:
                    (new / "etc").mkdir()
                    content = unpacked(cache.archive(digest).read_bytes())
                    (new / "etc" / "file").write_bytes(content)
                    os.rename(new, root)
            return str(root)

        cache.images.path = path  # type: ignore[method-assign]
        return cache

    # What is to happen.

    def touch(self, digest: str) -> None:
        self.last_use[digest] = self.now

    def hold(self, which: int, digest: str) -> None:
        if not self.held[which][digest]:
            self.touch(digest)
        self.held[which][digest] += 1

    def release(self, which: int, digest: str) -> None:
        self.held[which][digest] -= 1
        if not self.held[which][digest]:
            self.touch(digest)

    def release_dropped(self, which: int) -> None:
        for digest in self.dropped[which]:
            self.release(which, digest)
        self.dropped[which].clear()

    def remove(self, digest: str) -> bool:
        if any(held[digest] for held in self.held):
            return False
        self.present.pop(digest, None)
        self.last_use.pop(digest, None)
        return True

    def make_room(self, which: int, needed: int) -> bool:
        self.release_dropped(which)
        for digest in sorted(self.last_use, key=lambda one: (self.last_use[one], one)):
            if sum(self.present.values()) + needed <= LIMIT:
                break
            self.remove(digest)
        return sum(self.present.values()) + needed <= LIMIT

    def obtain(self, which: int, digest: str, size: int) -> bool:
        self.hold(which, digest)
        if self.make_room(which, 2 * size):
            self.present[digest] = size + UNPACKED[SIZES.index(size)] + 4 * KB
            self.touch(digest)
            if self.make_room(which, 0):
                self.release(which, digest)
                return True
        self.release(which, digest)
        self.remove(digest)
        return False

    # What happens.

    def locked(self, remove: Callable[..., None]) -> Callable[..., None]:
        """Return the function; it may remove a part of an image only under its lock."""

        def removing(path: Any, *more: Any, **options: Any) -> None:
            if (part := Path(path)).parent.name in ("roots", "blobs") and part.name[0] != ".":
                with open(self.place / "used" / part.name) as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            remove(path, *more, **options)

        return removing

    def step(self, what: str, which: int, number: int) -> None:
        """Act as process `which`; the one that has a lease closes or copies it, and two
        images of three that are asked for are there.
        """
        self.now += 1
        if what in ("close", "copy") and not self.leases[which]:
            which = 1 - which
        here = [at for at, path in enumerate(self.archives) if path.name in self.present]
        if what == "find" and number and here:
            number = here[number % len(here)]
        cache, leases, archive = self.caches[which], self.leases[which], self.archives[number]
        digest, size = archive.name, SIZES[number]
        match what:
            case "find":
                lease = cache.find(digest)
                self.release_dropped(which)
                self.hold(which, digest)
                assert (lease is not None) == (digest in self.present)
                if lease is not None:
                    leases.append(lease)
                else:
                    self.release(which, digest)
            case "obtain" if digest not in self.present:
                fetched = bool(self.now % 2)
                assert obtained(cache, archive, fetched) == self.obtain(which, digest, size)
            case "close" | "copy" if leases:
                lease = leases[number % len(leases)]
                if what == "copy":
                    leases.append(lease.copy())
                    self.hold(which, lease._digest)
                else:
                    lease.close()
                    lease.close()  # a second time, which does nothing
                    leases.remove(lease)
                    self.dropped[which].append(lease._digest)
            case "room":
                fits = self.make_room(which, size)
                text = r"the images in use and the next one, got 0\.000243"
                with contextlib.nullcontext() if fits else pytest.raises(ImageError, match=text):
                    cache.make_room(size)
            case "end" | "kill":
                for digest in +self.held[which] if what == "end" else ():
                    self.touch(digest)
                if what == "kill":
                    for fd, _ in cache._held.values():
                        os.close(fd)
                else:
                    cache.close()
                self.caches[which], self.leases[which] = self.opened(), []
                self.held[which].clear()
                self.dropped[which].clear()
        self.check()

    def check(self) -> None:
        """Compare the folder; stamp what was used in this step with its number."""
        used = self.place / "used"
        touched = {file.name for file in used.iterdir() if file.stat().st_mtime_ns > 1_000_000}
        assert touched == {one for one, at in self.last_use.items() if at == self.now}
        for name in touched:
            os.utime(used / name, ns=(self.now, self.now))
        assert {file.name for file in used.iterdir()} == set(self.last_use)
        assert set(os.listdir(self.place / "roots")) == set(self.present)
        assert set(os.listdir(self.place / "blobs")) == set(self.present)
        for digest, size in self.present.items():
            assert abs(int((used / digest).read_text()) - size) <= SLACK
        assert not list(self.place.glob(".new*"))
        for leases in self.leases:
            assert all(Path(lease.path, "etc/file").is_file() for lease in leases)


def unpacked(archive: bytes) -> bytes:
    """Return the file of an image."""
    return archive * (UNPACKED[SIZES.index(len(archive))] // len(archive))


def obtained(cache: ImageCache, archive: Path, fetched: bool = False) -> bool:
    """Obtain an image as `ImageSupply` does, from a file or a mirror."""
    digest = archive.name
    cache.hold(digest)
    try:
        if fetched:
            mirror = Source(url=str(archive).removesuffix(f"{ROUTE}{digest}"))
            assert cache.fetch(digest, mirror, lambda *_: None, Cancellation()) is None
        else:
            cache.add(archive, digest)
        cache.unpack(digest, Cancellation())
    except ImageError:
        cache.remove(digest)
        return False
    cache.release(digest)
    return True


ACTIONS = {"find": 5, "obtain": 5, "close": 4, "copy": 3, "room": 2, "end": 1, "kill": 1}
"""What happens, and how often."""


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 1 << 32))
def test_the_least_recently_used_images_make_room_for_others(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    actions = rng.choices(list(ACTIONS), list(ACTIONS.values()), k=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        machine = Machine(tmp_path_factory.mktemp("images") / "cache")
        for name in ("rename", "unlink"):
            patch.setattr(os, name, machine.locked(getattr(os, name)))
        for action in actions:
            machine.step(action, rng.randrange(2), rng.randrange(len(SIZES)))
        for which in (0, 1):
            machine.step("end", which, 0)
        machine.caches[0].make_room(LIMIT)
        for name in ("roots", "blobs"):
            assert os.listdir(machine.place / name) == [], "all room can be had"


CALLS = ("open", "pwrite", "rename", "unlink", "utime", "mkdir", "rmdir", "chmod", "fsync")
"""The functions of `os` by which the cache changes its folder."""


def killed_at(number: int) -> None:
    """End this process at the call `number` of these functions."""
    left = number

    def counted(call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.extended
def test_a_process_killed_at_any_call_leaves_no_part_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes room for an image and obtains it, while another process holds one. The
    next process can have all room but that of the image in use.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)
    machine = Machine(tmp_path / "before")
    held, other, new = machine.archives
    assert obtained(machine.caches[0], held)
    assert obtained(machine.caches[0], other)
    # of a build that was killed
    (machine.place / "blobs" / ("f" * 64)).write_bytes(bytes(32 * KB))
    killed = 0
    for number in range(1, 300, checked_every()):
        place = machine.place = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "before", place)
        holder = machine.opened()
        lease = holder.find(held.name)
        assert lease is not None
        if (child := os.fork()) == 0:
            cache = machine.opened()
            killed_at(number)
            obtained(cache, new)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        later = machine.opened()
        assert not list(place.glob(".new*")), "leftovers are gone"
        for archive in machine.archives:
            root = place / "roots" / archive.name
            if root.exists():
                content = unpacked(archive.read_bytes())
                assert (root / "etc" / "file").read_bytes() == content
        later.make_room(LIMIT - 36 * KB - SLACK)
        assert os.listdir(place / "blobs") == os.listdir(place / "roots") == [held.name]
        assert Path(lease.path, "etc/file").exists()
        holder.close()
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    assert 5 < killed * checked_every() < 99 + checked_every()
