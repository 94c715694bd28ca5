"""The process that holds the sandboxes of one back end: it forks each, watches what all its processes use, and ends it.

It is small, single-threaded and long-lived: a fork of it takes a millisecond, where one of a trainer takes many; a sandbox that
is to die with its parent's thread has one that stays; a busy event loop delays no watch. `launcher.py` is its other end.

Invariants: all its children end when it ends, and it ends when its owner does; a signal goes to a child that is not reaped yet,
or to a descendant of one found a moment before, never by name; every child's end is told exactly once.
Standard library alone: it imports nothing heavy, and nothing of ours that does.
"""

import contextlib
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

from rollweave.sandbox import kernel
from rollweave.sandbox.processes import Process, Table, family, process, started
from rollweave.sandbox.seccomp import bpf_filter
from rollweave.sandbox.stage import Root, stage

MESSAGE_BYTES = 1 << 17
"""Of the longest request: argument list and environment."""

TICK_S = 0.1
"""Between two looks at what the sandboxes use."""

LOOK_SHARE = 0.1
"""Of a core that looking may take: with many sandboxes the looks are further apart."""

UID_BASE, UIDS_EACH = 1_000_000, 1000
"""Host uids of sandboxes where we are root: a block for each warden, by its pid, one for each sandbox at a time."""


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
    seen: dict[int, int]
    """Start times of its processes, as of the last look: still its own when their parent is gone."""
    own: dict[int, int] = field(default_factory=dict)
    """Start times of the sandbox's own processes, which a soft stop leaves: its init and its server."""
    reaped: bool = False
    why: str = ""
    kill_at: float = 0.0
    """A soft stop ends then."""
    told: set[int] = field(default_factory=set)
    """Processes that were sent SIGTERM."""


class Warden:
    """Requests in, forks and signals out. `enter` becomes a sandbox that needs no other program (`zygote`)."""

    def __init__(self, owner: socket.socket, place: str, enter: Callable[[dict[str, Any]], None]) -> None:
        self._owner, self._place, self._enter = owner, place, enter
        self._held: dict[str, Held] = {}
        self._by_pid: dict[int, str] = {}
        self._unsent: deque[bytes] = deque()
        self._next_look = 0.0
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
        try:
            while True:
                owner = self._owner.fileno()
                readable, _, _ = select.select([owner, wake_r], [owner] if self._unsent else [], [], self._pause())
                if wake_r in readable:
                    os.read(wake_r, 4096)
                if owner in readable and not self._receive():
                    return
                self._reap()
                if time.monotonic() >= self._next_look and self._held:
                    self._look()
                self._flush()
        finally:
            self._end_all()

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
            self._tell(id=request["id"], event="gone", why=f"at most {UIDS_EACH} sandboxes may live at once")
            return
        uid = self._free_uid() if os.getuid() == 0 and request["drop"] else None
        ours = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(id=request["id"], event="gone", why=f"no process: {error}")
            return
        if pid == 0:
            self._become(request, fds, uid, ours)
        limits = request["limits"]
        held = Held(
            id=request["id"],
            pid=pid,
            uid=uid,
            contained=request["contained"],
            processes=limits["processes"],
            memory_bytes=limits["memory_bytes"],
            cpu_s=limits["cpu_s"],
            ends_at=time.monotonic() + limits["wall_s"],
            seen={pid: begun.started} if (begun := process(pid)) else {},
        )
        self._held[held.id] = held
        self._by_pid[pid] = held.id

    def _ready(self, held: Held, _: dict[str, Any]) -> None:
        """The server has answered, and no command has run yet: what is there now is the sandbox's own."""
        held.own = started(family(held.pid))
        self._tell(id=held.id, event="done")

    def _stop(self, held: Held, request: dict[str, Any]) -> None:
        held.why = held.why or "stopped"
        held.kill_at = time.monotonic() + request["grace_s"]
        if request["grace_s"] > 0:
            self._end_softly(held)
        else:
            self._end(held)
        self._next_look = 0.0

    def _kill(self, held: Held, _: dict[str, Any]) -> None:
        held.why = held.why or "killed"
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
            # A PID namespace's init ends last: when the sandbox's own processes are gone, all are.
            self._finish(held, [pid for pid, begun in held.own.items() if (now := process(pid)) and now.started == begun])
        others = [held for held in self._held.values() if not (held.reaped and held.contained)]
        table = Table.now() if others else None
        for held in others:
            processes = self._processes(held, table)
            if held.reaped:
                self._finish(held, [each.pid for each in processes])
            elif not held.why and (why := _excess(held, processes, began)):
                held.why = why
                self._end(held)
            elif held.kill_at:
                self._end_softly(held, processes)
        took = time.monotonic() - began
        ending = any(held.kill_at or held.reaped for held in self._held.values())
        self._next_look = began + max(TICK_S / 20 if ending else TICK_S, took / (1.0 if ending else LOOK_SHARE))

    def _processes(self, held: Held, table: Table | None = None) -> list[Process]:
        table = table or Table.now()
        found = table.below(held.seen)
        held.seen = {process.pid: process.started for process in found}
        return found

    def _end_softly(self, held: Held, processes: list[Process] | None = None) -> None:
        """SIGTERM to its commands, once each; SIGKILL to all where none is left, or the time is over."""
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
            held = self._held.get(self._by_pid.pop(pid, ""))
            if held is not None:  # else an orphan that we adopted
                held.reaped = True
                held.why = held.why or f"ended with status {os.waitstatus_to_exitcode(status)}"
                self._next_look = 0.0

    def _finish(self, held: Held, left: list[int]) -> None:
        """Its first process is gone; the rest is killed, and the end is told when none is left."""
        for pid in left:
            _signal(pid, signal.SIGKILL)
        if not left:
            del self._held[held.id]
            self._tell(id=held.id, event="gone", why=held.why)

    def _end_all(self) -> None:
        """Nothing that we forked, or adopted, is left."""
        for _ in range(1000):
            for pid in family(os.getpid()) - {os.getpid()}:
                _signal(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.005)

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

    def _become(self, request: dict[str, Any], fds: list[int], uid: int | None, parent: int) -> None:
        """Never returns."""
        try:
            _leave_warden(parent)
            root = request.get("root")
            writes, whole = stage(Root(**root), self._place, uid) if root else (None, True)
            message = {"id": request["id"], "event": "staged", "pid": os.getpid(), "whole": whole}
            socket.send_fds(self._owner, [json.dumps(message).encode()], [] if writes is None else [writes])
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                kernel.set_dumpable(1)
                kernel.die_with_parent(signal.SIGKILL)
            _arrange(fds[0], fds[1])
            if request["argv"]:
                os.execve(request["argv"][0], request["argv"], request["env"])
            self._enter(request)
        except BaseException as error:
            told = json.dumps({"id": request["id"], "event": "failed", "why": f"{type(error).__name__}: {error}"}).encode()
            try:
                self._owner.send(told)
            except OSError:
                os.write(2, told)  # the descriptors are arranged already: the owner reads this one too
        finally:
            os._exit(1)

    def _free_uid(self) -> int:
        first = UID_BASE + os.getpid() * UIDS_EACH
        taken = {held.uid for held in self._held.values()}
        return next(uid for uid in range(first, first + UIDS_EACH) if uid not in taken)


