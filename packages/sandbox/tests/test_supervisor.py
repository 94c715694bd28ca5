"""Decisions of the supervisor on records, process tables and clocks that are laid out.
Nothing is forked, and no process is signaled.
"""

import errno
import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest

from rollweave_sandbox import supervisor
from rollweave_sandbox.cgroups import REMOVE_S
from rollweave_sandbox.kernel import SHM_BYTES
from rollweave_sandbox.processes import Process, Table
from rollweave_sandbox.supervisor import KILLED, OVERDUE, STOPPED, SpareProcess, UnreadRequest

KILL, TERM, CONT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGSTOP


class Groups:
    def __init__(self, *, full=False, removable=True, calls=None):
        self.removable, self.calls = removable, [] if calls is None else calls
        self.limit = lambda **limits: self.calls.append(limits)
        self.join = lambda: self.calls.append("join")
        self.out_of_memory = lambda: full

    def remove(self):
        self.calls.append("remove")
        return self.removable

    close = remove


def member(pid, parent=1, *, cpu_s=0.0, resident=0, virtual=0, stopped=False):
    return Process(pid, parent, pid, cpu_s, resident, virtual, stopped)


def record(pid=10, **changes):
    fields = {"uid": None, "contained": False, "processes": 2, "memory_bytes": 1000, "cpu_s": 3.0}
    fields |= {"id": str(pid), "ends_at": 100.0, "group": Groups(), "seen": {pid: pid}}
    return supervisor.SandboxRecord(pid=pid, **fields | changes)


class World:
    """A supervisor among the processes `table`: of sandbox 10, 11 is the server and 12
    a command. Three processes can be forked.
    """

    def __init__(self, patch):
        self.now, self.cpu_s, self.signals, self.statuses = 5.0, iter([0.0] * 99), [], []
        self.table = {10: member(10), 11: member(11, 10), 12: member(12, 11)}
        self.ends = []
        patch.setattr(supervisor, "Groups", Groups)
        patch.setattr(supervisor, "_signal", lambda *sent: self.signals.append(sent))
        patch.setattr(supervisor, "process", lambda pid: self.table.get(pid))
        patch.setattr(supervisor, "started", lambda pids: {pid: pid for pid in pids})
        patch.setattr(supervisor, "family", lambda pid: {pid, 11} & {*self.table, os.getpid()})
        patch.setattr(Table, "now", lambda: Table(dict(self.table)))
        patch.setattr(os, "waitpid", lambda *_: self.waited())
        clock = {"monotonic": lambda: self.now, "process_time": lambda: next(self.cpu_s)}
        patch.setattr(supervisor, "time", SimpleNamespace(**clock, sleep=self.signals.append))
        patch.setattr(supervisor.Supervisor, "_fork_spare", lambda _: self.fork())
        self.owner, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.supervisor = supervisor.Supervisor(end, "/place", lambda _: None)

    def waited(self):
        if not self.statuses:
            raise ChildProcessError
        return self.statuses.pop(0)

    def fork(self):
        if len(self.ends) == 3:
            raise OSError(errno.EAGAIN, "no")
        own, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends.append(end)
        pid = 29 + len(self.ends)
        self.table[pid] = member(pid)
        return SpareProcess(pid, Groups(), own)

    def add(self, record):
        self.supervisor._records[record.id] = record
        self.supervisor._by_pid[record.pid] = record.id
        return record

    def ask(self, do, **request):
        self.owner.send(json.dumps({"do": do, "id": "10", **request}).encode())
        assert self.supervisor._receive()
        return self.taken()

    def polled(self):
        self.supervisor._poll()
        return self.taken()

    def taken(self):
        taken, self.signals = self.signals, []
        return taken

    def received(self):
        return json.loads(self.owner.recv(1 << 16, socket.MSG_DONTWAIT))


