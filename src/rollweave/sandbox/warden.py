"""The process that holds the sandboxes of one back end: it forks each, watches what all
its processes use, and ends it.

It is small, single-threaded and long-lived: a fork of it takes a millisecond, where one
of a trainer takes many; a sandbox that is to die with its parent's thread has one that
stays; a busy event loop delays no watch. `launcher.py` is its other end.

Invariants: all its children end when it ends, and it ends when its owner does; a signal
goes to a child that is not reaped yet, or to a descendant of one found a moment before,
never by name; every child's end is told exactly once. Standard library alone: it
imports nothing heavy, and nothing of ours that does.
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

from rollweave.io.inherited import reset_signals
from rollweave.sandbox import kernel
from rollweave.sandbox.boot import limit
from rollweave.sandbox.cgroups import REMOVE_S, Group, Groups
from rollweave.sandbox.devices import SHM_BYTES
from rollweave.sandbox.processes import Process, Table, family, process, started
from rollweave.sandbox.seccomp import bpf_filter
from rollweave.sandbox.stage import Root, stage

MESSAGE_BYTES = 1 << 17
"""Maximum size of a request in bytes."""

TICK_S = 0.1
"""Between two looks at what the sandboxes use."""

LOOK_SHARE = 0.1
"""Of a core that looking may take: with many sandboxes the looks are further apart."""

STOPPED, KILLED, OVERDUE = "stopped", "killed", "killed: it went beyond limits.wall_s"
"""Reasons for the end of a sandbox that the code in it did not cause."""

ENDED = "ended with status"
"""Beginning of the reason if its first process ended; the exit status follows, or minus
the signal's number.
"""

UID_BASE, UIDS_EACH = 1_000_000, 1000
"""Host uids of sandboxes where we are root: a block for each warden, by its pid, one
for each sandbox at a time.
"""


@dataclass
class Held:
    """One sandbox."""

    id: str
    pid: int
    uid: int | None
    contained: bool
    """All its processes end with the first one (a PID namespace)."""
    processes: int
    memory_bytes: int
    cpu_s: float
    ends_at: float
    group: Group
    seen: dict[int, int]
    """Start times of its processes, as of the last look: still its own when their
    parent is gone.
    """
    own: dict[int, int] = field(default_factory=dict)
    """Start times of the sandbox's own processes, which a soft stop leaves: its init
    and its server.
    """
    inherited: dict[int, int] = field(default_factory=dict)
    """Resident bytes of these before any command ran; a fork mostly shares them with
    its parent.
    """
    reaped: bool = False
    removed_by: float = 0.0
    """Time by which its groups must be gone; otherwise they stay until the warden ends."""
    why: str = ""
    kill_at: float = 0.0
    """A soft stop ends then."""
    told: set[int] = field(default_factory=set)
    """Processes that were sent SIGTERM."""


@dataclass(frozen=True)
class Spare:
    """A process that has joined its groups, and waits for the request that it will
    serve.
    """

    pid: int
    group: Group
    door: socket.socket
    """Socket over which it receives a request and the request's descriptors."""

    def drop(self) -> None:
        self.door.close()  # it then ends, if it has not yet
        self.group.remove()


