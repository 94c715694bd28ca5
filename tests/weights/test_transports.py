"""One contract for all transports: TCP alone, and with the libraries that are
installed, or stand-ins for them.
"""

import asyncio
import gc
import importlib.util
import os
import re
import socket
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from rollweave.schema.errors import ConfigError, WireError
from rollweave.schema.weights import RelayAddress, VersionFetched
from rollweave.weights import tcp
from rollweave.weights.transport import (
    Body,
    FetchError,
    KeepAlive,
    Message,
    Raw,
    Refused,
)
from tests.support.weight_host import hosts, versions
from tests.weights import libraries

IDLE_TIMEOUT_S = 0.5


@pytest.fixture(autouse=True)
def libraries_or_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mooncake.engine", "nixl._api"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            monkeypatch.setitem(sys.modules, module, libraries)


def make(kind: str) -> tcp.Tcp:
    carrier = tcp.transport_of(kind, host="127.0.0.1")._carrier  # type: ignore[arg-type]
    return tcp.Tcp(idle_timeout_s=IDLE_TIMEOUT_S, carrier=carrier)


FAILURES = tomllib.loads(Path(__file__).with_name("carriers.toml").read_text())
KINDS = ["tcp", "mooncake", "nixl"]
Two = tuple[tcp.Tcp, tcp.Tcp]


@pytest.fixture(params=KINDS)
def transports(request: pytest.FixtureRequest) -> Two:
    """The transport that listens, and the one that connects."""
    return make(request.param), make(request.param)


@pytest.fixture
def memory() -> Iterator[tuple[int, bytes]]:
    """A memory file, and its content."""
    data = os.urandom(3 << 20)
    fd = os.memfd_create("body", os.MFD_CLOEXEC)
    os.write(fd, data)
    yield fd, data
    os.close(fd)


class Line:
    """A server that puts its ends of the channels into `theirs`."""

    def __init__(self) -> None:
        self.listener: tcp.Listener | None = None
        self.accepted: asyncio.Queue[tcp.Channel] = asyncio.Queue()
        self.over = asyncio.Event()

    async def serve(self, channel: tcp.Channel) -> None:
        self.accepted.put_nowait(channel)
        await self.over.wait()


@pytest.fixture
async def line(transports: Two) -> AsyncIterator[tuple[tcp.Channel, tcp.Channel]]:
    """Both ends of a channel."""
    one = Line()
    serve: tcp.Serve = one.serve
    listener = await transports[0].listen("127.0.0.1", serve)
    near = await transports[1].connect(listener.address)
    far = await one.accepted.get()
    yield near, far
    near.close()
    await listener.close()


