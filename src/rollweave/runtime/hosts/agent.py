"""The agent of a host, which starts and ends the processes of a run there.

A *membership* lasts from the agent's offer to join until its connection ends.
Invariants: every process is a child of the agent, and the kernel kills it with the
agent; all processes of a membership end before the next one begins; an agent that
receives nothing from its controller for the duration of its lease ends all of them. It
measures the lease by its own clock, so a host that is cut off or was stopped need not
be reached for that. A controller chooses one of the programs that the agent has a
module for; it gets neither files nor variables nor code of the user onto a host whose
operator has not allowed it (`Permissions`).
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from rollweave.core.policy.waiting import LongWaits, Wait, wait_lines
from rollweave.io.child import exit_status, kill_group, start_process
from rollweave.io.disk import free_space
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.io.framing import FramedSocket, send_frame
from rollweave.io.locked_folders import temporary_folder
from rollweave.io.reading import whole
from rollweave.io.wire import Seal, decoder_of, encode
from rollweave.package import VERSION
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.authentication import introduce
from rollweave.runtime.hosts.hosts import environment, resources
from rollweave.schema.errors import HostError, WireError
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
    LenderState,
    ProcessEnded,
    ProcessLogged,
    ProcessStarted,
    Program,
    Programs,
    ReleaseHost,
    Resources,
    StartProcess,
)
from rollweave.schema.text import visible

CONNECT_S = 5.0
"""Maximum seconds to connect to the controller, once."""

RETRY_S = 1.0
"""Seconds between two attempts to reach a controller."""

ACCEPT_S = 10.0
"""Maximum seconds until the controller answers the offer to join."""

FOLDER_PREFIX = "rollweave-host-"
"""Prefix of the temporary folders with the user's files, one for each membership."""

MARK_BYTES = 1 << 10
"""Maximum size of the file by which a host recognizes the run's directory."""

LOG_BYTES = 1 << 18
"""Maximum bytes of one process's log that are sent at each sign of life: the newest
bytes.
"""

KEPT_BYTES = 4 << 20
"""Newest bytes of a log that stay on this host: a server's process looks for the first
error there.
"""

MAX_PROCESSES = 1024
"""Maximum number of processes of a membership at one time."""

LENT_ENGINE = "rollweave.runtime.entrypoints.lent_engine"
"""Module of the process that connects a run with the engine that this host lends."""

_decode = decoder_of(ControllerMessage)


