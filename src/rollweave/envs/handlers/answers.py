r"""Final answers: found in the agent's last message, read, compared.

Invariants: nothing of the agent's text is evaluated; numbers are read exactly, as
fractions, and never from what is only partly a number; how long the work takes is
bounded by `MOST_CHARS`.
"""

import re
from fractions import Fraction

MOST_CHARS = 1000
"""Of an answer; a longer one is none."""

MOST_DECIMALS = 300
"""Greatest power of ten that is read: 10^(10^9) is short to write and long to compute."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKUP = re.compile(
    r"\$|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\[,;:! "
    r"]|\\(?:quad|qquad)(?![a-z])"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}|\\%|%|[a-zA-Z°][a-zA-Z°/^·*]*[23]?)$"
)
_NAMED = re.compile(r"^[a-zA-Z_(){}, ]+=")
_APART = re.compile(r"\d\s+\d")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_POWER = re.compile(r"(?:e|(?:\\times|\\cdot|[*x×·])10(?:\^|\*\*))\{?([-+]?\d{1,4})\}?", re.ASCII)
_RATIO = re.compile(
    r"([-+]?)(?:\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|\\[dt]?frac(\d)(\d)|([^/{}]+)/([^/{}]+))",
    re.ASCII,
)


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}`; None where there is none, or its brace is
    not closed.
    """
    starts = [found.end() for found in _BOXED.finditer(text)]
    depth = 1
    for place in range(starts[-1], len(text)) if starts else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place].strip()
    return None


def number(text: str) -> Fraction | None:
    r"""The number that the text is: integer, decimal, power of ten, or a fraction of
    those; None for anything else.

    `1,234`, `\frac{1}{2}`, `1.5 \times 10^{3}`, `3/4` and `x = 3` are read; `1+1`,
    `\sqrt{4}`, `1 1/2` and `12 or 13` are not.
    """
    if len(text) > MOST_CHARS:
        return None
    bare = _NAMED.sub("", _MARKUP.sub("", text).strip())
    if _APART.search(bare):
        return None
    bare = re.sub(r"\s+", "", bare).replace("−", "-")
    ratio = _RATIO.fullmatch(bare)
    if ratio is None:
        return _plain(bare)
    sign, *parts = ratio.groups()
    above, below = (_plain(part) for part in parts if part is not None)
    if above is None or not below or (sign and above < 0):
        return None
    return (-1 if sign == "-" else 1) * above / below


def numbers(text: str) -> tuple[Fraction, ...] | None:
    """The numbers of a tuple `(1, 2/3)`, or of a single one; None where one of them is
    none.
    """
    bare = _NAMED.sub("", _MARKUP.sub("", text).strip()).strip()
    if len(bare) > MOST_CHARS or not (bare.startswith("(") and bare.endswith(")")):
        alone = number(text)
        return None if alone is None else (alone,)
    found = [number(part) for part in bare[1:-1].split(",")]
    return None if None in found else tuple(value for value in found if value is not None)


def same(given: str, expected: str) -> bool:
    """Whether the answer is the expected one: equal numbers, however they are written,
    else equal texts but for mark-up.
    """
    value = numbers(expected)
    if value is not None:
        return numbers(given) == value
    return len(given) <= MOST_CHARS and _simple(given) == _simple(expected)


def close(given: str, expected: str, *, tolerance: float) -> bool:
    """`same`, with numbers that may differ by `tolerance`, relative to the expected
    one, and may be followed by a unit.
    """
    value = number(expected)
    if value is None:
        return same(given, expected)
    found = number(given)
    if found is None and len(given) <= MOST_CHARS:
        found = number(_UNIT.sub("", given.strip().removesuffix("$").strip()))
    return found is not None and abs(found - value) <= Fraction(tolerance) * abs(value)


def _plain(bare: str) -> Fraction | None:
    """A number without a fraction bar."""
    grouped = _GROUPED.match(bare)
    if grouped is not None:
        bare = re.sub(r",|\{,\}", "", grouped[0]) + bare[grouped.end() :]
    decimal = _DECIMAL.match(bare)
    if decimal is None:
        return None
    rest = bare[decimal.end() :]
    power = _POWER.fullmatch(rest)
    if rest and (power is None or abs(int(power[1])) > MOST_DECIMALS):
        return None
    return Fraction(decimal[0]) * Fraction(10) ** (int(power[1]) if power else 0)


def _simple(text: str) -> str:
    """Without mark-up, white space and case."""
    words = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", _MARKUP.sub("", text))
    return re.sub(r"\s+", " ", words).strip().rstrip(".").casefold()
