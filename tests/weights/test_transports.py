"""One contract, whatever carries the bytes: TCP, a fake without a network, and the
libraries where they are installed.
"""

import asyncio
import gc
import importlib.util
import os
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import xxhash

from rollweave.schema.errors import ConfigError
from rollweave.schema.weights import RelayAddress, VersionFetched
from rollweave.weights.carriers import MooncakeCarrier, NixlCarrier
from rollweave.weights.protocol import FetchError, KeepAlive, Message, Raw, Refused
from rollweave.weights.tcp import MAX_CONNECTIONS, MAX_UNAUTHENTICATED, Tcp, transport_of
from rollweave.weights.transport import Body, Channel, Listener, Serve, Transport
from tests.weights.fake_transport import FakeTransport
from tests.weights.host import hosts, versions

SILENT_S = 0.5


def make(kind: str) -> Transport:
    try:
        match kind:
            case "fake":
                return FakeTransport(silent_s=SILENT_S)
            case "mooncake":
                return Tcp(silent_s=SILENT_S, carrier=MooncakeCarrier("127.0.0.1"))
            case "nixl":
                return Tcp(silent_s=SILENT_S, carrier=NixlCarrier())
    except ConfigError as error:
        pytest.skip(str(error))
    return Tcp(silent_s=SILENT_S)


KINDS = ["tcp", "fake", "mooncake", "nixl"]
Two = tuple[Transport, Transport]


def several(kind: str, count: int) -> list[Transport]:
    """As many hosts have: each its own, but for the fake, which is the network itself."""
    if kind == "fake":
        return [make(kind)] * count
    return [make(kind) for _ in range(count)]


@pytest.fixture(params=KINDS)
def transports(request: pytest.FixtureRequest) -> Two:
    """Who listens, and who connects."""
    one, two = several(request.param, 2)
    return one, two


@pytest.fixture
def memory() -> Iterator[tuple[int, bytes]]:
    """A memory file, and what it holds."""
    data = os.urandom(3 << 20)
    fd = os.memfd_create("body", os.MFD_CLOEXEC)
    os.write(fd, data)
    yield fd, data
    os.close(fd)


class Line:
    """A connection: what the server's end is given goes to `theirs`."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.theirs: asyncio.Queue[Channel] = asyncio.Queue()
        self.over = asyncio.Event()

    async def serve(self, channel: Channel) -> None:
        self.theirs.put_nowait(channel)
        await self.over.wait()


@pytest.fixture
async def line(transports: Two) -> AsyncIterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    one = Line()
    serve: Serve = one.serve
    listener = await transports[0].listen("127.0.0.1", serve)
    ours = await transports[1].connect(listener.address)
    theirs = await one.theirs.get()
    yield ours, theirs
    ours.close()
    await listener.close()


class Inbox:
    """Takes bodies of at most `most` bytes."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.data, self._most = bytearray(), most

    def room(self, word: Message, nbytes: int) -> memoryview:
        if nbytes > self._most:
            raise FetchError("broken", f"too long: {nbytes}")
        self.data = bytearray(nbytes)
        return memoryview(self.data)


async def test_words_and_bodies_come_as_they_were_sent(
    line: tuple[Channel, Channel], memory: tuple[int, bytes]
) -> None:
    ours, theirs = line
    fd, data = memory
    whole, part = Raw(start=0, stop=len(data)), Raw(start=4097, stop=70_001)

    async def say() -> None:
        await theirs.send(KeepAlive())
        await theirs.send(
            whole, Body.of_file(fd, 0, len(data), check=xxhash.xxh3_64_intdigest(data))
        )
        await theirs.send(
            part, Body.of_file(fd, 4097, 70_001, check=xxhash.xxh3_64_intdigest(data[4097:70_001]))
        )
        await theirs.send(whole, Body.of(data))
        await theirs.send(Refused(reason="room", error="enough"))

    saying, inbox = asyncio.create_task(say()), Inbox()
    assert await ours.receive() == (KeepAlive(), 0)
    assert await ours.receive(inbox.room) == (whole, xxhash.xxh3_64_intdigest(data))
    assert inbox.data == data
    assert (await ours.receive(inbox.room))[0] == part
    assert inbox.data == data[4097:70_001]
    await ours.receive(inbox.room)
    assert inbox.data == data
    assert await ours.receive() == (Refused(reason="room", error="enough"), 0)
    await saying


