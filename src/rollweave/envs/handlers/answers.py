r"""Final answers: extracted from the agent's last message, parsed, and compared.

Invariants: nothing of the agent's text is evaluated; numbers are parsed exactly, as
fractions, and never from text that is only partly a number; `MAX_CHARS` bounds the
work.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollweave.envs.base import Score

MAX_CHARS = 1000
"""Maximum characters of an answer; a longer text is no answer."""

MAX_DECIMALS = 300
"""Maximum power of ten that is parsed: 10^(10^9) is short to write and long to compute.
"""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKUP = re.compile(
    r"\\?\$|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\[,;:! "
    r"]|\\(?:quad|qquad)(?![a-z])"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}|\\%|%|[a-zA-Z°][a-zA-Z°/^·*]*[23]?)$"
)
_PERCENT = re.compile(r"(?:\\?%|\\text\s*\{\s*\\?%\s*\})\s*$")
_THOUGHT = re.compile(r".*</think>", re.DOTALL)
_NAMED = re.compile(r"^[a-zA-Z_(){}, ]+=")
_APART = re.compile(r"\d\s+\d")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_POWER = re.compile(r"(?:e|(?:\\times|\\cdot|[*x×·])10(?:\^|\*\*))\{?([-+]?\d{1,4})\}?", re.ASCII)
_RATIO = re.compile(
    r"([-+]?)(?:\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|\\[dt]?frac(\d)(\d)|([^/{}]+)/([^/{}]+))",
    re.ASCII,
)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; None if there is none, or its brace
    is not closed.
    """
    starts = [match.end() for match in _BOXED.finditer(text)]
    depth = 1
    for place in range(starts[-1], len(text)) if starts else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[starts[-1] : place].strip()
    return None


def parse_number(text: str) -> Fraction | None:
    r"""Parse a number: an integer, a decimal, a power of ten, or a fraction of those;
    return None for any other text.

    `1,234`, `\frac{1}{2}`, `1.5 \times 10^{3}`, `3/4` and `x = 3` are numbers; `1+1`,
    `\sqrt{4}`, `1 1/2` and `12 or 13` are not.
    """
    if len(text) > MAX_CHARS:
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


def parse_numbers(text: str) -> tuple[Fraction, ...] | None:
    """Parse the numbers of a tuple `(1, 2/3)`, or a single one; return None if one of
    them is not a number.
    """
    bare = _NAMED.sub("", _MARKUP.sub("", text).strip()).strip()
    if len(bare) > MAX_CHARS or not (bare.startswith("(") and bare.endswith(")")):
        number = parse_number(text)
        return None if number is None else (number,)
    values = [parse_number(part) for part in bare[1:-1].split(",")]
    return None if None in values else tuple(value for value in values if value is not None)


def equivalent(given: str, expected: str) -> bool:
    """Return whether the answer is the expected one: equal numbers, however they are
    written, otherwise equal texts except for markup.

    25% is 25 hundredths. Where only one of both has the sign, it may also be a unit:
    the answer 25% to a question for a percentage, whose answer is given as 25.
    """
    (answer, answer_sign), (value, value_sign) = _measured(given), _measured(expected)
    if value is None:
        return len(given) <= MAX_CHARS and _simple(given) == _simple(expected)
    if answer_sign == value_sign or answer is None:
        return answer == value
    percent, plain = (answer, value) if answer_sign else (value, answer)
    return plain in (percent, tuple(number / 100 for number in percent))


def boxed_reward(record: Mapping[str, Any], answer: str) -> Score:
    r"""Return 1 if the last `\boxed{…}` of the agent's answer is `equivalent` to the
    record's `answer`, else 0: a reward function of the environment `jsonl`.

    What the agent thinks before `</think>` is no answer. Raises ValueError for a record
    without an answer.
    """
    expected = record.get("answer")
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        raise ValueError(f"a record must have an answer, text or a number, got {expected!r:.80}")
    visible = _THOUGHT.sub("", answer, count=1)
    given = None if "<think>" in visible else boxed_answer(visible)
    right = given is not None and equivalent(given, str(expected))
    return Score(reward=float(right), success=right)


def within_tolerance(given: str, expected: str, *, tolerance: float) -> bool:
    """Return whether the answer is `equivalent`, or a number that differs from the
    expected one by at most the relative `tolerance`. A unit may follow it.
    """
    value = parse_number(expected)
    if value is None:
        return equivalent(given, expected)
    answer = parse_number(given)
    if answer is None and len(given) <= MAX_CHARS:
        answer = parse_number(_UNIT.sub("", given.strip().removesuffix("$").strip()))
    return answer is not None and abs(answer - value) <= Fraction(tolerance) * abs(value)


def _measured(text: str) -> tuple[tuple[Fraction, ...] | None, bool]:
    """Return the numbers of the text, and whether a percent sign follows them."""
    if len(text) > MAX_CHARS:
        return None, False
    bare = text.strip().removesuffix("$").rstrip()
    number = _PERCENT.sub("", bare)
    return (parse_numbers(number), True) if number != bare else (parse_numbers(text), False)


def _plain(bare: str) -> Fraction | None:
    """Parse a number without a fraction bar."""
    grouped = _GROUPED.match(bare)
    if grouped is not None:
        bare = re.sub(r",|\{,\}", "", grouped[0]) + bare[grouped.end() :]
    decimal = _DECIMAL.match(bare)
    if decimal is None:
        return None
    rest = bare[decimal.end() :]
    power = _POWER.fullmatch(rest)
    if rest and (power is None or abs(int(power[1])) > MAX_DECIMALS):
        return None
    return Fraction(decimal[0]) * Fraction(10) ** (int(power[1]) if power else 0)


def _simple(text: str) -> str:
    """Return the text without markup, white space and case."""
    words = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", _MARKUP.sub("", text))
    return re.sub(r"\s+", " ", words).strip().rstrip(".").casefold()