@pytest.fixture
def world(monkeypatch):
    with monkeypatch.context() as patch:
        world = World(patch)
        yield world
        for sock in (world.owner, world.supervisor._owner, *world.ends):
            sock.close()


BEYOND = "killed: it went beyond limits."


@pytest.mark.parametrize(
    ("changes", "memories", "now", "why"),
    [
        ({}, [(0, 0)] * 2, 99.9, ""),
        ({}, [], 100.0, OVERDUE),
        ({"own": {1: 1}}, [(0, 0)] * 3, 0.0, ""),
        ({"own": {1: 1}}, [(0, 0)] * 4, 0.0, f"{BEYOND}processes (4 of 2)"),
        ({"cpu_s": 2.0}, [(0, 0)] * 2, 0.0, ""),
        ({"cpu_s": 1.9}, [(0, 0)] * 2, 0.0, f"{BEYOND}cpu_s (2.0 of 1.9)"),
        ({}, [(600, 0), (400, 0)], 0.0, ""),  # the upper bound is at the limit
        ({"inherited": {2: 1002}}, [(600, 0), (401, 0)], 0.0, ""),
        ({"inherited": {2: 1001}}, [(600, 0), (401, 0)], 0.0, f"{BEYOND}memory_bytes (1001 of 1000)"),
        ({}, [(1000, 1000)], 0.0, f"{BEYOND}memory_bytes (2000 of 1000)"),
        ({}, [(1000, 1001)], 0.0, f"{BEYOND}memory_bytes (1001 of 1000)"),
        ({"group": Groups(full=True)}, [], 0.0, f"{BEYOND}memory_bytes, and the kernel ended a process"),
    ],
)  # fmt: skip
def test_limits_hold_up_to_the_last_unit(changes, memories, now, why, monkeypatch):
    """Here page tables are as large as the address space, and resident memory counts
    twice.
    """
    monkeypatch.setattr(Process, "table_bytes", lambda self: self.virtual_bytes)
    monkeypatch.setattr(
        Process, "proportional_bytes", lambda self, inherited: 2 * self.resident_bytes - inherited
    )
    members = [
        member(pid, cpu_s=1.0, resident=resident, virtual=virtual)
        for pid, (resident, virtual) in enumerate(memories, start=1)
    ]
    assert supervisor._exceeded_limit(record(**changes), members, now) == why


def test_a_soft_stop_spares_the_server_until_no_command_or_time_is_left(world):
    sandbox = world.add(record(processes=3))
    assert world.ask("ready") == []
    assert world.received() == {"id": "10", "event": "done"}
    assert (sandbox.own, sandbox.inherited) == ({10: 10, 11: 11}, {10: 0, 11: 0})
    assert world.ask("freeze") == [(12, STOP), (12, STOP)]
    assert world.received() == {"id": "10", "event": "done"}
    assert world.ask("thaw") == [(12, CONT)]
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
    assert (world.ask("kill"), sandbox.why) == ([(10, KILL)], STOPPED)
    sandbox.reaped = True
    assert world.ask("stop", grace_s=0.0) == world.ask("kill", id="11") == []
    early = world.add(record(contained=True))  # it is not ready
    assert (world.ask("stop", grace_s=1.0), early.own) == ([(10, KILL)], {10: 10, 11: 11})
    early.why = ""
    assert (world.ask("kill"), early.why) == ([(10, KILL)], KILLED)
    assert (world.ask("stop", grace_s=1.0), early.why) == ([(10, KILL)], KILLED)


