"""Control groups: each sandbox has limited groups that end with it, and without them
all other limits hold.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollweave.io.processes import family
from rollweave.sandbox.base import MIB, Limits, Sandbox, SandboxSpec
from rollweave.schema.errors import SandboxLostError
from rollweave_sandbox import cgroups
from rollweave_sandbox.cgroups import OWN_PROCESSES, Groups, remove_all_stale, unbounded
from rollweave_sandbox.kernel import SHM_BYTES
from tests.support.sandboxes import ISOLATING, NAMES, opened, python

LIMITS = Limits(processes=40, memory_bytes=96 * MIB, disk_bytes=32 * MIB)

UNMAPPED = f"""
import mmap, time
area = mmap.mmap(-1, {3 * 96 * MIB})
for start in range(0, len(area), 1 << 24):
    for at in range(start, start + (1 << 24), 4096): area[at] = 1
    area.madvise(mmap.MADV_DONTNEED, start, 1 << 24)
time.sleep(60)
"""
"""Program that allocates three times the limit of shared memory, and maps at most 16
MiB of it at a time.
"""


def needs_groups() -> None:
    if missing := unbounded():
        pytest.skip(f"no control groups can be made here: {missing}")


def _groups_of(pid: int) -> dict[str, Path]:
    """Return the folders of a process's groups by controller, as the kernel reports
    them.
    """
    paths: dict[str, Path] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for mount in Path("/proc/self/mountinfo").read_text().splitlines():
            words = mount.split()
            if (names and names in words[-1].split(",")) or (not names and " - cgroup2 " in mount):
                for name in names.split(",") if names else ("memory", "pids"):
                    if name in cgroups.CONTROLLERS and Path(f"{words[4]}{path}").is_dir():
                        paths.setdefault(name, Path(f"{words[4]}{path}"))
    return paths


def _read(folder: Path, *names: str) -> int:
    """Return the number in the first file that exists, of version 2 or 1."""
    return next(int((folder / name).read_text()) for name in names if (folder / name).exists())


@pytest.mark.variants
@pytest.mark.parametrize("name", NAMES)
async def test_a_sandbox_and_its_branches_have_limited_groups_that_end_with_them(name: str) -> None:
    needs_groups()
    async with opened(name) as backend:
        sandbox = await backend.start(SandboxSpec(limits=LIMITS))
        branch = await backend.branch(await sandbox.snapshot())
        own = [_groups_of(each.pid) for each in (sandbox, branch)]  # type: ignore[attr-defined]
        for groups in own:
            most = LIMITS.memory_bytes + LIMITS.disk_bytes + SHM_BYTES
            assert _read(groups["memory"], "memory.max", "memory.limit_in_bytes") == most
            assert _read(groups["pids"], "pids.max") == LIMITS.processes + OWN_PROCESSES
        assert own[0]["memory"] != own[1]["memory"]
        assert own[0]["memory"].parent == own[1]["memory"].parent
        await sandbox.stop(grace_s=0.0)
        assert [path for path in own[0].values() if path.exists()] == []
        assert [path for path in own[1].values() if not path.exists()] == []
    assert [path for groups in own for path in groups.values() if path.parent.exists()] == []


@pytest.mark.parametrize("name", ISOLATING)
async def test_unmapped_memory_ends_a_sandbox_with_the_limit_as_reason(name: str) -> None:
    needs_groups()
    async with opened(name) as backend:
        sandbox = await backend.start(SandboxSpec(limits=LIMITS))
        with pytest.raises(SandboxLostError, match=r"went beyond limits\.memory_bytes"):
            await _twice(sandbox)
        other = await backend.start(SandboxSpec(limits=LIMITS))
        assert (await other.exec(["echo", "on"])).stdout == b"on\n"


async def _twice(sandbox: Sandbox) -> None:
    """Run a command that the kernel kills, which may be answered before its sandbox
    ends.
    """
    for _ in range(2):
        await sandbox.exec(python(UNMAPPED), timeout_s=60.0)


async def test_removes_the_groups_of_a_killed_supervisor() -> None:
    needs_groups()
    async with opened("zygote") as backend:
        sandbox = await backend.start(SandboxSpec())
        group = _groups_of(sandbox.pid)["memory"]  # type: ignore[attr-defined]
        backend._launcher._process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(SandboxLostError):
            await sandbox.exec(["sleep", "100"])
        while (group / "cgroup.procs").read_text():  # the kernel ends its processes
            os.sched_yield()
    assert not group.parent.exists()


def test_removes_stale_groups_and_keeps_those_of_a_live_owner() -> None:
    needs_groups()
    hold = (
        "import sys, time\nfrom rollweave_sandbox.cgroups import Groups\n"
        "group = Groups().make('x')\n"
        "print(*sorted(group.paths), flush=True)\ntime.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            paths = [Path(word) for word in owner.stdout.readline().split()]
            assert paths
            remove_all_stale()
            assert [path for path in paths if not path.is_dir()] == []
        finally:
            owner.kill()
    Groups().close()
    assert [path for path in paths if path.parent.exists()] == []


@pytest.mark.parametrize("name", ISOLATING)
async def test_a_killed_spare_process_is_replaced(name: str) -> None:
    async with opened(name) as backend:
        first = await backend.start(SandboxSpec())
        for _ in range(3):
            supervisor = backend._launcher._process.pid  # type: ignore[attr-defined]
            for spare in family(supervisor) - family(first.pid) - {supervisor}:  # type: ignore[attr-defined]
                os.kill(spare, signal.SIGKILL)
            sandbox = await backend.start(SandboxSpec())
            assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
            await sandbox.stop(grace_s=0.0)


@pytest.mark.parametrize("name", ISOLATING)
async def test_a_request_that_a_killed_spare_process_has_not_read_is_not_lost(name: str) -> None:
    async with opened(name) as backend:
        first = await backend.start(SandboxSpec())
        supervisor = backend._launcher._process.pid  # type: ignore[attr-defined]
        others = family(first.pid) | {supervisor}  # type: ignore[attr-defined]
        while not (spares := family(supervisor) - others):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (spare,) = spares
        os.kill(spare, signal.SIGSTOP)
        starting = asyncio.create_task(backend.start(SandboxSpec()))
        while not family(supervisor) - others - spares:  # noqa: ASYNC110 (until it is sent)
            await asyncio.sleep(0.01)
        assert not starting.done()
        os.kill(spare, signal.SIGKILL)
        sandbox = await starting
        assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"
        await sandbox.stop(grace_s=0.0)


ATTACKS = (
    *("memory of page tables", "memory of many processes", "many empty files"),
    *("all terminals", "fork bomb"),
)

WITHOUT = f"""
import asyncio
from packages.sandbox.tests.attacks import COUNTED_BY_GROUPS, attacks_here, attempt
from rollweave.cli.doctor import _sandbox_limits
from rollweave_sandbox.cgroups import unbounded
from rollweave_sandbox.registry import backend

