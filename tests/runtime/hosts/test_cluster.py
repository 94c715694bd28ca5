"""Whole runs on hosts whose agents are processes: results, and the loss of hosts."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollweave.package import DIRECTORY
from rollweave.runtime.launch import train
from rollweave.runtime.metrics import Silent
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import EngineJoined, HostJoined, HostLost, RunStarted, WorkerJoined
from tests.support import fake_runs
from tests.support.host_agents import Agents, agents, secret
from tests.support.processes import parent

__all__ = ["agents", "secret"]  # fixtures


def config_of(directory: Path, agents: Agents, *, hosts: int = 2, **sections: Any) -> RunConfig:
    cluster = {"address": f"127.0.0.1:{agents.port}", "hosts": hosts}
    return fake_runs.make_config(directory, cluster=cluster, **sections)


@contextlib.contextmanager
def meanwhile(config: RunConfig, step: int, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on another thread as soon as the run has trained `step`."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set() and not fake_runs.reached(config, step):
            time.sleep(0.01)
        if not over.is_set():
            action()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        try:
            thread.join()
        except KeyboardInterrupt:  # the action has interrupted a run that was over
            thread.join()


def test_a_run_uses_all_its_hosts(tmp_path: Path, agents: Agents) -> None:
    config = config_of(tmp_path, agents)
    agents.start("a", "b")
    summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    (begun,) = fake_runs.events(config, RunStarted)
    assert sorted(host.name for host in begun.hosts) == ["a", "b"]
    assert [slot.host for slot in begun.engines] == [0, 1]
    assert begun.relays == 2
    fake_runs.assert_trained_once(config)
    assert agents.statuses() == {"a": 0, "b": 0}
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


def run_through_a_loss(
    config: RunConfig, agents: Agents, lost: int, kill: Callable[[], None]
) -> None:
    """Run, with a `kill` of the host `lost` in the third step."""
    with meanwhile(config, 3, kill):
        summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    (event,) = fake_runs.events(config, HostLost)
    assert event.host == lost
    fake_runs.assert_trained_once(config)
    assert sorted(agents.statuses().values()) == [-signal.SIGKILL, 0]
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(0, id="with the trainer"),
        pytest.param(1, id="with an engine", marks=pytest.mark.slow),
    ],
)
def test_a_lost_host_is_replaced_by_the_others(tmp_path: Path, agents: Agents, lost: int) -> None:
    config = config_of(tmp_path, agents, steps=40)
    agents.start("a", "b")

    def kill() -> None:
        (begun,) = fake_runs.events(config, RunStarted)
        agents.signal(begun.hosts[lost].name, signal.SIGKILL)

    run_through_a_loss(config, agents, lost, kill)


@pytest.mark.extended
@pytest.mark.parametrize("lost", [0, 1])
def test_a_colocated_run_survives_the_loss_of_a_host(
    tmp_path: Path, agents: Agents, lost: int
) -> None:
    """Engines and trainer take turns on both hosts, and then on one."""
    config = config_of(
        tmp_path,
        agents,
        steps=40,
        rollout={"mode": "sync"},
        trainer={"colocated": True},
        eval={"every": 0},
    )
    agents.start("a", "b")

    def kill() -> None:
        (begun,) = fake_runs.events(config, RunStarted)
        assert [slot.host for slot in begun.engines] == [0, 1]
        assert [slot.host for slot in begun.ranks] == [0]
        agents.signal(begun.hosts[lost].name, signal.SIGKILL)

    run_through_a_loss(config, agents, lost, kill)


@pytest.mark.extended
def test_a_host_joins_during_the_run_and_takes_over(tmp_path: Path, agents: Agents) -> None:
    """The only host is lost once another has joined; it had nothing to do before."""
    config = config_of(tmp_path, agents, hosts=1, steps=60)
    agents.start("a")

    def join_then_kill() -> None:
        agents.start("b")
        deadline = time.monotonic() + 60
        while not fake_runs.events(config, HostJoined) and time.monotonic() < deadline:
            time.sleep(0.02)
        agents.signal("a", signal.SIGKILL)

    with meanwhile(config, 1, join_then_kill):
        summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    wanted = [HostJoined, HostLost]
    assert [type(event) for event in fake_runs.events(config, HostJoined, HostLost)] == wanted
    fake_runs.assert_trained_once(config)
    assert agents.statuses() == {"a": -signal.SIGKILL, "b": 0}
    fake_runs.assert_no_processes(config)


def test_the_loss_of_the_last_host_ends_the_run_with_its_reason(
    tmp_path: Path, agents: Agents
) -> None:
    config = config_of(tmp_path, agents, hosts=1, steps=60)
    agents.start("a")
    with meanwhile(config, 1, lambda: agents.signal("a", signal.SIGKILL)):
        summary = fake_runs.run(config)
    assert "host a is lost" in summary.error
    assert summary.account.balanced
    fake_runs.assert_no_processes(config)


@pytest.mark.extended
def test_a_resumed_controller_finds_its_hosts(tmp_path: Path, agents: Agents) -> None:
    config = config_of(tmp_path, agents, steps=30)
    agents.start("a", "b")
    with fake_runs.controller(config) as first:
        deadline = time.monotonic() + 60
        while not fake_runs.reached(config, 3) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.kill()
    summary = fake_runs.run(config, resume=True)
    assert summary.error == ""
    assert summary.account.balanced
    fake_runs.assert_trained_once(config)
    assert agents.statuses() == {"a": 0, "b": 0}
    fake_runs.assert_no_processes(config)


@pytest.mark.extended
def test_the_controller_starts_agents_on_its_own_machine_and_again_when_they_end(
    tmp_path: Path,
) -> None:
    config = fake_runs.make_config(tmp_path, steps=40, cluster={"launcher": "local", "hosts": 2})

    agents: list[int] = []

    def kill() -> None:
        agents.extend({parent(pid) for pid, _ in fake_runs.pids(config)} - {0})
        os.kill(agents[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not fake_runs.events(config, HostJoined) and time.monotonic() < deadline:
            time.sleep(0.02)

    with meanwhile(config, 3, kill):
        summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    (begun, lost, again) = fake_runs.events(config, RunStarted, HostLost, HostJoined)
    names = {host.number: host.name for host in begun.hosts}
    assert sorted(names.values()) == ["local-0", "local-1"]
    assert again.host.name == names[lost.host]
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)
    assert not any(Path(f"/proc/{agent}").exists() for agent in agents)


def test_no_host_joins_a_controller_that_is_not_ready(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long replay would last longer than the lease of a host that has joined."""

    def replay_slowly(*_: object, **__: object) -> None:
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", agents.port))
        raise ConfigError("the replay is over")

    monkeypatch.setattr("rollweave.runtime.life.recover", replay_slowly)
    with pytest.raises(ConfigError, match="the replay is over"):
        fake_runs.run(config_of(tmp_path, agents))


