"""Amounts in whole cents: parse, show, split, convert."""

import re

_AMOUNT = re.compile(r"(-?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.(\d{1,2}))?")


def parse(text):
    """Cents of "1,234.5" or "-3". Raises ValueError for anything else."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an amount: {text!r}")
    sign, whole, part = match.groups()
    cents = int(whole.replace(",", "")) * 100 + int((part or "").ljust(2, "0"))
    return -cents if sign else cents


def show(cents):
    """Cents as "1,234.50"."""
    sign = "-" if cents < 0 else ""
    whole, part = divmod(abs(cents), 100)
    return f"{sign}{whole:,}.{part:02d}"


def split(cents, parts):
    """`cents` in `parts` shares that add up; the first ones get a cent more where it is not even."""
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    share, rest = divmod(cents, parts)
    return [share + (1 if number < rest else 0) for number in range(parts)]


def split_by(cents, weights):
    """`cents` in shares by weight, that add up: what is left goes to the largest remainders, of equal ones to the first."""
    total = sum(weights)
    if total <= 0:
        raise ValueError("weights must add up to more than 0")
    shares = [cents * weight // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(cents * weights[i] % total), i))
    for i in order[: cents - sum(shares)]:
        shares[i] += 1
    return shares


def convert(cents, rate, *, per=100):
    """`cents` at `rate` hundredths of the other currency for each unit, half a cent rounded away from zero."""
    product = abs(cents) * rate
    rounded = (2 * product + per) // (2 * per)
    return -rounded if cents < 0 else rounded
