"""A host that has joined a run, as the controller sees it: one `RemoteHost` for each
agent, its processes, and the log on this host of each of these processes.

Invariants: a host counts as lost once its connection has ended or was silent for
`SILENT_S`, and `on_lost` is then called exactly once, before the processes of the host
report their ends. A log holds printable text, so that no terminal acts on what a
process writes; it takes at most `LOG_BYTES` on the disk, in the file and in the older
half beside it, and says at its top that something is cut; a host that sends more than
`RATE_BYTES` between two signs of life cannot keep the controller's disk busy.
"""

import asyncio
import codecs
import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

from rollweave.io.child import ChildProcess, Spawn, why_it_ended
from rollweave.io.framing import FramedSocket
from rollweave.io.wire import Seal, decoder_of, encode
from rollweave.schema.errors import WireError
from rollweave.schema.hosts import (
    ALIVE_S,
    AgentMessage,
    ArchivePart,
    AttachProcess,
    HostAccepted,
    HostAlive,
    HostReady,
    JoinHost,
    KillProcess,
    LenderState,
    ProcessEnded,
    ProcessLogged,
    ProcessStarted,
    Program,
    ReleaseHost,
    Share,
    StartProcess,
)
from rollweave.schema.text import shortened, visible

SILENT_S = 4.0
"""Seconds without a sign of life after which a host counts as lost: more than a busy
machine delays one, and few enough that the run continues within five seconds.
"""

LEASE_S = 10.0
"""Seconds without a sign of life after which an agent ends its processes: longer than
`SILENT_S`, so that no host ends what the controller still counts on.
"""

DRAIN_S = 2.0
"""Maximum seconds between the two signs of a process's end: that of its connection, and
the agent's report.
"""

CONTROL_BYTES = 4 << 20
"""Maximum size of an agent's message; the largest has a piece of a log."""

REASON_CHARS = 2000
"""Maximum characters of a reason that an agent gives."""

PART_BYTES = 1 << 20
"""Maximum bytes of the user's files in one message, each of which is a sign of life."""

decode = decoder_of(AgentMessage)

LOG_BYTES = 32 << 20
"""Maximum bytes of a process's log, over all epochs of a run."""

RATE_BYTES = 1 << 20
"""Maximum bytes that are written between two calls of `tick`: an agent sends a quarter
of it (`runtime/hosts/agent.LOG_BYTES`).
"""

OLDER = ".1"
"""Suffix of the older half."""


class ProcessLog:
    """Writes the log at `path`. `on_cut` is called once, when output is cut for the
    first time, with a description.
    """

    def __init__(self, path: Path, on_cut: Callable[[str], None]) -> None:
        self.path = path
        self._on_cut, self._is_cut = on_cut, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._left = RATE_BYTES

    def tick(self) -> None:
        """Allow `RATE_BYTES` more."""
        self._left = RATE_BYTES

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Append output. A full disk loses it."""
        if len(data) > self._left:
            self._cut(f"output is left out, since more than {RATE_BYTES >> 20} MiB came at once")
            data = data[: self._left]
        self._left -= len(data)
        text = self._decoder.decode(data, last)
        lines = visible(text.replace("\r\n", "\n").replace("\r", "\n")).encode()
        with contextlib.suppress(OSError):
            self._make_room(len(lines))
            with self.path.open("ab") as file:
                file.write(lines)

    def _make_room(self, count: int) -> None:
        """Rename the file to the older half, which it replaces, before it gets too
        long.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if not size or size + count <= LOG_BYTES // 2:
            return
        older = self.path.with_name(self.path.name + OLDER)
        self.path.replace(older)
        text = (
            f"older output is in {older.name}, and what was older still is cut: a log of a process "
            f"on another host has at most {LOG_BYTES >> 20} MiB"
        )
        self.path.write_text(f"[{text}]\n")
        self._cut(text)

    def _cut(self, text: str) -> None:
        if not self._is_cut:
            self._is_cut = True
            self._on_cut(f"{self.path}: {text}")


