"""Relays put a version together whose parts are published on several hosts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.schema import weights
from rollweave.schema.errors import WeightsError
from rollweave.weights import arrivals
from rollweave.weights.publication import read_tensors
from rollweave.weights.tcp import StallDetector, Tcp
from rollweave.weights.transport import KeepAlive, RawRanges, Refused, Request
from tests.support.weight_host import KIB, Host, hosts, parts_of, versions


def start(
    host: Host,
    manifest: weights.WeightManifest,
    parts: tuple[weights.PartSource, ...] = (),
    source: Host | None = None,
    **options: Any,
) -> None:
    host.start_fetch(manifest, source, parts=parts, chunk_bytes=64 * KIB, **options)


def assembled_from(*holders: Host) -> tuple[weights.PartSource, ...]:
    """The parts as the first of these hosts gets them."""
    return tuple(
        weights.PartSource(part=number, source=host.address if number else None)
        for number, host in enumerate(holders)
    )


async def test_each_host_receives_what_it_has_not_published() -> None:
    with versions(1) as (whole,), parts_of(whole) as parts:
        async with hosts(4) as (first, second, third, other):
            start(first, parts.manifest, assembled_from(first, second, third))
            start(second, parts.manifest, (weights.PartSource(part=1),), first)
            start(third, parts.manifest, (weights.PartSource(part=2),), second)
            start(other, parts.manifest, (), third)
            total = len(parts.payload)
            for host, own in zip((first, second, third, other), [*parts.sizes, 0], strict=True):
                answer = await host.answer()
                assert isinstance(answer, weights.VersionFetched), answer
                assert answer.nbytes == total - own
                assert host.payload(1) == parts.payload
                assert read_tensors(answer.manifest).keys() == {
                    meta.name for meta in parts.manifest.tensors
                }


async def test_a_host_that_needs_no_version_serves_its_part_only() -> None:
    """It serves the trainer's memory, and keeps no byte itself."""
    with versions(2) as (old, new), parts_of(old) as before, parts_of(new) as after:
        async with hosts(3) as (first, second, third):
            for parts in (before, after):
                for number, host in enumerate((second, third), 1):
                    command = weights.ServePart(manifest=parts.manifest, part=number)
                    host.relay.serve_part(command)
                    host.relay.serve_part(command)
                start(first, parts.manifest, assembled_from(first, second, third))
                answer = await first.answer()
                assert isinstance(answer, weights.VersionFetched), answer
                assert answer.nbytes == parts.sizes[1] + parts.sizes[2]
                assert first.payload(parts.manifest.publication_id) == parts.payload
            assert [host.relay.manifest(2) for host in (second, third)] == [None, None]
            served = [one.version.manifest.publication_id for one in second.relay._parts]
            assert served == [2], "only the newest part"


async def test_a_part_that_is_gone_is_not_served(capfd: pytest.CaptureFixture[str]) -> None:
    with versions(1) as (whole,), parts_of(whole, 2) as parts:
        gone = msgspec.structs.replace(parts.manifest.parts[1], location="/proc/self/fd/999")
        manifest = msgspec.structs.replace(parts.manifest, parts=(parts.manifest.parts[0], gone))
        async with hosts(1) as (host,):
            host.relay.serve_part(weights.ServePart(manifest=manifest, part=1))
            assert "the publisher is gone" in capfd.readouterr().err
            host.relay.serve_part(weights.ServePart(manifest=parts.manifest, part=1))
            assert len(host.relay._parts) == 1