class Inbox:
    """Accepts bodies of at most `most` bytes."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.data, self._most = bytearray(), most

    def allocate(self, message: Message, nbytes: int) -> memoryview:
        if nbytes > self._most:
            raise FetchError("broken", f"too long: {nbytes}")
        self.data = bytearray(nbytes)
        return memoryview(self.data)


async def test_messages_and_bodies_arrive_unchanged(
    line: tuple[tcp.Channel, tcp.Channel], memory: tuple[int, bytes]
) -> None:
    near, far = line
    fd, data = memory
    assert near._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    full, part = Raw(start=0, stop=len(data)), Raw(start=4097, stop=70_001)

    async def send() -> None:
        await far.send(KeepAlive())
        await far.send(
            full, Body.of_file(fd, 0, len(data), checksum=xxhash.xxh3_64_intdigest(data))
        )
        await far.send(
            part,
            Body.of_file(fd, 4097, 70_001, checksum=xxhash.xxh3_64_intdigest(data[4097:70_001])),
        )
        await far.send(full, Body.of(data))
        await far.send(Refused(reason="room", error="enough"))

    sending, inbox = asyncio.create_task(send()), Inbox()
    assert await near.receive() == (KeepAlive(), 0)
    assert await near.receive(inbox.allocate) == (full, xxhash.xxh3_64_intdigest(data))
    assert inbox.data == data
    assert (await near.receive(inbox.allocate))[0] == part
    assert inbox.data == data[4097:70_001]
    await near.receive(inbox.allocate)
    assert inbox.data == data
    assert await near.receive() == (Refused(reason="room", error="enough"), 0)
    await sending
    assert libraries.registered == {}


async def test_refusing_a_body_ends_the_channel(line: tuple[tcp.Channel, tcp.Channel]) -> None:
    near, far = line
    sending = asyncio.create_task(far.send(Raw(start=0, stop=9), Body.of(b"x" * (1 << 20))))
    with pytest.raises(FetchError, match="too long"):
        await near.receive(Inbox(most=10).allocate)
    with pytest.raises(FetchError):
        await near.receive()
    await asyncio.wait([sending])
    assert sending.exception() is None or isinstance(sending.exception(), FetchError)


async def test_reports_a_closed_and_a_silent_peer(line: tuple[tcp.Channel, tcp.Channel]) -> None:
    near, far = line
    with pytest.raises(FetchError) as silence:
        await near.receive()
    assert silence.value.reason == "source"
    far.close()
    with pytest.raises(FetchError) as end:
        await near.receive()
    assert end.value.reason == "source"
    with pytest.raises(FetchError, match="is gone: "):
        await near.send(KeepAlive())


async def test_a_sender_without_a_reader_gives_up(line: tuple[tcp.Channel, tcp.Channel]) -> None:
    _, far = line

    async def send() -> None:
        for _ in range(100):
            await far.send(Raw(start=0, stop=1), Body.of(bytes(1 << 20)))

    with pytest.raises(FetchError) as error:
        await send()
    assert error.value.reason == "source"


async def test_rejects_wrong_secrets_and_closed_ports(transports: Two) -> None:
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
    assert one.accepted.empty()
    await listener.close()
    with pytest.raises(FetchError):
        await transport.connect(listener.address)


@pytest.mark.parametrize("kind", KINDS)
async def test_carries_a_chain_of_relays(kind: str) -> None:
    with versions(2) as (old, new):
        async with hosts(3, *(make(kind) for _ in range(3))) as chain:
            for memory, base_id in ((old, None), (new, 1)):
                for host, source in zip(chain, (None, *chain), strict=False):
                    host.start_fetch(memory.manifest, source, base_id=base_id, keep=(1,))
                for host in chain:
                    answer = await host.answer()
                    assert isinstance(answer, VersionFetched), answer
            assert {host.payload(2) for host in chain} == {new.payload}


async def test_silent_unauthenticated_connections_do_not_block_clients() -> None:
    """With more of them than are served at once, a client with the secret is still
    accepted immediately, and a connected one stays.
    """
    one, transport, loop = Line(), tcp.Tcp(idle_timeout_s=60.0), asyncio.get_running_loop()
    listener = await transport.listen("127.0.0.1", one.serve)
    idle = []
    inside = await transport.connect(listener.address)
    far = await one.accepted.get()
    try:
        for _ in range(tcp.MAX_CONNECTIONS + tcp.MAX_UNAUTHENTICATED):
            idle.append(socket.socket())
            idle[-1].setblocking(False)
            await loop.sock_connect(idle[-1], ("127.0.0.1", listener.address.port))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            (await transport.connect(listener.address)).close()
            await far.send(KeepAlive())
            assert (await inside.receive())[0] == KeepAlive()
            assert await loop.sock_recv(idle[0], 1) == b"", "the oldest is closed first"
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for sock in idle:
            sock.close()
        inside.close()
        await listener.close()


@pytest.mark.parametrize("kind", FAILURES)
def test_a_carrier_reads_a_body_or_the_reason_is_known(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for module in ("mooncake.engine", "nixl._api"):
        monkeypatch.setitem(sys.modules, module, libraries)
    for call, (reason, error) in FAILURES[kind].items():
        owner, reader = make(kind)._carrier, make(kind)._carrier
        assert owner is not None
        assert reader is not None
        data, into = bytearray(os.urandom(1000)), memoryview(bytearray(1000))
        token = owner.register(memoryview(data))
        with monkeypatch.context() as patch:
            patch.setitem(libraries.failing, "call", call)
            patch.setattr("rollweave.weights.carriers.READ_S", 0.0 if call == "stuck" else 60.0)
            with pytest.raises(FetchError, match=f"^{re.escape(error)}$") as caught:
                reader.read(token, into)
        assert caught.value.reason == reason
        for wrong, text in ((b"x", "a token of another transport"), (token, "for 1000 bytes, not")):
            with pytest.raises(WireError, match=text):
                reader.read(wrong, into[1:])
        reader.read(token, into)
        assert into == data
        owner.unregister(token)
        assert (libraries.registered, libraries.nixl_agent.transfers) == ({}, 0)


def test_a_library_that_does_not_start_or_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", libraries)
    with pytest.raises(ConfigError, match="mooncake cannot be started on gpu with tcp"):
        tcp.transport_of("mooncake", host="gpu")
    for name, module in (("mooncake", "mooncake.engine"), ("nixl", "nixl._api")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=rf"pip install .*\[{name}\]"):
            tcp.transport_of(name, host="127.0.0.1")  # type: ignore[arg-type]


def test_rejects_an_idle_timeout_of_zero() -> None:
    with pytest.raises(ValueError, match="idle_timeout_s must be above 0, got 0"):
        tcp.Tcp(idle_timeout_s=0)


async def test_a_stall_is_one_wait_over_several_ticks(
    line: tuple[tcp.Channel, tcp.Channel],
) -> None:
    stalls: list[int] = []
    detector = tcp.StallDetector(lambda: stalls.append(1))

    def after_each_of(count: int) -> list[int]:
        counts = [(detector._tick(), len(stalls))[1] for _ in range(count)]
        stalls.clear()
        return counts

    assert after_each_of(8) == [0, 0, 0, 1, 1, 1, 2, 2], "the channel does not open"
    detector.channel = line[0]
    assert after_each_of(9) == [0] * 9, "it does not wait"
    for since in (1.0, 2.0):
        line[0].waiting_since = since
        assert after_each_of(5) == [0, 0, 0, 1, 1]
        line[0].waiting_since = 0.5
        assert after_each_of(3) == [0, 0, 0]
    detector.close()
    assert detector._timer.cancelled()


async def test_a_listener_closed_at_once_leaves_no_socket() -> None:
    """A connection that is being accepted is closed, too."""
    loop = asyncio.get_running_loop()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(6):
        one = Line()
        listener = await tcp.Tcp().listen("127.0.0.1", one.serve)
        connecting = [socket.socket() for _ in range(3)]
        for sock in connecting:
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", listener.address.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.close()
        for sock in connecting:
            sock.close()
    assert len(os.listdir("/proc/self/fd")) == before
