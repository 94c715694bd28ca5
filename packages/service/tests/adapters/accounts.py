"""Checks of an account of groups."""

from rollweave_service.adapters.dapo_policy import Account


def balances(account: Account) -> bool:
    """Return whether every group that was started has exactly one outcome."""
    return (
        account.started
        == account.used
        + account.filtered
        + account.failed
        + account.stale
        + account.cancelled
        + account.carried
    )
