"""The controller's side of other hosts: a listener that agents join, and one
`RemoteHost` for each of them.

Invariants: no message is read before the handshake, and none without its seal; what a
host says of itself is bounded and printable; a host counts as lost once its
connection has ended or was silent for `SILENT_S`, and `on_lost` is then called exactly
once, before the processes of the host report their ends; no two hosts have the same
name.
"""

import asyncio
import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollweave.io.child import ChildProcess, Spawn, why_it_ended
from rollweave.io.framing import FramedSocket, receive_frame, send_frame
from rollweave.io.sealing import Seal
from rollweave.io.sockets import bound_socket
from rollweave.io.wire import decoder_of, encode
from rollweave.package import VERSION
from rollweave.runtime.hosts.authentication import admit
from rollweave.runtime.hosts.process_log import ProcessLog
from rollweave.runtime.tasks import Tasks
from rollweave.schema.errors import HostError, WireError
from rollweave.schema.hosts import (
    ALIVE_S,
    AgentMessage,
    ArchivePart,
    AttachProcess,
    HostAccepted,
    HostAlive,
    HostReady,
    HostRefused,
    JoinHost,
    KillProcess,
    ProcessEnded,
    ProcessLogged,
    ProcessStarted,
    Program,
    ReleaseHost,
    Share,
    StartProcess,
    wrong_offer,
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

FIRST_FRAME_S = 5.0
"""Maximum seconds between the handshake and the message that follows it."""

ENTER_S = 180.0
"""Maximum seconds in which an accepted host must report that it is ready: enough for
the largest archive over a slow link. A file system that hangs takes longer.
"""

MAX_NAMED = 16
"""Maximum number of addresses that are reported because of a wrong secret."""

MAX_UNAUTHENTICATED = 64
"""Maximum number of connections in the handshake; further ones are closed."""

FIRST_BYTES = 1 << 18
"""Maximum size of the message that follows a handshake."""

CONTROL_BYTES = 4 << 20
"""Maximum size of an agent's message; the largest has a piece of a log."""

REASON_CHARS = 2000
"""Maximum characters of a reason that an agent gives."""

PART_BYTES = 1 << 20
"""Maximum bytes of the user's files in one message, each of which is a sign of life."""

_decode = decoder_of(AgentMessage)


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
        self._numbers = itertools.count()

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
        match _decode(payload):
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


class HostListener:
    """Admits agents that know `secret`.

    Each host that joins receives `accepted` and, if it runs the user's code, `archive`,
    the user's files. All callbacks run on the event loop. `refusal` returns the reason
    why the run does not take a host, or ""; `on_refused` receives the reason why a host
    cannot join, `on_wrong_secret` a report of one with a wrong secret, `on_cut` a line
    about a log that is cut, and `on_lost` the reason of a loss; it is not called for
    hosts that `close` releases.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        accepted: HostAccepted,
        archive: bytes = b"",
        tasks: Tasks,
        on_joined: Callable[[RemoteHost], None],
        on_lost: Callable[[RemoteHost, str], None],
        on_refused: Callable[[str], None],
        on_wrong_secret: Callable[[str], None],
        on_cut: Callable[[str], None],
        refusal: Callable[[JoinHost], str] = lambda _: "",
        silent_s: float = SILENT_S,
        enter_s: float = ENTER_S,
    ) -> None:
        self._secret, self._tasks = secret, tasks
        self._accepted, self._archive = accepted, archive
        self._on_joined, self._on_lost, self._on_refused = on_joined, on_lost, on_refused
        self._on_wrong_secret, self._silent_s = on_wrong_secret, silent_s
        self._enter_s, self._on_cut, self._refusal = enter_s, on_cut, refusal
        self._hosts: dict[str, RemoteHost] = {}
        self._named: set[str] = set()
        """Addresses that were reported because of a wrong secret."""
        self._greeted = 0
        self._socket: socket.socket | None = None
        self._closing = False

    @property
    def port(self) -> int:
        """The port on which it listens."""
        assert self._socket is not None, "it listens"
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def entering(self) -> tuple[str, ...]:
        """The names of the hosts that were accepted and are not ready yet."""
        return tuple(host.name for host in self._hosts.values() if not host.ready.done())

    def listen(self, address: str, port: int) -> None:
        """Listen on one address of this host. Raises OSError."""
        sock = bound_socket(address, port)
        try:
            sock.listen(MAX_UNAUTHENTICATED)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._tasks.spawn(self._accept(sock), "accept hosts")

    async def close(self) -> None:
        """Release all hosts, wait until they have ended their processes, and stop
        listening.
        """
        self._closing = True
        if self._socket is not None:
            self._socket.close()
        hosts = list(self._hosts.values())
        for host in hosts:
            host.release()
        if hosts:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await asyncio.gather(*(host.gone.wait() for host in hosts))
        for host in hosts:
            host.lose("the run is over")

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(ALIVE_S)  # too many open files, for example
                continue
            if self._greeted >= MAX_UNAUTHENTICATED:
                sock.close()
            else:
                self._greeted += 1
                self._tasks.spawn(self._greet(sock), "greet a host")

    async def _greet(self, sock: socket.socket) -> None:
        """Complete the handshake, and dispatch the connection by its first message."""
        try:
            try:
                first = await self._first_message(sock)
            finally:
                self._greeted -= 1
            if first is None:
                sock.close()
            else:
                await self._dispatch(sock, *first)
        except (OSError, TimeoutError, WireError):
            sock.close()
        except BaseException:
            sock.close()
            raise

    async def _first_message(self, sock: socket.socket) -> tuple[object, Seal] | None:
        """Complete the handshake, and return the message that follows it with the seal
        of the connection, or None after a wrong secret.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seal = await admit(sock, self._secret)
        if seal is None:
            self._on_wrong_proof(sock.getpeername()[0])
            return None
        async with asyncio.timeout(FIRST_FRAME_S):
            return _decode(await receive_frame(sock, seal, limit=FIRST_BYTES)), seal

    def _on_wrong_proof(self, address: str) -> None:
        """Report a host with a wrong secret: once for each address, and only for the
        first few, since anything may connect.
        """
        if address not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(address)
            self._on_wrong_secret(
                f"a host at {address} must know the run's secret, got another one"
            )

    async def _dispatch(self, sock: socket.socket, message: object, seal: Seal) -> None:
        match message:
            case AttachProcess() if message.host in self._hosts:
                self._hosts[message.host].attach(message, sock, seal)
            case JoinHost():
                await self._join(sock, message, seal)
            case _:
                sock.close()

    async def _join(self, sock: socket.socket, joined: JoinHost, seal: Seal) -> None:
        """Admit a host, or report to its agent and to the user why it is refused.

        A host of the same name may still be listed because its loss was not noticed
        yet.
        """
        former = self._hosts.get(joined.name)
        if former is not None:
            await former.is_alive()
        try:
            self._check(joined)
        except HostError as problem:
            await send_frame(sock, encode(HostRefused(error=str(problem))), seal)
            sock.close()
            self._on_refused(str(problem))
            return
        host = self._hosts[joined.name] = RemoteHost(joined, sock, seal, silent_s=self._silent_s)
        host.on_cut = self._on_cut
        host.accept(*self._given(joined))
        if error := await self._enter(host):
            del self._hosts[host.name]
            host.lose(error)
            self._on_refused(error)
            return
        host.on_lost = functools.partial(self._forget, host)
        self._on_joined(host)

    async def _enter(self, host: RemoteHost) -> str:
        """Wait until a host has entered the run; return why it cannot, or ""."""
        try:
            async with asyncio.timeout(self._enter_s):
                return await host.ready
        except TimeoutError:
            return (
                f"host {host.name} must see the run's directory and unpack the user's files "
                f"within {self._enter_s:g} s, got no answer: a file system may hang there"
            )

    def _given(self, joined: JoinHost) -> tuple[HostAccepted, bytes]:
        """Return the settings and files for a host. A host that does not run the user's
        code gets no files; each host gets only the variables that its operator names.
        """
        accepted, archive = self._accepted, self._archive
        env = {name: value for name, value in accepted.env.items() if name in joined.variables}
        accepted = msgspec.structs.replace(accepted, env=env)
        if joined.user_code:
            return accepted, archive
        return msgspec.structs.replace(accepted, archive_bytes=0, modules=()), b""

    def _check(self, joined: JoinHost) -> None:
        """Raise `HostError` if the host must not join."""
        if self._closing:
            raise HostError("the run is over")
        if wrong := wrong_offer(joined):
            raise HostError(wrong)
        if joined.package != VERSION:
            raise HostError(
                f"rollweave on host {joined.name} must be version {VERSION}, as on the "
                f"controller, got {joined.package}"
            )
        if joined.name in self._hosts:
            raise HostError(
                f"host names must be distinct, got {joined.name} a second time, from "
                f"{joined.address}"
            )
        if reason := self._refusal(joined):
            raise HostError(reason)

    def _forget(self, host: RemoteHost, reason: str) -> None:
        del self._hosts[host.name]
        if not self._closing:
            self._on_lost(host, reason)
