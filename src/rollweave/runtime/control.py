"""The control socket of a living run, which lists, adds and withdraws engines.

A connection carries one line of JSON in each direction (`schema/status`). Invariants:
only the run's own user can connect; a request takes effect in the core alone, by
events, and is in the journal before it is answered; a client that sends nothing, too
much or nonsense delays neither the run nor, for long, other clients; a run for which no
socket can be made runs without one.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

import msgspec

from rollweave.core.mechanisms.membership.members import next_id, why_not_join, why_not_leave
from rollweave.core.mechanisms.relays.state import is_relayed
from rollweave.core.state import Engine, State
from rollweave.runtime.pump import PostEvent
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import as_json
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.events import EngineRegistered, EngineSlot, EngineWithdrawn, Event
from rollweave.schema.status import (
    AddEngines,
    ControlReply,
    ControlRequest,
    EngineLine,
    ListEngines,
    WithdrawEngine,
)

LINE_BYTES = 4096
"""Maximum length of a request: ten times that of any meaningful one."""

REPLY_BYTES = 1 << 20
"""Maximum length of a reply: some thousands of engines."""

MAX_CONNECTIONS = 8
"""Maximum number of connections that are served at a time; as many may wait in the
kernel.
"""

LINE_S = 5.0
"""Maximum time for one side to send its line, and for the core to handle the event, in
seconds.
"""

_decode = msgspec.json.Decoder(ControlRequest)


class Control:
    """The socket at `path`, in a directory that this process has locked.

    Call `open` to listen, and `close` once `tasks` are over.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: RunConfig,
        state: Callable[[], State],
        post: PostEvent,
        tasks: Tasks,
        warn: Callable[[Warn], None],
    ) -> None:
        self._path, self._config, self._state, self._post = path, config, state, post
        self._tasks, self._warn = tasks, warn
        self._sockets: set[socket.socket] = set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._lock = asyncio.Lock()
        """Serializes requests, so that no two engines get the same name."""

    def open(self) -> None:
        """Listen, and replace the socket of a former life.

        If that fails, warn once.
        """
        try:
            listener = _listening(self._path)
        except OSError as error:
            text = f"`rollweave engines` cannot reach this run: no socket at {self._path}: {error}"
            self._warn(Warn(component="control", message=text))
        else:
            self._sockets.add(listener)
            self._tasks.spawn(self._accept(listener), "control")

    def close(self) -> None:
        """Close and remove all sockets.

        A task that was cancelled before it began does not close its connection itself.
        """
        if self._sockets:
            with contextlib.suppress(OSError):  # the next life replaces it
                self._path.unlink()
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no file descriptors are left, or the client is gone
                self._slots.release()
                await asyncio.sleep(1.0)
                continue
            connection.setblocking(False)
            self._sockets.add(connection)
            self._tasks.spawn(self._serve(connection), "control request")

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            # the client is gone or silent: TimeoutError is an OSError
            with connection, contextlib.suppress(OSError):
                async with asyncio.timeout(LINE_S):
                    line = await _line(connection)
                reply = as_json(await self._answer(line)) + b"\n"
                async with asyncio.timeout(LINE_S):
                    await loop.sock_sendall(connection, reply)
        finally:
            self._sockets.discard(connection)
            self._slots.release()

    async def _answer(self, line: bytes) -> ControlReply:
        if len(line) > LINE_BYTES or not line.endswith(b"\n"):
            return ControlReply(error=f"a request must be one line of at most {LINE_BYTES} bytes")
        try:
            request = _decode.decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            return ControlReply(error=f"a request must be one of schema/status: {error}")
        async with self._lock:
            return await self._execute(request)

    async def _execute(self, request: ControlRequest) -> ControlReply:
        match request:
            case ListEngines():
                return self._reply()
            case AddEngines():
                return await self._add(request)
            case WithdrawEngine():
                return await self._withdraw(request)
            case _:
                assert_never(request)

    async def _add(self, request: AddEngines) -> ControlReply:
        added: list[EngineSlot] = []
        for _ in range(request.count):
            name, group = next_id(self._state()), request.group
            degree = self._config.engines[group].degree if group < len(self._config.engines) else 1
            slot = EngineSlot(id=name, degree=degree, group=group)
            if why := why_not_join(self._config, self._state(), slot):
                return self._reply(*added, error=why)
            await self._handled(EngineRegistered(engine=slot))
            if name not in self._state().engines:
                return self._reply(*added, error="the run is ending and accepts no engine")
            added.append(slot)
        return self._reply(*added)

    async def _withdraw(self, request: WithdrawEngine) -> ControlReply:
        engines = self._state().engines
        engine = engines.get(request.engine_id)
        if engine is None:
            names = ", ".join(engines)
            return self._reply(
                error=f"there is no engine {request.engine_id!r:.40}; there are {names}"
            )
        if why := why_not_leave(self._config, self._state(), engine):
            return self._reply(error=why)
        await self._handled(EngineWithdrawn(engine_id=engine.id, drain=request.drain))
        if engine.id in engines and not engine.leaving:
            return self._reply(
                error=why_not_leave(self._config, self._state(), engine) or "the run is ending"
            )
        return self._reply()

    async def _handled(self, event: Event) -> None:
        """Post an event and wait until the core has handled it, which it does not if
        the run is ending.
        """
        handled = asyncio.get_running_loop().create_future()
        self._post(event, lambda: None if handled.done() else handled.set_result(None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINE_S):
                await handled

    def _reply(self, *added: EngineSlot, error: str = "") -> ControlReply:
        lines = tuple(self._line(engine) for engine in self._state().engines.values())
        return ControlReply(engines=lines, added=tuple(slot.id for slot in added), error=error)

    def _line(self, engine: Engine) -> EngineLine:
        return EngineLine(
            id=engine.id,
            status="leaving" if engine.departing else engine.status,
            version=engine.version,
            host=engine.seat.host if is_relayed(self._state()) else None,
            group=engine.seat.group,
            degree=engine.seat.degree,
            slots=engine.abilities.max_slots,
            busy=len(engine.active),
            joined=engine.joined,
            phase=engine.seat.phase,
        )


def ask(path: Path, request: ControlRequest) -> ControlReply:
    """Send a request to the run with this socket, and return its reply.

    Raises ConfigError if no run is alive there, and RollweaveError if it does not
    answer.
    """
    not_alive = f"RUN must be the directory of a living run, and none is in {path.parent}"
    try:
        with _short(path) as name, socket.socket(socket.AF_UNIX) as connection:
            # without this, connecting would fail at once if all connections are taken
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(4 * LINE_S), 0)
            )
            connection.connect(name)
            connection.settimeout(4 * LINE_S)
            # the run may have replied and closed already: its reply counts
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(as_json(request) + b"\n")
            answer = b""
            while (
                not answer.endswith(b"\n")
                and len(answer) < REPLY_BYTES
                and (more := connection.recv(1 << 16))
            ):
                answer += more
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise ConfigError(not_alive) from error
    except PermissionError as error:
        raise ConfigError(
            f"RUN must be a run of your own, and {path.parent} belongs to another user"
        ) from error
    except OSError as error:
        raise RollweaveError(f"the run in {path.parent} does not answer: {error}") from error
    try:
        return msgspec.json.decode(answer, type=ControlReply)
    except msgspec.MsgspecError as error:
        raise RollweaveError(
            f"the run in {path.parent} did not answer: it is ending or overloaded"
        ) from error


async def _line(connection: socket.socket) -> bytes:
    """Read up to the end of the first line, the end of the stream, or beyond the
    maximum length.
    """
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n") and len(line) <= LINE_BYTES:
        more = await loop.sock_recv(connection, LINE_BYTES)
        if not more:
            break
        line += more
    return line


def _listening(path: Path) -> socket.socket:
    """Listen on a socket at `path`, to which only our user may connect.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        # a life that was killed has left it: this process has locked the directory
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # the file has this mode from the start
        with _short(path) as name:
            listener.bind(name)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield another name of `path` that fits a socket's address of at most 107
    bytes.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
