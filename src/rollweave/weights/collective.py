"""Weights by a collective group of the trainer and the engines (RollArt §6.3), over
NCCL between GPUs and Gloo otherwise.

The trainer's first rank has a `Sender`, and each engine is a `Member`. A member says
which version it wants, on a channel with a secret (`weights/tcp`). The first version of
a member comes over that channel. For later versions the sender waits until all members
want the same one, or `GATHER_S`, and broadcasts its bytes to those that do, in buckets.
A group is kept for as long as the same engines come; engines that join, or that are
missing, change it between two broadcasts.

Invariants: a member has a version only if its digest is right; each operation of a
group ends within `WAIT_S`, and after a failure the group is not used again; who could
not receive a broadcast, or comes late, requests the version over the channel; nothing
here waits on the trainer's thread, and the trainer waits for nothing here.
"""

import asyncio
import contextlib
import datetime
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from rollweave.io.machine import bound_socket
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import RelayAddress, WeightManifest, WeightPart
from rollweave.weights.memory import PayloadDigest, open_payload, read_payload
from rollweave.weights.publication import bytes_of, check_layout, tensor_of, tensors_in
from rollweave.weights.relay import ServedPart
from rollweave.weights.serve import KEEPALIVE_S, Broadcast, ServedVersion, pull, serve_version
from rollweave.weights.tcp import Channel, Listener, Tcp
from rollweave.weights.transport import (
    Alone,
    FetchError,
    Gathered,
    Join,
    KeepAlive,
    Refused,
    Request,
)

GATHER_S = 0.5
"""Maximum seconds that a broadcast waits for members: they are told of a version at the
same moment.
"""

WAIT_S = 10.0
"""Maximum seconds to form a group, and for one operation in it, after which a peer that
is silent counts as gone, as on a channel.
"""

POLL_S = 0.001
"""Seconds between two polls of an operation of NCCL, which has no wait with an end."""

BUCKET_BYTES = 16 << 20
"""Bytes of one operation: enough to amortize it; the next is under way while a member
computes the digest of the last.
"""

MAX_MEMBERS = 1024
"""Maximum number of members; who comes beyond them requests every version."""

STORE_BACKLOG = 1024
"""Maximum number of ranks that connect to a store at the same moment."""

ERRORS = (RuntimeError, ValueError)
"""The errors of torch.distributed."""

_log = logging.getLogger(__name__)


def open_store(address: str) -> tuple[dist.TCPStore, str]:
    """Open the store at which ranks meet, on one address of this host.

    Return it, for rank 0, and the address at which the other ranks reach it
    ("10.0.0.1:29500"). Raises OSError.
    """
    # the store would otherwise listen on every address of this host
    with bound_socket(address, 0) as listening:
        listening.listen(STORE_BACKLOG)
        port: int = listening.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, f"{address}:{port}"


def join_store(where: str, wait_s: float = 300.0) -> dist.TCPStore:
    """Connect to the store of rank 0. Raises RuntimeError."""
    host, _, port = where.rpartition(":")
    return dist.TCPStore(
        host, int(port), is_master=False, timeout=datetime.timedelta(seconds=wait_s)
    )


