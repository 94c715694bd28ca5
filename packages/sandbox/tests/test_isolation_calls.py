"""Golden lists of the system calls that isolate a sandbox, so that every change is
visible in review. Nothing is mounted, and no namespace is entered.
"""

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave_sandbox import kernel, stage, zygote_process
from rollweave_sandbox.stage import Root

MACHINE = os.uname().machine
QUIET, BIND, READ_ONLY = 0x2 | 0x8, 0x1000, 0x20 | 0x1000 | 0x1


class Recorder:
    """Notes calls; arguments that are descriptors by name `fd` are noted as paths."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._patch = patch

    def note(
        self, where: object, *names: str, result: Callable[..., Any] = lambda *_: None
    ) -> None:
        def noted(name: str) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                self.calls.append((name, *map(_plain, args), *named.values()))
                return result(*args)

            return call

        for name in names:
            self._patch.setattr(where, name, noted(name))

    def taken(self) -> list[tuple[Any, ...]]:
        taken, self.calls = self.calls, []
        return taken


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, ctypes._SimpleCData) else value
    if isinstance(value, str) and value.startswith("/proc/self/fd/"):
        return os.readlink(value)
    return value


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    with monkeypatch.context() as patch:
        yield Recorder(patch)


def test_kernel_calls_have_the_kernels_numbers(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    libc = SimpleNamespace()
    monkeypatch.setattr(kernel, "_libc", libc)
    for name in ("unshare", "mount", "umount2", "prctl", "syscall"):
        setattr(libc, name, None)
    opened = lambda number, *_: os.open("/", os.O_PATH) if _plain(number) == 428 else 0  # noqa: E731
    recorder.note(libc, "unshare", "mount", "umount2", "prctl", "syscall", result=opened)
    recorder.note(os, "chdir")
    descriptors = sorted(os.listdir("/proc/self/fd"))
    kernel.unshare(5)
    kernel.mount("a", "b")
    kernel.mount("a", "b", "c", 3, "d")
    kernel.unmount("a")
    kernel.pivot_root("/new")
    kernel.set_hostname("bóx")
    for number in (kernel.die_with_parent, kernel.set_dumpable):
        number(9)
    kernel.adopt_orphans()
    kernel.no_new_privileges()
    numbers = {"x86_64": (155, 170), "aarch64": (41, 161)}[MACHINE]
    assert recorder.taken() == [
        ("unshare", 5),
        ("mount", b"a", b"b", None, 0, None),
        ("mount", b"a", b"b", b"c", 3, b"d"),
        ("umount2", b"a", 0),
        ("chdir", "/new"),
        ("syscall", numbers[0], b".", b"."),
        ("umount2", b".", 2),
        ("chdir", "/"),
        ("syscall", numbers[1], "bóx".encode(), 4),
        *[("prctl", option, 9, 0, 0, 0) for option in (1, 4)],
        *[("prctl", option, 1, 0, 0, 0) for option in (36, 38)],
    ]
    kernel.bind_read_only("/s", 7)
    kernel.bind_as("/s", str(tmp_path), 9)
    calls = recorder.taken()
    tree, target = calls[1][2], calls[5][4]
    for at, to, flags, namespace, deep in ((0, 7, 7, 0, 0x8000), (3, target, 0x100001, 9, 0)):
        attributes = struct.pack("=QQQQ", flags, 0, 0, namespace)
        assert calls[at : at + 3] == [
            ("syscall", 428, -100, b"/s", 1 | deep),
            ("syscall", 442, calls[at + 1][2], b"", 0x1000 | deep, attributes, 32),
            ("syscall", 429, calls[at + 1][2], b"", to, b"", 0x44),
        ]
    assert tree > 2 and sorted(os.listdir("/proc/self/fd")) == descriptors
    kernel.drop_capabilities()
    assert recorder.taken() == [
        *[("prctl", 24, number, 0, 0, 0) for number in range(64)],
        (
            "syscall",
            {"x86_64": 126, "aarch64": 91}[MACHINE],
            struct.pack("=Ii", 0x20080522, 0),
            bytes(24),
        ),
    ]
    kernel.load_filter(bytes(24))
    ((*call, program, last, least),) = recorder.taken()
    assert (call, last, least) == (["prctl", 22, 2], 0, 0)
    assert struct.unpack_from("@HP", program)[0] == 3
    recorder.note(libc, "prctl", result=lambda *_: -1)
    kernel.drop_capabilities()
    assert [name for name, *_ in recorder.taken()] == ["prctl", "syscall"]
    ctypes.set_errno(errno.EPERM)
    with pytest.raises(PermissionError, match="prctl 36: Operation not permitted"):
        kernel.adopt_orphans()


def test_kernel_devices_are_few_and_limited(recorder: Recorder, tmp_path: Path) -> None:
    recorder.note(kernel, "mount")
    kernel.mount_devices(str(tmp_path))
    names = ("null", "zero", "full", "random", "urandom", "tty")
    assert recorder.taken() == [
        ("mount", "tmpfs", f"{tmp_path}", "tmpfs", QUIET, "size=64k,nr_inodes=64,mode=0755"),
        *[("mount", f"/dev/{name}", f"{tmp_path}/{name}", BIND) for name in names],
        ("mount", "devpts", f"{tmp_path}/pts", "devpts", QUIET)
        + ("newinstance,ptmxmode=0666,mode=0620,max=32",),
        ("mount", "tmpfs", f"{tmp_path}/shm", "tmpfs", 0x2 | 0x4)
        + ("size=67108864,nr_inodes=8192,mode=1777",),
        ("mount", "none", f"{tmp_path}", READ_ONLY | QUIET),
    ]
    assert os.readlink(tmp_path / "ptmx") == "pts/ptmx"
    assert (tmp_path / "pts").is_dir()


@pytest.mark.parametrize("way", ["root", "user", "copied"])
def test_stage_mounts_what_the_root_names(way: str, recorder: Recorder, tmp_path: Path) -> None:
    uid, place = None if way == "user" else os.getuid(), tmp_path / "place"
    upper, lower = tmp_path / "new", tmp_path / "old"
    for folder in (place, upper, lower):
        folder.mkdir()
    for folder, name in ((upper, "a"), (lower, "a"), (lower, "b")):
        (folder / name).write_text(folder.name)

    def refuse(*args: Any) -> None:
        if way == "copied" and args[2:3] == ("overlay",):
            raise OSError(errno.EINVAL, "no overlay")

    recorder.note(kernel, "unshare")
    recorder.note(kernel, "mount", result=refuse)
    recorder.note(kernel, "bind_as")
    recorder.note(kernel, "bind_read_only", result=lambda *_: None)
    recorder.note(stage, "enter_user_namespace", "_bound_watchers")
    recorder.note(stage, "mount_devices", result=lambda dev: os.rmdir(dev))
    recorder.note(stage, "_mapping", result=lambda *_: os.open("/", os.O_PATH))
    root = Root(
        layers=[str(upper), str(lower)],
        binds=[("/host/deep", "/x/y/z"), ("/host/x", "/x")],
        links=[("to", "/x/link")],
        files={"/etc/one": "text"},
        folders=["/home/agent", "/x/link/below"],
        hidden=["/x/y"],
        disk_bytes=8192 * 20_000,
    )
    writes, has_root = stage.stage(root, str(place), uid)
    calls, top = recorder.taken(), f"{place}/root"
    seen = os.readlink(f"/proc/self/fd/{writes}")
    os.close(writes)
    copied = way == "copied"
    assert (seen, has_root) == (f"{place}/{'root' if copied else 'upper'}", copied)
    flags = {"root": "metacopy=off,redirect_dir=off", "user": "userxattr"}
    options = f"lowerdir={place}/l0:{place}/l1,upperdir={place}/upper,workdir={place}/work"
    options += f",index=off,xino=off,{flags['user' if way == 'user' else 'root']}"
    expected: list[tuple[Any, ...]] = [("unshare", 0x20000)]
    if way == "user":
        expected = [("enter_user_namespace", 0x20000), ("_bound_watchers",)]
    size = "size=163840000,nr_inodes=20000,mode=0755"
    expected += [
        ("mount", "none", "/", 0x4000 | 0x40000),
        ("mount", "tmpfs", str(place), "tmpfs", 0x2 | 0x4, size),
    ]
    for number, layer in enumerate(root.layers):
        if way == "user":
            expected.append(("mount", layer, f"{place}/l{number}", 0x1000 | 0x4000))
        else:
            owner = os.stat(layer)
            maps = (f"{owner.st_uid} {uid} 1", f"{owner.st_gid} {uid} 1")
            expected += [("_mapping", *maps), ("bind_as", layer, f"{place}/l{number}")]
    expected.append(("mount", "overlay", top, "overlay", 0x2 | 0x4, options))
    expected += [("mount", top, top, BIND)] if copied else []
    empty = "size=4k,nr_inodes=256,mode=0755"
    expected += [
        ("bind_read_only", "/host/x"),
        ("mount", "tmpfs", f"{top}/x/y", "tmpfs", 0x2 | 0x4, empty),
        ("bind_read_only", "/host/deep"),
        ("mount", "none", f"{top}/x/y", READ_ONLY | 0x2 | 0x4),
        ("mount_devices", f"{top}/dev"),
    ]
    assert [
        call[:3] if call[0] == "bind_as" else call
        for call in (call[:2] if call[0] == "bind_read_only" else call for call in calls)
    ] == expected
    inside = Path(top)
    assert os.readlink(inside / "x/link") == "to" and (inside / "home/agent").is_dir()
    assert (inside / "etc/one").read_text() == "text"
    assert {name: (inside / name).stat().st_mode & 0o7777 for name in ("tmp", "proc", "sys")} == {
        **{"tmp": 0o1777, "proc": 0o755, "sys": 0o755}
    }
    if copied:
        assert [(inside / name).read_text() for name in "ab"] == ["new", "old"]
    assert [stage.inodes(size) for size in (0, 8192 * 10_000, 8192 * 10_001)] == [
        *[10_000, 10_000, 10_001]
    ]


def test_stage_binds_on_old_kernels_and_repeats_locked_flags(
    recorder: Recorder, tmp_path: Path
) -> None:
    def refuse(number: int) -> Callable[..., None]:
        def bind(*_: object) -> None:
            raise OSError(number, "no")

        return bind

    top = os.open(tmp_path, os.O_RDONLY)
    for number, flag, repeated in (
        (errno.ENOSYS, 0, 0),
        (errno.EPERM, os.ST_NOEXEC | 0x1000, 0x8 | 0x200000),
        (errno.EPERM, os.ST_NODEV | os.ST_NOATIME, 0x4 | 0x400),
    ):
        recorder.note(kernel, "bind_read_only", result=refuse(number))
        recorder.note(kernel, "mount")
        recorder.note(os, "statvfs", result=lambda *_, flag=flag: SimpleNamespace(f_flag=flag))
        stage._bind("/s", "a/b", top, -1)
        mounts = [call for call in recorder.taken() if call[0] == "mount"]
        at, flags = f"{tmp_path}/a/b", READ_ONLY | 0x2
        assert mounts[0] == ("mount", "/s", at, 0x1000 | 0x4000)
        assert mounts[1][:3] == ("mount", "none", at)
        assert mounts[1][3] == flags | 0x4 | repeated
    recorder.note(kernel, "bind_read_only", result=refuse(errno.ENOENT))
    with pytest.raises(FileNotFoundError):
        stage._bind("/s", "a/b", top, -1)
    os.close(top)


@pytest.mark.parametrize("child", [True, False])
@pytest.mark.parametrize("network", [True, False])
def test_zygote_process_gives_up_everything_before_it_serves(
    child: bool, network: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fork is followed on both sides; the exit of a process is an exception
    here.
    """

    def leave(status: int) -> None:
        raise SystemExit(status)

    forks = iter([0, 0] if child else [0, 77])
    recorder.note(os, "fork", result=lambda: next(forks))
    recorder.note(os, "_exit", result=leave)
    recorder.note(os, "close", "setsid", "chdir", "umask", "dup2")
    recorder.note(os, "open", result=lambda *_: 50)
    statuses = iter([(76, 0), (77, 9)])
    recorder.note(os, "wait", result=lambda: next(statuses))
    recorder.note(kernel, "unshare", "die_with_parent", "set_hostname", "pivot_root", "mount")
    recorder.note(kernel, "drop_capabilities", "no_new_privileges", "load_filter", "set_dumpable")
    recorder.note(zygote_process, "map_user", "_loopback_up")
    monkeypatch.setattr(zygote_process, "masked", lambda: ["keys"])
    monkeypatch.setattr(zygote_process, "bpf_filter", lambda: b"filter")
    monkeypatch.setattr(zygote_process, "_preloaded", ["cells"])
    monkeypatch.setattr(zygote_process, "_ours", ["ours"])
    monkeypatch.setattr(zygote_process, "_forgotten", forgotten := [])
    monkeypatch.setattr(os, "environ", environment := {"OURS": "1"})
    for name in ("cells", "ours"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(name=name))
    inside = {"root": "/r", "uid": 1000, "network": network, "hostname": "box"}
    inside |= {"workdir": "/w", "env": {"A": "b"}, "preloaded": network}
    with pytest.raises(SystemExit) as ended:
        zygote_process.enter(
            {"inside": inside}, lambda words: recorder.calls.append(("serve", *words))
        )
    calls = [call for call in recorder.taken() if call[0] != "fork"]
    spaces = 0x20000 | 0x20000000 | 0x8000000 | 0x4000000 | 0x2000000 | 0x10000000
    locked = READ_ONLY | 0x2 | 0x8 | 0x4
    expected = [
        ("close", 4),
        ("unshare", spaces | (0 if network else 0x40000000)),
        ("map_user", 1000, os.getuid(), 1000, os.getgid()),
        ("die_with_parent", signal.SIGKILL),
        *([] if network else [("_loopback_up",)]),
        ("set_hostname", "box"),
        ("mount", "/r", "/r", 0x1000 | 0x4000),
        ("mount", "proc", "/r/proc", "proc", QUIET | 0x4),
        ("mount", "/r/dev/null", "/r/proc/keys", BIND),
        ("mount", "/r/proc/sys", "/r/proc/sys", BIND),
        ("mount", "none", "/r/proc/sys", locked),
        ("mount", "none", "/r/proc", locked),
        ("pivot_root", "/r"),
        *[("open", "/dev/null", os.O_RDWR), ("dup2", 50, 0), ("dup2", 50, 1), ("close", 50)],
        *[("setsid",), ("drop_capabilities",), ("no_new_privileges",), ("load_filter", b"filter")],
    ]
    serving = [("set_dumpable", 0), ("umask", 0o022), ("chdir", "/w"), ("serve", "--fd", "3")]
    reaping = [("close", 3), ("set_dumpable", 0), ("wait",), ("wait",)]
    assert calls == [
        *expected,
        *(serving if child else reaping),
        ("_exit", 1 if child else 128 + 9),
    ]
    assert ended.value.code == (1 if child else 128 + 9)
    assert [module.name for module in forgotten] == ["ours", *([] if network else ["cells"])]
    assert environment == ({"A": "b"} if child else {"OURS": "1"})


def test_zygote_process_brings_the_loopback_up(recorder: Recorder) -> None:
    recorder.note(zygote_process.fcntl, "ioctl")
    zygote_process._loopback_up()
    ((_, sock, number, request),) = recorder.taken()
    assert isinstance(sock, socket.socket) and sock.fileno() == -1
    assert (number, request) == (0x8914, b"lo" + bytes(14) + struct.pack("h", 0x41) + bytes(14))
    assert [zygote_process._status(status) for status in (0, 3 << 8, 15)] == [0, 3, 128 + 15]
