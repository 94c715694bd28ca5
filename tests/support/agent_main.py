"""`rollweave host` with other programs than Rollweave's: `main(engine="module", …)`.

An agent chooses the modules of its programs itself, so a test that replaces one starts
its agents by this module.
"""

import dataclasses

from rollweave.cli import fleet
from rollweave.cli.entry import main as rollweave
from rollweave.runtime.hosts.agent import HostAgent
from rollweave.schema.hosts import Programs


def main(**modules: str) -> None:
    """Run the command line with these modules in place of the programs'."""
    made = fleet.agent_for

    def agent_for(joining: fleet.Joining) -> HostAgent:
        permissions = dataclasses.replace(joining.permissions, programs=Programs(**modules))
        return made(dataclasses.replace(joining, permissions=permissions))

    fleet.agent_for = agent_for
    rollweave()
