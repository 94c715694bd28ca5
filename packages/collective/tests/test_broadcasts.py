"""Broadcasts of versions to engines: every bit arrives, by the group or else by TCP,
whoever comes, goes, lies, dies or hangs; the trainer waits for nobody.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from packages.collective.tests.group_member import BUCKET, CPU, digest, main, version, weights
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.publication import publish
from rollweave.weights.tcp import Channel, Tcp
from rollweave.weights.transport import FetchError, KeepAlive, Refused
from rollweave_collective import group as groups
from rollweave_collective import sender as senders
from rollweave_collective.group import Group
from rollweave_collective.member import Member
from rollweave_collective.messages import Alone, Gathered, Join, decode, next_answer
from rollweave_collective.sender import Sender
from rollweave_collective.server import NcclRoot

LIMIT_S = 60.0
"""Maximum seconds that a test waits for a process."""


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender("127.0.0.1", CPU, wait_s=5.0, gather_s=5.0)
    yield made
    if made._thread.is_alive():
        made.close()


def read_all(members: list[Member], manifest: WeightManifest) -> list[str]:
    """Return the digest of what each member has read, all at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: digest(member.read(manifest)), members))


def send(sender: Sender, members: list[Member], number: int) -> list[int]:
    """Send a version to members, check every bit, and return their numbers of
    broadcasts.
    """
    with version(number) as publication:
        manifest = sender.offer(publication.manifest)
        assert read_all(members, manifest) == [digest(weights(number))] * len(members)
    sender.keep(())
    return [member.broadcasts for member in members]


def test_every_bit_arrives_and_the_group_stays(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "BUCKET_BYTES", 1000)
    members = [Member(CPU) for _ in range(3)]
    assert send(sender, members, 0) == [0, 0, 0]  # it tells the trainer who is there
    assert send(sender, members, 1) == [1, 1, 1]
    group = sender._group
    assert send(sender, members, 2) == [2, 2, 2]
    assert sender._group is group
    assert group is not None
    assert group.size == 4
    assert sender.doubts() == ()
    closed: list[Group] = []
    monkeypatch.setattr(Group, "close", lambda group: closed.append(group))
    sender.close()
    assert closed == [group]


def test_an_empty_version(sender: Sender) -> None:
    member = Member(CPU)
    for number in range(2):
        with publish({}, version=number, publication_id=number) as publication:
            assert member.read(sender.offer(publication.manifest)) == {}
    assert member.broadcasts == 1


