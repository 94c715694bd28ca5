"""Golden lists of the system calls that isolate a sandbox, so that every change is
visible in review. Nothing is mounted, and no namespace is entered.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollweave_sandbox import confined_unpacking, kernel, stage, zygote_process

MACHINE = os.uname().machine == "aarch64"
QUIET, BIND, READ_ONLY = 0x2 | 0x8, 0x1000, 0x20 | 0x1000 | 0x1


@pytest.fixture
def calls(monkeypatch):
    """Return the list of noted calls. Its method `note` lets functions note theirs;
    paths of descriptors are noted as what they lead to.
    """

    class Calls(list):
        def note(self, where, *names, result=lambda *_: None):
            for name in names:
                call = lambda *args, name=name, **named: self.call(name, args, named, result)  # noqa: E731
                monkeypatch.setattr(where, name, call, raising=False)

        def call(self, name, args, named, result):
            self.append((name, *map(plain, args), *named.values()))
            return result(*args)

        def taken(self):
            taken = self[:]
            self.clear()
            return taken

    return Calls()


def plain(value):
    value = value.value if isinstance(value, ctypes._SimpleCData) else value
    is_link = isinstance(value, str) and value.startswith("/proc/self/fd/")
    return os.readlink(value) if is_link else value


def leave(status):
    raise SystemExit(status)


def test_kernel_calls_have_the_kernels_numbers(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "_libc", libc := SimpleNamespace())
    opened = lambda number, *_: os.open("/", os.O_PATH) if plain(number) == 428 else 0  # noqa: E731
    calls.note(libc, "unshare", "mount", "umount2", "prctl", "syscall", result=opened)
    calls.note(os, "chdir")
    descriptors = sorted(os.listdir("/proc/self/fd"))
    kernel.unshare(5)
    kernel.mount("a", "b")
    kernel.mount("a", "b", "c", 3, "d")
    kernel.unmount("a")
    kernel.pivot_root("/new")
    kernel.set_hostname("bóx")
    kernel.die_with_parent(9)
    kernel.set_dumpable(9)
    kernel.adopt_orphans()
    kernel.no_new_privileges()
    assert calls.taken() == [
        *[("unshare", 5), ("mount", b"a", b"b", None, 0, None)],
        *[("mount", b"a", b"b", b"c", 3, b"d"), ("umount2", b"a", 0), ("chdir", "/new")],
        *[("syscall", (155, 41)[MACHINE], b".", b"."), ("umount2", b".", 2), ("chdir", "/")],
        ("syscall", (170, 161)[MACHINE], "bóx".encode(), 4),
        *[("prctl", option, 9, 0, 0, 0) for option in (1, 4)],
        *[("prctl", option, 1, 0, 0, 0) for option in (36, 38)],
    ]
    kernel.bind_read_only("/s", 7)
    kernel.bind_as("/s", str(tmp_path), 9)
    made = calls.taken()
    for at, to, flags, namespace, deep in ((0, 7, 7, 0, 0x8000), (3, made[5][4], 0x100001, 9, 0)):
        attributes, tree = struct.pack("=QQQQ", flags, 0, 0, namespace), made[at + 1][2]
        assert made[at : at + 3] == [
            ("syscall", 428, -100, b"/s", 1 | deep),
            ("syscall", 442, tree, b"", 0x1000 | deep, attributes, 32),
            ("syscall", 429, tree, b"", to, b"", 0x44),
        ]
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    kernel.drop_capabilities()
    no_rights = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    assert calls.taken() == [
        *[("prctl", 24, number, 0, 0, 0) for number in range(64)],
        ("syscall", (126, 91)[MACHINE], *no_rights),
    ]
    kernel.load_filter(bytes(24))
    (((*call, program), rest),) = [(call[:4], call[4:]) for call in calls.taken()]
    assert (call, struct.unpack_from("@HP", program)[0], rest) == (["prctl", 22, 2], 3, (0, 0))
    calls.note(libc, "prctl", result=lambda *_: -1)
    kernel.drop_capabilities()
    assert [name for name, *_ in calls.taken()] == ["prctl", "syscall"]
    ctypes.set_errno(errno.EPERM)
    with pytest.raises(PermissionError, match="prctl 36: Operation not permitted"):
        kernel.adopt_orphans()


def test_kernel_devices_are_few_and_limited(calls, tmp_path):
    calls.note(kernel, "mount")
    kernel.mount_devices(dev := str(tmp_path))
    names = ("null", "zero", "full", "random", "urandom", "tty")
    terminals = "newinstance,ptmxmode=0666,mode=0620,max=32"
    memory = "size=67108864,nr_inodes=8192,mode=1777"
    assert calls == [
        ("mount", "tmpfs", dev, "tmpfs", QUIET, "size=64k,nr_inodes=64,mode=0755"),
        *[("mount", f"/dev/{name}", f"{dev}/{name}", BIND) for name in names],
        ("mount", "devpts", f"{dev}/pts", "devpts", QUIET, terminals),
        ("mount", "tmpfs", f"{dev}/shm", "tmpfs", 0x2 | 0x4, memory),
        ("mount", "none", dev, READ_ONLY | QUIET),
    ]
    assert os.readlink(tmp_path / "ptmx") == "pts/ptmx"


@pytest.mark.parametrize("way", ["root", "user", "copied"])
def test_stage_mounts_what_the_root_names(way, calls, tmp_path):
    place, user, copied = str(tmp_path / "place"), way == "user", way == "copied"
    uid, top = None if user else os.getuid(), f"{place}/root"
    os.mkdir(place)
    layers = [str(tmp_path / name) for name in ("new", "old")]
    for layer, names in zip(layers, ("a", "ab"), strict=True):
        os.mkdir(layer)
        for name in names:
            Path(layer, name).write_text(layer)

    def refuse(*args):
        if copied and args[2:3] == ("overlay",):
            raise OSError(errno.EINVAL, "no overlay")

    calls.note(kernel, "unshare", "bind_as", "bind_read_only")
    calls.note(kernel, "mount", result=refuse)
    calls.note(stage, "enter_user_namespace", "_bound_watchers")
    calls.note(stage, "mount_devices", result=os.rmdir)
    calls.note(stage, "_mapping", result=lambda *_: os.open("/", os.O_PATH))
    root = stage.Root(
        layers=layers,
        binds=[("/host/deep", "/x/y/z"), ("/host/x", "/x")],
        links=[("to", "/x/link")],
        files={"/etc/one": "text"},
        folders=["/home/agent", "/x/link/below"],
        hidden=["/x/y"],
        disk_bytes=8192 * 20_000,
    )
    writes, has_root = stage.stage(root, place, uid)
    made, seen = calls.taken(), os.readlink(f"/proc/self/fd/{writes}")
    os.close(writes)
    assert (seen, has_root) == (f"{place}/{'root' if copied else 'upper'}", copied)
    expected = [("enter_user_namespace", 0x20000), ("_bound_watchers",)]
    expected = expected if user else [("unshare", 0x20000)]
    size, limited = "size=163840000,nr_inodes=20000,mode=0755", 0x2 | 0x4
    expected += [("mount", "none", "/", 0x4000 | 0x40000)]
    expected += [("mount", "tmpfs", place, "tmpfs", limited, size)]
    for number, layer in enumerate(layers):
        owner, target = os.stat(layer), f"{place}/l{number}"
        maps = (f"{owner.st_uid} {uid} 1", f"{owner.st_gid} {uid} 1")
        bound = [("mount", layer, target, 0x1000 | 0x4000)]
        expected += bound if user else [("_mapping", *maps), ("bind_as", layer, target)]
    options = f"lowerdir={place}/l0:{place}/l1,upperdir={place}/upper,workdir={place}/work,"
    options += "index=off,xino=off," + ("userxattr" if user else "metacopy=off,redirect_dir=off")
    assert [call[:3] if call[0] == "bind_as" else call[:2] if call[0] == "bind_read_only" else call
            for call in made] == [
        *expected,
        ("mount", "overlay", top, "overlay", limited, options),
        *([("mount", top, top, BIND)] if copied else []),
        ("bind_read_only", "/host/x"),
        ("mount", "tmpfs", f"{top}/x/y", "tmpfs", limited, "size=4k,nr_inodes=256,mode=0755"),
        ("bind_read_only", "/host/deep"),
        ("mount", "none", f"{top}/x/y", READ_ONLY | limited),
        ("mount_devices", f"{top}/dev"),
    ]  # fmt: skip
    found = [os.path.isdir(f"{top}/home/agent"), os.readlink(f"{top}/x/link")]
    assert [*found, Path(top, "etc/one").read_text()] == [True, "to", "text"]
    modes = [os.stat(f"{top}/{name}").st_mode & 0o7777 for name in ("tmp", "proc", "sys")]
    assert modes == [0o1777, 0o755, 0o755]
    assert not copied or [Path(top, name).read_text() for name in "ab"] == layers


@pytest.mark.parametrize("way", ["child", "parent", "no namespaces", "another owner"])
def test_confined_unpacking_gives_up_everything_but_its_folder(way, calls, monkeypatch, tmp_path):
    def unshare(_):
        if way == "no namespaces":
            raise PermissionError

    top = str(tmp_path)
    calls.note(kernel, "die_with_parent", "mount", "pivot_root", "drop_capabilities")
    calls.note(kernel, "no_new_privileges", "load_filter")
    calls.note(kernel, "unshare", result=unshare)
    calls.note(confined_unpacking.resource, "setrlimit")
    calls.note(signal, "pthread_sigmask", "signal")
    calls.note(os, "_exit", result=leave)
    calls.note(os, "open", result=lambda *_: 50)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "fork", lambda: 77 * (way == "parent"))
    monkeypatch.setattr(os, "waitpid", lambda pid, _: (pid, 9))
    monkeypatch.setattr(confined_unpacking, "bpf_filter", lambda: b"filter")
    started = [("die_with_parent", signal.SIGTERM)]
    limited = [("setrlimit", resource.RLIMIT_AS, (1 << 30, 1 << 30))]
    limited += [("setrlimit", resource.RLIMIT_CORE, (0, 0)), ("unshare", 0x6C020000)]
    block, unblock = (
        ("pthread_sigmask", how, {signal.SIGTERM}) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
    )
    own = [("mount", "none", "/", 0x44000), ("mount", top, top, BIND), ("pivot_root", top)]
    ended = [("drop_capabilities",), ("no_new_privileges",), ("load_filter", b"filter")]
    opened = ("open", "/" if way == "child" else top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if way in ("parent", "another owner"):
        with pytest.raises(SystemExit, match="1"):
            confined_unpacking.confine(top, os.getppid() + (way == "another owner"))
        waits = (
            [block, ("signal", signal.SIGTERM, calls[-3][2]), unblock] if way == "parent" else []
        )
        assert calls == [*started, *(limited if waits else []), *waits, ("_exit", 1)]
        return
    assert confined_unpacking.confine(top, os.getppid()) == 50
    calls[-4] = (*calls[-4][:2], calls[-4][2] & opened[2])
    rest = [block, unblock, *own] if way == "child" else []
    assert calls == [*started, *limited, *rest, opened, *ended]


@pytest.mark.parametrize("child", [True, False])
def test_zygote_process_gives_up_everything_before_it_serves(child, calls, monkeypatch):
    """The server has the network and packages here, and its init has not."""
    forks, statuses = iter([0, 0] if child else [0, 77]), iter([(76, 0), (77, 9)])
    for name in ("cells", "ours"):
        monkeypatch.setitem(sys.modules, name, name)
    calls.note(os, "_exit", result=leave)
    calls.note(os, "close", "setsid", "chdir", "umask", "dup2")
    calls.note(os, "open", result=lambda *_: 50)
    calls.note(kernel, "unshare", "die_with_parent", "set_hostname", "pivot_root", "mount")
    calls.note(kernel, "drop_capabilities", "no_new_privileges", "load_filter", "set_dumpable")
    calls.note(zygote_process, "map_user", "_loopback_up")
    changed = [(os, "fork", lambda: next(forks)), (os, "wait", lambda: next(statuses))]
    changed += [(os, "environ", {"OURS": "1"}), (zygote_process, "masked", lambda: ["keys"])]
    changed += [
        (zygote_process, "bpf_filter", lambda: b"filter"),
        (zygote_process, "_forgotten", []),
    ]
    changed += [(zygote_process, "_ours", ["ours"]), (zygote_process, "_preloaded", ["cells"])]
    for change in changed:
        monkeypatch.setattr(*change)
    inside = {"root": "/r", "uid": 1000, "network": child, "hostname": "box"}
    inside |= {"workdir": "/w", "env": {"A": "b"}, "preloaded": child}
    with pytest.raises(SystemExit, match=f"^{1 if child else 137}$"):
        zygote_process.enter({"inside": inside}, lambda words: calls.append(("serve", *words)))
    serving = [("set_dumpable", 0), ("umask", 0o022), ("chdir", "/w"), ("serve", "--fd", "3")]
    ended = (
        [*serving, ("_exit", 1)] if child else [("close", 3), ("set_dumpable", 0), ("_exit", 137)]
    )
    locked = READ_ONLY | 0x2 | 0x8 | 0x4
    assert calls == [
        *[("close", 4), ("unshare", 0x3E020000 if child else 0x7E020000)],
        *[("map_user", 1000, os.getuid(), 1000, os.getgid()), ("die_with_parent", signal.SIGKILL)],
        *([] if child else [("_loopback_up",)]),
        *[("set_hostname", "box"), ("mount", "/r", "/r", 0x1000 | 0x4000)],
        ("mount", "proc", "/r/proc", "proc", QUIET | 0x4),
        ("mount", "/r/dev/null", "/r/proc/keys", BIND),
        ("mount", "/r/proc/sys", "/r/proc/sys", BIND),
        *[("mount", "none", path, locked) for path in ("/r/proc/sys", "/r/proc")],
        *[("pivot_root", "/r"), ("open", "/dev/null", os.O_RDWR), ("dup2", 50, 0), ("dup2", 50, 1)],
        *[("close", 50), ("setsid",), ("drop_capabilities",), ("no_new_privileges",)],
        *[("load_filter", b"filter"), *ended],
    ]
    assert zygote_process._forgotten == ["ours", *([] if child else ["cells"])]
    assert os.environ == ({"A": "b"} if child else {"OURS": "1"})
