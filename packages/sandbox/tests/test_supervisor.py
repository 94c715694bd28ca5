"""Decisions of the supervisor on records, process tables and clocks that are laid out.
Nothing is forked, and no process is signaled.
"""

import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave_sandbox import supervisor
from rollweave_sandbox.cgroups import REMOVE_S
from rollweave_sandbox.kernel import SHM_BYTES
from rollweave_sandbox.processes import Process, Table
from rollweave_sandbox.supervisor import (
    KILLED,
    OVERDUE,
    STOPPED,
    SandboxRecord,
    SpareProcess,
    Supervisor,
    UnreadRequest,
    _exceeded_limit,
    _stopped,
)

KILL, TERM, CONT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGSTOP


@dataclass
class _Groups:
    calls: list[object] = field(default_factory=list)
    full: bool = False
    removable: bool = True

    def limit(self, **limits: int) -> None:
        self.calls.append(limits)

    def join(self) -> None:
        self.calls.append("join")

    def out_of_memory(self) -> bool:
        return self.full

    def remove(self) -> bool:
        self.calls.append("remove")
        return self.removable

    close = remove


def member(
    pid: int, parent: int = 1, *, cpu_s: float = 0.0, stopped: bool = False, **memory: int
) -> Process:
    sizes = {"resident_bytes": 0, "virtual_bytes": 0, **memory}
    return Process(pid=pid, parent=parent, started=pid, cpu_s=cpu_s, stopped=stopped, **sizes)


def record(pid: int = 10, **changes: Any) -> SandboxRecord:
    fields = {"uid": None, "contained": False, "processes": 2, "memory_bytes": 1000, "cpu_s": 3.0}
    fields |= {"id": str(pid), "ends_at": 100.0, "group": _Groups(), "seen": {pid: pid}}
    return SandboxRecord(pid=pid, **fields | changes)


