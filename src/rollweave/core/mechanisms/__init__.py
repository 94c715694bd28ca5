"""The optional behaviors of a run, each in a room of its own (`core/run.Mechanism`).

The order of the tuple is the order in which their hooks are called, and so that of the
commands of one event.
"""

from rollweave.core.mechanisms import (
    cluster,
    colocated,
    comparison,
    costs,
    lengths,
    loans,
    membership,
    phases,
    placement,
    pools,
    relays,
    suspects,
    versions,
)
from rollweave.core.run import Mechanism

MECHANISMS: tuple[Mechanism, ...] = (
    membership.MECHANISM,
    suspects.MECHANISM,
    colocated.MECHANISM,
    costs.MECHANISM,
    phases.MECHANISM,
    lengths.MECHANISM,
    placement.MECHANISM,
    pools.MECHANISM,
    versions.MECHANISM,
    comparison.MECHANISM,
    loans.MECHANISM,
    relays.MECHANISM,
    cluster.MECHANISM,
)