async def test_both_ends_speak(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    for _ in range(20):
        await ours.send(Raw(start=0, stop=1))
        assert await theirs.receive() == (Raw(start=0, stop=1), 0)
        await theirs.send(KeepAlive())
        assert await ours.receive() == (KeepAlive(), 0)


async def test_a_body_that_is_refused_ends_the_channel(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    sending = asyncio.create_task(theirs.send(Raw(start=0, stop=9), Body.of(b"x" * (1 << 20))))
    with pytest.raises(FetchError, match="too long"):
        await ours.receive(Inbox(most=10).room)
    with pytest.raises(FetchError):
        await ours.receive()
    await asyncio.wait([sending])
    assert sending.exception() is None or isinstance(sending.exception(), FetchError)


async def test_the_end_and_silence_are_told(line: tuple[Channel, Channel]) -> None:
    ours, theirs = line
    with pytest.raises(FetchError) as silence:
        await ours.receive()
    assert silence.value.reason == "source"
    theirs.close()
    with pytest.raises(FetchError) as end:
        await ours.receive()
    assert end.value.reason == "source"


async def test_who_is_read_by_nobody_gives_up(line: tuple[Channel, Channel]) -> None:
    _, theirs = line

    async def say() -> None:
        for _ in range(100):
            await theirs.send(Raw(start=0, stop=1), Body.of(bytes(1 << 20)))

    with pytest.raises(FetchError) as error:
        await say()
    assert error.value.reason == "source"


async def test_wrong_secrets_and_nobody(transports: Two) -> None:
    one, transport = Line(), transports[1]
    listener = await transports[0].listen("127.0.0.1", one.serve)
    for wrong in (
        msgspec.structs.replace(listener.address, secret=b""),
        msgspec.structs.replace(listener.address, secret=listener.address.secret[:-1]),
        RelayAddress(host="127.0.0.1", port=1, secret=listener.address.secret),
    ):
        with pytest.raises(FetchError) as error:
            await transport.connect(wrong)
        assert error.value.reason == "source"
    assert one.theirs.empty()
    await listener.close()
    with pytest.raises(FetchError):
        await transport.connect(listener.address)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_chain_of_relays(kind: str) -> None:
    with versions(2) as (old, new):
        async with hosts(3, *several(kind, 3)) as chain:
            for memory, base_id in ((old, None), (new, 1)):
                for host, source in zip(chain, (None, *chain), strict=False):
                    host.begin(memory.manifest, source, base_id=base_id, keep=(1,))
                for host in chain:
                    answer = await host.answer()
                    assert isinstance(answer, VersionFetched), answer
            assert {host.payload(2) for host in chain} == {new.payload}


async def test_strangers_who_say_nothing_do_not_crowd_the_door() -> None:
    """More of them than are served at once; whoever knows the secret gets in at once,
    and who is in stays.
    """
    one, transport, loop = Line(), Tcp(silent_s=60.0), asyncio.get_running_loop()
    listener = await transport.listen("127.0.0.1", one.serve)
    idle = []
    inside = await transport.connect(listener.address)
    theirs = await one.theirs.get()
    try:
        for _ in range(MAX_CONNECTIONS + MAX_UNAUTHENTICATED):
            idle.append(socket.socket())
            idle[-1].setblocking(False)
            await loop.sock_connect(idle[-1], ("127.0.0.1", listener.address.port))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            (await transport.connect(listener.address)).close()
            await theirs.send(KeepAlive())
            assert (await inside.receive())[0] == KeepAlive()
            assert await loop.sock_recv(idle[0], 1) == b"", "the first to come was the first to go"
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for sock in idle:
            sock.close()
        inside.close()
        await listener.close()


def test_a_library_that_is_not_there_is_named() -> None:
    for name in ("mooncake", "nixl"):
        if importlib.util.find_spec(name) is None:
            with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]"):
                transport_of(name, host="127.0.0.1")  # type: ignore[arg-type]


def test_silence_must_last() -> None:
    with pytest.raises(ValueError, match="silent_s must be above 0, got 0"):
        Tcp(silent_s=0)


async def test_a_listener_that_closes_at_once_leaves_no_socket() -> None:
    """Whoever is just being let in goes with it."""
    loop = asyncio.get_running_loop()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(6):
        one = Line()
        listener = await Tcp().listen("127.0.0.1", one.serve)
        knocking = [socket.socket() for _ in range(3)]
        for sock in knocking:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", listener.address.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        for sock in knocking:
            sock.close()
    assert len(os.listdir("/proc/self/fd")) == before