class World:
    """A supervisor among the processes `table`: of sandbox 10, 11 is the server and 12
    a command.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu_s, self.signals = 5.0, iter([0.0] * 99), list[tuple[int, int]]()
        self.table = {10: member(10), 11: member(11, 10), 12: member(12, 11)}
        self.statuses: list[tuple[int, int]] = []
        patch.setattr(supervisor, "Groups", _Groups)
        patch.setattr(supervisor, "_signal", lambda *sent: self.signals.append(sent))
        patch.setattr(supervisor, "process", lambda pid: self.table.get(pid))
        patch.setattr(supervisor, "started", lambda pids: {pid: pid for pid in pids})
        patch.setattr(supervisor, "family", lambda pid: {pid, 11} & {*self.table, os.getpid()})
        patch.setattr(Table, "now", lambda: Table(dict(self.table)))
        patch.setattr(os, "waitpid", lambda *_: self.waited())
        clock = {"monotonic": lambda: self.now, "process_time": lambda: next(self.cpu_s)}
        patch.setattr(supervisor, "time", SimpleNamespace(**clock, sleep=self.signals.append))
        self.owner, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.supervisor = Supervisor(end, "/place", lambda _: None)

    def waited(self) -> tuple[int, int]:
        if not self.statuses:
            raise ChildProcessError
        return self.statuses.pop(0)

    def add(self, record: SandboxRecord) -> SandboxRecord:
        self.supervisor._records[record.id] = record
        self.supervisor._by_pid[record.pid] = record.id
        return record

    def ask(self, do: str, **request: object) -> list[tuple[int, int]]:
        self.owner.send(json.dumps({"do": do, "id": "10", **request}).encode())
        assert self.supervisor._receive()
        return self.taken()

    def polled(self) -> list[tuple[int, int]]:
        self.supervisor._poll()
        return self.taken()

    def taken(self) -> list[tuple[int, int]]:
        taken, self.signals = self.signals, []
        return taken

    def received(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.owner.recv(1 << 16, socket.MSG_DONTWAIT))
        return answer


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with monkeypatch.context() as patch:
        world = World(patch)
        yield world
        world.owner.close()
        world.supervisor._owner.close()


@pytest.mark.parametrize(
    ("changes", "memories", "now", "why"),
    [
        ({}, [(0, 0)] * 2, 99.9, ""),
        ({}, [], 100.0, OVERDUE),
        ({"own": {1: 1}}, [(0, 0)] * 3, 0.0, ""),
        ({"own": {1: 1}}, [(0, 0)] * 4, 0.0, "killed: it went beyond limits.processes (4 of 2)"),
        ({"cpu_s": 2.0}, [(0, 0)] * 2, 0.0, ""),
        ({"cpu_s": 1.9}, [(0, 0)] * 2, 0.0, "killed: it went beyond limits.cpu_s (2.0 of 1.9)"),
        ({}, [(600, 0), (400, 0)], 0.0, ""),  # the upper bound is at the limit
        ({"inherited": {2: 1002}}, [(600, 0), (401, 0)], 0.0, ""),
        ({"inherited": {2: 1001}}, [(600, 0), (401, 0)], 0.0, "limits.memory_bytes (1001 of 1000)"),
        ({}, [(1000, 1000)], 0.0, "killed: it went beyond limits.memory_bytes (2000 of 1000)"),
        ({}, [(1000, 1001)], 0.0, "killed: it went beyond limits.memory_bytes (1001 of 1000)"),
        ({"group": _Groups(full=True)}, [], 0.0, "memory_bytes, and the kernel ended a process"),
    ],
)
def test_limits_hold_up_to_the_last_unit(
    changes: dict[str, Any],
    memories: list[tuple[int, int]],
    now: float,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here page tables are as large as the address space, and resident memory counts
    twice.
    """
    monkeypatch.setattr(Process, "table_bytes", lambda self: self.virtual_bytes)
    counted = lambda self, inherited: 2 * self.resident_bytes - inherited  # noqa: E731
    monkeypatch.setattr(Process, "proportional_bytes", counted)
    members = [
        member(pid, cpu_s=1.0, resident_bytes=resident, virtual_bytes=virtual)
        for pid, (resident, virtual) in enumerate(memories, start=1)
    ]
    got = _exceeded_limit(record(**changes), members, now)
    assert got.endswith(why) and bool(got) == bool(why)


def test_a_server_that_was_stopped_is_its_own_and_not_one_of_its_pid() -> None:
    owned = record(own={11: 11})
    assert _stopped(owned, [member(12, stopped=True), member(11)]) == ""
    assert _stopped(record(own={11: 7}), [member(11, stopped=True)]) == ""
    assert "server was stopped from inside" in _stopped(owned, [member(11, stopped=True)])


def test_a_soft_stop_spares_the_server_until_no_command_or_time_is_left(world: World) -> None:
    sandbox = world.add(record())
    assert world.ask("ready") == []
    assert world.received() == {"id": "10", "event": "done"}
    assert (sandbox.own, sandbox.inherited) == ({10: 10, 11: 11}, {10: 0, 11: 0})
    world.supervisor._next_poll = 9.0
    assert world.ask("stop", grace_s=2.0) == [(12, TERM), (12, CONT)]
    assert (sandbox.why, sandbox.kill_at, world.supervisor._next_poll) == (STOPPED, 7.0, 0.0)
    world.table[13] = member(13, 12)
    assert world.polled() == [(13, TERM), (13, CONT)]
    world.now = 7.0
    assert sorted(world.polled()) == [(10, KILL), (10, KILL), (11, KILL), (12, KILL), (13, KILL)]
    world.now = 6.0
    del world.table[12], world.table[13]
    assert sorted(world.polled()) == [(10, KILL), (10, KILL), (11, KILL)]
    sandbox.contained = True
    assert world.ask("kill") == [(10, KILL)]
    assert sandbox.why == STOPPED
    sandbox.reaped = True
    assert world.ask("stop", grace_s=0.0) == []
    assert world.ask("kill", id="11") == []