async def main():
    assert sorted(unbounded()) == ["memory", "pids"], unbounded()
    assert not COUNTED_BY_GROUPS & set(attacks_here())
    print(_sandbox_limits())
    for name in {ISOLATING}:
        made = backend(name)
        for attack in {ATTACKS}:
            outcome = await attempt(made, attack)
            print("ESCAPED" if outcome.escaped else "held", outcome)
        await made.close()

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_groups_the_doctor_reports_it_and_other_limits_hold() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can hide the control groups from a process")
    hidden = 'mount -t tmpfs none /sys/fs/cgroup && exec "$0" "$@"'
    argv = ["unshare", "--mount", "sh", "-c", hidden, sys.executable, "-c", WITHOUT]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "no control group for memory" in lines[0]
    assert "buffers of sockets and pipes" in lines[0]
    assert [line for line in lines[1:] if not line.startswith("held")] == []
    assert len(lines) == 1 + len(ISOLATING) * len(ATTACKS)


class Version2:
    """A tree of folders that looks like version 2, whose files come when they are
    written, as groups' files come by mkdir.
    """

    def __init__(self, folder: Path) -> None:
        self.top = folder / "cgroup"
        self.written: list[tuple[str, str]] = []
        self.proc = folder / "proc"
        self.proc.mkdir()
        (self.proc / "mountinfo").write_text(
            f"30 24 0:26 / {self.top} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
        )

    def group(self, path: str, *, has: str, delegates: str) -> None:
        folder = Path(f"{self.top}/{path}")
        folder.mkdir(parents=True)
        (folder / "cgroup.controllers").write_text(has)
        (folder / "cgroup.subtree_control").write_text(delegates)

    def write(self, path: str, value: str) -> None:
        where = Path(path).relative_to(self.top)
        self.written.append(
            (str(where.relative_to(*where.parts[:-2]) if len(where.parts) > 2 else where), value)
        )
        if path.endswith("subtree_control") and Path(path).exists():
            Path(path).write_text(f"{Path(path).read_text()} {value.strip('+')}")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version2:
    version2 = Version2(tmp_path)
    monkeypatch.setattr(cgroups, "_write", version2.write)
    return version2


