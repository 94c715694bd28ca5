"""Whole runs, with fake engines and a fake trainer, on a real Ray cluster whose nodes
are network namespaces: `make test-cluster`.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster.hosts import CONTROLLERS
from packages.ray.benchmarks.ray_hosts import RayHosts
from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import HostJoined, HostLost, RunStarted
from tests.support.fake_runs import (
    ROOT,
    assert_no_processes,
    assert_trained_once,
    events,
    lines,
    make_config,
    pids,
    reached,
    run_dir,
    write,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NOTICED_S = 5.0
LEASE_S = 10.0
LAKE = """
[run]
name = "lake"
steps = 1
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
"""
ROLE = """
import sys

import torch
import torch.distributed as dist
from rollweave import Cluster, Worker, register
from rollweave.runtime.roles.role import WorkerResources
from rollweave.runtime.roles.worker import hw_mapping

class Ring(Worker):
    def __init__(self) -> None:
        self.join_ranks()

    @register()
    def reduce(self, number: float) -> float:
        value = torch.tensor([number * (self.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @hw_mapping({"long": "bandwidth", "default": "compute"})
    def where(self, tag_name: str) -> str:
        return self.hardware

if __name__ == "__main__":
    resources = [WorkerResources(hardware="bandwidth"), WorkerResources(hardware="compute")]
    with Cluster(Ring, resources, cluster={"launcher": f"ray:{sys.argv[1]}"}) as rings:
        print(rings.reduce(1.0), rings.where("long"), rings.where("short"))
"""
WORKERS = """
[workers]
count = 1
[cluster]
env = ["COLOR"]
[eval]
final_episodes = 2
"""
MINE = """
import os
from rollweave.envs.frozenlake import FrozenLake

class Mine(FrozenLake):
    def reset(self, task):
        assert os.environ["COLOR"] == "blue"
        return super().reset(task)
"""
PLACED = """
import ray

def node(conversation, task, reward):
    return float(ray.util.get_node_ip_address().rpartition(".")[2])
"""


@pytest.fixture(scope="module")
def imported() -> Iterator[None]:
    """The tests' own environment can be imported on the nodes, whatever the working
    directory of a run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def ray(imported: None) -> Iterator[RayHosts]:
    """A head without CPUs, and two nodes, each with a resource of the user's."""
    with RayHosts([{"compute": 1}, {"bandwidth": 2}], megabits=None) as hosts:
        if hosts.why_not:
            pytest.skip(hosts.why_not)
        yield hosts


def config_of(directory: Path, ray: RayHosts, **sections: Any) -> RunConfig:
    cluster = {
        "launcher": f"ray:{ray.cluster}",
        **sections.pop("cluster", {}),
    }
    return make_config(directory, cluster=cluster, **sections)


@contextlib.contextmanager
def controller(
    config: RunConfig, ray: RayHosts, *options: str, directory: Path = ROOT
) -> Iterator[Any]:
    """Run a controller on the head's host, with this working directory, and kill it in
    the end.
    """
    with ray.inside(CONTROLLERS), (Path(config.run.dir) / "printed").open("ab") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_runs", str(write(config)), *options],
            env={**ray.environment(), "PYTHONPATH": str(ROOT)},
            cwd=directory,
            stdout=printed,
            stderr=printed,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def outcome(
    config: RunConfig, process: "subprocess.Popen[bytes]", within_s: float = 180.0
) -> dict[str, Any]:
    """Wait for the end of a run that succeeds, and return what it printed."""
    status = process.wait(within_s)
    printed = (Path(config.run.dir) / "printed").read_text()
    assert status == 0, printed
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert result["error"] == ""
    return result


def stop(config: RunConfig, process: "subprocess.Popen[bytes]") -> None:
    """Let the run train more steps, and end it in order."""
    until_trained(config, len(lines(config, "step")) + 5, process)
    process.send_signal(signal.SIGINT)
    assert outcome(config, process)["interrupted"]


def until_trained(config: RunConfig, step: int, process: "subprocess.Popen[bytes]") -> None:
    until(lambda: reached(config, step) or process.poll() is not None, f"step {step}")
    printed = Path(config.run.dir) / "printed"
    assert process.poll() is None, printed.read_text()


def until(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> float:
    """Wait for a condition, and return how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s, f"waited {within_s:g} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - began


def assert_nothing_left(config: RunConfig, ray: RayHosts) -> None:
    """Check that no process and no reservation of a run is left."""
    assert_no_processes(config)
    ray.wait_for_agents(20)
    until(lambda: " 0.0/" in cpus(ray), "the release of all CPUs", 30)


def cpus(ray: RayHosts) -> str:
    """Return Ray's line on its CPUs."""
    (line,) = [line for line in ray.status().splitlines() if line.endswith(" CPU")]
    return line


def test_a_run_uses_the_nodes_and_their_resources(ray: RayHosts, tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        ray,
        steps=100_000,
        pools={"first": {"resource": "compute"}, "second": {"resource": "bandwidth"}},
        trainer={"pool": "first"},
        engines={"pool": "second"},
    )
    with controller(config, ray) as process:
        until_trained(config, 2, process)
        in_use = ("2.0/2.0 CPU", "1.0/1.0 compute", "2.0/2.0 bandwidth")
        # Ray updates its status from time to time
        until(lambda: {*in_use} <= {*map(str.strip, ray.status().splitlines())}, "the resources")
        stop(config, process)
    (begun,) = events(config, RunStarted)
    names = {host.number: host.name for host in begun.hosts}
    assert sorted(names.values()) == [ray.name(0), ray.name(1)]
    assert {names[slot.host] for slot in begun.engines} == {ray.name(1)}
    assert [names[rank.host] for rank in begun.ranks] == [ray.name(0)]
    assert_trained_once(config, count=len(lines(config, "step")))
    assert_nothing_left(config, ray)


def test_a_killed_node_is_lost_at_once_and_one_that_joins_is_used(
    ray: RayHosts, tmp_path: Path
) -> None:
    config = config_of(tmp_path, ray, steps=100_000)
    with controller(config, ray) as process:
        until_trained(config, 2, process)
        ray.kill(0)
        took = until(lambda: bool(events(config, HostLost)), "the loss")
        assert took < NOTICED_S
        ray.start_nodes(0)
        until(lambda: bool(events(config, HostJoined)), "the new node")
        stop(config, process)
    lost, joined = events(config, HostLost, HostJoined)
    # for a while Ray counts on the former node of that name, too
    assert joined.host.name.startswith(ray.name(0))
    assert joined.host.number != lost.host
    assert_nothing_left(config, ray)


def test_a_node_that_is_cut_off_ends_its_processes_and_comes_back(
    ray: RayHosts, tmp_path: Path
) -> None:
    config = config_of(tmp_path, ray, steps=100_000)
    with controller(config, ray) as process:
        until_trained(config, 2, process)
        there = {pid for pid, _ in pids(config)} & set(ray.processes(1))
        assert there
        ray.cut(1)
        assert until(lambda: bool(events(config, HostLost)), "the loss") < NOTICED_S
        gone = until(lambda: not there & set(ray.processes(1)), "their end", 20)
        assert gone < LEASE_S + 2.0
        ray.restore(1)
        until(lambda: bool(events(config, HostJoined)), "the host again")
        stop(config, process)
    assert_nothing_left(config, ray)


def test_a_killed_controller_leaves_no_actor_and_is_resumed(ray: RayHosts, tmp_path: Path) -> None:
    config = config_of(tmp_path, ray, steps=30)
    with controller(config, ray) as process:
        until_trained(config, 2, process)
        assert 0 in ray.agents()
        process.kill()
        process.wait()
        assert_nothing_left(config, ray)
    with controller(config, ray, "resume") as process:
        outcome(config, process)
    assert_trained_once(config)
    assert_nothing_left(config, ray)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupted_run_leaves_nothing(ray: RayHosts, tmp_path: Path, interrupts: int) -> None:
    config = config_of(tmp_path, ray, steps=10_000)
    with controller(config, ray) as process:
        until_trained(config, 2, process)
        for _ in range(interrupts):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        process.wait(60)
    assert_nothing_left(config, ray)


def test_a_node_in_use_is_named(ray: RayHosts, tmp_path: Path) -> None:
    other = "import ray, time; ray.init('auto'); ray.remote(lambda: time.sleep(60)).remote(); "
    with ray.inside(CONTROLLERS):
        busy = subprocess.Popen(
            [sys.executable, "-c", other + "time.sleep(60)"],
            env=ray.environment(),
            stderr=subprocess.DEVNULL,
        )
    try:
        until(lambda: "1.0/2.0 CPU" in ray.status(), "the other work")
        printed = tmp_path / "printed"
        with controller(config_of(tmp_path, ray), ray, "phases"):
            wait = "waiting for Ray to reserve all of the node (1 CPU, "
            until(lambda: wait in printed.read_text(), "the wait for the node")
    finally:
        busy.kill()
        busy.wait()
    ray.wait_for_agents(20)


def test_the_command_line_uses_the_cluster_of_its_node(ray: RayHosts, tmp_path: Path) -> None:
    """The engines are real, and a rollout worker runs a module of the user's."""
    (tmp_path / "config.toml").write_text(LAKE.replace("frozenlake", "mine.game:Mine") + WORKERS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "game.py").write_text(MINE)
    done = train(ray, tmp_path, "auto", COLOR="blue")
    assert done.returncode == 0, done.stderr.decode()
    assert "trajectories" in done.stdout.decode()
    ray.wait_for_agents(20)


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("10.77.9.9:6379", "got 10.77.9.9:6379: "),
        ("127.0.0.1:9", "got 127.0.0.1:9: [Errno 111] Connection refused"),
        ("ray://10.77.1.1:10001", "cluster.launcher must be manual, local, ray, or ray:HOST:PORT"),
    ],
)
def test_a_wrong_address_is_one_line(
    ray: RayHosts, tmp_path: Path, address: str, line: str
) -> None:
    (tmp_path / "config.toml").write_text(LAKE)
    done = train(ray, tmp_path, address)
    text = done.stderr.decode().strip()
    assert done.returncode == 2, text
    assert line in text
    assert text.count("\n") == 0


def test_a_role_of_the_users_own_runs_on_the_nodes(ray: RayHosts, tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(ROLE)
    program = (sys.executable, "ring.py", ray.cluster)
    printed = ray.run(CONTROLLERS, "env", "-C", str(tmp_path), f"PYTHONPATH={ROOT}", *program)
    assert printed == "[3.0, 3.0] bandwidth compute\n"
    ray.wait_for_agents(20)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_serverless_reward_is_computed_on_another_node(
    ray: RayHosts, tmp_path: Path, workers: int
) -> None:
    """The run's agent has one node, and the instances of the function the other, which
    has the only CPU that is left. The controller is on a third one, the head's; with
    `workers`, the function is called from the agent's.
    """
    (tmp_path / "placed.py").write_text(PLACED)
    reward = {"name": "node", "function": "placed:node", "run": "serverless", "weight": 0.0}
    config = config_of(
        tmp_path,
        ray,
        steps=2,
        cluster={"hosts": 1},
        rewards=[{**reward, "timeout_s": 120.0}],
        workers={"count": workers},
    )
    with controller(config, ray, directory=tmp_path) as process:
        outcome(config, process, within_s=400)
    (begun,) = events(config, RunStarted)
    (taken,) = (ray.number(host.name) for host in begun.hosts)
    entries = TrajectoryReader(run_dir(config) / "trajectories").entries
    places = {entry.score.rewards["node"] for entry in entries if entry.score is not None}
    assert places == {float(ray.address(1 - taken).rpartition(".")[2])}
    ray.wait_for_agents(20)
    until(lambda: " 0.0/" in cpus(ray), "the end of the instances", 60)


def train(
    ray: RayHosts, directory: Path, address: str, **env: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run `rollweave train --cluster` on the head's host."""
    with ray.inside(CONTROLLERS):
        return subprocess.run(
            [
                *(sys.executable, "-c", "from rollweave.cli.entry import main; main()"),
                *("train", "config.toml", "--cluster", address),
            ],
            env={**ray.environment(), **env},
            cwd=directory,
            capture_output=True,
            timeout=300,
            check=False,
        )
