"""Figures that the relay bench computes from its samples, its hosts, which leave
nothing behind, and its variants of sending, on loopback.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks.delta_payloads import masked
from benchmarks.network import Network
from benchmarks.relay import broadcast as relay_broadcast
from benchmarks.relay import sites as relay_sites
from benchmarks.relay.bench import QUICK, RelayPlan, bench_relay, payload
from benchmarks.relay.broadcast import FIT_CHUNKS, Link, Times, fit
from benchmarks.relay.repair import Fault, repaired
from benchmarks.relay.sites import VARIANTS, Delivery, Sites, pair_of
from benchmarks.relay.tier import tier
from rollweave.core.policy.relay import broadcast_s
from rollweave.weights.publication import publish

SECONDS = st.floats(0, 1e-2)


@pytest.fixture(autouse=True)
def real_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay starts in the network namespace of its machine."""
    monkeypatch.setattr("rollweave.io.child.Popen", subprocess.Popen)


@given(
    start=SECONDS,
    byte=st.floats(0, 1e-5),
    fixed=SECONDS,
    slow=st.lists(st.floats(0, 10), min_size=4, max_size=4),
)
def test_a_link_is_recovered_from_samples(
    start: float, byte: float, fixed: float, slow: list[float]
) -> None:
    """Sample each size and count five times; two of the five are disturbed."""
    pairs = [(nbytes, chunks) for nbytes in (1_000_000, 4_000_000) for chunks in FIT_CHUNKS]
    samples = []
    for (nbytes, chunks), late in zip(pairs, slow, strict=True):
        true = fixed + nbytes * byte + chunks * start
        samples += [(nbytes, chunks, true + extra) for extra in (0.0, late, 0.0, late / 2, 0.0)]
    measured = fit(samples)
    assert measured.start_s == pytest.approx(start, abs=1e-9)
    assert measured.byte_s == pytest.approx(byte, abs=1e-12)
    assert measured.fixed_s == pytest.approx(fixed, abs=1e-7)


def test_noise_never_makes_a_link_negative() -> None:
    measured = fit([(1, 4, 2.0), (1, 64, 1.0), (2, 4, 1.0), (2, 64, 0.5)])
    assert (measured.start_s, measured.byte_s) == (0.0, 0.0)
    with pytest.raises(ValueError, match="two sizes in two counts"):
        fit([(1, 4, 2.0), (2, 4, 1.0)])


def test_ratios_of_broadcasts() -> None:
    """Ratios are medians: the maximum over the formula, and the largest number of
    relays over star and gloo.
    """
    link = Link(start_s=0.01, byte_s=1e-6, fixed_s=0.0)
    times = Times(1_000_000, chunks={2: 1, 4: 10})
    short, long = (
        broadcast_s(1_000_000, nodes=n, chunks=k, start_s=0.01, byte_s=1e-6)
        for n, k in times.chunks.items()
    )
    times.chain.update({2: [9.0, 2 * short, 0.0], 4: [1.5 * long] * 3})
    times.cpu_s.update({2: [1.0, 1.0, 1.0], 4: [0.5 * long] * 3})
    times.star.update({2: [short] * 3, 4: [3 * long] * 3})
    times.gloo.update({2: [short] * 3, 4: [6 * long] * 3})
    measured = relay_broadcast.figures(times, link)
    assert measured["time_over_formula"] == pytest.approx(2.0)
    assert measured["curve_time_over_formula"] == pytest.approx([2.0, 1.5])
    assert measured["time_over_star"] == pytest.approx(0.5)
    assert measured["time_over_gloo"] == pytest.approx(0.25)
    assert measured["curve_chain_cores"][1] == pytest.approx(1 / 3)
    assert measured["link_mb_per_s"] == pytest.approx(1.0)


def test_without_a_link_there_is_no_formula() -> None:
    times = Times(1000, {2: [1.0]}, {2: [1.0]}, {2: [1.0]}, {2: 1}, {2: [0.1]})
    measured = relay_broadcast.figures(times, Link(start_s=0.0, byte_s=0.0, fixed_s=0.0))
    assert (
        measured["time_over_formula"]
        is measured["curve_time_over_formula"]
        is measured["link_mb_per_s"]
        is None
    )
    assert measured["time_over_gloo"] == 1.0


def test_each_step_gains_over_the_one_before() -> None:
    plan = relay_sites.SitesPlan(
        elements=61_000,
        rates=(1.0, 5.0),
        reference=5.0,
        rounds=1,
    )
    seconds = {"batch": (8.0, 6.0), "async": (4.0, 3.5), "sparse": (0.5, 0.4)}
    runs = {
        (rate, variant): [Delivery(total * rate, first * rate, 1000 if variant != "sparse" else 10)]
        for rate in plan.rates
        for variant, (total, first) in seconds.items()
    }
    measured = relay_sites.figures(runs, plan)
    gains = (measured["gain_async"], measured["gain_sparse"], measured["gain_all"])
    assert gains == (2.0, 8.0, 16.0)
    assert measured["ablation_s"] == [40.0, 20.0, 2.5]
    assert measured["pull_hidden"] == 0.75
    assert (measured["naive_s"], measured["push_s"]) == (40.0, 17.5)
    assert measured["sparse_over_whole_bytes"] == 0.01


