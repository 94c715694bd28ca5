"""A real run on two sites that a slow link joins: each version of the weights crosses
it once, a slow crossing is named, and the loss of the relay that receives it loses
nothing.

These tests need root, `ip` and `tc`, and take minutes: `make test-cluster`.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.hosts import command_of
from benchmarks.cluster.run import ClusterRun, lost_trajectories
from benchmarks.soak.run_under_test import RELAY
from rollweave.core.state import State
from tests.cluster.agents import HostsByHand
from tests.cluster.sites import FAR, HOSTS, SETTINGS, config_of, crossing_of, start_agents
from tests.support.real_runs import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LIMIT_S = 300.0
"""Maximum seconds to wait for anything on a busy machine."""

MBITS = 100.0
"""Speed of the link between the sites: a version takes a second."""

FETCHING = re.compile(
    r"waiting \d+ s for relay (?P<relay>r\d) on host (?P<host>.): fetching version \d+ from "
    r"r\d, [1-9]\d* of \d+ MB"
)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostsByHand]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with HostsByHand(HOSTS, tmp_path / "hosts", megabits=None, far=FAR) as made:
        if made.why_not:
            pytest.skip(made.why_not)
        made.limit_sites(MBITS)
        yield made
        made.wait_for_agents()
        assert made.leftovers() == []


def first_far_relay(state: State) -> str:
    """Return the first relay of the other site."""
    return next(
        name
        for name in state.mechanisms["relays"].order
        if "far" in state.hosts.up[state.mechanisms["relays"].relays[name].host].pools
    )


def kill_relay(hosts: HostsByHand, host: int) -> None:
    (pid,) = [pid for pid in hosts.processes(host) if RELAY in command_of(pid)]
    os.kill(pid, signal.SIGKILL)


def test_a_version_crosses_to_another_site_once(hosts: HostsByHand, tmp_path: Path) -> None:
    """Engines run at the other site alone: the second host of the trainer's site
    receives nothing.
    """
    settings = (
        *SETTINGS,
        "engines={pool='far', count=2, max_slots=16}",
        "run.steps=1000000",
        "pools.far.site=elsewhere",
        'ablation.changes=["no_deltas"]',
        f'run.dir="{tmp_path / "runs"}"',
        "run.name=sites",
    )
    with ClusterRun(config_of(settings, hosts), hosts) as run:
        run.start()
        start_agents(hosts)
        run.wait(lambda: run.trained >= 4, LIMIT_S, "four steps")
        state = run.state()
        first = first_far_relay(state)
        victim = hosts.number(state.hosts.up[state.mechanisms["relays"].relays[first].host].name)

        hosts.limit_sites(2.0)

        def is_named() -> bool:
            return any(
                (named := FETCHING.search(line)) is not None and named["relay"] == first
                for line in run.waiting()
            )

        run.wait(is_named, LIMIT_S, "the name of the wait")
        hosts.limit_sites(MBITS)
        reached = run.reached
        run.wait(lambda: run.reached > reached + 2, LIMIT_S, "two more steps")
        crossed, crossing = hosts.crossed_bytes(), crossing_of(run)
        whole = crossing.versions * crossing.version_bytes
        # where a relay is silent on the slow link, another one fetches past it
        bypassed = run.warnings("suspected|stall on their way|not fetched")
        assert crossing.fetches <= crossing.versions + 1 + len(bypassed), bypassed
        assert whole < crossed < 1.15 * crossing.fetches * crossing.version_bytes, bypassed

        kill_relay(hosts, victim)
        restarted = f"{first} restarted"
        run.wait(lambda: bool(run.warnings(restarted)), LIMIT_S, "the loss of the relay")
        reached = run.reached
        run.wait(lambda: run.reached > reached + 2, LIMIT_S, "two more steps")
        state = run.state()
        assert first_far_relay(state) != first
        versions = {
            name: relay.versions for name, relay in state.mechanisms["relays"].relays.items()
        }
        (near,) = [
            name
            for name in state.mechanisms["relays"].order[1:]
            if "near" in state.hosts.up[state.mechanisms["relays"].relays[name].host].pools
        ]
        assert versions[near] == [], "its host has neither the trainer nor an engine"
        summary = run.stop(LIMIT_S)
        assert summary["error"] == ""
        assert run.unaccounted(summary["account"]) == 0
        assert lost_trajectories(summary["account"]) == 0
        assert run.leftovers == 0
