"""Images from the cache, other hosts, the mirror and a build: sources that fail,
requests at the same time, and what stays in the cache.
"""

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from rollweave.core.policy import images as policy
from rollweave.sandbox.base import Backend
from rollweave.schema.errors import ConfigError, ImageError
from rollweave.schema.images import GrantImage, ImagePeer, ImageWait
from rollweave_sandbox import image_supply
from rollweave_sandbox.blobs import ROUTE, BlobServer, digest_of
from rollweave_sandbox.image_cache import ImageCache
from rollweave_sandbox.image_supply import BUILT, ImageSupply

ROOMY = 1 << 40


def no_backend() -> Backend:
    """The recipes here run no commands."""
    return cast(Backend, None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(image_supply, "LOCK_S", 0.01)


class Granting:
    """An exchange with the answers of the test."""

    def __init__(self, *grants: GrantImage) -> None:
        self.grants = list(grants)
        self.reports: list[tuple[str, ...]] = []

    async def ask(self, key: str, *, alone: bool) -> GrantImage:
        self.reports.append(("ask", "alone" if alone else "first"))
        return self.grants.pop(0) if self.grants else GrantImage(key=key, origin=True)

    def hold(self, key: str, digest: str) -> None:
        self.reports.append(("hold", digest))

    def miss(self, key: str) -> None:
        self.reports.append(("miss",))


@contextlib.asynccontextmanager
async def supply_at(place: Path, *, limit: int = ROOMY, **options: Any) -> Any:
    made = ImageSupply(ImageCache(place, limit_bytes=limit), **options)
    try:
        yield made
    finally:
        await made.close()


def archive_of(place: Path, text: str = "given", *, nbytes: int = 0) -> tuple[Path, str]:
    """Write an archive with one file, and return it with its digest."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "word").write_text(text)
    if nbytes:
        (place / "bulk").write_bytes(os.urandom(nbytes))
    archive = place / "given.tar"
    with tarfile.open(archive, "w") as out:
        out.add(place / "word", arcname="etc/word")
        if nbytes:
            out.add(place / "bulk", arcname="bulk")
    with archive.open("rb") as file:
        return archive, digest_of(file)


def mirror_of(place: Path, *archives: tuple[Path, str]) -> Path:
    """Return a mirror directory with these archives."""
    (place / ROUTE.strip("/")).mkdir(parents=True, exist_ok=True)
    for archive, digest in archives:
        (Path(f"{place}{ROUTE}{digest}")).write_bytes(archive.read_bytes())
    return place


@contextlib.contextmanager
def over_http(folder: Path, *, cut: int | None = None) -> Iterator[str]:
    """Serve a folder; with `cut` each answer ends after so many bytes."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def copyfile(self, source: Any, outputfile: Any) -> None:
            outputfile.write(source.read() if cut is None else source.read(cut))

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def peers(digest: str, *urls: str, token: str = "t") -> GrantImage:
    named = (ImagePeer(host=f"h{n}", url=url, token=token) for n, url in enumerate(urls))
    return GrantImage(key=digest, digest=digest, peers=tuple(named))


def damage(mirror: Path, archive: Path, digest: str) -> None:
    """Let the mirror have other bytes."""
    Path(f"{mirror}{ROUTE}{digest}").write_bytes(archive.read_bytes()[:-1] + b"x")


def text_of(path: str) -> str:
    return Path(path).read_text()


def word(path: str) -> str:
    return text_of(f"{path}/etc/word")


async def taken(supply: ImageSupply, image: str) -> str:
    lease = await supply.take(image, no_backend)
    return word(lease.path)


@pytest.mark.parametrize("kind", ["peer", "http mirror", "directory mirror", "file"])
async def test_every_source_gives_the_same_image(tmp_path: Path, kind: str) -> None:
    given = archive, digest = archive_of(tmp_path / "given")
    mirror = mirror_of(tmp_path / "mirror", given)
    folder = Path(f"{mirror}{ROUTE}")
    async with contextlib.AsyncExitStack() as stack:
        options: dict[str, Any] = {}
        if kind == "peer":
            server = stack.enter_context(BlobServer(folder, token="t"))
            options["exchange"] = Granting(peers(digest, server.url))
        elif kind == "http mirror":
            options["mirror"] = stack.enter_context(over_http(mirror))
        elif kind == "directory mirror":
            options["mirror"] = str(mirror)
        supply = await stack.enter_async_context(supply_at(tmp_path / "cache", **options))
        image = str(archive) if kind == "file" else f"sha256:{digest}"
        assert await supply.find(image) is None
        assert await taken(supply, image) == "given"
    async with supply_at(tmp_path / "cache") as later:  # without any source
        assert await taken(later, f"sha256:{digest}") == "given"


async def test_sources_that_fail_cost_time_and_never_give_other_bytes(tmp_path: Path) -> None:
    """A peer asks for its token, one sends half, one other bytes; then the mirror."""
    given = archive, digest = archive_of(tmp_path / "given", nbytes=1 << 16)
    good, bad = mirror_of(tmp_path / "good", given), mirror_of(tmp_path / "bad")
    damage(bad, archive, digest)
    with (
        BlobServer(Path(f"{good}{ROUTE}"), token="other") as closed,
        over_http(good, cut=1000) as half,
        over_http(bad) as wrong,
    ):
        grant = peers(digest, "http://127.0.0.1:1", closed.url, half, wrong)
        exchange = Granting(*[grant] * 9)
        async with supply_at(tmp_path / "cache", exchange=exchange) as supply:
            with pytest.raises(ImageError) as failed:
                await supply.take(f"sha256:{digest}", no_backend)
        rounds = [("ask", "first"), ("miss",), *[("ask", "alone"), ("miss",)] * 4]
        assert exchange.reports == rounds
        reasons = str(failed.value).split("; ")
        assert "Connection refused" in reasons[0]
        assert "401" in reasons[1]
        assert "sent other bytes (1000," in reasons[2]
        assert "sent other bytes" in reasons[3]
        assert os.listdir(tmp_path / "cache" / "blobs") == []
        assert os.listdir(tmp_path / "cache" / "roots") == []
        exchange = Granting(grant)
        async with supply_at(tmp_path / "c", exchange=exchange, mirror=str(good)) as supply:
            assert await taken(supply, f"sha256:{digest}") == "given"
        assert exchange.reports == [("ask", "first"), ("hold", digest)]


DYING = """
import socket, sys, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    sock.recv(1 << 16)
    sock.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4000000\\r\\n\\r\\n" + b"x" * 1_000_000)
    time.sleep(600)
"""


async def test_a_peer_that_is_killed_in_the_middle_is_replaced_by_the_mirror(
    tmp_path: Path,
) -> None:
    given = _, digest = archive_of(tmp_path / "given")
    mirror = str(mirror_of(tmp_path / "mirror", given))
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DYING, stdout=asyncio.subprocess.PIPE
    )
    assert peer.stdout is not None
    exchange = Granting(peers(digest, f"http://127.0.0.1:{int(await peer.stdout.readline())}"))
    async with supply_at(tmp_path / "cache", exchange=exchange, mirror=mirror) as supply:
        taking = asyncio.create_task(taken(supply, f"sha256:{digest}"))
        (wait,) = await received(supply, "1 of 4 MB")
        assert wait.what == "fetching from host h0, 1 of 4 MB"
        assert wait.image == f"sha256:{digest[:12]}…"
        peer.kill()
        assert await taking == "given"
    await peer.wait()


