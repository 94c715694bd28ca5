"""A cluster of workers on hosts whose agents are processes."""

import signal
import threading
from pathlib import Path

import pytest

from rollweave import Cluster, ConfigError
from rollweave.runtime.roles.role import WorkerResources
from rollweave.schema.roles import WorkerLostError
from tests.runtime.roles.workers import Adder, Ring
from tests.support.host_agents import Agents, agents, secret
from tests.support.processes import alive, parent

__all__ = ["agents", "secret"]  # fixtures


def settings(agents: Agents, hosts: int = 2) -> dict[str, object]:
    return {"address": f"127.0.0.1:{agents.port}", "hosts": hosts}


def test_workers_run_on_hosts_and_end_with_one(
    tmp_path: Path, agents: Agents, capfd: pytest.CaptureFixture[str]
) -> None:
    agents.start("a", resource="fast")
    agents.start("b", resource="large")
    resources = [WorkerResources(hardware="fast"), WorkerResources(hardware="large")]
    with Cluster(Adder, resources, cluster=settings(agents), directory=tmp_path) as adders:
        pids = adders.pid()
        owners = {name: process.pid for name, process in agents.processes.items()}
        assert [parent(pid) for pid in pids] == [owners["a"], owners["b"]]
        assert [one.total for one in adders.add(1)] == [1, 2]
        assert adders.generate("", tag_name="short") == (0, "fast")
        assert adders.generate("") == (1, "large")
        threading.Timer(0.2, agents.signal, ("b", signal.SIGKILL)).start()
        with pytest.raises(WorkerLostError, match="adder rank 1: host b is lost"):
            adders.wait_for(1000)
    assert agents.statuses() == {"a": 0, "b": -signal.SIGKILL}
    assert not any(map(alive, pids))
    assert "waiting for 2 hosts: rollweave host --join 127.0.0.1:" in capfd.readouterr().err


@pytest.mark.extended
def test_ranks_on_two_hosts_meet(tmp_path: Path, agents: Agents) -> None:
    agents.start("a", "b")
    # the hosts have equally many cores: one worker each
    with Cluster(Ring, 2, cluster=settings(agents), directory=tmp_path) as rings:
        assert rings.reduce(1.0) == [3.0, 3.0]
    assert agents.statuses() == {"a": 0, "b": 0}


def test_hardware_that_no_host_has_is_named(tmp_path: Path, agents: Agents) -> None:
    agents.start("a", resource="large")
    wrong = [WorkerResources(hardware="lage")]
    hint = r"resources: hardware must be .* \(large\), got 'lage' \(did you mean large\?\)"
    with pytest.raises(ConfigError, match=hint):
        Cluster(Ring, wrong, cluster=settings(agents, hosts=1), directory=tmp_path)
    assert agents.statuses() == {"a": 0}