POOLS = {"compute": {"resource": "H800"}, "bandwidth": {"resource": "H20"}}


def test_roles_run_in_their_pools(tmp_path: Path, agents: Agents) -> None:
    config = config_of(
        tmp_path,
        agents,
        pools=POOLS,
        trainer={"pool": "compute"},
        engines={"count": 3, "pool": "bandwidth"},
    )
    agents.start("a", resource="H800=8")
    agents.start("b", resource="H20=8")
    assert fake_runs.run(config).error == ""
    (begun,) = fake_runs.events(config, RunStarted)
    names = {host.number: host.name for host in begun.hosts}
    assert {names[slot.host] for slot in begun.engines} == {"b"}
    assert [names[rank.host] for rank in begun.ranks] == ["a"]


@pytest.mark.extended
def test_workers_on_a_host_run_the_users_module(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the controller's working directory only."""
    agents.start("a")
    package = tmp_path / "work" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "words.py").write_text("from tests.support.game import Game")
    (package / "game.py").write_text("from mine.words import Game\n\nclass Mine(Game): pass\n")
    monkeypatch.chdir(package.parent)
    monkeypatch.syspath_prepend(str(package.parent))
    config = config_of(
        tmp_path, agents, hosts=1, task={"env": "mine.game:Mine"}, workers={"count": 1}
    )
    summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    assert "mine.game" not in sys.modules, "the controller does not import it"
    fake_runs.assert_trained_once(config)
    assert agents.statuses() == {"a": 0}


