"""Archives that reach outside, never end, or are truncated: the result is complete,
inside its folder and within its bounds, or nothing is left.
"""

import gzip
import io
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollweave.io import unpacking
from rollweave.io.unpacking import Bounds
from rollweave.schema.errors import SandboxError
from rollweave_sandbox.blobs import Blobs
from rollweave_sandbox.images import Images, unpack
from rollweave_sandbox.sources import DIRECTORIES
from tests.support.properties import examples
from tests.support.sandboxes import needs, no_process_left

SOURCES = [str(directory.parent) for directory in DIRECTORIES]

Member = tuple[tarfile.TarInfo, bytes]
FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def member(name: str, kind: bytes = FILE, link: str = "", data: bytes = b"") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    info.mode = 0o755 if kind == FOLDER else 0o644
    return info, data


def archive(path: Path, *members: Member) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        for info, data in members:
            out.addfile(info, io.BytesIO(data))
    return path


def beyond_path_max(*, below: str) -> list[Member]:
    """A link whose target the kernel cannot resolve in one piece, so that a check by
    name takes it for harmless.
    """
    part, members, path = "d" * 247, [], ""
    for step in "abcdefghijklmnop":
        members += [member(f"{path}{part}", FOLDER), member(f"{path}{step}", LINK, part)]
        path += f"{part}/"
    far = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    return [
        *members,
        member(far, LINK, "../" * 16),
        member("escape", LINK, f"{far}/.."),
        member(f"escape/{below}", data=b"x"),
    ]


ATTACKS: dict[str, list[Member]] = {
    "dots": [member("../out", data=b"x")],
    "dots within": [member("a/../../out", data=b"x")],
    "through a link to a place": [member("a", LINK, "PLACE"), member("a/out", data=b"x")],
    "through a link upwards": [member("a", LINK, ".."), member("a/out", data=b"x")],
    "through a link as a folder": [
        member("a", LINK, ".."),
        member("a", FOLDER),
        member("a/out", data=b"x"),
    ],
    "a folder in a link": [member("a", LINK, ".."), member("a/made", FOLDER)],
    "a link in a link": [member("a", LINK, ".."), member("a/made", LINK, "x")],
    "a hard link in a link": [
        member("f", data=b"x"),
        member("a", LINK, ".."),
        member("a/made", HARD, "f"),
    ],
    "hard link upwards": [member("a", HARD, "../secret"), member("a", data=b"x")],
    "hard link to a place": [member("a", HARD, "PLACE/secret")],
    "hard link through a link": [member("a", LINK, ".."), member("b", HARD, "a/secret")],
    "beyond PATH_MAX": beyond_path_max(below="out"),
    "a folder that becomes a link": [
        member("a", FOLDER),
        member("a", LINK, ".."),
        member("a/out", data=b"x"),
    ],
    "NUL": [member("a\0/../../out", data=b"x"), member("b", LINK, "x")],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "to").mkdir()
    return tmp_path


def untouched(place: Path) -> bool:
    secret = place / "secret"
    return sorted(os.listdir(place)) == ["bad.tar", "secret", "to"] and (
        secret.read_text(),
        secret.stat().st_nlink,
    ) == ("secret", 1)


def attack(place: Path, name: str) -> Path:
    for info, _ in ATTACKS[name]:
        info.linkname = info.linkname.replace("PLACE", str(place))
    return archive(place / "bad.tar", *ATTACKS[name])


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "NUL"])
def test_refuses_archives_that_reach_outside_and_leaves_nothing(place: Path, name: str) -> None:
    with pytest.raises(SandboxError, match=r"bad\.tar cannot be unpacked"):
        unpack(attack(place, name), place / "to", Bounds())
    assert untouched(place)
    assert os.listdir(place / "to") == []


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_unconfined_process_follows_no_link_either(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "PATH_BYTES", 1 << 20)
    _unpacked_here(attack(place, name), place / "to")
    assert untouched(place)


