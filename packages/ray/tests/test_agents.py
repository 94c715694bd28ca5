"""The nodes on which a run keeps agents, with a fake Ray."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.schema.hosts import AgentSpec, Programs
from rollweave_ray import agents as module
from rollweave_ray.agents import Agents
from rollweave_ray.messages import StartAgents


class FakeRay:
    """A Ray cluster whose nodes take one actor each; others wait for their turn."""

    exceptions = SimpleNamespace(RayTaskError=KeyError, RayError=RuntimeError)

    def __init__(self, **nodes: Mapping[str, float]) -> None:
        self.table = [
            {
                "NodeID": name,
                "NodeName": "",
                "NodeManagerAddress": name,
                "Alive": True,
                "Resources": {"CPU": 1.0, **resources},
            }
            for name, resources in nodes.items()
        ]
        self.actors: list[FakeActor] = []

    def nodes(self) -> list[dict[str, Any]]:
        return self.table

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, scheduling_strategy: SimpleNamespace, **resources: Any) -> Any:
        def start() -> FakeActor:
            actor = FakeActor(self, scheduling_strategy.node_id)
            self.actors.append(actor)
            return actor

        return SimpleNamespace(remote=start)

    def kill(self, actor: "FakeActor") -> None:
        self.actors.remove(actor)

    def wait(self, references: list[tuple[str, "FakeActor"]], timeout: float) -> Any:
        ((what, actor),) = references
        done = actor.lost or (what == "ready" and actor.placed)
        return (references, []) if done else ([], references)

    def get(self, reference: tuple[str, "FakeActor"]) -> None:
        if reference[1].lost:
            raise RuntimeError("the actor died")

    def lose(self, node: str) -> None:
        """End the node."""
        self.table = [row for row in self.table if row["NodeID"] != node]
        for actor in list(self.actors):
            if actor.node == node:
                actor.lost = True
                self.actors.remove(actor)


class FakeActor:
    def __init__(self, ray: FakeRay, node: str) -> None:
        self._ray, self.node, self.lost = ray, node, False
        self.specs: list[AgentSpec] = []
        self.ready = SimpleNamespace(remote=lambda: ("ready", self))
        self.run = SimpleNamespace(remote=self._run)

    @property
    def placed(self) -> bool:
        return next(actor for actor in self._ray.actors if actor.node == self.node) is self

    def _run(self, spec: AgentSpec) -> tuple[str, "FakeActor"]:
        self.specs.append(spec)
        return "run", self


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "RETRY_S", 0.0)


def agents(ray: FakeRay, hosts: int | None, *labels: str) -> Agents:
    start = StartAgents(
        controller=("10.0.0.1", 1), secret=b"s", join_s=1.0, hosts=hosts, labels=labels
    )
    return Agents(ray, start, lambda report: None)


def serving(ray: FakeRay) -> list[str]:
    """Return the nodes whose agents were started."""
    return sorted(actor.node for actor in ray.actors if actor.specs)


def test_a_run_takes_all_nodes_unless_its_hosts_are_limited() -> None:
    ray = FakeRay(a={}, b={}, c={})
    agents(ray, None).poll()
    assert serving(ray) == ["a", "b", "c"]


def test_agents_get_what_their_run_names() -> None:
    ray, programs = FakeRay(a={}), Programs(trainer="tests.runtime.fake_trainer")
    start = StartAgents(
        controller=("10.0.0.1", 1), secret=b"s", join_s=1.0, variables=("COLOR",), programs=programs
    )
    Agents(ray, start, lambda report: None).poll()
    (spec,) = ray.actors[0].specs
    assert (spec.controller, spec.secret, spec.join_s) == (start.controller, start.secret, 1.0)
    assert (spec.variables, spec.programs) == (("COLOR",), programs)


def test_two_runs_with_one_host_share_a_cluster() -> None:
    ray = FakeRay(a={}, b={})
    first, second = agents(ray, 1), agents(ray, 1)
    for _ in range(3):
        first.poll()
        second.poll()
    assert serving(ray) == ["a", "b"]
    assert all(len(actor.specs) == 1 for actor in ray.actors)


def test_nodes_beyond_the_limit_are_given_back() -> None:
    ray = FakeRay(a={}, b={}, c={})
    run = agents(ray, 2)
    for _ in range(3):
        run.poll()
    assert serving(ray) == ["a", "b"]
    assert [actor.node for actor in ray.actors] == ["a", "b"]


def test_another_node_takes_the_place_of_a_lost_one() -> None:
    ray = FakeRay(a={}, b={}, c={})
    run = agents(ray, 2)
    run.poll()
    run.poll()
    ray.lose("a")
    for _ in range(3):
        run.poll()
    assert serving(ray) == ["b", "c"]


def test_a_limited_run_takes_a_node_of_each_pool() -> None:
    ray = FakeRay(a={}, b={}, c={"compute": 1.0}, d={"bandwidth": 1.0})
    run = agents(ray, 2, "compute", "bandwidth", "missing")
    for _ in range(3):
        run.poll()
    assert serving(ray) == ["c", "d"]


def test_a_node_that_is_started_again_is_used_before_ray_misses_the_former_one() -> None:
    ray = FakeRay(a={}, b={})
    run = agents(ray, 1)
    run.poll()
    run.poll()
    assert serving(ray) == ["a"]
    ray.table.append({**ray.table[0], "NodeID": "a-again"})
    for _ in range(3):
        run.poll()
    assert serving(ray) == ["a", "a-again"]