def test_without_tools_hosts_are_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    monkeypatch.setenv("PATH", "/nowhere")
    with Network(2) as net:
        assert "there is no `ip`" in net.why_not
    assert os.readlink("/proc/thread-self/ns/net") == home


@contextmanager
def namespaces(hosts: int) -> Iterator[Network]:
    with Network(hosts) as net:
        if net.why_not:
            pytest.skip(net.why_not)
        yield net


def test_hosts_reach_each_other_and_the_original_namespace_is_unchanged() -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with namespaces(2) as net:
        with net.inside(1):
            server = socket.create_server((net.address(1), 0))
        with (
            server,
            net.inside(0),
            socket.create_connection(server.getsockname(), timeout=5) as ours,
        ):
            theirs, peer = server.accept()
            theirs.close()
            assert peer[0] == net.address(0)
            assert ours.recv(1) == b""
        with net.inside(0), pytest.raises(OSError, match="assign"):
            socket.create_server((net.address(1), 0)).close()
        net.limit(50.0, [0])
        shown = subprocess.run(
            ["tc", "qdisc", "show", "dev", "h0"], capture_output=True, text=True, check=True
        ).stdout
        assert "rate 50Mbit" in shown
    assert os.readlink("/proc/thread-self/ns/net") == home


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from benchmarks.delta_payloads import masked
from benchmarks.network import Network
from benchmarks.relay.tier import tier

async def main(net):
    async with tier(net, range(2), Path(sys.argv[1])) as made:
        print(*(link.pid for link in made.links), flush=True)
        await asyncio.sleep(60)

with Network(2) as net:
    asyncio.run(main(net))
"""


@pytest.mark.variants
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.extended
def test_nothing_outlives_a_killed_bench(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(number)
        process.wait(30)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("fault", ["killed", "hangs"])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.extended
async def test_a_broken_chain_is_repaired(victim: int, fault: Fault, tmp_path: Path) -> None:
    with (
        Network(3, loopback=True) as net,
        publish(payload(4 << 20, 2), version=1, publication_id=1) as whole,
    ):
        measured = await repaired(
            net, whole.manifest, tmp_path, relays=3, victim=victim, fault=fault
        )
    assert 0 < measured.known_s <= min(measured.repair_s, measured.complete_s)
    assert measured.repeated_bytes == 0


@pytest.mark.extended
async def test_a_relay_that_is_cut_off_is_bypassed(tmp_path: Path) -> None:
    with (
        namespaces(4) as net,
        publish(payload(4 << 20, 2), version=1, publication_id=1) as whole,
    ):
        net.limit(100.0)
        measured = await repaired(net, whole.manifest, tmp_path, relays=4, victim=1, fault="cut")
    assert 0 < measured.known_s <= min(measured.repair_s, measured.complete_s)
    assert measured.repeated_bytes == 0


@pytest.mark.extended
async def test_every_variant_delivers_a_version(tmp_path: Path) -> None:
    count = 15 * 64 * 64
    versions = masked(np.random.default_rng(0), count, 0.01)
    with (
        Network(3, loopback=True) as net,
        pair_of(versions, tmp_path) as pair,
    ):
        assert pair.new.nbytes == 2 * count
        async with tier(net, range(3), tmp_path) as relays:
            sites = Sites(net, relays)
            sent = {}
            for variant in VARIANTS:
                run = await sites.run(variant, pair, 1000.0)
                assert run.seconds >= run.first_s > 0
                sent[variant] = run.crossed_bytes
    assert sent["batch"] == sent["async"] == 2 * count
    assert 0 < sent["sparse"] < 2 * count / 10


@pytest.mark.slow
def test_a_tiny_run_without_limits() -> None:
    plan = RelayPlan(
        relays=(2,),
        mbits=100.0,
        nbytes=2 << 20,
        rounds=1,
        fits=1,
        repairs=1,
        sites=QUICK.sites,
    )
    lines: list[str] = []
    measured = bench_relay(
        quick=True, progress=lines.append, plan=plan, network=Network(5, loopback=True)
    )
    assert lines
    for name in ("time_over_gloo", "time_over_star", "repair_s", "repair_master_hang_s"):
        value = measured.figures[name]
        assert isinstance(value, float)
        assert value > 0
    for name, value in measured.figures.items():
        assert value is not None or name in measured.conditions