def _base(groups: Groups) -> Path:
    (base,) = {folder for _, folder in groups._bases.values()}
    return Path(base)


def test_version_2_uses_the_parent_of_a_group_with_processes(tree: Version2) -> None:
    tree.group("user.slice", has="cpu memory pids", delegates="memory pids")
    tree.group("user.slice/session", has="memory pids", delegates="")
    (tree.proc / "cgroup").write_text("0::/user.slice/session\n")
    groups = Groups(str(tree.proc))
    assert (groups.missing, groups.versions) == ({}, {"memory": 2, "pids": 2})
    assert _base(groups).parent == tree.top / "user.slice"
    groups.make("7").limit(memory_bytes=1000, processes=10)
    base = _base(groups).name
    assert tree.written == [
        (f"{base}/cgroup.subtree_control", "+memory"),
        (f"{base}/cgroup.subtree_control", "+pids"),
        ("7/pids.max", str(10 + OWN_PROCESSES)),
        ("7/memory.max", "1000"),
        ("7/memory.oom.group", "1"),
        ("7/memory.swap.max", "0"),
    ]
    groups.close()
    assert not Path(tree.top, "user.slice", base).exists()


def test_version_2_uses_our_own_group_if_it_offers_controllers(tree: Version2) -> None:
    tree.group("box", has="memory pids", delegates="memory pids")
    (tree.proc / "cgroup").write_text("1:name=systemd:/x\n0::/box\n")
    groups = Groups(str(tree.proc))
    assert _base(groups).parent == tree.top / "box"
    groups.close()


def test_missing_controllers_are_reported_with_reasons(tree: Version2) -> None:
    tree.group("", has="cpu pids", delegates="pids")
    tree.group("box", has="pids", delegates="")
    (tree.proc / "cgroup").write_text("0::/box\n")
    groups = Groups(str(tree.proc))
    assert groups.missing == {"memory": cgroups.NO_CONTROLLER}
    assert groups.versions == {"pids": 2}
    groups.close()


@pytest.mark.parametrize("version", [1, 2])
def test_its_limit_is_distinguished_from_a_full_machine(version: int, tmp_path: Path) -> None:
    group = cgroups.Group({"memory": (version, str(tmp_path))})
    assert not group.out_of_memory()
    (tmp_path / "memory.limit_in_bytes").write_text(str(64 * MIB))
    for most, full, kills, own in (
        *[(64 * MIB, 0, 0, False), (60 * MIB - 1, 0, 3, False)],
        *[(60 * MIB, 1, 1, True), (64 * MIB - 4096, 2, 2, True)],
    ):
        (tmp_path / "memory.events").write_text(f"oom {full}\noom_kill {kills}\n")
        (tmp_path / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
        (tmp_path / "memory.max_usage_in_bytes").write_text(str(most))
        assert group.out_of_memory() is own


def test_version_1_limits_memory_with_swap_and_the_buffers_of_ip_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out, because a machine without swap would not notice; in this order,
    because the second may not be less.
    """
    proc, own = tmp_path / "proc", tmp_path / "memory" / "job"
    proc.mkdir()
    own.mkdir(parents=True)
    (proc / "cgroup").write_text("4:memory:/job\n")
    (proc / "mountinfo").write_text(f"30 24 0:26 / {own.parent} rw - cgroup cgroup rw,memory\n")
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(
        cgroups, "_write", lambda path, value: written.append((Path(path).name, value))
    )
    groups = Groups(str(proc))
    groups.make("7").limit(memory_bytes=1000, processes=10)
    assert _base(groups).parent == own
    assert written == [
        ("memory.limit_in_bytes", "1000"),
        ("memory.memsw.limit_in_bytes", "1000"),
        ("memory.kmem.tcp.limit_in_bytes", str(64 * MIB)),
    ]
    assert groups.missing == {"pids": cgroups.NO_CONTROLLER}
    groups.close()