def test_a_sandbox_that_is_not_ready_is_ended_at_once(world: World) -> None:
    sandbox = world.add(record(contained=True))
    assert world.ask("stop", grace_s=1.0) == [(10, KILL)]
    assert sandbox.own == {10: 10, 11: 11}
    other = world.add(record(contained=True))
    assert world.ask("kill") == [(10, KILL)]
    assert other.why == KILLED


def test_freezing_stops_commands_twice_and_thawing_continues_them(world: World) -> None:
    world.add(record(own={10: 10, 11: 11}))
    assert world.ask("freeze") == [(12, STOP), (12, STOP)]
    assert world.received() == {"id": "10", "event": "done"}
    assert world.ask("thaw") == [(12, CONT)]


def test_a_poll_ends_what_is_beyond_a_limit_and_costs_a_share_of_a_core(world: World) -> None:
    poll, sandbox = world.supervisor, world.add(record(processes=3, ends_at=5.0))
    other = world.add(record(20, contained=True, reaped=True, own={21: 21, 22: 7}, why="x"))
    world.table |= {21: member(21), 22: member(22)}
    world.cpu_s = iter([1.0, 1.02, 0.0, 0.001, 0.0, 0.02, 0.0, 0.005])
    assert (21, KILL) in (sent := world.polled()) and (22, KILL) not in sent
    assert sandbox.why == OVERDUE and (12, KILL) in sent
    assert poll._next_poll == pytest.approx(5.0 + 0.02 / 0.5)
    del poll._records["20"]
    sandbox.ends_at = 99.0
    for took in (0.1, 0.2, 0.1):
        assert world.polled() == []
        assert poll._next_poll == pytest.approx(5.0 + took)
    sandbox.kill_at, world.cpu_s = 99.0, iter([0.0] * 2)
    world.polled()
    assert poll._next_poll == pytest.approx(5.0 + 0.1 / 20)
    other.group.removable = False  # type: ignore[attr-defined]
    assert (other.removed_by, sandbox.seen) == (0.0 + 5.0 + REMOVE_S, {10: 10, 11: 11, 12: 12})


def test_an_end_is_reported_when_no_process_and_no_group_is_left(world: World) -> None:
    sandbox = world.add(record(reaped=True, why="x", group=_Groups(removable=False)))
    world.supervisor._finish(sandbox, [11])
    assert world.taken() == [(11, KILL)]
    for world.now in (5.0 + REMOVE_S - 0.1, 5.0 + REMOVE_S):
        assert "10" in world.supervisor._records
        world.supervisor._finish(sandbox, [])
    assert world.received() == {"id": "10", "event": "gone", "why": "x"}
    assert world.supervisor._records == {}


@pytest.mark.parametrize(
    ("status", "changes", "why"),
    [
        (3 << 8, {}, "ended with status 3"),
        (9, {}, "ended with status -9"),
        (9, {"why": KILLED}, KILLED),
        (9, {"group": _Groups(full=True)}, "limits.memory_bytes, and the kernel ended a process"),
    ],
)
def test_the_reason_of_an_end(world: World, status: int, changes: dict[str, Any], why: str) -> None:
    sandbox = world.add(record(**changes))
    spare = SpareProcess(30, _Groups(), socket.socket())  # type: ignore[arg-type]
    world.supervisor._spare, world.supervisor._next_poll = spare, 9.0
    world.statuses = [(99, 0), (10, status), (0, 0), (30, 0)]
    world.supervisor._reap()
    assert sandbox.reaped and sandbox.why.endswith(why)
    assert world.supervisor._next_poll == 0.0 and world.supervisor._spare is spare
    world.supervisor._reap()
    assert world.supervisor._spare is None
    assert (spare.group.calls, spare.request_socket.fileno()) == (["remove"], -1)  # type: ignore[attr-defined]