class Warden:
    """Requests in, forks and signals out.

    `enter` becomes a sandbox that needs no other program (`zygote`).
    """

    def __init__(
        self, owner: socket.socket, place: str, enter: Callable[[dict[str, Any]], None]
    ) -> None:
        self._owner, self._place, self._enter = owner, place, enter
        self._held: dict[str, Held] = {}
        self._by_pid: dict[int, str] = {}
        self._unsent: deque[bytes] = deque()
        self._next_look = 0.0
        self._ending = False
        self._groups = Groups()
        self._numbers = itertools.count(1)
        self._spare: Spare | None = None
        bpf_filter()  # computed once, before any fork
        self._requests = {
            "ready": self._ready,
            "stop": self._stop,
            "kill": self._kill,
            "freeze": self._freeze,
            "thaw": self._thaw,
        }

    def run(self) -> None:
        """Serve until the owner's end of the socket closes; then end all."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # from now on SIGTERM interrupts nothing, least of all the end
        signal.signal(signal.SIGTERM, self._asked_to_end)
        try:
            while not self._ending:
                owner = self._owner.fileno()
                readable, _, _ = select.select(
                    [owner, wake_r], [owner] if self._unsent else [], [], self._pause()
                )
                if wake_r in readable:
                    os.read(wake_r, 4096)
                if owner in readable and not self._receive():
                    return
                self._reap()
                if time.monotonic() >= self._next_look and self._held:
                    self._look()
                self._flush()
                if self._spare is None and not select.select([owner], [], [], 0)[0]:
                    self._prepare()
        finally:
            self._end_all()

    def _asked_to_end(self, *_: object) -> None:
        self._ending = True

    def _pause(self) -> float | None:
        return max(0.0, self._next_look - time.monotonic()) if self._held else None

    def _receive(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._owner, MESSAGE_BYTES, 4)
        if not data:
            return False
        request = json.loads(data)
        try:
            if request["do"] == "start":
                self._start(request, fds)
            elif request["id"] in self._held:
                self._requests[request["do"]](self._held[request["id"]], request)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    # --- requests ---

    def _start(self, request: dict[str, Any], fds: list[int]) -> None:
        if len(self._held) == UIDS_EACH:
            self._tell(
                id=request["id"],
                event="gone",
                why=f"at most {UIDS_EACH} sandboxes may live at once",
            )
            return
        uid = self._free_uid() if os.getuid() == 0 and request["drop"] else None
        limits = request["limits"]
        self._reap()  # a spare may have ended
        spare, self._spare = self._spare, None
        try:
            spare = spare or self._forked()
            # Its files are in memory, too, and have their own limits.
            most = limits["memory_bytes"] + limits["disk_bytes"] + SHM_BYTES
            spare.group.limit(memory_bytes=most, processes=limits["processes"])
            socket.send_fds(spare.door, [json.dumps({**request, "uid": uid}).encode()], fds)
        except OSError as error:
            if spare is not None:
                spare.drop()
            self._tell(id=request["id"], event="gone", why=f"no process with its limits: {error}")
            return
        spare.door.close()
        pid, group = spare.pid, spare.group
        held = Held(
            id=request["id"],
            pid=pid,
            uid=uid,
            contained=request["contained"],
            processes=limits["processes"],
            memory_bytes=limits["memory_bytes"],
            cpu_s=limits["cpu_s"],
            ends_at=time.monotonic() + limits["wall_s"],
            group=group,
            seen={pid: begun.started} if (begun := process(pid)) else {},
        )
        self._held[held.id] = held
        self._by_pid[pid] = held.id

    def _prepare(self) -> None:
        """Keep a process ready for the next request: moving one into its groups takes
        longer than all other steps together.
        """
        # then the next request tries again, and reports the error
        with contextlib.suppress(OSError):
            self._spare = self._forked()

    def _forked(self) -> Spare:
        """Raises OSError."""
        group, us = self._groups.make(str(next(self._numbers))), os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                group.remove()
                raise
            if pid == 0:
                ours.close()
                self._become(theirs, us, group)
        return Spare(pid, group, ours)

    def _ready(self, held: Held, _: dict[str, Any]) -> None:
        """The server has answered, and no command has run yet: what is there now is the
        sandbox's own.
        """
        own = [line for pid in family(held.pid) if (line := process(pid))]
        held.own = {line.pid: line.started for line in own}
        held.inherited = {line.pid: line.resident_bytes for line in own}
        self._tell(id=held.id, event="done")

    def _stop(self, held: Held, request: dict[str, Any]) -> None:
        held.why = held.why or STOPPED
        held.kill_at = time.monotonic() + request["grace_s"]
        if request["grace_s"] > 0:
            self._end_softly(held)
        else:
            self._end(held)
        self._next_look = 0.0

    def _kill(self, held: Held, _: dict[str, Any]) -> None:
        held.why = held.why or KILLED
        self._end(held)

    def _freeze(self, held: Held, _: dict[str, Any]) -> None:
        """Stop its commands; a second round stops what was forked during the first."""
        for _round in range(2):
            for each in self._processes(held):
                if each.pid not in held.own:
                    _signal(each.pid, signal.SIGSTOP)
        self._tell(id=held.id, event="done")

    def _thaw(self, held: Held, _: dict[str, Any]) -> None:
        for each in self._processes(held):
            if each.pid not in held.own:
                _signal(each.pid, signal.SIGCONT)

    # --- watching ---

    def _look(self) -> None:
        began = time.monotonic()
        for held in [held for held in self._held.values() if held.reaped and held.contained]:
            # A PID namespace's init ends last: when the sandbox's own processes are
            # gone, all are.
            self._finish(
                held,
                [
                    pid
                    for pid, begun in held.own.items()
                    if (now := process(pid)) and now.started == begun
                ],
            )
        others = [held for held in self._held.values() if not (held.reaped and held.contained)]
        table = Table.now() if others else None
        for held in others:
            processes = self._processes(held, table)
            if held.reaped:
                self._finish(held, [each.pid for each in processes])
            elif not held.why and (
                why := _excess(held, processes, began) or _stopped(held, processes)
            ):
                held.why = why
                self._end(held)
            elif held.kill_at:
                self._end_softly(held, processes)
        took = time.monotonic() - began
        ending = any(held.kill_at or held.reaped for held in self._held.values())
        self._next_look = began + max(
            TICK_S / 20 if ending else TICK_S, took / (1.0 if ending else LOOK_SHARE)
        )

    def _processes(self, held: Held, table: Table | None = None) -> list[Process]:
        table = table or Table.now()
        found = table.below(held.seen)
        held.seen = {process.pid: process.started for process in found}
        return found

    def _end_softly(self, held: Held, processes: list[Process] | None = None) -> None:
        """SIGTERM to its commands, once each; SIGKILL to all where none is left, or the
        time is over.
        """
        left = [each for each in processes or self._processes(held) if each.pid not in held.own]
        if not held.own or not left or time.monotonic() >= held.kill_at:
            self._end(held)
            return
        for each in left:
            if each.pid not in held.told:
                held.told.add(each.pid)
                _signal(each.pid, signal.SIGTERM)
                _signal(each.pid, signal.SIGCONT)

    def _end(self, held: Held) -> None:
        """SIGKILL: its first process; of one that is not contained, all."""
        held.own = held.own or started(family(held.pid))
        left = [] if held.contained else self._processes(held)
        if not held.reaped:
            _signal(held.pid, signal.SIGKILL)
        for each in left:
            _signal(each.pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # it could not join its groups, or was killed
            if self._spare is not None and pid == self._spare.pid:
                self._spare.drop()
                self._spare = None
            held = self._held.get(self._by_pid.pop(pid, ""))
            if held is not None:  # else an orphan that we adopted
                held.reaped = True
                held.why = (
                    held.why
                    or _beyond_memory(held)
                    or f"{ENDED} {os.waitstatus_to_exitcode(status)}"
                )
                self._next_look = 0.0

    def _finish(self, held: Held, left: list[int]) -> None:
        """Kill what is left after the first process ended, and report the end of the
        sandbox once nothing is left.
        """
        for pid in left:
            _signal(pid, signal.SIGKILL)
        held.removed_by = held.removed_by or time.monotonic() + REMOVE_S
        if not left and (held.group.remove() or time.monotonic() >= held.removed_by):
            del self._held[held.id]
            self._tell(id=held.id, event="gone", why=held.why)

    def _end_all(self) -> None:
        """End all processes that we forked or adopted, and remove all groups."""
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

    def _tell(self, **message: object) -> None:
        self._unsent.append(json.dumps(message).encode())
        self._flush()

    def _flush(self) -> None:
        """Never wait for an owner that does not read: the watch goes on."""
        try:
            while self._unsent:
                self._owner.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the owner is gone, which the next read sees

    # --- in the forked process ---

    def _become(self, door: socket.socket, parent: int, group: Group) -> None:
        """Become a sandbox; never returns.

        The third descriptor has its description, which no other process has in memory.
        """
        request: dict[str, Any] = {}
        try:
            _leave_warden(parent)
            group.join()
            _volunteer_for_oom()
            asked, fds, _, _ = socket.recv_fds(door, MESSAGE_BYTES, 4)
            if not asked:
                os._exit(0)
            request = json.loads(asked)
            request |= json.loads(os.pread(fds[2], os.fstat(fds[2]).st_size, 0))
            uid = request["uid"]
            root = request.get("root")
            writes, whole = stage(Root(**root), self._place, uid) if root else (None, True)
            message = {"id": request["id"], "event": "staged", "pid": os.getpid(), "whole": whole}
            socket.send_fds(
                self._owner, [json.dumps(message).encode()], [] if writes is None else [writes]
            )
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                kernel.set_dumpable(1)
                kernel.die_with_parent(signal.SIGKILL)
            _arrange(fds[0], fds[1])
            _limit(request.get("rlimits"))
            if request["argv"]:
                os.execve(request["argv"][0], request["argv"], request["env"])
            self._enter(request)
        except BaseException as error:
            told = json.dumps(
                {
                    "id": request.get("id"),
                    "event": "failed",
                    "why": f"{type(error).__name__}: {error}",
                }
            ).encode()
            try:
                self._owner.send(told)
            except OSError:
                # the descriptors are arranged already: the owner reads this one too
                os.write(2, told)
        finally:
            os._exit(1)

    def _free_uid(self) -> int:
        first = UID_BASE + os.getpid() * UIDS_EACH
        taken = {held.uid for held in self._held.values()}
        return next(uid for uid in range(first, first + UIDS_EACH) if uid not in taken)


def _excess(held: Held, processes: list[Process], now: float) -> str:
    """The limit that a sandbox is beyond, in words."""
    if now >= held.ends_at:
        return OVERDUE
    # the kernel does not count those of the host's root
    if len(processes) - len(held.own) > held.processes:
        return f"killed: it went beyond limits.processes ({len(processes)} of {held.processes})"
    if why := _beyond_memory(held):
        return why
    cpu_s = sum(each.cpu_s for each in processes)
    if cpu_s > held.cpu_s:
        return f"killed: it went beyond limits.cpu_s ({cpu_s:.1f} of {held.cpu_s:.1f})"
    # Pages that processes share count once, but to ask so takes long: first the sum
    # that counts them often.
    if sum(each.most_bytes for each in processes) > held.memory_bytes:
        used = sum(each.proportional_bytes(held.inherited.get(each.pid, 0)) for each in processes)
        if used > held.memory_bytes:
            return f"killed: it went beyond limits.memory_bytes ({used} of {held.memory_bytes})"
    return ""


def _beyond_memory(held: Held) -> str:
    """Return why the sandbox must end, if the kernel killed a process of it for its
    memory; else "".
    """
    return (
        "killed: it went beyond limits.memory_bytes, and the kernel ended a process"
        if held.group.out_of_memory()
        else ""
    )


def _stopped(held: Held, processes: list[Process]) -> str:
    """Return why the sandbox must end, if code inside stopped its server, for which
    calls would wait in vain; else "".
    """
    stopped = any(each.stopped and held.own.get(each.pid) == each.started for each in processes)
    return "killed: its own server was stopped from inside" if stopped else ""


def _signal(pid: int, number: signal.Signals) -> None:
    # Not permitted: a set-uid helper of a runtime, which ends with the process that
    # started it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _leave_warden(parent: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _volunteer_for_oom() -> None:
    """Make the kernel end a sandbox first when the machine runs out of memory.
    Descendants inherit the setting; if we are root, none of them can undo it.
    """
    with open("/proc/self/oom_score_adj", "w") as out:
        out.write("1000")


def _limit(rlimits: dict[str, int] | None) -> None:
    """Set per-process limits before any program of the image runs. The kernel counts
    processes by user and user namespace, both of which are the sandbox's by now; this
    process is one more than those inside.
    """
    if rlimits is not None:
        limit({**rlimits, "NPROC": rlimits["NPROC"] + 1})


def _arrange(channel: int, errors: int) -> None:
    """0 and 1 are nothing, 2 the errors, 3 the channel, 4 the seccomp program; no other
    descriptor is left.
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
    """`SOCKET OWNER PLACE BASE KEPT`: serve SOCKET, whose other end process OWNER has;
    mount roots at PLACE.

    BASE and KEPT are folders that we remove when we end, so that a killed owner leaves
    none. They are locked by descriptors that we have inherited and that no sandbox has.
    """
    serve(_no_entrance)


def serve(enter: Callable[[dict[str, Any]], None]) -> None:
    """As `main`, with what becomes a sandbox."""
    fd, owner, place, base, kept = sys.argv[1:]
    reset_signals()
    os.umask(0o022)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        kernel.die_with_parent(signal.SIGTERM)
        if os.getppid() != int(owner):
            sys.exit(1)
        kernel.adopt_orphans()
        Warden(socket.socket(fileno=int(fd)), place, enter).run()
    finally:
        for folder in (base, kept):
            shutil.rmtree(folder, ignore_errors=True)


def _no_entrance(request: dict[str, Any]) -> None:
    raise ValueError(f"argv must not be empty, got {request['argv']!r}")