@dataclass(slots=True, eq=False, kw_only=True)
class _Process:
    number: int
    popen: "subprocess.Popen[bytes]"
    log: IO[bytes]
    """Its output, in a file without a name, which vanishes with the agent."""
    sent: int = 0
    """Number of bytes of the log that were sent or left out."""
    freed: int = 0
    """Number of bytes whose space is freed."""


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """A host's permissions for a run, as its operator gave them: the user's code and
    files, and environment variables of the controller by name. With `lent`, the socket
    of an engine that the host lends, nothing runs but that engine and a relay.
    """

    user_code: bool = False
    variables: tuple[str, ...] = ()
    lent: str = ""
    programs: Programs = field(default_factory=Programs)

    def check(self, program: Program) -> None:
        """Raise `HostError` for a program that a run must not start here."""
        if self.lent and program not in (Program.ENGINE, Program.RELAY):
            raise HostError(f"this host lends an engine, and starts no {program.value}")
        if program in (Program.WORKER, Program.ROLE) and not self.user_code:
            raise HostError(f"a {program.value} runs the user's code, which needs --user-code here")

    def command(self, program: Program) -> tuple[str, tuple[str, ...]]:
        """Return the module of a program, and its arguments."""
        if self.lent and program is Program.ENGINE:
            return LENT_ENGINE, (self.lent,)
        return self.programs.module(program), ()


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
        permissions: Permissions | None = None,
        on_change: Callable[[str], None] = print,
    ) -> None:
        """`join_s` is the maximum number of seconds without a controller. `address` is
        that at which other hosts reach this one; by default, it is the one from which
        this host reaches the controller. `on_change` receives a line whenever the host
        joins or leaves a run.
        """
        self.name, self._controller, self._secret = name, controller, secret
        self.resources, self._join_s, self._address = resources, join_s, address
        self.permissions = permissions or Permissions()
        self._on_change = on_change
        self._lender: LenderState | None = None
        self._membership: _Membership | None = None

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
            sock, seal = await self._connect()
            with temporary_folder(FOLDER_PREFIX) as folder, contextlib.chdir("."):
                self._membership = _Membership(self, sock, seal, folder)
                over, reason = await self._membership.run()
                self._membership = None
            if over:
                self._on_change(f"host {self.name}: the run is over")
                return
            self._on_change(f"host {self.name}: left the run at {self.where}: {reason}")

    @property
    def lender(self) -> LenderState | None:
        """The last reported state of the engine that this host lends, if any."""
        return self._lender

    def report(self, lender: LenderState) -> bool:
        """Report the state of the engine that this host lends to the run, now and when
        the host joins again. Return False if the run does not ask for it.
        """
        self._lender = lender
        return self._membership is not None and self._membership.report_lender()

    async def connect(self) -> tuple[socket.socket, Seal]:
        """Open a connection to the controller, complete the handshake, and return both
        ends' seal with it.

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
                seal = await introduce(sock, self._secret, where=self.where)
            except HostError as error:
                sock.close()
                raise HostError(f"host {self.name}: {error}") from None
            except BaseException:
                sock.close()
                raise
        return sock, seal

    def joining(self, sock: socket.socket) -> JoinHost:
        """Return the offer to join, for the controller to which `sock` is connected."""
        return JoinHost(
            name=self.name,
            address=self._address or sock.getsockname()[0],
            package=VERSION,
            resources=self.resources,
            user_code=self.permissions.user_code,
            variables=self.permissions.variables,
            lends=bool(self.permissions.lent),
        )

    def enter(self, accepted: HostAccepted, archive: bytes, folder: Path) -> str:
        """Unpack the user's files into `folder`, and make it the working directory.

        Returns the reason why this host cannot serve the run, or "".
        """
        foreign = sorted(set(accepted.env) - set(self.permissions.variables))
        if foreign or ((archive or accepted.modules) and not self.permissions.user_code):
            return f"host {self.name}: the controller sent files or variables that it must not send"
        try:
            if whole(Path(accepted.mark_path), MARK_BYTES) != accepted.mark.encode():
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

    async def _connect(self) -> tuple[socket.socket, Seal]:
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
        permissions=Permissions(user_code=True, variables=spec.variables, programs=spec.programs),
    )


class _Membership:
    """One membership in a run, from `JoinHost` to the end of its connection."""

    def __init__(self, agent: HostAgent, sock: socket.socket, seal: Seal, folder: Path) -> None:
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
        self._control = FramedSocket(sock, on_frame=self._on_frame, on_end=self._on_end, seal=seal)
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
                if self._accepted is not None:  # its variables are checked once
                    raise WireError("this host is accepted already")
                self._accepted, self._lease_s = accepted, accepted.lease_s
                self._receive(b"")
            case ArchivePart(data=data):
                self._receive(data)
            case HostRefused(error=error):
                self._refused = visible(error)
                self._end(self._refused)
            case StartProcess(process=number) as start:
                if number in self._tasks:  # of two, only one would be ended
                    raise WireError(f"process {number} runs already")
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
        if self._entering is not None:
            raise WireError("the user's files are complete already")
        self._archive += data
        accepted = self._accepted
        if len(self._archive) > 2 * user_files.BYTES:
            self._end("the controller sent too many files")
        elif accepted is not None and len(self._archive) >= accepted.archive_bytes:
            self._entering = self._loop.create_task(self._enter(accepted))

    async def _enter(self, accepted: HostAccepted) -> None:
        """Report to the controller that this host is ready, or why it cannot be."""
        archive, self._archive = bytes(self._archive), bytearray()
        error = await asyncio.to_thread(self._agent.enter, accepted, archive, self._folder)
        if error and not self._refused:
            self._refused = error
        self._control.send(encode(HostReady(error=error)))
        if not error:
            self.report_lender()

    def report_lender(self) -> bool:
        """Send the state of the engine that is lent; False if it is not known yet, or
        if the run does not ask for it.
        """
        accepted, state = self._accepted, self._agent.lender
        if accepted is None or not accepted.loans or state is None:
            return False
        self._control.send(encode(state))
        return True

    def _env(self, start: StartProcess) -> Mapping[str, str]:
        """Return the variables of a process, in addition to the agent's own."""
        env = dict(self._accepted.env) if self._accepted is not None else {}
        env |= environment(start.program, start.share)
        if not self._agent.permissions.user_code:
            env[USER_CODE_VARIABLE] = USER_CODE_REFUSED
        return env

    def _check(self, start: StartProcess) -> None:
        """Raise `HostError` for a process that must not run here."""
        agent = self._agent
        if self._entering is None or not self._entering.done():
            raise HostError("this host has not entered the run yet")
        agent.permissions.check(start.program)
        offered = {device.index for device in agent.resources.devices}
        if not offered.issuperset(start.share.devices or ()):
            raise HostError(f"GPUs must be among those that this host offers, {sorted(offered)}")
        if len(self._tasks) > MAX_PROCESSES:
            raise HostError(f"a host starts at most {MAX_PROCESSES} processes at one time")

    async def _run_process(self, start: StartProcess) -> ProcessEnded:
        """Run one process from its start to its end."""
        number = start.process
        try:
            self._check(start)
            process = self._processes[number] = await self._open(start)
        except (OSError, TimeoutError, HostError) as error:
            return ProcessEnded(process=number, error=str(error) or type(error).__name__)
        self._control.send(encode(ProcessStarted(process=number, pid=process.popen.pid)))
        with process.log:
            status = await exit_status(process.popen, within_s=None)
            self._forward_log(process)
        return ProcessEnded(process=number, status=status)

    def _on_process_ended(self, number: int, task: "asyncio.Task[ProcessEnded]") -> None:
        self._processes.pop(number, None)
        del self._tasks[number]
        cancelled = ProcessEnded(process=number, error="killed before it was started")
        self._control.send(encode(cancelled if task.cancelled() else task.result()))

    async def _open(self, start: StartProcess) -> _Process:
        """Connect to the controller, and start the process with that connection."""
        sock, seal = await self._agent.connect()
        module, arguments = self._agent.permissions.command(start.program)
        with sock, contextlib.ExitStack() as opened:
            attach = AttachProcess(host=self._agent.name, process=start.process, key=start.key)
            await send_frame(sock, encode(attach), seal)
            # the mode belongs to the connection, which the process shares
            sock.setblocking(True)
            log = opened.enter_context(tempfile.TemporaryFile())
            popen = start_process(
                sock,
                module=module,
                log=Path(f"/dev/fd/{log.fileno()}"),
                env=self._env(start),
                arguments=arguments,
                seal=seal,
            )
            opened.pop_all()
        return _Process(number=start.process, popen=popen, log=log)

    def _kill(self, number: int) -> None:
        if number in self._processes:
            kill_group(self._processes[number].popen)
        elif number in self._tasks:
            self._tasks[number].cancel()  # it is not started yet

    def _forward_log(self, process: _Process) -> None:
        """Send what is new in a log, at most its newest `LOG_BYTES`, and free the space
        of what was sent.
        """
        file = process.log.fileno()
        try:
            end = os.fstat(file).st_size
            start = max(process.sent, end - LOG_BYTES)
            data = os.pread(file, end - start, start)
        except OSError:
            return
        if left_out := start - process.sent:
            data = b"\n[%d bytes of output are left out here]\n" % left_out + data
        process.sent = end
        if data:
            self._control.send(encode(ProcessLogged(process=process.number, data=data)))
        if end - process.freed > 2 * KEPT_BYTES:
            process.freed = end - KEPT_BYTES
            free_space(file, process.freed)

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