START = {
    **{"do": "start", "id": "1", "contained": True, "drop": True},
    "limits": {"memory_bytes": 7, "disk_bytes": 9, "processes": 4, "cpu_s": 2.0, "wall_s": 3.0},
}


def forked(world: World, patch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Let processes 30, 31, … be forked; return the list of their ends of the
    sockets.
    """
    ends: list[socket.socket] = []

    def fork(_: Supervisor) -> SpareProcess:
        if len(ends) == 3:
            raise OSError(errno.EAGAIN, "no")
        own, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(end)
        world.table[29 + len(ends)] = member(29 + len(ends))
        return SpareProcess(29 + len(ends), _Groups(), own)  # type: ignore[arg-type]

    patch.setattr(Supervisor, "_fork_spare", fork)
    return ends


def test_requests_go_to_the_spare_or_to_a_new_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, machine = forked(world, monkeypatch), world.supervisor
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(supervisor, "UNREAD_REQUESTS", 1)
    monkeypatch.setattr(supervisor, "UIDS_EACH", 3)
    machine._prepare()
    first_uid = 1_000_000 + os.getpid() * 3
    for number, uid in ((1, first_uid), (2, first_uid + 1)):
        world.ask(**(START | {"id": str(number)}))
        assert json.loads(ends[-1].recv(4096)) == START | {"id": str(number), "uid": uid}
        got = machine._records[str(number)]
        assert (got.pid, got.seen, got.uid) == (29 + number, {29 + number: 29 + number}, uid)
        assert got.group.calls == [{"memory_bytes": 16 + SHM_BYTES, "processes": 4}]  # type: ignore[attr-defined]
        assert (got.processes, got.memory_bytes, got.cpu_s, got.ends_at) == (4, 7, 2.0, 8.0)
        assert (got.unread is not None) == (number == 1)
    machine._prepare()
    ends[-1].close()  # the spare has ended, and no other can be forked
    world.ask(**(START | {"id": "3", "drop": False}))
    assert machine._spare is None
    assert world.received()["why"] == f"no process with its limits: [Errno {errno.EAGAIN}] no"
    unread = machine._records["1"].unread
    world.statuses = [(30, 9)]  # its request is unread: it is sent again
    ends.pop().close()
    machine._reap()
    assert machine._records["1"].pid == 32
    assert isinstance(unread, UnreadRequest) and unread.acknowledgment.fileno() == -1
    for end in ends:
        end.close()
    world.add(record())
    world.ask(**(START | {"id": "5"}))
    assert world.received()["why"] == "at most 3 sandboxes may live at once"


@pytest.mark.parametrize("answers", [True, False])
def test_an_acknowledged_request_is_not_kept(world: World, answers: bool) -> None:
    own, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.open("/dev/null", os.O_RDONLY)
    sandbox = world.add(record(unread=UnreadRequest({}, [fd], own)))
    if answers:
        end.send(b".")
    world.supervisor._read_acknowledgment(sandbox)
    assert (sandbox.unread is None, own.fileno() == -1) == (answers, answers)
    end.close()
    if not answers:
        sandbox.why, world.statuses = KILLED, [(10, 9)]
        world.supervisor._reap()
        assert sandbox.reaped
        world.supervisor._finish(sandbox, [])
        assert own.fileno() == -1
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_messages_wait_for_an_owner_that_does_not_read(world: World) -> None:
    machine, count = world.supervisor, 0
    while not machine._unsent:
        machine._send(number=count, pad="x" * 4096)
        count += 1
    machine._send(number=count)
    for number in range(count + 1):
        assert world.received()["number"] == number
        machine._flush()
    assert not machine._unsent
    world.owner.close()
    machine._send(number=0)
    assert not machine._unsent
    assert not machine._receive()


def test_all_requests_are_served_until_the_owner_ends_and_all_sandboxes_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = forked(world, monkeypatch)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: None)
    for request in (
        START | {"drop": False},
        {"do": "freeze", "id": "1"},
        {"do": "kill", "id": "1"},
    ):
        world.owner.send(json.dumps(request).encode())
    world.owner.shutdown(socket.SHUT_WR)
    groups, world.table = world.supervisor._groups, {11: member(11)}
    world.statuses = [(0, 0)] * 5 + [(9, 0), (0, 0)]
    world.supervisor.run()
    assert world.received()["event"] == "done" and len(ends) == 1
    assert [sent for sent in world.signals if sent not in ((30, STOP), (30, KILL))] == [
        *[(11, KILL), 0.005] * 2,
        (11, KILL),
    ]
    assert groups.calls == ["remove"]  # type: ignore[attr-defined]
    ends[0].close()
    world.supervisor._records["1"].group.remove()


@pytest.mark.parametrize("root", [True, False])
def test_a_fork_becomes_its_sandbox_step_by_step(
    world: World, root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []

    def note(name: str, result: object = None) -> Any:
        return lambda *given: (steps.append((name, *given)), result)[1]

    ours = ("_leave_supervisor", "_prefer_for_oom_kill", "name_account", "_arrange", "limit")
    for name in ours:
        monkeypatch.setattr(supervisor, name, note(name))
    monkeypatch.setattr(supervisor, "stage", note("stage", (os.dup(0), False)))
    for name in ("setgroups", "setresgid", "setresuid", "chdir", "execve", "_exit"):
        monkeypatch.setattr(os, name, note(name))
    for name in ("set_dumpable", "die_with_parent"):
        monkeypatch.setattr(supervisor.kernel, name, note(name))
    monkeypatch.setattr(world.supervisor, "_enter", note("enter"))
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    private = os.memfd_create("private")
    content = {"argv": ["/a", "b"], "env": {"A": "1"}, "account": True, "rlimits": {"NPROC": 4}}
    content |= {"root": {"layers": ["/l"]}} if root else {"argv": []}
    os.write(private, json.dumps(content).encode())
    request = {"id": "7", "uid": 5 if root else None}
    socket.send_fds(near, [json.dumps(request).encode()], [0, 1, private])
    other = world.add(record(unread=UnreadRequest({}, [private], socket.socket())))
    world.supervisor._become(far, 3, _Groups(steps))  # type: ignore[arg-type]
    assert other.unread is not None and other.unread.acknowledgment.fileno() == -1
    data, fds, _, _ = socket.recv_fds(world.owner, 4096, 2)
    staged = {"id": "7", "event": "staged", "pid": os.getpid(), "has_root": not root}
    assert (json.loads(data), len(fds)) == (staged, int(root))
    assert near.recv(9) == b"."
    first = [("_leave_supervisor", 3), "join", ("_prefer_for_oom_kill",)]
    arranged = next(step for step in steps if step[0] == "_arrange")  # type: ignore[index]
    limited = [arranged, ("limit", {"NPROC": 5})]
    if root:
        dropped = [("name_account", 5, "/place"), ("setgroups", []), ("setresgid", 5, 5, 5)]
        dropped += [("setresuid", 5, 5, 5), ("set_dumpable", 1), ("die_with_parent", KILL)]
        run = [("chdir", "/"), ("execve", "/a", ["/a", "b"], {"A": "1"})]
        staging = ("stage", supervisor.Root(layers=["/l"]), "/place", 5)
        assert steps[: 3 + 1 + 6 + 4] == [*first, staging, *dropped, *limited, *run]
    else:
        assert steps[:5] == [*first, *limited] and steps[5][0] == "enter"  # type: ignore[index]
    assert arranged[1] < arranged[2]  # type: ignore[index]
    assert steps[-1] == ("_exit", 1)
    for fd in (*fds, arranged[1], arranged[2]):  # type: ignore[index]
        os.close(fd)
    near.close()
    far.close()
