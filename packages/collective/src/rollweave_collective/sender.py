"""The trainer's end: gathers the members that want a version, and broadcasts it from
this host's memory.
"""

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest, WeightPart
from rollweave.train.distributed import open_store
from rollweave.weights.memory import open_payload, read_payload
from rollweave.weights.publication import tensor_of, tensors_in
from rollweave.weights.relay import ServedPart
from rollweave.weights.serve import KEEPALIVE_S, Broadcast, ServedVersion, serve_version
from rollweave.weights.tcp import Channel, Listener, Tcp
from rollweave.weights.transport import FetchError, KeepAlive, Refused, Request
from rollweave_collective.group import ERRORS, WAIT_S, Group
from rollweave_collective.messages import Alone, Begun, Gathered, Join, JoinServer, Sent, decode
from rollweave_collective.server import NcclRoot

GATHER_S = 0.5
"""Maximum seconds that a broadcast waits for members: they are told of a version at the
same moment.
"""

CLOSE_S = 5.0
"""Maximum seconds to begin to listen, and to end."""

MAX_MEMBERS = 1024
"""Maximum number of members; who comes beyond them requests every version."""


SERVER_S = 300.0
"""Maximum seconds to form a group with a server and to send it a version."""


class Root(Protocol):
    """The trainer's rank in the group of a server, as `server.NcclRoot`."""

    unique_id: bytes

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors, after the group is formed."""


MakeRoot = Callable[[int, torch.device], Root]
"""Makes the trainer's rank in a group of this size."""


@dataclass(eq=False)
class Seat:
    """A member that waits for a broadcast."""

    join: Join
    answer: "asyncio.Future[Gathered | Alone]"


@dataclass(eq=False)
class Round:
    """The broadcast of one version; once it is `closed`, nobody joins it."""

    version: ServedVersion
    seats: dict[bytes, Seat] = field(default_factory=dict)
    closed: bool = False
    changes: Broadcast = field(default_factory=Broadcast)


