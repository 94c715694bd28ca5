"""The agent of a host, which starts and ends the processes of a run there.

A *membership* lasts from the agent's offer to join until its connection ends.
Invariants: every process is a child of the agent, and the kernel kills it with the
agent; all processes of a membership end before the next one begins; an agent that
receives nothing from its controller for the duration of its lease ends all of them. It
measures the lease by its own clock, so a host that is cut off or was stopped need not
be reached for that.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from rollweave.core.policy.waiting import LongWaits, Wait, wait_lines
from rollweave.io.child import exit_status, kill_group, start_process
from rollweave.io.framing import FramedSocket, send_frame
from rollweave.io.locked_folders import temporary_folder
from rollweave.io.wire import decoder_of, encode
from rollweave.package import VERSION
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.authentication import introduce
from rollweave.runtime.hosts.resources import resources
from rollweave.schema.errors import HostError
from rollweave.schema.hosts import (
    ALIVE_S,
    AgentSpec,
    ArchivePart,
    AttachProcess,
    ControllerMessage,
    HostAccepted,
    HostAlive,
    HostReady,
    HostRefused,
    JoinHost,
    KillProcess,
    ProcessEnded,
    ProcessLogged,
    ProcessStarted,
    ReleaseHost,
    Resources,
    StartProcess,
)

CONNECT_S = 5.0
"""Maximum seconds to connect to the controller, once."""

RETRY_S = 1.0
"""Seconds between two attempts to reach a controller."""

ACCEPT_S = 10.0
"""Maximum seconds until the controller answers the offer to join."""

FOLDER_PREFIX = "rollweave-host-"
"""Prefix of the temporary folders with the user's files, one for each membership."""

LOG_BYTES = 1 << 18
"""Maximum bytes of one process's log that are sent at once."""

_decode = decoder_of(ControllerMessage)


@dataclass(slots=True, eq=False, kw_only=True)
class _Process:
    number: int
    popen: "subprocess.Popen[bytes]"
    log: IO[bytes]
    """Its output, in a file without a name, which vanishes with the agent."""
    sent: int = 0
    """Number of bytes of the log that were sent."""


