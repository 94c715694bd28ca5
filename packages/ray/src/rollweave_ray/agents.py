"""Agents on the nodes of a Ray cluster, one on each: an actor that reserves all CPUs,
GPUs and named resources of the node, so that Ray gives them to no other work.

Only Ray knows which nodes are free. A run with a limit on its hosts therefore asks for
all nodes, serves on those that it gets first, and gives back the others.

Ray starts and ends the agents; it carries none of the run's data. This module runs in a
separate process, Ray's driver, and Ray ends all actors with it. Only this module and
`applications` import Ray.
"""

import asyncio
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollweave.io.extras import how_to_install_distribution
from rollweave.runtime.hosts.agent import agent_of
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import AgentSpec
from rollweave_ray.messages import AgentEnded, AgentPending, AgentReport, StartAgents

PROBE_S = 5.0
"""Maximum seconds for a connection to Ray's address."""

SETTINGS = {
    # maximum of a request to Ray's head, and of the search for a node on this machine
    "RAY_gcs_server_request_timeout_seconds": "15",
    # each line of each agent belongs in the log, which is no terminal
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
"""Environment variables of Ray that its driver sets unless the user has set them."""

RETRY_S = 10.0
"""Seconds between the end of an agent and the next start on its node."""

PENDING_S = 10.0
"""Seconds after which an agent that Ray has not started yet is reported."""

RAYS_OWN = frozenset(("CPU", "GPU", "memory", "object_store_memory"))
"""Names of the resources that Ray itself gives to nodes."""

ACCELERATOR = "accelerator_type:"
"""Prefix of the resource that names the kind of a node's GPUs."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a Ray cluster. `resources` are those that the user named."""

    id: str
    name: str
    address: str
    cpus: float
    gpus: float
    resources: Mapping[str, float]
    labels: Mapping[str, float]
    """Names by which a pool may select the node: its resources and kinds of GPUs."""

    def describe(self) -> str:
        """Describe what an agent reserves there."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)


def nodes_of(table: Iterable[Mapping[str, Any]]) -> dict[str, Node]:
    """Return the nodes of Ray's table, by id, that are alive and have CPUs or GPUs.

    The names of nodes that share one get parts of their ids.
    """
    nodes: dict[str, Node] = {}
    for row in table:
        have: Mapping[str, float] = row.get("Resources", {})
        cpus, gpus = have.get("CPU", 0.0), have.get("GPU", 0.0)
        if not row["Alive"] or (not cpus and not gpus):
            continue
        named = {
            name: amount
            for name, amount in have.items()
            if name not in RAYS_OWN and not name.startswith(("node:", ACCELERATOR))
        }
        kinds = {
            name.removeprefix(ACCELERATOR): gpus for name in have if name.startswith(ACCELERATOR)
        }
        name, number = row.get("NodeName") or row["NodeManagerAddress"], row["NodeID"]
        if any(node.name == name for node in nodes.values()):
            name = f"{name}-{number[:8]}"
        nodes[number] = Node(
            id=number,
            name=name,
            address=row["NodeManagerAddress"],
            cpus=cpus,
            gpus=gpus,
            resources=named,
            labels={**kinds, **named},
        )
    return nodes


def prepare_environment() -> None:
    """Set the variables of Ray that the user has not set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def imported(module: str) -> Any:
    """Return a module of Ray. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed ({how_to_install_distribution('rollweave-ray')})"
        ) from None


def connect(address: str) -> Any:
    """Connect to the Ray cluster at `address`, or to that of the node on this machine
    for "auto", and return the module `ray`.

    Raises ConfigError.
    """
    prepare_environment()
    ray = imported("ray")
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        ray.init(address=address, logging_level="warning")
    except Exception as error:  # Ray raises several, and its own
        raise ConfigError(in_one_line(error)) from error
    return ray


class AgentActor:
    """The agent of one node, as an actor."""

    def ready(self) -> None:
        """Return, since the actor has been placed."""

    def run(self, spec: AgentSpec) -> None:
        """Serve until the run is over. Raises HostError as `HostAgent.run` does."""
        asyncio.run(agent_of(spec).run())


@dataclass(kw_only=True, eq=False)
class _Running:
    """An agent that was started. `ready` and `ended` are Ray's references to results;
    `ended` is None until it serves.
    """

    node: Node
    actor: Any
    ready: Any
    ended: Any = None
    since: float = field(default_factory=time.monotonic)
    reported: bool = False


class Agents:
    """The agents of a run. `report` receives what the user should know."""

    def __init__(self, ray: Any, start: StartAgents, report: Callable[[AgentReport], None]) -> None:
        self._ray, self._start, self._report = ray, start, report
        self._affinity = importlib.import_module(
            "ray.util.scheduling_strategies"
        ).NodeAffinitySchedulingStrategy
        self._actor = ray.remote(AgentActor)
        self._running: dict[str, _Running] = {}
        self._failures: list[AgentEnded] = []
        self._not_before: dict[str, float] = {}
        """Time from which an agent may be started again, by the node's id."""

    def poll(self) -> None:
        """Start agents on nodes that have none, up to the limit, and report those that
        ended.
        """
        nodes = nodes_of(self._ray.nodes())
        for running in list(self._running.values()):
            if self._done(running.ready if running.ended is None else running.ended):
                self._advance(running, nodes)
            elif not running.reported and not self._done(running.ready):
                self._pending(running)
        now = time.monotonic()
        for node_id, node in nodes.items():
            if (
                node_id not in self._running
                and now >= self._not_before.get(node_id, now)
                and self._is_wanted(node, nodes)
            ):
                self._running[node_id] = self._launch(node)
        for running in list(self._running.values()):
            if running.ended is None and not self._is_wanted(running.node, nodes):
                self._give_back(running)

    def _advance(self, running: _Running, nodes: Mapping[str, Node]) -> None:
        """Let an agent serve whose node is reserved, or report that it has ended."""
        if running.ended is not None:
            self._ended(running, running.ended)
            return
        try:
            self._ray.get(running.ready)
        except self._ray.exceptions.RayError:
            self._ended(running, running.ready)
            return
        if self._is_wanted(running.node, nodes):
            self._serve(running)
        else:
            self._give_back(running)

    def _is_wanted(self, node: Node, nodes: Mapping[str, Node]) -> bool:
        """Return whether an agent on this node may begin to serve.

        A node with the address of one that serves is wanted: it has been started again,
        while Ray still counts on the former one. Where no more hosts are left to choose
        than there are labels to find, the node must have one of these.
        """
        if self._start.hosts is None:
            return True
        serving = {
            running.node.address: running.node
            for running in self._running.values()
            if running.ended is not None
        }
        if node.address in serving:
            return True
        served = {label for one in serving.values() for label in one.labels}
        offered = {label for one in nodes.values() for label in one.labels}
        missing = (set(self._start.labels) & offered) - served
        left = self._start.hosts - len(serving)
        return left > len(missing) or (left > 0 and not missing.isdisjoint(node.labels))

    def _launch(self, node: Node) -> _Running:
        actor = self._actor.options(
            num_cpus=node.cpus,
            num_gpus=node.gpus,
            resources=dict(node.resources),
            scheduling_strategy=self._affinity(node_id=node.id, soft=False),
        ).remote()
        running = _Running(node=node, actor=actor, ready=actor.ready.remote())
        if self._start.hosts is None:
            self._serve(running)
        return running

    def _serve(self, running: _Running) -> None:
        """Let the agent join the run as soon as its node is reserved."""
        node = running.node
        spec = AgentSpec(
            name=node.name,
            address=node.address,
            controller=self._start.controller,
            secret=self._start.secret,
            join_s=self._start.join_s,
            cpus=max(1, int(node.cpus)),
            devices=None if node.gpus else (),
            labels=dict(node.labels),
            variables=self._start.variables,
            programs=self._start.programs,
        )
        running.ended = running.actor.run.remote(spec)

    def _give_back(self, running: _Running) -> None:
        """Leave a node to other runs."""
        del self._running[running.node.id]
        self._not_before[running.node.id] = time.monotonic() + RETRY_S
        self._ray.kill(running.actor)

    def _ended(self, running: _Running, result: Any) -> None:
        """Report why an agent ended, unless the run is over or Ray has lost the
        node.
        """
        del self._running[running.node.id]
        self._not_before[running.node.id] = time.monotonic() + RETRY_S
        try:
            self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:
            self._failed(running.node, error.cause)
        except self._ray.exceptions.RayError as error:
            if not self._done(running.ready):
                self._failed(running.node, error)

    def _failed(self, node: Node, error: BaseException) -> None:
        """Report an error of this node's agent, but only once."""
        ended = AgentEnded(host=node.name, error=in_one_line(error))
        if ended not in self._failures:
            self._failures.append(ended)
            self._report(ended)

    def _pending(self, running: _Running) -> None:
        if time.monotonic() - running.since > PENDING_S:
            running.reported = True
            self._report(
                AgentPending(
                    host=running.node.name,
                    reason=f"waiting for Ray to reserve all of the node ({running.node.describe()})"
                    ", which other work may use",
                )
            )

    def _done(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
