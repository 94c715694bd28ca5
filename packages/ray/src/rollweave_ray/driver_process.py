"""The process of Ray's driver for a run, which keeps agents on Ray's nodes (`agents`),
or deploys functions on Ray Serve (`applications`).
"""

import os
import queue
import sys
from collections.abc import Callable

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import ConfigError
from rollweave_ray.agents import Agents, connect, nodes_of
from rollweave_ray.messages import (
    ConnectRay,
    DeployFunctions,
    DriverCommand,
    DriverFailed,
    FunctionsDeployed,
    RayConnected,
    StartAgents,
)

POLL_S = 1.0
"""Seconds between two polls of Ray's nodes."""

_decode = decoder_of(DriverCommand)


def keep_agents(parent: Parent, command: ConnectRay, receive: Callable[..., bytes]) -> None:
    """Connect, and keep agents on the nodes until the parent stops them."""
    try:
        ray = connect(command.address)
    except ConfigError as error:
        parent.send(encode(DriverFailed(error=str(error))))
        return
    hosts = len(nodes_of(ray.nodes()))
    parent.send(encode(RayConnected(address=ray.util.get_node_ip_address(), hosts=hosts)))
    start = _decode(receive())
    if isinstance(start, StartAgents):
        agents = Agents(ray, start, lambda report: parent.send(encode(report)))
        while True:
            try:
                agents.poll()
            except ray.exceptions.RayError as error:  # Ray's head does not answer
                print(f"Ray: {error}", file=sys.stderr, flush=True)
            try:
                receive(timeout=POLL_S)
                break
            except queue.Empty:
                continue
    ray.shutdown()


def deploy(parent: Parent, command: DeployFunctions, receive: Callable[..., bytes]) -> None:
    """Deploy functions, and remove them when the parent asks."""
    # agents need nothing of it
    from rollweave_ray.applications import Functions

    functions = None
    try:
        functions = Functions(command)
        urls = functions.deploy()
    except ConfigError as error:
        if functions is not None:
            functions.remove()
        parent.send(encode(DriverFailed(error=str(error))))
        return
    parent.send(encode(FunctionsDeployed(urls=urls)))
    receive()
    functions.remove()


def main() -> None:
    """Serve the parent, whose first command says what to do."""
    parent = Parent.from_arguments()
    receive = parent.queue().get
    match _decode(receive()):
        case ConnectRay() as command:
            keep_agents(parent, command, receive)
        case DeployFunctions() as command:
            deploy(parent, command, receive)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing outlives the process