def _unpacked_here(path: Path, to: Path, bounds: Bounds | None = None) -> None:
    top = os.open(to, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with path.open("rb") as file:
            unpacking.unpack(file, top, bounds or Bounds())
    except (unpacking.Refused, OSError):
        pass
    finally:
        os.close(top)


NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", "", "secret"]), min_size=1, max_size=4).map(
    "/".join
)
MEMBERS = st.builds(
    member, NAMES, st.sampled_from([FILE, FOLDER, LINK, HARD]), NAMES, st.just(b"")
) | st.builds(member, NAMES, st.just(FILE), st.just(""), st.binary(max_size=9))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
@given(members=st.lists(MEMBERS, max_size=8))
def test_no_archive_changes_anything_outside(
    members: list[Member], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("unpack")
    (place / "secret").write_text("secret")
    (place / "to").mkdir()
    _unpacked_here(archive(place / "bad.tar", *members), place / "to")
    assert untouched(place)


def test_omits_members_that_raise_privileges_or_are_not_files(place: Path) -> None:
    raised, data = member("program", data=b"x")
    raised.mode = 0o7755
    raised.mtime = 1e300
    closed, _ = member("closed", FOLDER)
    closed.mode, closed.mtime = 0o2000, 1_000_000_000
    device, _ = member("device", tarfile.CHRTYPE)
    device.devmajor, device.devminor = 1, 3
    members = [
        (device, b""),
        member("fifo", tarfile.FIFOTYPE),
        (closed, b""),
        member("closed/in"),
        (raised, data),
    ]
    members += [
        member("/top/./made", data=b"abs"),
        *(member("again", data=d) for d in (b"1", b"2")),
    ]
    members += [member("hard", HARD, "program"), member("sh", LINK, "/bin/sh")]
    members += [member("soft", HARD, "sh"), member("./", FOLDER)]
    unpack(archive(place / "bad.tar", *members), place / "to", Bounds())
    to = place / "to"
    assert sorted(os.listdir(to)) == ["again", "closed", "hard", "program", "sh", "soft", "top"]
    expected = [0o1755, 0o700]
    assert [stat.S_IMODE((to / name).stat().st_mode) for name in ("program", "closed")] == expected
    assert ((to / "closed").stat().st_mtime, (to / "again").read_bytes()) == (1_000_000_000, b"2")
    assert (to / "top" / "made").read_bytes() == b"abs"
    assert os.readlink(to / "soft") == "/bin/sh"
    assert (to / "hard").stat().st_ino == (to / "program").stat().st_ino


def _sparse(size: int) -> Member:
    info, data = member("sparse", data=b"x")
    info.pax_headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": "0,1"}
    return info, data


def _zeros(path: Path, *, size: int) -> Path:
    """A file of zeros, compressed by about a thousand to one, in parts that are the
    same.
    """
    header = member("zeros")[0]
    header.size = size
    part = gzip.compress(bytes(1 << 24))
    with path.open("wb") as out:
        out.write(gzip.compress(header.tobuf()))
        for _ in range(size >> 24):
            out.write(part)
    return path


SMALL, FEW = "at most bounds.bytes = 1048576 bytes, and", "bounds.members = 10 members"
FLAT, LATE = "at most bounds.depth = 5 names", "within bounds.seconds = 0.5 s, and takes"


@pytest.mark.variants
@pytest.mark.parametrize(
    ("make_archive", "bounds", "message"),
    [
        (lambda path: _zeros(path, size=400 << 20), Bounds(bytes=1 << 20), SMALL),
        (lambda path: archive(path, _sparse(1 << 40)), Bounds(bytes=1 << 20), SMALL),
        (lambda path: archive(path, *map(member, map(str, range(11)))), Bounds(members=10), FEW),
        (lambda path: archive(path, member("/".join("abcdefghijk"))), Bounds(members=10), FEW),
        (lambda path: archive(path, member("a/b/c/d/e/f")), Bounds(depth=5), f"{FLAT}, got 6"),
        (lambda path: archive(path, member("x" * 3000)), Bounds(), "at most 2048 bytes, got 'xxx"),
        (lambda path: _zeros(path, size=1 << 40), Bounds(bytes=1 << 50, seconds=0.5), LATE),
    ],
)
def test_refuses_archives_beyond_the_bounds_and_leaves_nothing(
    tmp_path: Path, make_archive: Callable[[Path], Path], bounds: Bounds, message: str
) -> None:
    path = make_archive(tmp_path / "bomb.tar")
    images = Images(tmp_path / "images", Blobs(tmp_path / "blobs"), bounds=bounds)
    with no_process_left(), pytest.raises(SandboxError, match=message) as refused:
        images.add(path)
    assert str(path) in str(refused.value)
    assert sorted(os.listdir(tmp_path / "images")) == ["built", "roots"]
    assert os.listdir(tmp_path / "images" / "roots") == os.listdir(tmp_path / "blobs") == []


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (Bounds(bytes=50_000), "at most bounds.bytes = 50000 bytes, and"),
        (Bounds(members=3), "at most bounds.members = 3 members"),
        (Bounds(depth=2), "at most bounds.depth = 2 names, got 3"),
    ],
)
def test_does_not_pack_a_folder_that_could_not_be_unpacked(
    tmp_path: Path, bounds: Bounds, message: str
) -> None:
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    for name in ("c", "d"):
        (tmp_path / "tree" / "a" / "b" / name).write_bytes(bytes(25_000))
    images = Images(tmp_path / "images", Blobs(tmp_path / "blobs"), bounds=bounds)
    with pytest.raises(SandboxError, match=message):
        images.add(tmp_path / "tree")
    assert os.listdir(tmp_path / "blobs") == []
    enough = Bounds(bytes=61_440, members=4, depth=3)
    images = Images(tmp_path / "images", Blobs(tmp_path / "blobs"), bounds=enough)
    wanted = ["c", "d"]
    assert sorted(os.listdir(Path(images.path(images.add(tmp_path / "tree")), "a", "b"))) == wanted


