"""The process that supervises the sandboxes of one back end: it forks the sandboxes,
polls the resources that their processes use, and ends them.

The process is small, single-threaded and long-lived. Forking it takes a millisecond,
while forking a trainer takes many. Sandboxes die with their parent's thread, and this
thread lives as long as any sandbox may. A busy event loop delays no check.
`launcher.py` is the other end of its socket.

Invariants: all children of the supervisor end when it ends, and it ends when its owner
ends; a signal goes only to a child that is not reaped yet or to a descendant found a
moment before, never to a process selected by name; the end of every child is reported
exactly once. The supervisor uses the standard library alone, and imports no module that
is slow to import.
"""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollweave.io.boot import reset_signals
from rollweave.io.processes import family
from rollweave_sandbox import kernel
from rollweave_sandbox.boot import limit
from rollweave_sandbox.cgroups import REMOVE_S, Group, Groups
from rollweave_sandbox.kernel import SHM_BYTES
from rollweave_sandbox.processes import Process, Table, process, started
from rollweave_sandbox.seccomp import bpf_filter
from rollweave_sandbox.stage import Root, name_account, stage

MESSAGE_BYTES = 1 << 17
"""Maximum size of a request in bytes."""

UNREAD_REQUESTS = 16
"""Maximum number of requests kept until a spare process has read them."""

TICK_S = 0.1
"""Seconds between two checks of the resources that the sandboxes use."""

POLL_CPU_SHARE, ENDING_CPU_SHARE = 0.1, 0.5
"""Largest shares of one core spent on polling, and while a sandbox ends; with many
sandboxes the interval grows.
"""

STOPPED, KILLED, OVERDUE = "stopped", "killed", "killed: it went beyond limits.wall_s"
"""Reasons for a sandbox's end that the code in it did not cause."""

ENDED = "ended with status"
"""Beginning of the reason if the first process ended. Its exit status or the negated
signal number follows.
"""

UID_BASE, UIDS_EACH = 1_000_000, 1000
"""Host uids of sandboxes if we are root: each supervisor has a block of uids, by its
pid, and each live sandbox has one uid of the block.
"""


@dataclass
class SandboxRecord:
    """The supervisor's knowledge of one sandbox."""

    id: str
    pid: int
    uid: int | None
    contained: bool
    """True if all its processes end with its first process (a PID namespace)."""
    processes: int
    memory_bytes: int
    cpu_s: float
    ends_at: float
    group: Group
    seen: dict[int, int]
    """Start times, by pid, of the sandbox's processes at the last check. They still
    belong to the sandbox after their parent has ended.
    """
    own: dict[int, int] = field(default_factory=dict)
    """Start times, by pid, of the sandbox's init and server, which a soft stop
    spares.
    """
    inherited: dict[int, int] = field(default_factory=dict)
    """Resident bytes, by pid, of the init and the server before any command ran. A fork
    shares most of these bytes with its parent.
    """
    reaped: bool = False
    removed_by: float = 0.0
    """Time after which its end is reported even if its control groups remain."""
    why: str = ""
    kill_at: float = 0.0
    """Time at which a soft stop ends; 0 without a soft stop."""
    signaled: set[int] = field(default_factory=set)
    """Pids of the processes that have been sent SIGTERM."""
    unread: "UnreadRequest | None" = None
    """Its start request, until the process that was forked in advance has read the
    request.
    """


@dataclass(frozen=True)
class SpareProcess:
    """A process that has joined the control groups of a sandbox and waits for a start
    request.
    """

    pid: int
    group: Group
    request_socket: socket.socket
    """Socket over which it receives a request and the request's descriptors."""

    def drop(self) -> None:
        self.request_socket.close()  # the process then ends, if it has not yet
        self.group.remove()


@dataclass(frozen=True)
class UnreadRequest:
    """A start request that was sent to a spare process. The process acknowledges the
    request before it acts on it. If the process is killed earlier, another process can
    take the request.
    """

    request: dict[str, Any]
    fds: list[int]
    acknowledgment: socket.socket

    def close(self) -> None:
        self.acknowledgment.close()
        for fd in self.fds:
            os.close(fd)

    def acknowledged(self) -> bool:
        """Return whether the process has read the request. Must be called when the
        socket is readable, or the process has ended.
        """
        try:
            return bool(self.acknowledgment.recv(1, socket.MSG_DONTWAIT))
        except OSError:  # nothing was sent, or the process ended with the request unread
            return False


