"""What an account did: statements, totals by month, the greatest payees."""

from ledger.money import show


def statement(ledger, name, *, first=None, last=None):
    """Lines with a running balance, from day `first` to day `last`, both included; the balance starts with what was before."""
    running = 0 if first is None else ledger.balance(name, until=first - 1)
    lines = []
    for entry in ledger.entries(name):
        if (first is not None and entry.day < first) or (last is not None and entry.day > last):
            continue
        running += entry.cents
        lines.append(f"{entry.day:>4} {show(entry.cents):>12} {show(running):>12} {entry.memo}".rstrip())
    return lines


def by_period(ledger, name, *, days=30):
    """Total of each period of so many days, {number of the period: cents}; day 1 is the first of period 0."""
    totals = {}
    for entry in ledger.entries(name):
        period = (entry.day - 1) // days
        totals[period] = totals.get(period, 0) + entry.cents
    return totals


def top_memos(ledger, name, count=3):
    """The memos that most was spent on, as (memo, cents spent); of equal ones the first by name."""
    spent = {}
    for entry in ledger.entries(name):
        if entry.cents < 0:
            spent[entry.memo] = spent.get(entry.memo, 0) - entry.cents
    return sorted(spent.items(), key=lambda item: (-item[1], item[0]))[:count]


def tree(ledger, names):
    """Accounts under their parents, indented, with balances."""
    lines = []
    seen = set()
    for name in sorted(names):
        parts = name.split(":")
        for depth in range(1, len(parts) + 1):
            path = ":".join(parts[:depth])
            if path not in seen:
                seen.add(path)
                lines.append(f"{'  ' * (depth - 1)}{parts[depth - 1]} {show(ledger.balance(path))}")
    return lines