def test_refuses_invalid_bounds() -> None:
    for bounds in ({"bytes": 0}, {"members": -1}, {"depth": 0}, {"seconds": float("inf")}):
        with pytest.raises(ValueError, match="must be positive and finite"):
            Bounds(**bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", ["", ":gz", ":bz2", ":xz"])
def test_refuses_truncated_archives_only(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "whole.tar"
    with tarfile.open(path, f"w{compression}") as out:  # type: ignore[call-overload]
        for info, data in (member(name, data=os.urandom(40_000)) for name in "ab"):
            out.addfile(info, io.BytesIO(data))
    (tmp_path / "to").mkdir()
    unpack(path, tmp_path / "to", Bounds())
    assert [(tmp_path / "to" / name).stat().st_size for name in ("a", "b")] == [40_000, 40_000]
    content = path.read_bytes()
    torn = [b"", b"no archive" * 100, content[:20_000], content[:60_000]]
    torn += [content[: 40_960 + 100] if not compression else content[:-9]]
    for number, data in enumerate(torn):
        path.write_bytes(data)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(SandboxError, match="cannot be unpacked"):
            unpack(path, tmp_path / str(number), Bounds())
        assert os.listdir(tmp_path / str(number)) == []
    with pytest.raises(SandboxError, match="No such file"):
        unpack(tmp_path / "missing", tmp_path / "to", Bounds())


SAYING = """
import os, signal, sys
from rollweave_sandbox import confined_unpacking, kernel

def read(archive, top, bounds):
    {code}

confined_unpacking.unpack = read
confined_unpacking.main()
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: os.write(1, b'x' * 4096)", "unpacked: x{1000}$"),
        ("os.kill(os.getpid(), signal.SIGSEGV); os._exit(9)", "ended without a message"),
        ("kernel.die_with_parent(0); os.setsid(); signal.pause()", "within bounds.seconds = 1 s"),
        ("os.close(1); kernel.die_with_parent(0); os.setsid(); signal.pause()", "within bounds.s"),
        ("raise OSError('\\udcff')", "OSError: .udcff"),
    ],
)
def test_bounds_the_messages_of_a_compromised_reader(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    def started(argv: list[str], **more: object) -> "subprocess.Popen[bytes]":
        path = f"import sys; sys.path[:0] = {SOURCES!r}"
        return popen([*argv[:4], f"{path}\n{SAYING.format(code=code)}", *argv[5:]], **more)  # type: ignore[call-overload,no-any-return]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    with no_process_left(), pytest.raises(SandboxError, match=message):
        unpack(archive(place / "bad.tar", member("a")), place / "to", Bounds(seconds=1.0))


CONFINED = """
import json, os, socket, sys
sys.path[:0] = {sources!r}
from rollweave_sandbox import kernel
from rollweave_sandbox.confined_unpacking import confine

top = confine({folder!r}, os.getppid())

def fails(call, *args):
    try:
        call(*args)
    except OSError:
        return True
    return False

seen = {{"root": os.listdir("/"), "pid": os.getpid(), "top": os.listdir(top)}}
seen["passwd"] = fails(open, "/etc/passwd")
seen["proc"] = fails(os.listdir, "/proc")
seen["chown"] = fails(os.chown, "/in", 12345, 12345) if {root} else True
seen["mount"] = fails(kernel.mount, "tmpfs", "/", "tmpfs")
seen["unshare"] = fails(kernel.unshare, kernel.CLONE_NEWUSER)
seen["network"] = fails(socket.socket().connect, ("127.0.0.1", {port}))
os.write(1, json.dumps(seen).encode())
os._exit(0)
"""


def test_the_reading_process_can_access_only_its_folder(tmp_path: Path) -> None:
    needs("bubblewrap")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "in").write_text("in")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = CONFINED.format(
            sources=SOURCES, folder=str(tmp_path / "to"), port=port, root=os.getuid() == 0
        )
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True, timeout=60
        )
    names = ("passwd", "proc", "chown", "mount", "unshare", "network")
    assert json.loads(ran.stdout) == {
        "root": ["in"],
        "pid": 1,
        "top": ["in"],
        **dict.fromkeys(names, True),
    }