@pytest.mark.slow
def test_workers_wait_for_another_host_of_their_pool(tmp_path: Path, agents: Agents) -> None:
    """Their attempts, which the loss of their host ends, start again on the next
    one.
    """
    config = config_of(
        tmp_path,
        agents,
        steps=60,
        pools={"gpus": {"resource": "gpus"}, "cpus": {"resource": "cpus"}},
        trainer={"pool": "gpus"},
        engines={"count": 1, "pool": "gpus"},
        workers={"count": 2, "pool": "cpus"},
    )
    agents.start("a", resource="gpus")
    agents.start("b", resource="cpus")

    def await_events(kind: type, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(fake_runs.events(config, kind)) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def replace() -> None:
        await_events(WorkerJoined, 2)
        agents.signal("b", signal.SIGKILL)
        await_events(HostLost, 1)
        agents.start("c", resource="cpus")

    with meanwhile(config, 2, replace):
        summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    (begun,) = fake_runs.events(config, RunStarted)
    names = {host.number: host.name for host in begun.hosts}
    assert [names[slot.host] for slot in begun.workers] == ["b", "b"]
    assert summary.watchdog["worker_unplaced"] == 2
    assert any(event.epoch for event in fake_runs.events(config, WorkerJoined))
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


@pytest.mark.slow
def test_engines_and_workers_leave_a_host_that_is_given_up_and_move_to_the_next(
    tmp_path: Path, agents: Agents
) -> None:
    """They stand on hosts of the fallback meanwhile."""
    config = config_of(
        tmp_path,
        agents,
        steps=5000,
        pools={"near": {"resource": "near"}, "far": {"resource": "far", "fallback": ["near"]}},
        trainer={"pool": "near"},
        engines=[{"count": 1, "pool": "near"}, {"count": 1, "pool": "far"}],
        workers={"count": 2, "pool": "far"},
        watchdog={"restarts": 0},
    )
    agents.start("a", resource="near")
    agents.start("b", resource="far")

    def joined(engines: int, workers: int) -> None:
        """Wait until so many have joined in all."""
        for kind, count in ((EngineJoined, engines), (WorkerJoined, workers)):
            deadline = time.monotonic() + 60
            while len(fake_runs.events(config, kind)) < count and time.monotonic() < deadline:
                time.sleep(0.2)

    def kill_engine() -> None:
        agent = agents.processes["b"].pid
        (engine,) = (
            pid
            for pid, _ in fake_runs.pids(config)
            if parent(pid) == agent and b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(engine, signal.SIGKILL)
        joined(3, 4)
        agents.start("c", resource="far")
        joined(4, 6)
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(config, 2, kill_engine):
        summary = fake_runs.run(config)
    assert summary.interrupted
    assert summary.error == ""
    assert summary.account.balanced
    assert summary.watchdog["host_evicted"] == 1
    state = fake_runs.replay(config).core.state
    names = {number: host.name for number, host in state.hosts.up.items()}
    assert sorted(names.values()) == ["a", "c"]
    assert sorted(names[engine.seat.host] for engine in state.engines.values()) == ["a", "c"]
    assert [names[worker.host] for worker in state.workers.values()] == ["c", "c"]
    assert agents.statuses() == {"a": 0, "b": 0, "c": 0}
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


@pytest.mark.extended
def test_a_fallback_serves_where_a_pool_has_no_host(tmp_path: Path, agents: Agents) -> None:
    pools = {**POOLS, "bandwidth": {"resource": "H20", "fallback": ["compute"]}}
    config = config_of(tmp_path, agents, hosts=1, pools=pools, engines={"pool": "bandwidth"})
    agents.start("a", resource="H800")
    shown: list[Mapping[str, Any]] = []

    class Recorder(Silent):
        def line(self, line: Mapping[str, Any]) -> None:
            shown.append(line)

    assert train(config, programs=fake_runs.FAKES, progress=Recorder()).error == ""
    (warning,) = [line for line in shown if line.get("component") == "pools.bandwidth.resource"]
    assert warning["message"].endswith("(H800), got 'H20': it has no host yet")


def test_a_pool_without_a_host_is_named(tmp_path: Path, agents: Agents) -> None:
    config = config_of(tmp_path, agents, hosts=1, pools=POOLS, engines={"pool": "bandwidth"})
    agents.start("a", resource="H800")
    with pytest.raises(
        ConfigError, match=r"pools\.bandwidth\.resource: must be .* \(H800\), got 'H20'"
    ):
        fake_runs.run(config)
    assert agents.statuses() == {"a": 0}


def test_hosts_that_lack_memory_are_named(tmp_path: Path, agents: Agents) -> None:
    """The run ends before a process is started."""
    (tmp_path / "model").mkdir()
    example = DIRECTORY.parents[1] / "examples" / "qwen3_8b" / "config.json"
    shutil.copy(example, tmp_path / "model")
    config = config_of(tmp_path, agents, hosts=1)
    agents.start("a")
    with pytest.raises(ConfigError, match=r"trainer.ranks: must fit, .* of a, got .*: about"):
        fake_runs.run(config)
    assert agents.statuses() == {"a": 0}


def test_missing_and_refused_hosts_are_named(
    tmp_path: Path, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, agents, hosts=2)
    monkeypatch.setattr("rollweave.runtime.hosts.cluster.JOIN_S", 5.0)
    agents.start("a")
    with monkeypatch.context() as patch:
        patch.setenv("ROLLWEAVE_HOST_SECRET", "wrong")
        agents.start("b")
    shown: list[str] = []

    class Recorder(Silent):
        def phase(self, text: str) -> None:
            shown.append(text)

    with pytest.raises(
        ConfigError,
        match=r"cluster\.hosts: 2 hosts must join within 5 s, got a; refused: a host at 127\.",
    ):
        train(config, programs=fake_runs.FAKES, progress=Recorder())
    assert agents.statuses() == {"a": 0, "b": 2}
    (refusal,) = [line for line in shown if line.startswith("a host at ")]
    assert re.search(
        r"got another one; the run waits up to [1-5] s for [12] more of 2 hosts$", refusal
    )


def test_an_address_in_use_is_refused(tmp_path: Path, agents: Agents) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", agents.port))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cluster\.address must be a free address"):
            fake_runs.run(config_of(tmp_path, agents))
