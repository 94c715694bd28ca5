"""The optional behaviors of a run, each in a room of its own (`core/run.Mechanism`).

Hooks are called in the order of the tuple, so the commands of one event have this
order, too.
"""

from rollweave.core.mechanisms import (
    buffer,
    cluster,
    colocated,
    comparison,
    costs,
    division,
    lengths,
    load,
    loans,
    membership,
    phases,
    placement,
    pools,
    ratio,
    relays,
    suspects,
    versions,
)
from rollweave.core.run import Mechanism

MECHANISMS: tuple[Mechanism, ...] = (
    membership.MECHANISM,
    suspects.MECHANISM,
    buffer.MECHANISM,
    colocated.MECHANISM,
    costs.MECHANISM,
    phases.MECHANISM,
    lengths.MECHANISM,
    placement.MECHANISM,
    pools.MECHANISM,
    load.MECHANISM,
    ratio.MECHANISM,
    division.MECHANISM,
    versions.MECHANISM,
    comparison.MECHANISM,
    loans.MECHANISM,
    relays.MECHANISM,
    cluster.MECHANISM,
)
