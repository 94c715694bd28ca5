"""The process of an agent that the controller starts on its own machine
(`runtime/hosts/agent.py`).
"""

import asyncio
import sys

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of
from rollweave.runtime.hosts.agent import agent_of
from rollweave.schema.errors import HostError
from rollweave.schema.hosts import AgentSpec


def main() -> None:
    """Serve until the run is over; the first frame is the `AgentSpec`."""
    parent = Parent.from_arguments()
    spec = decoder_of(AgentSpec)(parent.receive())
    parent.listen(lambda _: None)  # it ends this process when the parent ends
    try:
        asyncio.run(agent_of(spec).run())
    except HostError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
