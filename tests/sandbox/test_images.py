"""Images by content: builds, what is taken instead of a build, peers that lie, and archives that reach outside."""

import http.client
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rollweave.sandbox.base import SandboxSpec
from rollweave.sandbox.blobs import Blobs, BlobServer
from rollweave.sandbox.images import CopyStep, Images, Mode, Recipe, read_recipe, unpack
from rollweave.schema.errors import ConfigError, SandboxError

from .worlds import image, needs, opened

pytestmark = pytest.mark.skipif(not hasattr(tarfile, "tar_filter"), reason="images need Python 3.11.4 or later")


def images_at(place: Path, *peers: str, mirror: str | None = None) -> Images:
    return Images(place, Blobs(place / "blobs", peers=peers, mirror=mirror))


def tree(place: Path) -> Path:
    folder = place / "tree"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text("#!/bin/sh\n")
    (folder / "bin" / "run").chmod(0o4755)
    (folder / "sh").symlink_to("/bin/sh")
    return folder


def test_one_content_has_one_digest_whatever_it_came_as(tmp_path: Path) -> None:
    images = images_at(tmp_path / "a")
    folder = tree(tmp_path)
    digest = images.add(folder)
    archive = tmp_path / "tree.tar.gz"
    with tarfile.open(archive, "w:gz") as out:
        out.add(folder, arcname="")
    assert images.add(archive) == digest
    root = Path(images.path(digest))
    assert (root / "bin" / "run").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(root / "sh") == "/bin/sh"
    assert images_at(tmp_path / "a").path(digest) == str(root)


class _Liar(BaseHTTPRequestHandler):
    """A peer that cuts an answer, or sends other bytes."""

    torn = True
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"x" * (10 if self.torn else 100_000))

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=[True, False])
def liar(request: pytest.FixtureRequest) -> Iterator[str]:
    class Handler(_Liar):
        torn = request.param

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_an_image_comes_from_a_peer_and_one_that_lies_is_passed_over(tmp_path: Path, liar: str) -> None:
    digest = images_at(tmp_path / "a").add(tree(tmp_path))
    with BlobServer(tmp_path / "a" / "blobs") as honest:
        assert Path(images_at(tmp_path / "b", liar, "http://127.0.0.1:1", honest.url).path(digest), "bin", "run").is_file()
        assert Path(images_at(tmp_path / "c", liar, mirror=honest.url).path(digest), "bin", "run").is_file()
    with pytest.raises(SandboxError, match="no blob"):
        images_at(tmp_path / "d", liar).path(digest)
    assert os.listdir(tmp_path / "d" / "blobs") == []
    assert os.listdir(tmp_path / "d" / "roots") == []


def test_a_torn_blob_of_ours_is_fetched_again(tmp_path: Path) -> None:
    digest = images_at(tmp_path / "a").add(tree(tmp_path))
    mine = images_at(tmp_path / "b")
    torn = tmp_path / "b" / "blobs" / digest
    torn.write_bytes((tmp_path / "a" / "blobs" / digest).read_bytes()[:-100])
    with pytest.raises(SandboxError, match="no peer to ask"):
        mine.path(digest)
    torn.write_bytes(b"")
    with BlobServer(tmp_path / "a" / "blobs") as peer:
        assert Path(images_at(tmp_path / "b", peer.url).path(digest), "sh").is_symlink()


def test_a_peer_serves_blobs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "secret").write_text("secret")
    with BlobServer(tmp_path / "blobs") as peer:
        for path in ("/blobs/sha256/../../secret", "/secret", "/blobs/sha256/%2e%2e/secret", "/blobs/sha256/" + "0" * 64, "/"):
            connection = http.client.HTTPConnection(peer.url.removeprefix("http://"))
            connection.request("GET", path)
            assert connection.getresponse().status == 404
            connection.close()


def _archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as out:
        for member, data in members:
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    "members",
    [
        [(_member("../out"), b"x")],
        [(_member("a", tarfile.SYMTYPE, "PLACE"), b""), (_member("a/out"), b"x")],
        [(_member("a", tarfile.SYMTYPE, ".."), b""), (_member("a/out"), b"x")],
        [(_member("a", tarfile.LNKTYPE, "../secret"), b""), (_member("a"), b"x")],
        [(_member("a", tarfile.LNKTYPE, "PLACE/secret"), b"")],
    ],
)
def test_an_archive_reaches_nothing_outside(tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "to").mkdir()
    for member, _ in members:
        member.linkname = member.linkname.replace("PLACE", str(tmp_path))
    archive = _archive(tmp_path / "bad.tar", *members)
    try:
        unpack(archive, tmp_path / "to")
    except SandboxError:
        pass
    else:
        raise AssertionError("it was unpacked")
    assert (tmp_path / "secret").read_text() == "secret"
    assert sorted(os.listdir(tmp_path)) == ["bad.tar", "secret", "to"]
    assert all(not below.is_file() or below.stat().st_nlink == 1 for below in (tmp_path / "to").iterdir())


def test_recipes_are_templates_and_mistakes_are_told(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "a-{{ version }}"\nbase = "/b"\n[[copy]]\nsource = "x"\ntarget = "/y"\n')
    assert read_recipe(recipe, {"version": 3}).name == "a-3"
    with pytest.raises(ConfigError, match="'version' is undefined"):
        read_recipe(recipe)
    recipe.write_text('name = "a"\nbase = "/b"\nunknown = 1\n')
    with pytest.raises(ConfigError, match="unknown"):
        read_recipe(recipe)
    with pytest.raises(ValueError, match=r"copy\.target must be"):
        Recipe(name="a", base="b", copy=(CopyStep(source="x", target="/../y"),))


async def test_a_recipe_is_built_in_a_sandbox_and_taken_when_nothing_changed(tmp_path: Path) -> None:
    needs("bubblewrap")
    base = image(tmp_path)
    (tmp_path / "lock").write_text("1")
    (tmp_path / "given").write_text("given")
    recipe = Recipe(
        name="a",
        base=base,
        run=("cat /etc/given > /project/made; rm /project/gone; echo $$ > /project/when; id -u > /project/who",),
        copy=(CopyStep(source="given", target="/etc/given"),),
        lock="lock",
    )
    images = images_at(tmp_path / "store")
    async with opened("bubblewrap") as backend:

        async def built(mode: Mode, changed: Recipe = recipe) -> str:
            return await images.build(changed, backend=backend, mode=mode, relative_to=tmp_path)

        first = await built("versioned")
        root = Path(images.path(first))
        assert (root / "project" / "made").read_text() == "given"
        assert (root / "project" / "who").read_text() == "0\n"
        assert not (root / "project" / "gone").exists()
        assert (Path(base) / "project" / "gone").exists()
        assert not (root / "run" / "rollweave" / "boot.py").exists()
        assert await built("versioned") == first
        locked = await built("lock")
        (tmp_path / "given").write_text("changed")
        assert await built("lock") == locked
        second = await built("versioned")
        assert second != first
        assert (Path(images.path(second)) / "project" / "made").read_text() == "changed"
        (tmp_path / "lock").write_text("2")
        relocked = await built("lock")
        assert relocked != locked
        sandbox = await backend.start(SandboxSpec(image=images.path(second), workdir="/project"))
        assert (await sandbox.exec(["cat", "made"])).stdout == b"changed"
        failing = Recipe(name="b", base=second, run=("echo why >&2; exit 3",))
        with pytest.raises(SandboxError, match=r"ended with status 3:\nwhy"):
            await built("scratch", failing)
    assert sorted(name for name in os.listdir(tmp_path / "store") if name.startswith(".new")) == []