async def received(supply: ImageSupply, text: str) -> tuple[ImageWait, ...]:
    """Return the waits as soon as one of them says this."""
    async with asyncio.timeout(60):
        while not any(text in wait.what for wait in supply.waits()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return supply.waits()


async def test_damaged_bytes_of_the_cache_are_fetched_again(tmp_path: Path) -> None:
    given = _, digest = archive_of(tmp_path / "given")
    place, mirror = tmp_path / "cache", str(mirror_of(tmp_path / "mirror", given))
    async with supply_at(place, mirror=mirror) as supply:
        await taken(supply, f"sha256:{digest}")
    (place / "blobs" / digest).write_bytes(b"x")
    os.rename(place / "roots" / digest, tmp_path / "lost")
    async with supply_at(place, mirror=mirror) as supply:
        assert await taken(supply, f"sha256:{digest}") == "given"


def recipe(folder: Path, **fields: str) -> Path:
    """Write a recipe that copies a file over the base."""
    archive_of(folder)
    (folder / "added").write_text("added")
    file = folder / "recipe.toml"
    lines = {"name": '"r"', "base": '"given.tar"', **fields}
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    file.write_text(f'{text}[[copy]]\nsource = "added"\ntarget = "/etc/word"\n')
    return file


async def test_a_recipe_is_built_once_and_given_to_a_mirror_directory(tmp_path: Path) -> None:
    file, mirror = recipe(tmp_path / "given"), tmp_path / "mirror"
    mirror.mkdir()
    async with supply_at(tmp_path / "a", mirror=str(mirror)) as supply:
        assert await taken(supply, str(file)) == "added"
    (key,) = os.listdir(f"{mirror}{BUILT}")
    digest = text_of(f"{mirror}{BUILT}{key}")
    # with the same files, and no base to build from
    with over_http(mirror) as url:
        exchange = Granting()
        async with supply_at(tmp_path / "b", mirror=url, exchange=exchange) as supply:
            assert await taken(supply, str(file)) == "added"
        assert exchange.reports == [("ask", "first"), ("hold", digest)]
    (tmp_path / "given" / "added").write_text("another text")
    async with supply_at(tmp_path / "a") as supply:
        assert await taken(supply, str(file)) == "another text"


async def test_requests_at_the_same_time_make_one_fetch(tmp_path: Path) -> None:
    """The requests come from one process, and from two of a host."""
    given = _, digest = archive_of(tmp_path / "given")
    exchange, mirror = Granting(), str(mirror_of(tmp_path / "mirror", given))
    options: dict[str, Any] = {"exchange": exchange, "mirror": mirror}
    async with (
        supply_at(tmp_path / "cache", **options) as one,
        supply_at(tmp_path / "cache", **options) as other,
    ):
        requests = [taken(supply, f"sha256:{digest}") for supply in (one, other, one, other)]
        assert await asyncio.gather(*requests) == ["given"] * 4
        assert one.waits() == other.waits() == ()
    assert [what for what, *_ in exchange.reports].count("ask") == 1


HOLDS = """
import sys
from pathlib import Path
from rollweave_sandbox.image_cache import ImageCache
assert ImageCache(Path(sys.argv[1]), limit_bytes=1 << 40).find(sys.argv[2])
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_elsewhere(place: Path, digest: str) -> Iterator[None]:
    """Hold an image in another process, which is killed."""
    command = [sys.executable, "-c", HOLDS, str(place), digest]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.extended
async def test_what_was_not_used_for_longest_makes_room_unless_it_is_in_use(tmp_path: Path) -> None:
    size, place = 1 << 18, tmp_path / "cache"
    given = [archive_of(tmp_path / f"{n}", f"{n}", nbytes=size) for n in range(4)]
    images = [f"sha256:{digest}" for _, digest in given]
    mirror = str(mirror_of(tmp_path / "mirror", *given))

    def kept() -> list[int]:
        roots, blobs = set(os.listdir(place / "roots")), set(os.listdir(place / "blobs"))
        assert roots == blobs
        return [n for n, (_, digest) in enumerate(given) if digest in roots]

    async with supply_at(place, limit=5 * size, mirror=mirror) as supply:  # room for two
        leases = [await supply.take(image, no_backend) for image in images[:2]]
        with pytest.raises(ImageError, match=r"the cache of images must have room for 0\.0 GB"):
            await supply.take(images[2], no_backend)
        assert kept() == [0, 1]
        leases[1].close()
        assert await taken(supply, images[2]) == "2"
        assert kept() == [0, 2]
        assert word(leases[0].path) == "0"
    with held_elsewhere(place, given[0][1]):
        async with supply_at(place, limit=5 * size, mirror=mirror) as supply:
            assert await taken(supply, images[3]) == "3"
            assert kept() == [0, 3]
    async with supply_at(place, limit=5 * size, mirror=mirror) as supply:
        assert await taken(supply, images[1]) == "1"
        assert kept() == [1, 3]


async def test_a_full_disk_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _, digest = archive_of(tmp_path / "given")
    mirror, exchange = str(mirror_of(tmp_path / "mirror", given)), Granting()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    async with supply_at(tmp_path / "cache", mirror=mirror, exchange=exchange) as supply:
        with pytest.raises(ImageError, match=r"cannot write to .*: No space left on device"):
            await supply.take(f"sha256:{digest}", no_backend)
    assert [what for what, *_ in exchange.reports] == ["ask", "miss"]
    assert os.listdir(tmp_path / "cache" / "blobs") == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("sha256:12", "64 hexadecimal digits after sha256:, got 'sha256:12'"),
        ("missing.toml", r"a readable recipe, got .*/missing.toml"),
        ("missing.tar", "missing.tar: No such file or directory"),
        ("wrong.toml", r"got 'bass' \(did you mean base\?\)"),
        ("noise.tar", "cannot be unpacked"),
    ],
)
async def test_names_that_no_image_can_have_are_errors(
    tmp_path: Path, image: str, message: str
) -> None:
    (tmp_path / "wrong.toml").write_text('name = "a"\nbass = "b"\n')
    (tmp_path / "noise.tar").write_bytes(b"x" * 2000)
    async with supply_at(tmp_path / "cache", here=tmp_path) as supply:
        with pytest.raises((ConfigError, ImageError), match=message):
            await supply.take(image, no_backend)
        assert os.listdir(tmp_path / "cache" / "roots") == []