def _excess(held: Held, processes: list[Process], now: float) -> str:
    """The limit that a sandbox is beyond, in words."""
    if now >= held.ends_at:
        return "killed: it went beyond limits.wall_s"
    if len(processes) - len(held.own) > held.processes:  # the kernel does not count those of the host's root
        return f"killed: it went beyond limits.processes ({len(processes)} of {held.processes})"
    cpu_s = sum(each.cpu_s for each in processes)
    if cpu_s > held.cpu_s:
        return f"killed: it went beyond limits.cpu_s ({cpu_s:.1f} of {held.cpu_s:.1f})"
    # Pages that processes share count once, but to ask so takes long: first the sum that counts them often.
    if sum(each.resident_bytes for each in processes) > held.memory_bytes:
        used = sum(each.proportional_bytes() for each in processes)
        if used > held.memory_bytes:
            return f"killed: it went beyond limits.memory_bytes ({used} of {held.memory_bytes})"
    return ""


def _signal(pid: int, number: signal.Signals) -> None:
    # Not permitted: a set-uid helper of a runtime, which ends with the process that started it.
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


def _arrange(channel: int, errors: int) -> None:
    """0 and 1 are nothing, 2 the errors, 3 the channel, 4 the seccomp program; no other descriptor is left."""
    program = os.memfd_create("seccomp", 0)
    os.write(program, bpf_filter())
    os.lseek(program, 0, os.SEEK_SET)
    nothing = os.open(os.devnull, os.O_RDWR)
    high = [os.dup2(fd, 100 + place) for place, fd in enumerate((nothing, nothing, errors, channel, program))]
    for place, fd in enumerate(high):
        os.dup2(fd, place)  # inheritable
    os.closerange(len(high), os.sysconf("SC_OPEN_MAX"))


def main() -> None:
    """`SOCKET OWNER PLACE BASE KEPT`: serve SOCKET, whose other end process OWNER has; mount roots at PLACE.

    BASE and KEPT are folders that end with us, so that an owner that was killed leaves none.
    """
    serve(_no_entrance)


def serve(enter: Callable[[dict[str, Any]], None]) -> None:
    """As `main`, with what becomes a sandbox."""
    fd, owner, place, base, kept = sys.argv[1:]
    os.umask(0o022)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != int(owner):
        sys.exit(1)
    kernel.adopt_orphans()
    try:
        Warden(socket.socket(fileno=int(fd)), place, enter).run()
    finally:
        for folder in (base, kept):
            shutil.rmtree(folder, ignore_errors=True)


def _no_entrance(request: dict[str, Any]) -> None:
    raise ValueError(f"argv must not be empty, got {request['argv']!r}")