def test_engines_join_and_leave_between_updates(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_gather_s", 0.3)
    first, second, third = (Member(CPU) for _ in range(3))
    assert send(sender, [first, second], 0) == [0, 0]
    assert send(sender, [first, second], 1) == [1, 1]
    assert send(sender, [first, second, third], 2) == [2, 2, 0]
    assert send(sender, [first, second, third], 3) == [3, 3, 1]
    assert send(sender, [first, third], 4) == [4, 2]  # the second is gone
    assert send(sender, [first, third], 5) == [5, 3]
    assert send(sender, [first, second, third], 6) == [6, 3, 4]  # and comes by TCP again
    assert send(sender, [first, second, third], 7) == [7, 4, 5]
    assert sender.doubts() == ()


def test_a_version_of_a_wrong_layout_is_refused_before_it_is_received(sender: Sender) -> None:
    with version(1) as publication:
        manifest = sender.offer(publication.manifest)
        wrong = msgspec.structs.replace(manifest, nbytes=manifest.nbytes // 2)
        member = Member(CPU)
        with pytest.raises(WeightsError):
            member.read(wrong)
        assert sender._members == {}, "it has not asked"


def test_who_comes_late_requests_the_version(sender: Sender) -> None:
    first, second = Member(CPU), Member(CPU)
    send(sender, [first], 0)
    with version(1) as publication:
        manifest = sender.offer(publication.manifest)
        assert digest(first.read(manifest)) == digest(weights(1))
        assert digest(second.read(manifest)) == digest(weights(1))
        assert digest(first.read(manifest)) == digest(weights(1))  # again, as after a failure
    assert (first.broadcasts, second.broadcasts) == (1, 0)


def test_a_flipped_bit_is_noticed_and_the_version_comes_by_tcp(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [Member(CPU), Member(CPU)]
    send(sender, members, 0)
    right = Group._finish

    def flipped(group: Group, *bucket: Any) -> torch.Tensor:
        received = right(group, *bucket)
        if group is members[1]._group:
            received[5] ^= 1
        return received

    monkeypatch.setattr(Group, "_finish", flipped)
    assert send(sender, members, 1) == [1, 0]
    monkeypatch.undo()
    assert send(sender, members, 2) == [2, 1]  # in a new group


def joining(member: bytes, manifest: WeightManifest, *, group: int = 0) -> Join:
    return Join(
        publication_id=manifest.publication_id,
        digest=manifest.digest,
        member=member,
        group=group,
        on_gpu=False,
    )


@contextlib.asynccontextmanager
async def known(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, members: Sequence[bytes]
) -> AsyncIterator[tuple[WeightManifest, list[Channel], list[Any]]]:
    """Yield a version for these members, whom the sender knows, a channel for each, and
    the options of the groups that are made. A group is a stand-in, formed without its
    members.
    """
    made = list[Any]()

    def group(*_: object, **options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(broadcast=lambda payload: None, close=lambda: None)

    monkeypatch.setattr(senders, "KEEPALIVE_S", 0.01)
    monkeypatch.setattr(senders, "Group", group)
    tcp = Tcp(decode=decode)
    with version(0) as publication:
        manifest = sender.offer(publication.manifest)
        assert manifest.sender is not None
        for member in members:
            channel = await tcp.connect(manifest.sender)
            await channel.send(joining(member, manifest))
            assert await next_answer(channel, Alone, Gathered) == Alone()
            channel.close()
    with version(1) as publication:
        manifest = sender.offer(publication.manifest)
        assert manifest.sender is not None
        channels = [await tcp.connect(manifest.sender) for _ in members]
        yield manifest, channels, made
        for channel in channels:
            channel.close()


@pytest.mark.parametrize("twice", [False, True])
async def test_who_comes_again_before_a_broadcast_is_counted_once(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    """After its first channel has ended, or before."""
    members = (b"first", b"second", b"third")
    async with known(sender, monkeypatch, members) as (manifest, channels, _):
        assert manifest.sender is not None
        first = channels[0]
        await first.send(joining(members[0], manifest))
        assert (await first.receive())[0] == KeepAlive()
        channels[0] = await Tcp(decode=decode).connect(manifest.sender)
        if twice:
            await channels[0].send(joining(members[0], manifest))
            assert (await channels[0].receive())[0] == KeepAlive()
        first.close()
        if twice:
            for _ in range(5):  # by now, the end of the first is known
                assert (await channels[0].receive())[0] == KeepAlive()
        else:
            async with asyncio.timeout(LIMIT_S):
                while sender._rounds[1].seats:  # noqa: ASYNC110 (it is reported nowhere)
                    await asyncio.sleep(0.005)
        for channel, member in list(zip(channels, members, strict=True))[twice:]:
            await channel.send(joining(member, manifest))
        answers = [await next_answer(channel, Gathered) for channel in channels]
        assert {answer.size for answer in answers} == {4}
        assert {answer.rank for answer in answers} == {1, 2, 3}
        (number,) = {answer.group for answer in answers}
        assert number > 0, "0 stands for no group"
        assert all(answer.store.startswith("127.0.0.1:") for answer in answers)


@pytest.mark.parametrize(
    ("device", "members", "on_gpu"),
    [
        ("cuda", (True, True), True),
        ("cuda", (True, False), False),
        ("cpu", (True, True), False),
    ],
)
async def test_a_group_is_on_gpus_if_all_of_it_is(
    monkeypatch: pytest.MonkeyPatch, device: str, members: tuple[bool, ...], on_gpu: bool
) -> None:
    """Nobody waits for `gather_s` once all have come."""
    sender = Sender("127.0.0.1", torch.device(device), wait_s=5.0, gather_s=LIMIT_S)
    assert (sender._make_root is NcclRoot) == (device == "cuda")
    monkeypatch.setattr("rollweave.weights.serve.KEEPALIVE_S", LIMIT_S)
    names = [bytes([number]) for number in range(len(members))]
    async with known(sender, monkeypatch, names) as (manifest, channels, made):
        for channel, name, there in zip(channels, names, members, strict=True):
            join = msgspec.structs.replace(joining(name, manifest), on_gpu=there)
            await channel.send(join)
        async with asyncio.timeout(LIMIT_S / 2):
            answers = [await next_answer(channel, Gathered) for channel in channels]
    assert {answer.on_gpu for answer in answers} == {on_gpu}
    sender.close()
    (options,) = made
    assert options["device"] == (torch.device("cuda") if on_gpu else None)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
async def test_a_member_names_its_group_and_its_device(device: str) -> None:
    sent, member = list[Join](), Member(torch.device(device))

    class Wire:
        async def send(self, message: Join) -> None:
            sent.append(message)

        async def receive(self) -> tuple[Alone, None]:
            return Alone(), None

    wire: Any = Wire()
    closed = list[int]()
    with version(5) as publication:
        for number in (None, 77, None):
            if number is None:
                member._leave()
            else:
                group = SimpleNamespace(number=number, close=lambda: closed.append(77))
                member._group = group  # type: ignore[assignment]
            assert await member._join(wire, publication.manifest) == Alone()
        digest_of = publication.manifest.digest
    assert closed == [77]
    assert [join.group for join in sent] == [0, 77, 0]
    assert {(join.publication_id, join.digest) for join in sent} == {(5, digest_of)}
    assert {join.on_gpu for join in sent} == {device == "cuda"}
    assert len({join.member for join in sent}) == 1
    assert Member(CPU)._id != member._id


def test_members_beyond_the_maximum_request_each_version(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "MAX_MEMBERS", 1)
    first, second = Member(CPU), Member(CPU)
    assert send(sender, [first], 0) == [0]
    for number in (1, 2):
        assert send(sender, [first, second], number) == [number, 0]
    assert sender.doubts() == ()


def test_a_version_has_one_part_with_all_bytes(sender: Sender) -> None:
    with version(3) as publication:
        manifest = sender.offer(publication.manifest)
        assert manifest == msgspec.structs.replace(
            publication.manifest, sender=sender._listener.address
        )
        member = Member(CPU)
        assert digest(member.read(manifest)) == digest(weights(3))
        (served,) = sender._served.values()
        assert served.version.manifest == manifest


def test_the_end_waits_for_no_broadcast_that_hangs(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def hang(group: Group, payload: torch.Tensor, *done: object) -> None:
        begun.set()
        assert over.wait(LIMIT_S)
        raise RuntimeError

    member = Member(CPU)
    send(sender, [member], 0)
    monkeypatch.setattr(Group, "broadcast", hang)
    with version(1) as publication, ThreadPoolExecutor(2) as pool:
        manifest = sender.offer(publication.manifest)
        reading = pool.submit(member.read, manifest)
        assert begun.wait(LIMIT_S)
        pool.submit(sender.close).result(LIMIT_S)
        assert not reading.done()
        over.set()
        with pytest.raises(WeightsError):
            reading.result(LIMIT_S)


def test_a_failure_without_a_text_is_named_by_its_kind(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(CPU)
    send(sender, [member], 0)

    def fail(host: str) -> None:
        raise OSError

    unhandled = list[object]()
    sender._loop.set_exception_handler(lambda _, what: unhandled.append(what))
    monkeypatch.setattr(senders, "open_store", fail)
    assert send(sender, [member], 1) == [0]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), sender._loop).result(LIMIT_S)
    gc.collect()  # which reports what a task has raised
    assert not unhandled
    (doubt,) = sender.doubts()
    assert doubt.endswith(
        "weights version 1 goes to 1 engines over TCP, since its broadcast failed: OSError"
    )
    assert sender.doubts() == ()


def test_a_group_that_cannot_form_costs_one_line(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [Member(CPU), Member(CPU)]
    send(sender, members, 0)

    def no_store(host: str) -> None:
        raise OSError("no ports are left")

    monkeypatch.setattr(senders, "open_store", no_store)
    assert send(sender, members, 1) == [0, 0]
    assert sender.doubts() == (
        "weights version 1 goes to 2 engines over TCP, since its broadcast failed: no ports are "
        "left",
    )
    monkeypatch.undo()
    assert send(sender, members, 2) == [1, 1]


def test_a_store_that_cannot_be_reached_is_given_up_within_the_deadline(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example behind a firewall. Torch alone would try for 300 s."""
    member, right = Member(CPU, wait_s=1.0), senders.open_store
    sender._wait_s = 1.0
    send(sender, [member], 0)
    monkeypatch.setattr(senders, "open_store", lambda host: (right(host)[0], "127.0.0.1:1"))
    before = time.monotonic()
    assert send(sender, [member], 1) == [0]
    assert time.monotonic() - before < LIMIT_S


def test_refuses_what_it_does_not_keep_and_who_does_not_know_the_secret(sender: Sender) -> None:
    member = Member(CPU, wait_s=2.0)
    with version(1) as publication, version(2) as other:
        manifest = sender.offer(publication.manifest)
        wrong = msgspec.structs.replace(manifest, digest="0" * 32)
        gone = msgspec.structs.replace(other.manifest, sender=manifest.sender)
        for bad in (wrong, gone):
            number = bad.publication_id
            with pytest.raises(WeightsError, match=f"publication {number} is not kept"):
                member.read(bad)
        stranger = msgspec.structs.replace(
            manifest, sender=msgspec.structs.replace(manifest.sender, secret=b"")
        )
        with pytest.raises(WeightsError, match="another secret"):
            member.read(stranger)
        assert manifest.sender is not None
        asyncio.run(_refused(manifest.sender))
    with pytest.raises(WeightsError, match=r"cannot be sent from 192\.0\.2\.1"):
        Sender("192.0.2.1", CPU)
    assert [one.name for one in threading.enumerate()].count("weights sender") == 1, "the fixture's"


async def _refused(address: RelayAddress) -> None:
    channel = await Tcp().connect(address)
    await channel.send(KeepAlive())
    message, _ = await channel.receive()
    assert message == Refused(
        reason="source", error="the trainer answers Request and Join, got KeepAlive"
    )
    with pytest.raises(FetchError):
        await channel.receive()


def test_listens_on_the_given_address_only(sender: Sender) -> None:
    """Neither the channel nor the store, which has no secret, is on all addresses."""
    store, where = senders.open_store("127.0.0.2")
    ports = {sender._listener.address.port, int(where.rpartition(":")[2])}
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.9", port))  # it would be in use
    del store


class Engines:
    """Members in processes of their own, which share no memory with the sender."""

    def __init__(self, count: int, wait_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=main, args=(theirs, wait_s), daemon=True) for _, theirs in pairs
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def tell(self, what: WeightManifest) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def answers(self, *numbers: int) -> list[Any]:
        for number in numbers:
            assert self.pipes[number].poll(LIMIT_S), f"engine {number} is silent"
        return [self.pipes[number].recv() for number in numbers]

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_an_engine_that_is_lost_amid_a_broadcast(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine gets the version by TCP within the deadline, the trainer goes on
    meanwhile, and the next version comes in a group of the two that are left.
    """
    monkeypatch.setattr(groups, "BUCKET_BYTES", BUCKET)
    sender = Sender("127.0.0.1", CPU, wait_s=2.0, gather_s=2.0)
    with contextlib.closing(sender), contextlib.closing(Engines(2, 2.0)) as engines:
        assert engines.answers(0, 1) == ["ready", "ready"]
        for number in range(2):
            with version(number, elements=1 << 20) as publication:
                engines.tell(sender.offer(publication.manifest))
                right = digest(weights(number, elements=1 << 20))
                assert engines.answers(0, 1) == [(right, number)] * 2
        engines.pipes[0].send("stop")
        with version(2, elements=8 << 20) as publication:  # 96 of its buckets
            before = time.monotonic()
            engines.tell(sender.offer(publication.manifest))
            assert engines.answers(0) == ["stopped"]
            os.kill(engines.processes[0].pid or 0, how)
            assert engines.answers(1) == [(digest(weights(2, elements=8 << 20)), 1)]
            assert time.monotonic() - before < 20.0
        with version(3) as publication:
            manifest = sender.offer(publication.manifest)
            engines.pipes[1].send(manifest)
            assert engines.answers(1) == [(digest(weights(3)), 2)]
        (doubt,) = sender.doubts()
        assert doubt.startswith("weights version 2 goes to 2 engines over TCP, since its broadcast")
        assert "\n" not in doubt


def test_no_memory_of_a_version_is_left(sender: Sender) -> None:
    open_files = Path("/proc/self/fd")
    members = [Member(CPU), Member(CPU)]
    send(sender, members, 0)
    send(sender, members, 1)
    before = len(list(open_files.iterdir()))
    for number in range(2, 6):
        send(sender, members, number)
    assert len(list(open_files.iterdir())) <= before + 2  # what the loop has not yet closed
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), sender._loop).result(LIMIT_S)
    assert not sender._served
    assert not sender._rounds