class Group:
    """A rank of a group, which needs no default group of torch.distributed. `host` is
    the address of this host by which the others reach it. Without a GPU as `device`,
    Gloo. All methods raise RuntimeError.
    """

    def __init__(
        self,
        store: dist.TCPStore | None,
        rank: int,
        size: int,
        *,
        number: int,
        host: str,
        device: torch.device | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self.number, self.size = number, size
        self._store, self._device, self._wait_s = store, device, wait_s
        prefix = dist.PrefixStore(str(number), store)
        self._ranks: dist.ProcessGroup
        if device is None:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = datetime.timedelta(seconds=wait_s)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._ranks = dist.ProcessGroupGloo(prefix, rank, size, options)
            return
        # by default, a thread of NCCL ends the process when a peer is lost
        with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            torch.cuda.set_device(device)
            self._ranks = dist.ProcessGroupNCCL(prefix, rank, size, dist.ProcessGroupNCCL.Options())

    def broadcast(
        self, payload: torch.Tensor, done: Callable[[torch.Tensor], None] = lambda bucket: None
    ) -> None:
        """Broadcast the bytes of rank 0 into the payload of all others, in buckets, and
        call `done` with each. A group that fails is closed.
        """
        under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()
        try:
            for bucket in payload.split(BUCKET_BYTES):
                under_way.append(self._begin(bucket))
                if len(under_way) > 1:
                    done(self._finish(*under_way.popleft()))
            for last in under_way:
                done(self._finish(*last))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group, so that the others notice it at once."""
        with contextlib.suppress(RuntimeError):
            self._ranks.abort()

    def _begin(self, bucket: torch.Tensor) -> tuple[dist.Work, torch.Tensor]:
        if self._device is not None:
            bucket = bucket.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._ranks.broadcast([bucket], options), bucket

    def _finish(self, work: dist.Work, bucket: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            work.wait(datetime.timedelta(seconds=self._wait_s))
            return bucket
        until = time.monotonic() + self._wait_s
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"a peer was silent for {self._wait_s:g} s")
            time.sleep(POLL_S)
        work.wait()  # raises if it has failed
        return bucket


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    former = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if former is not None:
            os.environ[name] = former


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
        self, host: str, device: torch.device, *, wait_s: float = WAIT_S, gather_s: float = GATHER_S
    ) -> None:
        self._host, self._wait_s, self._gather_s = host, wait_s, gather_s
        self._device = device if device.type == "cuda" else None
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
        self._thread = threading.Thread(target=self._run, name="weights sender", daemon=True)
        self._thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
            self._listener: Listener = listening.result()
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
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._sending.shutdown(wait=False)

    # On the thread of the loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> Listener:
        return await Tcp(idle_timeout_s=self._wait_s).listen(self._host, self._serve)

    async def _close(self) -> None:
        await self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._keep(frozenset())

    def _add(self, served: ServedPart) -> None:
        self._served[served.version.manifest.publication_id] = served

    def _keep(self, needed: Collection[int]) -> None:
        for publication_id in self._served.keys() - needed:
            self._served.pop(publication_id).close(f"publication {publication_id} is not kept")
            self._rounds.pop(publication_id, None)

    def _find(self, request: Request | Join) -> ServedVersion:
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
        else:
            error = f"the trainer answers Request and Join, got {type(message).__name__}"
            await channel.send(Refused(reason="source", error=error))

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
            while not seat.answer.done():
                await asyncio.wait([seat.answer], timeout=KEEPALIVE_S)
                if not seat.answer.done():
                    await channel.send(KeepAlive())
        except FetchError:
            if not current.closed and current.seats.get(join.member) is seat:
                del current.seats[join.member]
            raise
        await channel.send(seat.answer.result())

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
            location = f"/proc/self/fd/{version.fd}"
            payload = tensor_of(read_payload(location, manifest.nbytes, where="weights"))
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
        what = (str(error).splitlines() or [type(error).__name__])[0]
        self._doubts.append(
            f"weights version {manifest.version} goes to {engines} engines over TCP, since its "
            f"broadcast failed: {what}"
        )


class Member:
    """The end of one engine, whose weights are on `device`. Thread-safe; one version is
    received at a time.
    """

    def __init__(self, device: torch.device, *, wait_s: float = WAIT_S) -> None:
        self._device = device if device.type == "cuda" else None
        self._wait_s = wait_s
        self._id = secrets.token_bytes(16)
        self._group: Group | None = None
        self._lock = threading.Lock()
        self.broadcasts = 0
        """Number of versions that came by a broadcast."""

    def read(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Return the tensors of a version, verified: on the device after a broadcast
        over NCCL, else on the CPU. Raises WeightsError.
        """
        check_layout(manifest)
        with self._lock:
            return tensors_in(manifest, asyncio.run(self._receive(manifest)))

    async def _receive(self, manifest: WeightManifest) -> torch.Tensor:
        assert manifest.sender is not None, "the version is not sent"
        channel = await Tcp(idle_timeout_s=self._wait_s).connect(manifest.sender)
        try:
            answer, host = await self._join(channel, manifest), channel.host
        finally:
            channel.close()
        if isinstance(answer, Gathered):
            try:
                payload = await asyncio.to_thread(self._broadcast, answer, manifest, host)
                self.broadcasts += 1
                return payload
            except (*ERRORS, WeightsError) as error:
                self._leave()
                _log.warning("weights version %s by TCP: %s", manifest.version, error)
        return await self._pull(manifest, manifest.sender)

    async def _join(self, channel: Channel, manifest: WeightManifest) -> Gathered | Alone:
        await channel.send(
            Join(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                member=self._id,
                group=self._group.number if self._group is not None else 0,
                on_gpu=self._device is not None,
            )
        )
        while True:
            message, _ = await channel.receive()
            match message:
                case Gathered() | Alone():
                    return message
                case Refused(reason=reason, error=error):
                    raise FetchError(reason, f"the trainer refused: {error}")
                case KeepAlive():
                    pass
                case _:
                    raise FetchError("broken", f"the trainer sent {type(message).__name__}")

    def _broadcast(self, answer: Gathered, manifest: WeightManifest, host: str) -> torch.Tensor:
        device = self._device if answer.on_gpu else None
        group = self._group
        if group is None or group.number != answer.group:
            self._leave()
            group = self._group = Group(
                join_store(answer.store, self._wait_s),
                answer.rank,
                answer.size,
                number=answer.group,
                host=host,
                device=device,
                wait_s=self._wait_s,
            )
        payload = torch.empty(manifest.nbytes, dtype=torch.uint8, device=device)
        content = PayloadDigest()
        group.broadcast(payload, lambda bucket: content.update(bytes_of(bucket.cpu())))
        if content.hexdigest() != manifest.digest:
            raise WeightsError(
                f"the digest of the broadcast must be {manifest.digest}, got {content.hexdigest()}"
            )
        return payload

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _pull(self, manifest: WeightManifest, sender: RelayAddress) -> torch.Tensor:
        """Request the version over a channel. Raises FetchError."""
        payload = torch.empty(manifest.nbytes, dtype=torch.uint8)
        view = bytes_of(payload)
        await pull(
            Tcp(idle_timeout_s=self._wait_s),
            sender,
            manifest,
            [(0, manifest.nbytes)],
            lambda start, stop: view[start:stop],
            on_piece=lambda start, stop: None,
        )
        content = PayloadDigest()
        content.update(view)
        if content.hexdigest() != manifest.digest:
            raise FetchError(
                "broken", f"the digest must be {manifest.digest}, got {content.hexdigest()}"
            )
        return payload