async def test_no_stall_is_reported_of_a_fetch_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of a version in parts nor of a whole one, if it arrived or failed."""
    watched: list[StallDetector] = []

    def watch(stalled: Callable[[], None]) -> StallDetector:
        watched.append(StallDetector(stalled))
        return watched[-1]

    monkeypatch.setattr(arrivals, "StallDetector", watch)
    nobody = weights.RelayAddress(host="127.0.0.1", port=1, secret=b"")
    with versions(2) as (plain, whole), parts_of(whole, 2) as parts:
        async with hosts(3) as (first, second, third):
            second.relay.serve_part(weights.ServePart(manifest=parts.manifest, part=1))
            assert isinstance(await second.fetch(plain.manifest), weights.VersionFetched)
            for source in (nobody, second.address):
                assigned = tuple(
                    weights.PartSource(part=part, source=source if part else None)
                    for part in range(2)
                )
                start(first, parts.manifest, assigned)
                third.start_fetch(plain.manifest, source)
                expected = weights.VersionFailed if source is nobody else weights.VersionFetched
                assert isinstance(await first.answer(), expected)
                assert isinstance(await third.answer(), expected)
    assert len(watched) == 4
    assert all(detector._timer.cancelled() for detector in watched)


async def test_a_request_that_cannot_be_answered_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.weights.serve.UNKNOWN_VERSION_S", 0.0)
    monkeypatch.setattr("rollweave.weights.serve.KEEPALIVE_S", 0.01)
    with versions(1) as (whole,), parts_of(whole, 2) as parts:
        (low, high), manifest = parts.manifest.parts[1].ranges[0], parts.manifest
        good = Request(
            publication_id=1,
            digest=manifest.digest,
            nbytes=manifest.nbytes,
            ranges=((low, low + 9), (high - 1, high)),
        )
        async with hosts(1) as (host,):
            host.relay.serve_part(weights.ServePart(manifest=manifest, part=1))
            for change, error in (
                ({}, ""),
                ({"ranges": ((low - 1, high),)}, "publication 1 is not stored here"),
                ({"ranges": ((low, high + 1),)}, "publication 1 is not stored here"),
                ({"publication_id": 2}, "publication 2 is not stored here"),
                ({"digest": "x"}, f"another content ({manifest.digest}, not x): are two trainers"),
                ({"nbytes": manifest.nbytes + 1}, "publication 1 is stored with another content"),
                ({"ranges": ((-1, 0),)}, f"must be within {manifest.nbytes} bytes, got ((-1, 0),)"),
                ({"ranges": ((4, 4),)}, "ranges must be within"),
                ({"ranges": ((0, manifest.nbytes + 1),)}, "ranges must be within"),
                (None, "a relay answers Request, got KeepAlive"),
            ):
                channel = await Tcp(idle_timeout_s=5.0).connect(host.address)
                request = KeepAlive() if change is None else msgspec.structs.replace(good, **change)
                await channel.send(request)
                while isinstance(
                    answer := (
                        await channel.receive(lambda _, nbytes: memoryview(bytearray(nbytes)))
                    )[0],
                    KeepAlive,
                ):
                    pass
                if not error:
                    assert answer == RawRanges(ranges=good.ranges)
                else:
                    assert isinstance(answer, Refused)
                    assert error in answer.error
                    assert answer.reason == ("broken" if "within" in error else "source")
                channel.close()


async def test_changes_follow_a_version_in_parts() -> None:
    """A host without a part receives the changes since the version before."""
    with versions(2) as (old, new), parts_of(old, 2) as before, parts_of(new, 2) as after:
        async with hosts(3) as (first, second, other):
            for parts, base in ((before, None), (after, 1)):
                start(first, parts.manifest, assembled_from(first, second), base_id=base, keep=(1,))
                own = (weights.PartSource(part=1),)
                start(second, parts.manifest, own, first, base_id=base, keep=(1,))
                start(other, parts.manifest, (), second, base_id=base, keep=(1,))
                answers = [await host.answer() for host in (first, second, other)]
            sizes = [one.nbytes for one in answers if isinstance(one, weights.VersionFetched)]
            assert len(sizes) == 3
            assert 0 < sizes[2] < len(new.payload) / 10
            assert {host.payload(2) for host in (first, second, other)} == {new.payload}


async def test_a_lost_holder_is_named_and_nothing_is_received_twice() -> None:
    with versions(1) as (whole,), parts_of(whole) as parts:
        async with hosts(3) as (first, second, again):
            nobody = weights.RelayAddress(host="127.0.0.1", port=1, secret=b"s" * 32)
            lost = weights.PartSource(part=2, source=nobody)
            start(first, parts.manifest, (*assembled_from(first, second), lost))
            start(second, parts.manifest, (weights.PartSource(part=1),), first)
            answer = await first.answer()
            assert isinstance(answer, weights.VersionFailed)
            assert answer.reason == "source"
            start(again, parts.manifest, (weights.PartSource(part=2),), first)
            start(first, parts.manifest, assembled_from(first, second, again))
            answer = await first.answer()
            assert isinstance(answer, weights.VersionFetched), answer
            assert answer.nbytes == parts.sizes[1] + parts.sizes[2]
            for host in (second, again):
                assert isinstance(await host.answer(), weights.VersionFetched)
                assert host.payload(1) == parts.payload


async def test_a_part_that_is_gone_comes_from_the_source() -> None:
    with versions(1) as (whole,), parts_of(whole, 2) as parts:
        async with hosts(3) as (first, second, other):
            start(first, parts.manifest, assembled_from(first, second))
            start(second, parts.manifest, (weights.PartSource(part=1),), first)
            assert isinstance(await first.answer(), weights.VersionFetched)
            gone = msgspec.structs.replace(parts.manifest.parts[1], location="/proc/self/fd/999")
            manifest = msgspec.structs.replace(
                parts.manifest, parts=(parts.manifest.parts[0], gone)
            )
            start(other, manifest, (weights.PartSource(part=1),), first)
            answer = await other.answer()
            assert isinstance(answer, weights.VersionFetched), answer
            assert answer.nbytes == len(parts.payload)


@pytest.mark.variants
@pytest.mark.parametrize("damage", ["digest", "overlap", "gap"])
async def test_damaged_parts_are_refused(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr("rollweave.weights.serve.UNKNOWN_VERSION_S", 0.5)
    with versions(1) as (whole,), parts_of(whole, 2) as parts:
        one, two = parts.manifest.parts
        if damage == "digest":
            manifest = msgspec.structs.replace(parts.manifest, digest="0" * 32)
        else:
            ranges = (*two.ranges, one.ranges[0]) if damage == "overlap" else two.ranges[1:]
            other = msgspec.structs.replace(two, ranges=ranges)
            manifest = msgspec.structs.replace(parts.manifest, parts=(one, other))
        async with hosts(2) as (first, second):
            start(first, manifest, assembled_from(first, second))
            start(second, manifest, (weights.PartSource(part=1),), first)
            # the host that notices first is no source for the other one any more
            reasons = [
                answer.reason
                for answer in (await first.answer(), await second.answer())
                if isinstance(answer, weights.VersionFailed)
            ]
            assert len(reasons) == 2
            assert "broken" in reasons


def test_an_engine_refuses_a_version_that_is_in_parts() -> None:
    with versions(1) as (whole,), parts_of(whole, 2) as parts:
        with pytest.raises(WeightsError, match="cannot open"):
            read_tensors(parts.manifest)
        assert Path(parts.manifest.parts[0].location).stat().st_size == len(parts.payload)