def test_a_poll_ends_what_is_beyond_a_limit_and_costs_a_share_of_a_core(world):
    poll, sandbox = world.supervisor, world.add(record(processes=3, ends_at=5.0))
    world.add(record(20, contained=True, reaped=True, own={21: 21, 22: 7}, why="x"))
    world.table |= {21: member(21), 22: member(22)}
    world.cpu_s = iter([1.0, 1.02, 0.0, 0.001, 0.0, 0.02, 0.0, 0.005])
    sent = world.polled()
    assert ((21, KILL) in sent, (22, KILL) in sent, (12, KILL) in sent) == (True, False, True)
    assert (sandbox.why, poll._next_poll) == (OVERDUE, pytest.approx(5.0 + 0.02 / 0.5))
    del poll._records["20"]
    sandbox.ends_at, sandbox.why = 99.0, ""
    for took in (0.1, 0.2, 0.1):
        assert (world.polled(), poll._next_poll) == ([], pytest.approx(5.0 + took))
    world.cpu_s = iter([0.0] * 9)
    for pid, started, why in ((12, 12, ""), (11, 7, ""), (11, 11, "its own server was stopped")):
        sandbox.own = {pid: started} if pid == 11 else {11: 11}
        world.table[pid] = world.table[pid]._replace(stopped=True)
        world.polled()
        assert (why in sandbox.why, bool(why)) == (True, bool(sandbox.why))
    sandbox.kill_at = 99.0
    world.polled()
    assert poll._next_poll == pytest.approx(5.0 + 0.1 / 20)


@pytest.mark.parametrize(
    ("status", "changes", "why"),
    [
        (3 << 8, {}, "ended with status 3"),
        (9, {}, "ended with status -9"),
        (9, {"why": KILLED}, KILLED),
        (9, {"group": Groups(full=True)}, f"{BEYOND}memory_bytes, and the kernel ended a process"),
    ],
)
def test_an_end_is_reported_when_no_process_and_no_group_is_left(world, status, changes, why):
    sandbox, machine = world.add(record(**changes)), world.supervisor
    machine._spare, machine._next_poll = (spare := world.fork()), 9.0
    world.statuses = [(99, 0), (10, status), (0, 0), (30, 0)]
    machine._reap()
    assert (sandbox.reaped, sandbox.why, machine._next_poll) == (True, why, 0.0)
    assert machine._spare is spare
    machine._reap()
    assert machine._spare is None
    assert (spare.group.calls, spare.request_socket.fileno()) == (["remove"], -1)
    sandbox.group.removable = False
    machine._finish(sandbox, [11])
    assert world.taken() == [(11, KILL)]
    for world.now in (5.0 + REMOVE_S - 0.1, 5.0 + REMOVE_S):
        assert "10" in machine._records
        machine._finish(sandbox, [])
    assert world.received() == {"id": "10", "event": "gone", "why": why}
    assert machine._records == {}


START = {
    "do": "start",
    "id": "1",
    "contained": True,
    "drop": True,
    "limits": {"memory_bytes": 7, "disk_bytes": 9, "processes": 4, "cpu_s": 2.0, "wall_s": 3.0},
}


def test_requests_go_to_the_spare_or_to_a_new_process(world, monkeypatch):
    machine, first_uid = world.supervisor, 1_000_000 + os.getpid() * 3
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(supervisor, "UNREAD_REQUESTS", 1)
    monkeypatch.setattr(supervisor, "UIDS_EACH", 3)
    machine._prepare()
    for number, uid in ((1, first_uid), (2, first_uid + 1)):
        world.ask(**START | {"id": str(number)})
        assert json.loads(world.ends[-1].recv(4096)) == START | {"id": str(number), "uid": uid}
        got = machine._records[str(number)]
        assert (got.pid, got.seen, got.uid) == (29 + number, {29 + number: 29 + number}, uid)
        assert got.group.calls == [{"memory_bytes": 16 + SHM_BYTES, "processes": 4}]
        assert (got.processes, got.memory_bytes, got.cpu_s, got.ends_at) == (4, 7, 2.0, 8.0)
        assert (got.unread is not None) == (number == 1)
    machine._prepare()
    world.ends[-1].close()  # the spare has ended, and no other can be forked
    world.ask(**START | {"id": "3", "drop": False})
    assert machine._spare is None
    assert world.received()["why"] == f"no process with its limits: [Errno {errno.EAGAIN}] no"
    unread, world.statuses = machine._records["1"].unread, [(30, 9)]
    world.ends.pop()
    machine._reap()  # its request is unread: it is sent again
    assert (machine._records["1"].pid, unread.acknowledgment.fileno()) == (32, -1)
    world.add(record())
    world.ask(**START | {"id": "5"})
    assert world.received()["why"] == "at most 3 sandboxes may live at once"


