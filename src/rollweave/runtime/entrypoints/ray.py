"""The process of Ray's driver for a run, which keeps agents on Ray's nodes
(`runtime/hosts/on_ray.py`).
"""

import os
import queue
import sys

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts.on_ray import Agents, connect, nodes_of
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import ConnectRay, RayCommand, RayConnected, RayFailed, StartAgents

POLL_S = 1.0
"""Seconds between two polls of Ray's nodes."""


def serve(parent: Parent) -> None:
    """Connect, and keep agents on the nodes until the parent stops them."""
    decode = decoder_of(RayCommand)
    frames = parent.queue()
    first = decode(frames.get())
    assert isinstance(first, ConnectRay), "it comes first"
    try:
        ray = connect(first.address)
    except ConfigError as error:
        parent.send(encode(RayFailed(error=str(error))))
        return
    hosts = len(nodes_of(ray.nodes()))
    parent.send(encode(RayConnected(address=ray.util.get_node_ip_address(), hosts=hosts)))
    start = decode(frames.get())
    if isinstance(start, StartAgents):
        agents = Agents(ray, start, lambda report: parent.send(encode(report)))
        while True:
            try:
                agents.poll()
            except ray.exceptions.RayError as error:  # Ray's head does not answer
                print(f"Ray: {error}", file=sys.stderr, flush=True)
            try:
                frames.get(timeout=POLL_S)
                break
            except queue.Empty:
                continue
    ray.shutdown()


def main() -> None:
    """Serve the parent."""
    serve(Parent.from_arguments())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing outlives the process
