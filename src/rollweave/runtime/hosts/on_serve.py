"""Functions as applications of Ray Serve that scale to zero (RollArt §5.3): those of
rewards, and the serverless methods of roles.

This module runs in a separate process, Ray's driver, which removes the applications at
the end of the run. If it is killed, they stay on a cluster of the user's, without
instances, until the run is resumed, which replaces them.
"""

import importlib
from typing import Any

from rollweave.io.extras import from_extra
from rollweave.io.sockets import bound_socket
from rollweave.runtime.hosts.on_ray import connect, in_one_line, prepare_environment
from rollweave.runtime.hosts.reward_app import RewardApp
from rollweave.runtime.roles.app import RoleApp
from rollweave.schema.errors import ConfigError
from rollweave.schema.serverless import DeployedFunction, DeployedRole, DeployFunctions

IDLE_S = 30.0
"""Seconds without requests after which an instance ends, also the last one."""

PERIOD_S = 0.5
"""Seconds between two decisions of Ray Serve about the number of instances."""

MAX_INSTANCES = 64
"""Maximum number of instances of one function; fewer if the cluster has fewer CPUs."""

SHARED_PORT = 8000
"""Port of the proxy on a cluster of the user's: Ray Serve's own default."""

HEAD = "node:__internal_head__"
"""Ray's resource of the node on which the proxy listens."""


class Functions:
    """The deployed functions of a run."""

    def __init__(self, command: DeployFunctions) -> None:
        """Connect to Ray, and start Ray Serve unless it runs. Raises ConfigError."""
        self._command = command
        with from_extra("serverless"):
            self._serve: Any = importlib.import_module("ray.serve")
        self._ray = connect(command.address) if command.address else start_here()
        self._names: list[str] = []

    def deploy(self) -> dict[str, str]:
        """Deploy all functions, and return their URLs. Raises ConfigError."""
        try:
            base = self._start_proxy()
            return {one.name: base + self._deploy(one) for one in self._command.functions}
        except Exception as error:  # Ray raises several, and its own
            raise ConfigError(in_one_line(error)) from error

    def _start_proxy(self) -> str:
        """Start Ray Serve's proxy on the head node, and return its URL. On a cluster
        that serves already, this is the proxy that it has.
        """
        address, port = "127.0.0.1", _port()
        if self._command.address is not None:
            alive = [node for node in self._ray.nodes() if node["Alive"]]
            (head,) = [node for node in alive if HEAD in node["Resources"]]
            address, port = head["NodeManagerAddress"], SHARED_PORT
        options = {"host": address, "port": port}
        self._serve.start(proxy_location="HeadOnly", http_options=options)
        client = importlib.import_module("ray.serve.context")._get_global_client()
        return f"http://{address}:{client.http_config.port}"

    def _deploy(self, function: DeployedFunction | DeployedRole) -> str:
        """Deploy one function, and return the path of its URL."""
        command = self._command
        cpus = int(self._ray.cluster_resources().get("CPU", 1))
        deployment = self._serve.deployment(
            RewardApp if isinstance(function, DeployedFunction) else RoleApp,
            name=function.name,
            max_ongoing_requests=1,  # one call at a time, as on other platforms
            ray_actor_options={"num_cpus": command.cpus},
            autoscaling_config={
                "min_replicas": 0,
                "initial_replicas": 0,
                "max_replicas": max(1, min(MAX_INSTANCES, cpus)),
                "target_ongoing_requests": 1,
                "upscale_delay_s": 2 * PERIOD_S,
                "downscale_delay_s": IDLE_S,
                "metrics_interval_s": PERIOD_S,
                "look_back_period_s": 2 * PERIOD_S,
            },
        )
        name = f"rollweave-{command.owner}-{function.name}"
        path = f"/{command.secret}/{function.name}"
        self._serve.run(
            deployment.bind(function, command.archive, command.digest),
            name=name,
            route_prefix=path,
        )
        self._names.append(name)
        return path

    def remove(self) -> None:
        """Remove the functions once their instances have ended, and disconnect; a Ray
        of this machine alone ends.
        """
        for name in self._names:
            self._serve.delete(name)
        self._ray.shutdown()


def start_here() -> Any:
    """Start Ray on this machine, for this process alone. Raises ConfigError."""
    prepare_environment()
    with from_extra("serverless"):
        ray: Any = importlib.import_module("ray")
    try:
        ray.init(address="local", include_dashboard=False, logging_level="warning")
    except Exception as error:  # Ray raises several, and its own
        raise ConfigError(in_one_line(error)) from error
    return ray


def _port() -> int:
    with bound_socket("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])