def test_requests_are_served_until_the_owner_ends_and_all_sandboxes_with_it(world, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: None)
    for request in (START | {"drop": False}, *({"do": do, "id": "1"} for do in ("freeze", "kill"))):
        world.owner.send(json.dumps(request).encode())
    world.owner.shutdown(socket.SHUT_WR)
    groups, world.table = world.supervisor._groups, {11: member(11)}
    world.statuses = [(0, 0)] * 5 + [(9, 0), (0, 0)]
    world.supervisor.run()
    assert (world.received()["event"], len(world.ends), groups.calls) == ("done", 1, ["remove"])
    sent = [sent for sent in world.signals if sent not in ((30, STOP), (30, KILL))]
    assert sent == [*[(11, KILL), 0.005] * 2, (11, KILL)]


@pytest.mark.parametrize("root", [True, False])
def test_a_fork_becomes_its_sandbox_step_by_step(world, root, monkeypatch):
    steps = []

    def note(where, *names, result=None):
        for name in names:
            call = lambda *given, name=name: (steps.append((name, *given)), result)[1]  # noqa: E731
            monkeypatch.setattr(where, name, call)

    note(supervisor, "_leave_supervisor", "_prefer_for_oom_kill", "name_account")
    note(supervisor, "_arrange", "limit")
    note(supervisor, "stage", result=(writes := os.dup(0), False))
    note(os, "setgroups", "setresgid", "setresuid", "chdir", "execve", "_exit")
    note(supervisor.kernel, "set_dumpable", "die_with_parent")
    note(world.supervisor, "_enter")
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    private, request = os.memfd_create("private"), {"id": "7", "uid": 5 if root else None}
    content = {"argv": ["/a", "b"], "env": {"A": "1"}, "account": True, "rlimits": {"NPROC": 4}}
    content |= {"root": {"layers": ["/l"]}} if root else {"argv": []}
    os.write(private, json.dumps(content).encode())
    socket.send_fds(near, [json.dumps(request).encode()], [0, 1, private])
    other = world.add(record(unread=UnreadRequest({}, [private], socket.socket())))
    world.supervisor._become(far, 3, Groups(calls=steps))
    data, fds, _, _ = socket.recv_fds(world.owner, 4096, 2)
    staged = {"id": "7", "event": "staged", "pid": os.getpid(), "has_root": not root}
    assert (json.loads(data), len(fds), near.recv(9)) == (staged, int(root), b".")
    assert other.unread.acknowledgment.fileno() == -1
    _, channel, errors = next(step for step in steps if step[0] == "_arrange")
    expected = [("_leave_supervisor", 3), "join", ("_prefer_for_oom_kill",)]
    if root:
        expected += [("stage", supervisor.Root(layers=["/l"]), "/place", 5)]
        expected += [("name_account", 5, "/place"), ("setgroups", []), ("setresgid", 5, 5, 5)]
        expected += [("setresuid", 5, 5, 5), ("set_dumpable", 1), ("die_with_parent", KILL)]
    expected += [("_arrange", channel, errors), ("limit", {"NPROC": 5})]
    if root:
        expected += [("chdir", "/"), ("execve", "/a", ["/a", "b"], {"A": "1"})]
    entered = {**request, **content}
    assert steps == [*expected, ("_enter", entered), ("_exit", 1)]
    assert channel < errors
    for fd in (*fds, channel, errors, errors + 1, writes):
        os.close(fd)
    near.close()
    far.close()
