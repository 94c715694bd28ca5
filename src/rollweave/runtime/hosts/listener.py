"""The controller's listener, which agents of other hosts join.

Invariants: no message is read before the handshake, and none without its seal; what a
host says of itself is bounded and printable; no two hosts have the same name.
"""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable

import msgspec

from rollweave.io.framing import receive_frame, send_frame
from rollweave.io.machine import bound_socket
from rollweave.io.wire import Seal, encode
from rollweave.package import VERSION
from rollweave.runtime.hosts.authentication import admit
from rollweave.runtime.hosts.remote import DRAIN_S, SILENT_S, RemoteHost, decode
from rollweave.runtime.tasks import Tasks
from rollweave.schema.errors import HostError, WireError
from rollweave.schema.hosts import (
    ALIVE_S,
    AttachProcess,
    HostAccepted,
    HostRefused,
    JoinHost,
    wrong_offer,
)

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
            return decode(await receive_frame(sock, seal, limit=FIRST_BYTES)), seal

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