class HostAgent:
    """Joins the run of the controller at `controller`, again after each loss, until the
    run is over.
    """

    def __init__(
        self,
        *,
        name: str,
        controller: tuple[str, int],
        secret: bytes,
        resources: Resources,
        join_s: float,
        address: str | None = None,
        on_change: Callable[[str], None] = print,
    ) -> None:
        """`join_s` is the maximum number of seconds without a controller. `address` is
        that at which other hosts reach this one; by default, it is the one from which
        this host reaches the controller. `on_change` receives a line whenever the host
        joins or leaves a run.
        """
        self.name, self._controller, self._secret = name, controller, secret
        self._resources, self._join_s, self._address = resources, join_s, address
        self._on_change = on_change

    @property
    def where(self) -> str:
        """The controller's address as text."""
        return f"{self._controller[0]}:{self._controller[1]}"

    async def run(self) -> None:
        """Serve until the run is over.

        Raises `HostError` if the controller refuses this host, or if none is reached
        within `join_s`.
        """
        while True:
            sock = await self._connect()
            with temporary_folder(FOLDER_PREFIX) as folder, contextlib.chdir("."):
                over, reason = await _Membership(self, sock, folder).run()
            if over:
                self._on_change(f"host {self.name}: the run is over")
                return
            self._on_change(f"host {self.name}: left the run at {self.where}: {reason}")

    async def connect(self) -> socket.socket:
        """Open a connection to the controller, and complete the handshake.

        Raises OSError, TimeoutError, HostError.
        """
        loop = asyncio.get_running_loop()
        host, port = self._controller
        async with asyncio.timeout(CONNECT_S):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = socket.socket(addresses[0][0], socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(sock, addresses[0][4])
                await introduce(sock, self._secret, where=self.where)
            except HostError as error:
                sock.close()
                raise HostError(f"host {self.name}: {error}") from None
            except BaseException:
                sock.close()
                raise
        return sock

    def joining(self, sock: socket.socket) -> JoinHost:
        """Return the offer to join, for the controller to which `sock` is connected."""
        return JoinHost(
            name=self.name,
            address=self._address or sock.getsockname()[0],
            package=VERSION,
            resources=self._resources,
        )

    def enter(self, accepted: HostAccepted, archive: bytes, folder: Path) -> str:
        """Unpack the user's files into `folder`, and make it the working directory.

        Returns the reason why this host cannot serve the run, or "".
        """
        try:
            if Path(accepted.mark_path).read_text() != accepted.mark:
                raise OSError("another file of that name")
        except (OSError, ValueError) as problem:
            return (
                f"host {self.name} must see the run's directory ({accepted.mark_path}), got "
                f"{problem}"
            )
        try:
            user_files.unpack(archive, accepted.digest, folder)
            os.chdir(folder)
            user_files.check(accepted.modules, folder)
        except (OSError, HostError) as problem:
            return f"host {self.name}: {problem}"
        self._on_change(f"host {self.name}: joined the run at {self.where}")
        return ""

    async def _connect(self) -> socket.socket:
        """Connect; retry for at most `join_s` seconds."""
        error: Exception = HostError("not tried")
        long_waits, began = LongWaits(), time.monotonic()
        try:
            async with asyncio.timeout(self._join_s):
                while True:
                    try:
                        return await self.connect()
                    except (OSError, TimeoutError) as problem:
                        error = problem
                    wait = Wait(
                        component=f"the controller at {self.where}",
                        what=str(error) or "no answer",
                        since=began,
                    )
                    for _, line in wait_lines(long_waits.due(time.monotonic(), [wait])):
                        self._on_change(f"host {self.name}: {line}")
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise HostError(
                f"the controller at {self.where} must be reached within {self._join_s:g} s; last: "
                f"{error or 'no answer'}"
            ) from None


def agent_of(spec: AgentSpec) -> HostAgent:
    """Return the agent that this specification describes. Raises `HostError`."""
    offered = resources(spec.labels)
    chosen = spec.devices
    return HostAgent(
        name=spec.name,
        controller=spec.controller,
        secret=spec.secret,
        resources=msgspec.structs.replace(
            offered,
            cpus=spec.cpus or offered.cpus,
            devices=tuple(
                device for device in offered.devices if chosen is None or device.index in chosen
            ),
        ),
        join_s=spec.join_s,
        address=spec.address,
    )


class _Membership:
    """One membership in a run, from `JoinHost` to the end of its connection."""

    def __init__(self, agent: HostAgent, sock: socket.socket, folder: Path) -> None:
        self._agent, self._folder = agent, folder
        self._accepted: HostAccepted | None = None
        self._archive = bytearray()
        self._entering: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _Process] = {}
        self._tasks: dict[int, asyncio.Task[ProcessEnded]] = {}
        """Task that runs each process from its start to its end, by its number."""
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._released = False
        self._refused = ""
        self._lease_s = ACCEPT_S
        self._received_at = self._loop.time()
        self._control = FramedSocket(sock, on_frame=self._on_frame, on_end=self._on_end)
        self._control.send(encode(agent.joining(sock)))

    async def run(self) -> tuple[bool, str]:
        """Serve until the membership ends; return whether the run is over, and the
        reason of the end.

        Raises `HostError` if the host is refused.
        """
        watch = self._loop.create_task(self._watch())
        try:
            reason = await self._ended
        finally:
            watch.cancel()
            if self._entering is not None:
                await asyncio.wait([self._entering])  # it uses the folder
            await self._end_all()
            self._control.close()
        if self._refused:
            raise HostError(self._refused)
        return self._released, reason

    async def _watch(self) -> None:
        """Send signs of life and logs, and end the membership when its lease is
        over.
        """
        while True:
            self._control.send(encode(HostAlive()))
            for process in list(self._processes.values()):
                self._forward_log(process)
            await asyncio.sleep(ALIVE_S)
            if self._loop.time() - self._received_at > self._lease_s:
                self._end(f"the controller was silent for {self._lease_s:g} s")

    def _on_frame(self, payload: bytes) -> None:
        self._received_at = self._loop.time()
        match _decode(payload):
            case HostAccepted() as accepted:
                self._accepted, self._lease_s = accepted, accepted.lease_s
                self._receive(b"")
            case ArchivePart(data=data):
                self._receive(data)
            case HostRefused(error=error):
                self._refused = error
                self._end(error)
            case StartProcess(process=number) as start:
                task = self._tasks[number] = self._loop.create_task(self._run_process(start))
                task.add_done_callback(lambda task: self._on_process_ended(number, task))
            case KillProcess(process=number):
                self._kill(number)
            case ReleaseHost():
                self._released = True
                self._end("the run is over")
            case HostAlive():
                pass

    def _receive(self, data: bytes) -> None:
        """Receive a part of the user's files, and enter the run once all are there."""
        self._archive += data
        accepted = self._accepted
        if accepted is not None and len(self._archive) >= accepted.archive_bytes:
            self._entering = self._loop.create_task(self._enter(accepted))

    async def _enter(self, accepted: HostAccepted) -> None:
        """Report to the controller that this host is ready, or why it cannot be."""
        archive, self._archive = bytes(self._archive), bytearray()
        error = await asyncio.to_thread(self._agent.enter, accepted, archive, self._folder)
        if error and not self._refused:
            self._refused = error
        self._control.send(encode(HostReady(error=error)))

    @property
    def _env(self) -> dict[str, str]:
        return self._accepted.env if self._accepted is not None else {}

    async def _run_process(self, start: StartProcess) -> ProcessEnded:
        """Run one process from its start to its end."""
        number = start.process
        try:
            process = self._processes[number] = await self._open(start)
        except (OSError, TimeoutError, HostError) as error:
            return ProcessEnded(process=number, error=str(error) or type(error).__name__)
        self._control.send(encode(ProcessStarted(process=number, pid=process.popen.pid)))
        with process.log:
            status = await exit_status(process.popen, within_s=None)
            while self._forward_log(process):
                pass
        return ProcessEnded(process=number, status=status)

    def _on_process_ended(self, number: int, task: "asyncio.Task[ProcessEnded]") -> None:
        self._processes.pop(number, None)
        del self._tasks[number]
        cancelled = ProcessEnded(process=number, error="killed before it was started")
        self._control.send(encode(cancelled if task.cancelled() else task.result()))

    async def _open(self, start: StartProcess) -> _Process:
        """Connect to the controller, and start the process with that connection."""
        sock = await self._agent.connect()
        with sock, contextlib.ExitStack() as opened:
            attach = AttachProcess(host=self._agent.name, process=start.process, key=start.key)
            await send_frame(sock, encode(attach))
            # the mode belongs to the connection, which the process shares
            sock.setblocking(True)
            log = opened.enter_context(tempfile.TemporaryFile())
            popen = start_process(
                sock,
                module=start.module,
                log=Path(f"/dev/fd/{log.fileno()}"),
                env={**self._env, **start.env},
                arguments=start.arguments,
            )
            opened.pop_all()
        return _Process(number=start.process, popen=popen, log=log)

    def _kill(self, number: int) -> None:
        if number in self._processes:
            kill_group(self._processes[number].popen)
        elif number in self._tasks:
            self._tasks[number].cancel()  # it is not started yet

    def _forward_log(self, process: _Process) -> bool:
        """Send what is new in a log; return False if there was nothing."""
        try:
            data = os.pread(process.log.fileno(), LOG_BYTES, process.sent)
        except OSError:
            return False
        if data:
            process.sent += len(data)
            self._control.send(encode(ProcessLogged(process=process.number, data=data)))
        return bool(data)

    async def _end_all(self) -> None:
        """Kill all processes, and wait until they are reaped."""
        for number in list(self._tasks):
            self._kill(number)
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _on_end(self, error: str) -> None:
        self._end(error or "its connection ended")

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
