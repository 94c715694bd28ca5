"""The control socket of a run that goes on: whoever may write to its directory asks for
its engines, for more or for fewer.

One connection is one line of JSON there and one back (`schema/control`). Invariants:
only the run's own user can connect; what is asked for happens in the core alone, by
events, and is in the journal before it is answered; nobody who connects and says
nothing, too much, or nonsense holds up the run, or anybody else for long; the run goes
on where there can be no such socket.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, assert_never

import msgspec

from rollweave.core.seats import cannot_join, cannot_leave, machine_of, next_id
from rollweave.core.state import Engine, State
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.control import (
    AddEngines,
    ControlReply,
    ControlRequest,
    EngineLine,
    ListEngines,
    WithdrawEngine,
)
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.events import EngineRegistered, EngineSlot, EngineWithdrawn, Event
from rollweave.schema.packing import as_json

LINE_BYTES = 4096
"""Of a request, at most: none that means something is a tenth of it."""

REPLY_BYTES = 1 << 20
"""Of an answer, at most: some thousands of engines."""

AT_ONCE = 8
"""Connections that are served at one time, and as many that wait in the kernel."""

SAY_S = 5.0
"""That one side may take to say its line, and the core to hear of it."""

_decode = msgspec.json.Decoder(ControlRequest)


class Post(Protocol):
    """`runtime/pump.Pump.post`."""

    def __call__(self, event: Event, then: Callable[[], None] | None = None, /) -> None:
        """Queue an event; `then` is called once it is handled."""


class Control:
    """The socket at `path`, in a directory that is ours alone: `open` begins to listen;
    `close` when `tasks` are over.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: RunConfig,
        state: Callable[[], State],
        post: Post,
        tasks: Tasks,
        warned: Callable[[Warn], None],
    ) -> None:
        self._path, self._config, self._state, self._post = path, config, state, post
        self._tasks, self._warned = tasks, warned
        self._sockets: set[socket.socket] = set()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._in_turn = asyncio.Lock()  # so that no two are given the same name

    def open(self) -> None:
        """Listen, in the place of a former life's socket.

        Where that cannot be it is told, once.
        """
        try:
            listener = _listening(self._path)
        except OSError as error:
            text = f"`rollweave engines` cannot reach this run: no socket at {self._path}: {error}"
            self._warned(Warn(component="control", message=text))
        else:
            self._sockets.add(listener)
            self._tasks.spawn(self._accept(listener), "control")

    def close(self) -> None:
        """Nobody listens any more, nor is anything left.

        A task that was cancelled before it began closes nothing itself.
        """
        if self._sockets:
            with contextlib.suppress(OSError):  # the next life replaces it
                self._path.unlink()
        for one in self._sockets:
            one.close()
        self._sockets.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # we have no more files, or they have gone already
                self._places.release()
                await asyncio.sleep(1.0)
                continue
            connection.setblocking(False)
            self._sockets.add(connection)
            self._tasks.spawn(self._serve(connection), "control request")

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            # a TimeoutError is one: it has gone, or says nothing
            with connection, contextlib.suppress(OSError):
                async with asyncio.timeout(SAY_S):
                    line = await _line(connection)
                reply = as_json(await self._answer(line)) + b"\n"
                async with asyncio.timeout(SAY_S):
                    await loop.sock_sendall(connection, reply)
        finally:
            self._sockets.discard(connection)
            self._places.release()

    async def _answer(self, line: bytes) -> ControlReply:
        if len(line) > LINE_BYTES or not line.endswith(b"\n"):
            return ControlReply(error=f"a request must be one line of at most {LINE_BYTES} bytes")
        try:
            request = _decode.decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            return ControlReply(error=f"a request must be one of schema/control: {error}")
        async with self._in_turn:
            return await self._do(request)

    async def _do(self, request: ControlRequest) -> ControlReply:
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
            if name is None:
                return self._reply(*added, error="no machine is left")
            degree = self._config.engines[group].degree if group < len(self._config.engines) else 1
            seat = EngineSlot(id=name, degree=degree, group=group)
            if why := cannot_join(self._config, self._state(), seat):
                return self._reply(*added, error=why)
            await self._happened(EngineRegistered(engine=seat))
            if name not in self._state().engines:
                return self._reply(*added, error="the run did not take it: it is ending")
            added.append(seat)
        return self._reply(*added)

    async def _withdraw(self, request: WithdrawEngine) -> ControlReply:
        engines = self._state().engines
        engine = engines.get(request.engine_id)
        if engine is None:
            there = ", ".join(engines)
            return self._reply(
                error=f"there is no engine {request.engine_id!r:.40}; there are {there}"
            )
        if why := cannot_leave(self._config, self._state(), engine):
            return self._reply(error=why)
        await self._happened(EngineWithdrawn(engine_id=engine.id, drain=request.drain))
        if engine.id in engines and not engine.leaving:
            return self._reply(
                error=cannot_leave(self._config, self._state(), engine) or "the run is ending"
            )
        return self._reply()

    async def _happened(self, event: Event) -> None:
        """The core has heard of it; or, where the run is ending, never will."""
        heard = asyncio.get_running_loop().create_future()
        self._post(event, lambda: None if heard.done() else heard.set_result(None))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAY_S):
                await heard

    def _reply(self, *added: EngineSlot, error: str = "") -> ControlReply:
        lines = tuple(self._line(engine) for engine in self._state().engines.values())
        return ControlReply(engines=lines, added=tuple(seat.id for seat in added), error=error)

    def _line(self, engine: Engine) -> EngineLine:
        return EngineLine(
            id=engine.id,
            status="leaving" if engine.going else engine.status,
            version=engine.version,
            machine=machine_of(self._state(), engine.id),
            group=engine.group,
            degree=engine.degree,
            slots=engine.max_slots,
            busy=len(engine.active),
            joined=engine.joined,
        )


def ask(path: Path, request: ControlRequest) -> ControlReply:
    """Ask the run whose socket this is.

    Raises ConfigError where none goes on, RollweaveError where it does not answer.
    """
    nobody = f"RUN must be a run that is going on, and none is in {path.parent}"
    try:
        with _short(path) as name, socket.socket(socket.AF_UNIX) as connection:
            # Or connecting would not wait at all where as many are served, and wait, as
            # may.
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(4 * SAY_S), 0)
            )
            connection.connect(name)
            connection.settimeout(4 * SAY_S)
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
        raise ConfigError(nobody) from error
    except PermissionError as error:
        raise ConfigError(
            f"RUN must be a run of your own, and {path.parent} is somebody else's"
        ) from error
    except OSError as error:
        raise RollweaveError(f"the run in {path.parent} does not answer: {error}") from error
    try:
        return msgspec.json.decode(answer, type=ControlReply)
    except msgspec.MsgspecError as error:
        raise RollweaveError(
            f"the run in {path.parent} did not answer: it is ending, or has too much to do"
        ) from error


async def _line(connection: socket.socket) -> bytes:
    """Up to the end of the first line, or more than a line may have, or all that there
    is.
    """
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n") and len(line) <= LINE_BYTES:
        more = await loop.sock_recv(connection, LINE_BYTES)
        if not more:
            break
        line += more
    return line


def _listening(path: Path) -> socket.socket:
    """A socket at `path`, which only our user may connect to. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        # of a life that was killed: the directory's lock is ours
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # what it is bound to has this mode from the start
        with _short(path) as name:
            listener.bind(name)
        listener.listen(AT_ONCE)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of `path`, short enough for a socket's address, which may have 107
    bytes.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
