"""Accounts and entries that always balance."""

from dataclasses import dataclass


class UnknownAccountError(KeyError):
    """There is no account of this name."""


class UnbalancedError(ValueError):
    """The entries of a posting do not add up to zero."""


@dataclass(frozen=True)
class Entry:
    day: int
    account: str
    cents: int
    memo: str = ""


class Ledger:
    """Postings are all or nothing. Account names are paths: "assets:bank"."""

    def __init__(self, accounts=None):
        self._accounts = list(accounts) if accounts is not None else []
        self._entries = []
        self._limits = {}

    def open(self, name, *, limit=None):
        """A new account; `limit` is how far below zero it may go (None: as far as you like)."""
        if name in self._accounts:
            raise ValueError(f"account is open already: {name}")
        self._accounts.append(name)
        if limit is not None:
            self._limits[name] = limit

    def post(self, day, lines, memo=""):
        """`lines` are (account, cents). Raises UnknownAccountError, UnbalancedError, ValueError beyond a limit."""
        lines = list(lines)
        for account, _ in lines:
            if account not in self._accounts:
                raise UnknownAccountError(account)
        if sum(cents for _, cents in lines) != 0:
            raise UnbalancedError(f"lines add up to {sum(cents for _, cents in lines)}")
        change = {}
        for account, cents in lines:
            change[account] = change.get(account, 0) + cents
        for account, cents in change.items():
            limit = self._limits.get(account)
            if limit is not None and self.balance(account) + cents < -limit:
                raise ValueError(f"{account} would go below its limit")
        self._entries.extend(Entry(day, account, cents, memo) for account, cents in lines)

    def transfer(self, day, source, target, cents, memo=""):
        """Move money from `source` to `target`."""
        if cents <= 0:
            raise ValueError(f"cents must be positive, got {cents}")
        self.post(day, [(source, -cents), (target, cents)], memo)

    def balance(self, name, *, until=None):
        """Of an account and all below it, up to and including day `until`."""
        if not any(self._below(account, name) for account in self._accounts):
            raise UnknownAccountError(name)
        return sum(
            entry.cents
            for entry in self._entries
            if self._below(entry.account, name) and (until is None or entry.day <= until)
        )

    def entries(self, name=None):
        """By day; those of one day as they were posted."""
        found = [entry for entry in self._entries if name is None or self._below(entry.account, name)]
        return sorted(found, key=lambda entry: entry.day)

    @staticmethod
    def _below(account, name):
        return account == name or account.startswith(name + ":")