class Supervisor:
    """Receives requests, and forks and signals sandboxes.

    `enter` turns a fork into a sandbox that runs no other program (`zygote`).
    """

    def __init__(
        self, owner: socket.socket, place: str, enter: Callable[[dict[str, Any]], None]
    ) -> None:
        self._owner, self._place, self._enter = owner, place, enter
        self._records: dict[str, SandboxRecord] = {}
        self._by_pid: dict[int, str] = {}
        self._unsent: deque[bytes] = deque()
        self._next_poll = 0.0
        self._ending = False
        self._groups = Groups()
        self._numbers = itertools.count(1)
        self._spare: SpareProcess | None = None
        bpf_filter()  # computed once, before any fork
        self._requests = {
            "ready": self._ready,
            "stop": self._stop,
            "kill": self._kill,
            "freeze": self._freeze,
            "thaw": self._thaw,
        }

    def run(self) -> None:
        """Serve until the owner closes its end of the socket; then end all
        sandboxes.
        """
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # From now on SIGTERM interrupts nothing, least of all the shutdown.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            while not self._ending:
                owner = self._owner.fileno()
                unread = {
                    record.unread.acknowledgment.fileno(): record
                    for record in self._records.values()
                    if record.unread is not None
                }
                readable, _, _ = select.select(
                    [owner, wake_r, *unread], [owner] if self._unsent else [], [], self._pause()
                )
                if wake_r in readable:
                    os.read(wake_r, 4096)
                for fd in readable:
                    if fd in unread:
                        self._read_acknowledgment(unread[fd])
                if owner in readable and not self._receive():
                    return
                self._reap()
                if time.monotonic() >= self._next_poll and self._records:
                    self._poll()
                self._flush()
                if self._spare is None and not select.select([owner], [], [], 0)[0]:
                    self._prepare()
        finally:
            self._end_all()

    def _on_sigterm(self, *_: object) -> None:
        self._ending = True

    def _pause(self) -> float | None:
        return max(0.0, self._next_poll - time.monotonic()) if self._records else None

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._owner, MESSAGE_BYTES, 4)
        if not data:
            return False
        request = json.loads(data)
        try:
            if request["do"] == "start":
                self._start(request, fds)
            elif request["id"] in self._records:
                self._requests[request["do"]](self._records[request["id"]], request)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    # --- requests ---

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        if len(self._records) == UIDS_EACH:
            self._send(
                id=request["id"],
                event="gone",
                why=f"at most {UIDS_EACH} sandboxes may live at once",
            )
            return
        self._reap()  # a spare may have ended
        spare, self._spare = self._spare, None
        if spare is None or not self._launch(request, fds, spare):
            self._launch(request, fds, None)

    def _launch(self, request: dict[str, Any], fds: list[int], spare: SpareProcess | None) -> bool:
        """Send the request to the spare process, or to a new process. Return False if
        the spare process has ended; the end of a new process is reported.
        """
        uid = self._free_uid() if os.getuid() == 0 and request["drop"] else None
        limits = request["limits"]
        receiver = spare
        try:
            receiver = receiver or self._fork_spare()
            # The sandbox's files are in memory too, and are limited separately.
            most = limits["memory_bytes"] + limits["disk_bytes"] + SHM_BYTES
            receiver.group.limit(memory_bytes=most, processes=limits["processes"])
            socket.send_fds(
                receiver.request_socket, [json.dumps({**request, "uid": uid}).encode()], fds
            )
        except OSError as error:
            if receiver is not None:
                receiver.drop()
            if spare is None:
                why = f"no process with its limits: {error}"
                self._send(id=request["id"], event="gone", why=why)
            return False
        unread = None
        if spare is not None and self._unread() < UNREAD_REQUESTS:
            unread = UnreadRequest(request, [os.dup(fd) for fd in fds], receiver.request_socket)
        else:
            receiver.request_socket.close()
        pid, group = receiver.pid, receiver.group
        record = SandboxRecord(
            id=request["id"],
            pid=pid,
            uid=uid,
            contained=request["contained"],
            processes=limits["processes"],
            memory_bytes=limits["memory_bytes"],
            cpu_s=limits["cpu_s"],
            ends_at=time.monotonic() + limits["wall_s"],
            group=group,
            seen={pid: leader.started} if (leader := process(pid)) else {},
            unread=unread,
        )
        self._records[record.id] = record
        self._by_pid[pid] = record.id
        return True

    def _unread(self) -> int:
        return sum(record.unread is not None for record in self._records.values())

    def _read_acknowledgment(self, record: SandboxRecord) -> None:
        if record.unread is not None and record.unread.acknowledged():
            record.unread.close()
            record.unread = None

    def _relaunch(self, record: SandboxRecord, unread: UnreadRequest) -> None:
        """Send a request to a new process, because the former process ended before it
        had read the request.
        """
        del self._records[record.id]
        record.group.remove()
        self._launch(unread.request, unread.fds, None)
        unread.close()

    def _prepare(self) -> None:
        """Fork a process for the next request: moving a process into its groups takes
        longer than all other steps together.
        """
        # On failure the next request tries again, and reports the error.
        with contextlib.suppress(OSError):
            self._spare = self._fork_spare()

    def _fork_spare(self) -> SpareProcess:
        """Fork a process that joins new groups. Raises OSError."""
        group, us = self._groups.make(str(next(self._numbers))), os.getpid()
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            try:
                pid = os.fork()
            except OSError:
                own_end.close()
                group.remove()
                raise
            if pid == 0:
                own_end.close()
                self._become(child_end, us, group)
        return SpareProcess(pid, group, own_end)

    def _ready(self, record: SandboxRecord, _: dict[str, Any]) -> None:
        """Record the sandbox's own processes: its server has answered, and no command
        has run yet.
        """
        own = [line for pid in family(record.pid) if (line := process(pid))]
        record.own = {line.pid: line.started for line in own}
        record.inherited = {line.pid: line.resident_bytes for line in own}
        self._send(id=record.id, event="done")

    def _stop(self, record: SandboxRecord, request: dict[str, Any]) -> None:
        record.why = record.why or STOPPED
        record.kill_at = time.monotonic() + request["grace_s"]
        if request["grace_s"] > 0:
            self._terminate(record)
        else:
            self._end(record)
        self._next_poll = 0.0

    def _kill(self, record: SandboxRecord, _: dict[str, Any]) -> None:
        record.why = record.why or KILLED
        self._end(record)

    def _freeze(self, record: SandboxRecord, _: dict[str, Any]) -> None:
        """Stop its commands; a second round stops what was forked during the first."""
        for _round in range(2):
            for member in self._processes(record):
                if member.pid not in record.own:
                    _signal(member.pid, signal.SIGSTOP)
        self._send(id=record.id, event="done")

    def _thaw(self, record: SandboxRecord, _: dict[str, Any]) -> None:
        for member in self._processes(record):
            if member.pid not in record.own:
                _signal(member.pid, signal.SIGCONT)

    # --- watching ---

    def _poll(self) -> None:
        began, cpu_s = time.monotonic(), time.process_time()
        for record in [
            record for record in self._records.values() if record.reaped and record.contained
        ]:
            # The init of a PID namespace ends last: once the sandbox's own processes
            # are gone, all are.
            self._finish(
                record,
                [
                    pid
                    for pid, begun in record.own.items()
                    if (now := process(pid)) and now.started == begun
                ],
            )
        others = [
            record for record in self._records.values() if not (record.reaped and record.contained)
        ]
        table = Table.now() if others else None
        for record in others:
            processes = self._processes(record, table)
            if record.reaped:
                self._finish(record, [member.pid for member in processes])
            elif not record.why and (
                why := _exceeded_limit(record, processes, began) or _stopped(record, processes)
            ):
                record.why = why
                self._end(record)
            elif record.kill_at:
                self._terminate(record, processes)
        # the CPU's time: on a busy machine the same work takes longer, and costs no
        # more
        took = time.process_time() - cpu_s
        ending = any(record.kill_at or record.reaped for record in self._records.values())
        tick, share = (TICK_S / 20, ENDING_CPU_SHARE) if ending else (TICK_S, POLL_CPU_SHARE)
        self._next_poll = began + max(tick, took / share)

    def _processes(self, record: SandboxRecord, table: Table | None = None) -> list[Process]:
        table = table or Table.now()
        processes = table.below(record.seen)
        record.seen = {process.pid: process.started for process in processes}
        return processes

    def _terminate(self, record: SandboxRecord, processes: list[Process] | None = None) -> None:
        """Send SIGTERM once to each of its commands. Send SIGKILL to all processes if
        no command is left, or the grace period is over.
        """
        left = [
            member
            for member in processes or self._processes(record)
            if member.pid not in record.own
        ]
        if not record.own or not left or time.monotonic() >= record.kill_at:
            self._end(record)
            return
        for member in left:
            if member.pid not in record.signaled:
                record.signaled.add(member.pid)
                _signal(member.pid, signal.SIGTERM)
                _signal(member.pid, signal.SIGCONT)

    def _end(self, record: SandboxRecord) -> None:
        """Send SIGKILL to the sandbox's first process and, unless the sandbox is
        contained, to all.
        """
        record.own = record.own or started(family(record.pid))
        left = [] if record.contained else self._processes(record)
        if not record.reaped:
            _signal(record.pid, signal.SIGKILL)
        for member in left:
            _signal(member.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # The spare could not join its groups, or was killed.
            if self._spare is not None and pid == self._spare.pid:
                self._spare.drop()
                self._spare = None
            record = self._records.get(self._by_pid.pop(pid, ""))
            if record is not None:  # else an orphan that we adopted
                self._read_acknowledgment(record)
                if record.unread is not None and not record.why:
                    self._relaunch(record, record.unread)
                    continue
                record.reaped = True
                record.why = (
                    record.why
                    or _beyond_memory(record)
                    or f"{ENDED} {os.waitstatus_to_exitcode(status)}"
                )
                self._next_poll = 0.0

    def _finish(self, record: SandboxRecord, left: list[int]) -> None:
        """Kill the processes that are left after the first process ended, and report
        the end of the sandbox once no process is left.
        """
        for pid in left:
            _signal(pid, signal.SIGKILL)
        record.removed_by = record.removed_by or time.monotonic() + REMOVE_S
        if not left and (record.group.remove() or time.monotonic() >= record.removed_by):
            if record.unread is not None:
                record.unread.close()
            del self._records[record.id]
            self._send(id=record.id, event="gone", why=record.why)

    def _end_all(self) -> None:
        """Kill all processes that we forked or adopted, and remove all groups."""
        for _ in range(1000):
            for pid in family(os.getpid()) - {os.getpid()}:
                _signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(0.005)
        self._groups.close()

    # --- the owner ---

    def _send(self, **message: object) -> None:
        self._unsent.append(json.dumps(message).encode())
        self._flush()

    def _flush(self) -> None:
        """Send queued messages without waiting for an owner that does not read, so that
        polling continues.
        """
        try:
            while self._unsent:
                self._owner.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the owner is gone, which the next read detects

    # --- in the forked process ---

    def _become(self, request_socket: socket.socket, parent: int, group: Group) -> None:
        """Become a sandbox. Never returns.

        The third received descriptor is a file with the private part of the request,
        which no other process has in memory.
        """
        request: dict[str, Any] = {}
        try:
            _leave_supervisor(parent)
            for record in self._records.values():
                if record.unread is not None:
                    record.unread.close()  # the descriptors of another sandbox
            group.join()
            _prefer_for_oom_kill()
            data, fds, _, _ = socket.recv_fds(request_socket, MESSAGE_BYTES, 4)
            if not data:
                os._exit(0)
            request = json.loads(data)
            request |= json.loads(os.pread(fds[2], os.fstat(fds[2]).st_size, 0))
            with contextlib.suppress(ConnectionError):  # the supervisor need not wait for it
                request_socket.send(b".", socket.MSG_NOSIGNAL)
            uid = request["uid"]
            root = request.get("root")
            writes, has_root = stage(Root(**root), self._place, uid) if root else (None, True)
            message = {
                "id": request["id"],
                "event": "staged",
                "pid": os.getpid(),
                "has_root": has_root,
            }
            socket.send_fds(
                self._owner, [json.dumps(message).encode()], [] if writes is None else [writes]
            )
            if uid is not None:
                if request.get("account"):
                    name_account(uid, self._place)
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                kernel.set_dumpable(1)
                kernel.die_with_parent(signal.SIGKILL)
            _arrange(fds[0], fds[1])
            _limit(request.get("rlimits"))
            if request["argv"]:
                os.chdir("/")  # the user may not enter our folder, nor the sandbox see its path
                os.execve(request["argv"][0], request["argv"], request["env"])
            self._enter(request)
        except BaseException as error:
            signaled = json.dumps(
                {
                    "id": request.get("id"),
                    "event": "failed",
                    "why": f"{type(error).__name__}: {error}",
                }
            ).encode()
            try:
                self._owner.send(signaled)
            except OSError:
                # The descriptors are arranged already: the owner reads stderr, too.
                os.write(2, signaled)
        finally:
            os._exit(1)

    def _free_uid(self) -> int:
        first = UID_BASE + os.getpid() * UIDS_EACH
        used_uids = {record.uid for record in self._records.values()}
        return next(uid for uid in range(first, first + UIDS_EACH) if uid not in used_uids)


def _exceeded_limit(record: SandboxRecord, processes: list[Process], now: float) -> str:
    """Return the reason for killing a sandbox that exceeds a limit; "" if it exceeds no
    limit.
    """
    if now >= record.ends_at:
        return OVERDUE
    # The kernel does not count the processes of the host's root.
    if len(processes) - len(record.own) > record.processes:
        return f"killed: it went beyond limits.processes ({len(processes)} of {record.processes})"
    if why := _beyond_memory(record):
        return why
    cpu_s = sum(member.cpu_s for member in processes)
    if cpu_s > record.cpu_s:
        return f"killed: it went beyond limits.cpu_s ({cpu_s:.1f} of {record.cpu_s:.1f})"
    # Pages that processes share should count once, but that sum takes long to compute.
    # The upper bound, which counts them repeatedly, is checked first.
    if sum(member.most_bytes for member in processes) > record.memory_bytes:
        # The kernel walks all page tables to sum up the pages, which would take longest
        # for processes with the largest page tables.
        used = sum(member.table_bytes() for member in processes)
        if used <= record.memory_bytes:
            used = sum(
                member.proportional_bytes(record.inherited.get(member.pid, 0))
                for member in processes
            )
        if used > record.memory_bytes:
            return f"killed: it went beyond limits.memory_bytes ({used} of {record.memory_bytes})"
    return ""


def _beyond_memory(record: SandboxRecord) -> str:
    """Return the reason for the sandbox's end if the kernel killed one of its processes
    for its memory; else "".
    """
    return (
        "killed: it went beyond limits.memory_bytes, and the kernel ended a process"
        if record.group.out_of_memory()
        else ""
    )


def _stopped(record: SandboxRecord, processes: list[Process]) -> str:
    """Return the reason for killing a sandbox whose server was stopped by code inside,
    since calls would wait in vain; else "".
    """
    stopped = any(
        member.stopped and record.own.get(member.pid) == member.started for member in processes
    )
    return "killed: its own server was stopped from inside" if stopped else ""


def _signal(pid: int, number: signal.Signals) -> None:
    # A PermissionError means a set-uid helper of a runtime, which ends with the process
    # that started it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _leave_supervisor(parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prefer_for_oom_kill() -> None:
    """Make the kernel end a sandbox first when the machine runs out of memory.
    Descendants inherit the setting; if we are root, no descendant can undo it.
    """
    with open("/proc/self/oom_score_adj", "w") as out:
        out.write("1000")


def _limit(rlimits: dict[str, int] | None) -> None:
    """Set per-process limits before any program of the image runs. The kernel counts
    processes by user and user namespace, which are both the sandbox's by now. This
    process counts in addition to the processes inside.
    """
    if rlimits is not None:
        limit({**rlimits, "NPROC": rlimits["NPROC"] + 1})


def _arrange(channel: int, errors: int) -> None:
    """Make descriptors 0 and 1 /dev/null, 2 the error pipe, 3 the channel and 4 the
    seccomp program; close all others.
    """
    program = os.memfd_create("seccomp", 0)
    os.write(program, bpf_filter())
    os.lseek(program, 0, os.SEEK_SET)
    nothing = os.open(os.devnull, os.O_RDWR)
    high = [
        os.dup2(fd, 100 + place)
        for place, fd in enumerate((nothing, nothing, errors, channel, program))
    ]
    for place, fd in enumerate(high):
        os.dup2(fd, place)  # inheritable
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    """Serve as the arguments `SOCKET OWNER PLACE BASE KEPT` say: process OWNER has the
    other end of SOCKET, and roots are mounted at PLACE.

    BASE and KEPT are folders that the supervisor removes when it ends, so that a killed
    owner leaves no folders. They are locked by descriptors that the supervisor inherits
    and no sandbox has.
    """
    serve(_no_entrance)


def serve(enter: Callable[[dict[str, Any]], None]) -> None:
    """Serve as `main` does, with `enter` for sandboxes that run no program."""
    fd, owner, place, base, kept = sys.argv[1:]
    reset_signals()
    os.umask(0o022)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        kernel.die_with_parent(signal.SIGTERM)
        if os.getppid() != int(owner):
            sys.exit(1)
        kernel.adopt_orphans()
        Supervisor(socket.socket(fileno=int(fd)), place, enter).run()
    finally:
        for folder in (base, kept):
            shutil.rmtree(folder, ignore_errors=True)


def _no_entrance(request: dict[str, Any]) -> None:
    raise ValueError(f"argv must not be empty, got {request['argv']!r}")
