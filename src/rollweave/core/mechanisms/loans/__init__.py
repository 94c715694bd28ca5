"""Engines that the run borrows from serving engines (ROSE §4; `loans/borrowing`)."""

from rollweave.core.mechanisms.loans import borrowing
from rollweave.core.run import Mechanism
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import LendersReported


def used(config: RunConfig) -> bool:
    """True if a group of engines is borrowed."""
    return any(group.borrowed for group in config.engines)


MECHANISM = Mechanism(
    name="loans",
    used=used,
    state=borrowing.Loans,
    handlers={LendersReported: borrowing.on_reported},
    steps={"rests": borrowing.check_leases},
    check=borrowing.check,
)