class Sender:
    """The trainer's end, with threads of its own. It listens on the address `host` of
    this host. All public methods belong to the trainer's thread.

    Raises WeightsError if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        device: torch.device,
        *,
        wait_s: float = WAIT_S,
        gather_s: float = GATHER_S,
        make_root: MakeRoot | None = None,
    ) -> None:
        """Without a GPU, only `make_root` makes the trainer's rank in groups with
        servers.
        """
        self._make_root = make_root or (NcclRoot if device.type == "cuda" else None)
        self._roots: dict[bytes, Root] = {}
        """The trainer's rank in the group of each server."""
        self._host, self._wait_s, self._gather_s = host, wait_s, gather_s
        self._device = device if device.type == "cuda" else None
        self._server_s = SERVER_S
        self._doubts: deque[str] = deque(maxlen=16)
        self._served: dict[int, ServedPart] = {}
        self._rounds: dict[int, Round] = {}
        self._members: dict[bytes, int] = {}
        """The members, each with the publication that it last got over its channel."""
        self._group: Group | None = None
        self._arrivals = Broadcast()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="weights sender", daemon=True)
        self._thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
            self._listener: Listener = listening.result(CLOSE_S)
        except OSError as error:
            self._end()
            raise WeightsError(f"weights cannot be sent from {host}: {error}") from error

    def keep(self, needed: Collection[int]) -> None:
        """Give up all versions but those with these publication ids."""
        self._loop.call_soon_threadsafe(self._keep, frozenset(needed))

    def offer(self, manifest: WeightManifest) -> WeightManifest:
        """Send a version, which is in this host's memory, to those that want it. Return
        its manifest for engines. Raises WeightsError.
        """
        where = f"weights version {manifest.version}"
        fd = open_payload(manifest.location, manifest.nbytes, where=where)
        manifest = msgspec.structs.replace(manifest, sender=self._listener.address)
        part = WeightPart(
            rank=0,
            location=manifest.location,
            ranges=((0, manifest.nbytes),),
            digest=manifest.digest,
        )
        served = ServedPart(manifest, part, fd)
        self._loop.call_soon_threadsafe(self._add, served)
        return manifest

    def doubts(self) -> tuple[str, ...]:
        """Return what has failed since the last call: a line for each broadcast."""
        return tuple(self._doubts.popleft() for _ in range(len(self._doubts)))

    def close(self) -> None:
        """End at once. Members that wait see the channel close."""
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(CLOSE_S)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._sending.shutdown(wait=False)

    # On the thread of the loop.

    async def _listen(self) -> Listener:
        return await Tcp(idle_timeout_s=self._wait_s, decode=decode).listen(self._host, self._serve)

    async def _close(self) -> None:
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._group is not None:
            self._group.close()
        self._keep(frozenset())

    def _add(self, served: ServedPart) -> None:
        self._served[served.version.manifest.publication_id] = served

    def _keep(self, needed: Collection[int]) -> None:
        for publication_id in self._served.keys() - needed:
            self._served.pop(publication_id).close(f"publication {publication_id} is not kept")
            self._rounds.pop(publication_id, None)

    def _find(self, request: Request | Join | JoinServer) -> ServedVersion:
        served = self._served.get(request.publication_id)
        if served is None or served.version.manifest.digest != request.digest:
            raise FetchError("source", f"publication {request.publication_id} is not kept")
        return served.version

    async def _serve(self, channel: Channel) -> None:
        message, _ = await channel.receive()
        if isinstance(message, Request):
            await serve_version(channel, message, self._find, self._arrivals)
        elif isinstance(message, Join):
            try:
                version = self._find(message)
            except FetchError as error:
                await channel.send(Refused(reason=error.reason, error=str(error)))
                return
            await self._seat(channel, message, version)
        elif isinstance(message, JoinServer):
            await self._serve_server(channel, message)
        else:
            text = f"the trainer answers Request and Join, got {type(message).__name__}"
            await channel.send(Refused(reason="source", error=text))

    async def _seat(self, channel: Channel, join: Join, version: ServedVersion) -> None:
        """Let a member wait for a broadcast, if there is one for it."""
        known = join.member in self._members
        current = self._rounds.get(join.publication_id)
        if not known or (current is not None and current.closed):
            if known or len(self._members) < MAX_MEMBERS:
                self._members[join.member] = join.publication_id
            await channel.send(Alone())
            return
        if current is None:
            current = self._rounds[join.publication_id] = Round(version)
            task = self._loop.create_task(self._gather(current), name="broadcast weights")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        seat = current.seats[join.member] = Seat(join, self._loop.create_future())
        current.changes.notify_all()
        try:
            await _wait(channel, seat.answer)
        except FetchError:
            if not current.closed and current.seats.get(join.member) is seat:
                del current.seats[join.member]
            raise
        await channel.send(seat.answer.result())

    async def _serve_server(self, channel: Channel, join: JoinServer) -> None:
        """Send a version to a server, in the group of that server alone."""
        turn = asyncio.ensure_future(self._turn.acquire())  # one broadcast at a time
        try:
            await _wait(channel, turn)
            await self._to_server(channel, join)
            await channel.send(Sent())
        except (*ERRORS, OSError, WeightsError) as error:
            what = f"a server gets no weights: {_line(error)}"
            if not isinstance(error, FetchError):
                self._doubts.append(what)
            await channel.send(Refused(reason="source", error=what))
        finally:
            if not turn.cancel():
                self._turn.release()

    async def _to_server(self, channel: Channel, join: JoinServer) -> None:
        version, root = self._find(join), self._roots.pop(join.member, None)
        begun = Begun(unique_id=b"")
        if root is None:
            if self._make_root is None:
                raise FetchError("source", "the trainer has no GPU")
            root = self._make_root(1 + join.ranks, self._device or torch.device("cpu"))
            begun = Begun(unique_id=root.unique_id)
        tensors = tensors_in(version.manifest, _payload(version))
        sent: asyncio.Future[None] = self._loop.create_future()

        def send() -> None:
            error: Exception | None = None
            try:
                root.send(tensors.values())
            except Exception as raised:  # it goes to whoever waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_settle, sent, error)

        # it may hang in NCCL for ever, and is left there then
        threading.Thread(target=send, name="weights to a server", daemon=True).start()
        await channel.send(begun)
        try:
            async with asyncio.timeout(self._server_s):
                await _wait(channel, sent)
        except TimeoutError:
            what = f"the group did not receive them within {self._server_s:g} s"
            raise WeightsError(what) from None
        self._roots[join.member] = root

    async def _gather(self, current: Round) -> None:
        def missing() -> set[bytes]:
            others = {member for member, alone in self._members.items() if alone != number}
            return others - current.seats.keys()

        number = current.version.manifest.publication_id
        until = self._loop.time() + self._gather_s
        while missing() and self._loop.time() < until:
            await current.changes.wait()
        current.closed = True
        for member in missing():
            del self._members[member]
        async with self._turn:  # one broadcast at a time
            await self._broadcast(current.version, [*current.seats.values()])

    async def _broadcast(self, version: ServedVersion, seats: list[Seat]) -> None:
        """Broadcast a version in the present group, or in a new one."""
        if not seats:
            return
        manifest, size, store, where = version.manifest, 1 + len(seats), None, ""
        group, self._group = self._group, None
        if group is not None and (
            group.size != size or any(seat.join.group != group.number for seat in seats)
        ):
            group.close()
            group = None
        on_gpu = self._device is not None and all(seat.join.on_gpu for seat in seats)
        number = group.number if group is not None else secrets.randbits(62) + 1
        try:
            payload = _payload(version)
            if group is None:
                store, where = open_store(self._host)
        except (OSError, WeightsError) as error:
            for seat in seats:
                seat.answer.set_result(Alone())
            self._fail(manifest, len(seats), error)
            return
        for rank, seat in enumerate(seats, 1):
            seat.answer.set_result(
                Gathered(group=number, rank=rank, size=size, store=where, on_gpu=on_gpu)
            )
        device = self._device if on_gpu else None

        def send() -> Group:
            made = group or Group(
                store, 0, size, number=number, host=self._host, device=device, wait_s=self._wait_s
            )
            made.broadcast(payload)
            return made

        try:
            self._group = await self._loop.run_in_executor(self._sending, send)
        except ERRORS as error:
            self._fail(manifest, len(seats), error)

    def _fail(self, manifest: WeightManifest, engines: int, error: Exception) -> None:
        self._doubts.append(
            f"weights version {manifest.version} goes to {engines} engines over TCP, since its "
            f"broadcast failed: {_line(error)}"
        )


def _payload(version: ServedVersion) -> torch.Tensor:
    """Map the bytes of a version. Raises WeightsError."""
    if version.withdrawn:  # its descriptor may be another file's by now
        raise WeightsError(version.withdrawn)
    location = f"/proc/self/fd/{version.fd}"
    return tensor_of(read_payload(location, version.manifest.nbytes, where="weights"))


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)


async def _wait(channel: Channel, future: "asyncio.Future[Any]") -> None:
    """Wait, and keep the peer waiting. Raises FetchError if it is gone, and what the
    future has.
    """
    while not future.done():
        await asyncio.wait([future], timeout=KEEPALIVE_S)
        if not future.done():
            await channel.send(KeepAlive())
    future.result()