class RemoteProcess:
    """A `ChildProcess` on another host."""

    def __init__(
        self,
        name: str,
        number: int,
        host: "RemoteHost",
        log: Path,
        on_frame: Callable[[bytes], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.name, self.number, self.key = name, number, os.urandom(16)
        self.pid = 0
        self._host = host
        self._log = ProcessLog(log, lambda text: host.on_cut(f"host {host.name}: {text}"))
        self._on_frame, self._on_gone = on_frame, on_gone
        self._unsent: list[bytes] = []
        """Frames that were sent before the process had a connection."""
        self._frames: FramedSocket | None = None
        self._ended: ProcessEnded | None = None
        self._error = ""
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, payload: bytes) -> None:
        """Queue one frame. It is dropped if the process is gone."""
        if self._frames is not None:
            self._frames.send(payload)
        elif not self._gone.is_set():
            self._unsent.append(payload)

    def kill(self) -> None:
        """Kill the process at once. `on_gone` follows."""
        if self._gone.is_set():
            return
        self._error = self._error or "killed"
        self._host.kill(self)
        if self._frames is not None:
            self._frames.close()

    async def gone(self) -> None:
        """Return once `on_gone` was called."""
        await self._gone.wait()

    def attach(self, sock: socket.socket, seal: Seal) -> None:
        """Take over the connection that the agent has opened for this process."""
        if self._error or self._ended is not None or self._frames is not None:
            sock.close()
            return
        self._frames = FramedSocket(
            sock, on_frame=self._on_frame, on_end=self._on_disconnected, seal=seal
        )
        for payload in self._unsent:
            self._frames.send(payload)
        self._unsent.clear()

    def logged(self, data: bytes) -> None:
        """Append output of the process to its log on this host."""
        self._log.write(data)

    def tick(self) -> None:
        """Let the log grow again."""
        self._log.tick()

    def on_ended(self, ended: ProcessEnded) -> None:
        """Handle the agent's report that the process has ended."""
        self._ended = ended
        if self._frames is None or self._frames.closed:
            self._finish()
        else:  # its last frames may still be on their way
            self._within(DRAIN_S, self._frames.close)

    def on_host_lost(self, reason: str) -> None:
        """Report the end of the process, which can no longer be reached."""
        self._error = self._error or reason
        if self._frames is not None:
            self._frames.close()
        self._finish()

    def _on_disconnected(self, error: str) -> None:
        self._error = self._error or error
        if self._ended is not None:
            self._finish()
        elif error:
            self._host.kill(self)
        else:  # its interpreter may take a moment to end
            self._within(DRAIN_S, lambda: self._host.kill(self))

    def _within(self, seconds: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, action)

    def _finish(self) -> None:
        if self._gone.is_set():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._unsent.clear()
        where = f"on host {self._host.name}"
        if self._ended is None:
            reason = f"{self._error} {where}" if self._error == "killed" else self._error
        elif self._ended.error:
            reason = f"cannot be started {where}: {_reason(self._ended.error)}"
        else:
            reason = why_it_ended(
                self._ended.status, self._log.path, f"{self._error or 'ended'} {where}"
            )
        self._gone.set()
        self._on_gone(reason)


class RemoteHost:
    """A host that has joined. `starting` returns what starts processes there, as
    `io/child.child_of` does for this machine.
    """

    def __init__(
        self, joined: JoinHost, sock: socket.socket, seal: Seal, *, silent_s: float
    ) -> None:
        self.name, self.address, self.resources = joined.name, joined.address, joined.resources
        self.lends = joined.lends
        """True if the host lends an engine."""
        self._lender: LenderState | None = None
        self._lender_at = 0.0
        """The last report about this engine, and when it came."""
        self.on_lender: Callable[[], None] = lambda: None
        """Called at the first report, when the engine takes turns again or no longer,
        and when it is recalled.
        """
        self._silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self.on_lost: Callable[[str], None] = lambda _: None
        """Receives the reason of the loss, before the host's processes report their
        ends.
        """
        self.on_cut: Callable[[str], None] = lambda _: None
        """Receives a line when the log of a process is cut for the first time."""
        self.gone = asyncio.Event()
        """Set once the host is lost or released."""
        self._control = FramedSocket(
            sock, on_frame=self._on_frame, on_end=self._on_end, limit=CONTROL_BYTES, seal=seal
        )
        self.ready: asyncio.Future[str] = self._loop.create_future()
        """The error of the agent's `HostReady`, "" if there is none."""
        self._reason = ""
        self._missed = 0
        self._received = asyncio.Event()
        """Set by the next message, and when the connection ends."""
        self._timer = self._loop.call_later(ALIVE_S, self._tick)
        self._processes: dict[int, RemoteProcess] = {}
        self._engines: set[int] = set()
        """Numbers of all processes that are engines, also of those that have ended."""
        self._numbers = itertools.count()

    def lender(self, *, within_s: float) -> LenderState | None:
        """Return the last report about the engine that the host lends; None if the last
        `within_s` seconds brought no report.
        """
        recent = self._loop.time() - self._lender_at <= within_s
        return self._lender if recent else None

    @property
    def has_engine(self) -> bool:
        """True while an engine of the run is on this host."""
        return not self._engines.isdisjoint(self._processes)

    def starting(self, program: Program, share: Share) -> Spawn:
        """Return what starts processes of a program on this host. Each call of it
        raises OSError if the host is lost.
        """
        return functools.partial(self._start, program, share)

    def _start(
        self,
        program: Program,
        share: Share,
        *,
        name: str,
        log: Path,
        on_frame: Callable[[bytes], None],
        on_gone: Callable[[str], None],
    ) -> ChildProcess:
        if self._control.closed:
            raise OSError(f"host {self.name} is lost")
        log.parent.mkdir(parents=True, exist_ok=True)
        process = RemoteProcess(name, next(self._numbers), self, log, on_frame, on_gone)
        if program is Program.ENGINE:
            self._engines.add(process.number)
        self._processes[process.number] = process
        start = StartProcess(process=process.number, key=process.key, program=program, share=share)
        self._control.send(encode(start))
        return process

    def kill(self, process: RemoteProcess) -> None:
        """Request that the agent kill a process."""
        self._control.send(encode(KillProcess(process=process.number)))

    def attach(self, message: AttachProcess, sock: socket.socket, seal: Seal) -> None:
        """Give a new connection to the process that it belongs to, or close it."""
        process = self._processes.get(message.process)
        if process is None or process.key != message.key:
            sock.close()
        else:
            process.attach(sock, seal)

    async def is_alive(self) -> bool:
        """Wait for a sign of life; return False if the host is lost instead."""
        await asyncio.sleep(ALIVE_S)  # for messages that were sent earlier
        self._received.clear()
        if not self._control.closed:
            await self._received.wait()
        return not self._control.closed

    def accept(self, accepted: HostAccepted, archive: bytes) -> None:
        """Accept the host, and send it the user's files."""
        self._control.send(encode(accepted))
        for start in range(0, len(archive), PART_BYTES):
            self._control.send(encode(ArchivePart(data=archive[start : start + PART_BYTES])))

    def release(self) -> None:
        """Request that the agent end all its processes and leave: the run is over."""
        self._control.send(encode(ReleaseHost()))

    def lose(self, reason: str) -> None:
        """Give the host up now."""
        self._reason = self._reason or reason
        self._control.close()

    def _on_frame(self, payload: bytes) -> None:
        self._missed = 0
        self._received.set()
        match decode(payload):
            case ProcessStarted() as started:
                if (process := self._processes.get(started.process)) is not None:
                    process.pid = started.pid
            case ProcessLogged() as logged:
                if (process := self._processes.get(logged.process)) is not None:
                    process.logged(logged.data)
            case ProcessEnded() as ended:
                if (process := self._processes.pop(ended.process, None)) is not None:
                    process.on_ended(ended)
            case HostReady() as ready if not self.ready.done():
                self.ready.set_result(_reason(ready.error))
            case LenderState() as state if self.lends:
                former, self._lender = self._lender, state
                self._lender_at = self._loop.time()
                changes = (state.takes, state.recalled)
                if former is None or (former.takes, former.recalled) != changes:
                    self.on_lender()
            case HostAlive():
                pass
            case other:
                raise WireError(f"{type(other).__name__} is out of place")

    def _tick(self) -> None:
        """Send a sign of life, and count those of the agent that are missing.

        Ticks stop while our own event loop is blocked, so that a busy controller loses
        no host.
        """
        self._missed += 1
        if self._missed * ALIVE_S > self._silent_s:
            self.lose(f"silent for {self._silent_s:g} s")
            return
        self._control.send(encode(HostAlive()))
        for process in self._processes.values():
            process.tick()
        self._timer = self._loop.call_later(ALIVE_S, self._tick)

    def _on_end(self, error: str) -> None:
        self._timer.cancel()
        self._received.set()
        reason = self._reason or error or "its connection ended"
        if not self.ready.done():
            self.ready.set_result(reason)
        self.on_lost(reason)
        processes, self._processes = list(self._processes.values()), {}
        for process in processes:
            process.on_host_lost(f"host {self.name} is lost: {reason}")
        self.gone.set()


def _reason(text: str) -> str:
    """Return the reason that an agent gives, in one bounded and printable line."""
    return visible(shortened(" ".join(text.split()), REASON_CHARS))
