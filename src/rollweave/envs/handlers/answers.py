r"""Final answers: extracted from the agent's last message, and compared with the
expected answer.

Equal texts and plain numbers are judged here. Other mathematics is judged by
math-verify, in a process that can be ended (`math_judge.py`).

Invariants: nothing of the agent's text is evaluated in this process; plain numbers are
parsed exactly, as fractions, in ASCII digits, and never from text that is only partly a
number; the work is linear in the length of the text, which `MAX_CHARS` bounds for an
answer.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollweave.envs.base import Score
from rollweave.envs.handlers import math_judge
from rollweave.envs.handlers.math_judge import Verdict
from rollweave.io.extras import how_to_install, missing_from
from rollweave.schema.errors import RewardError

MAX_CHARS = 1000
"""Maximum characters of an answer; a longer text does not count as an answer."""

MAX_DECIMALS = 300
"""Maximum power of ten that is parsed: 10^(10^9) is quickly written, but takes long to
compute.
"""

NEAR = Fraction(1, 1000)
"""Relative difference beyond which two plain numbers differ, however they were rounded.
math-verify judges numbers that are nearer to each other: it accepts 0.333333 for 1/3.
"""

WORD_CHARS = 4
"""Minimum letters of a word: fewer letters may be a product of variables."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKUP = re.compile(
    r"\\?\$|\\[()]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\\[,;:! "
    r"]|\\(?:quad|qquad)(?![a-z])"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|operatorname)\s*\{[^{}]*\}|\\%|%|[a-zA-Z°][a-zA-Z°/^·*]*[23]?)$"
)
_PERCENT = re.compile(r"(?:\\?%|\\text\s*\{\s*\\?%\s*\})\s*$")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s.,;'’-])*")
_WORD = re.compile(rf"[a-zA-Z]{{{WORD_CHARS}}}|[^\W\d_a-zA-Z\u0370-\u03ff]")
_NAMED = re.compile(r"^[a-zA-Z_(){}, ]+=")
_APART = re.compile(r"[\d,]\s+[\d,]", re.ASCII)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d*)?", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_POWER = re.compile(r"(?:e|(?:\\times|\\cdot|[*x×·])10(?:\^|\*\*))\{?([-+]?\d{1,4})\}?", re.ASCII)
_RATIO = re.compile(
    r"([-+]?)(?:\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|\\[dt]?frac(\d)(\d)|([^/{}]+)/([^/{}]+))",
    re.ASCII,
)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`; None if there is none, or its brace
    is not closed. A longer content is cut after `MAX_CHARS` + 1 characters.
    """
    start = -1
    for match in _BOXED.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : min(brace.start(), start + MAX_CHARS + 1)].strip()
    return None


def parse_number(text: str) -> Fraction | None:
    r"""Parse a number: an integer, a decimal, a power of ten, or a fraction of those;
    return None for any other text.

    `1,234`, `\frac{1}{2}`, `1.5 \times 10^{3}`, `3/4` and `x = 3` are numbers; `1+1`,
    `\sqrt{4}`, `1 1/2`, `1, 234` and `12 or 13` are not.
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
    """Parse the numbers of a tuple such as `(1, 2/3)`, or a single number; return None
    if any part is not a number.
    """
    bare = _NAMED.sub("", _MARKUP.sub("", text).strip()).strip()
    if len(bare) > MAX_CHARS or not (bare.startswith("(") and bare.endswith(")")):
        number = parse_number(text)
        return None if number is None else (number,)
    values = [parse_number(part) for part in bare[1:-1].split(",")]
    return None if None in values else tuple(value for value in values if value is not None)


def equivalent(given: str, expected: str) -> Verdict:
    """Return whether the answer is the expected one: an equal text except for markup,
    an equal plain number, or an answer that math-verify accepts as equal.

    25% is 25 hundredths. If only one of the two answers has the percent sign, the sign
    may also be a unit: 25% is right if a question asks for a percentage and the
    expected answer is 25.

    Waits for the judge, so an event loop must await `judged` instead. Raises
    RewardError without a judge.
    """
    given, expected = _bare(given), _bare(expected)
    return _at_once(given, expected) or math_judge.judge(given, expected)


async def judged(given: str, expected: str) -> Verdict:
    """Return the verdict of `equivalent` without blocking the event loop. Raises
    RewardError.
    """
    given, expected = _bare(given), _bare(expected)
    return _at_once(given, expected) or await math_judge.judged(given, expected)


def judged_by_text(expected: str) -> bool:
    """Return whether answers are compared with `expected` without math-verify, because
    it is a plain number, words, or a letter.
    """
    return (
        _measured(expected)[0] is not None
        or _is_words(expected)
        or re.fullmatch(r"\(?[A-Za-z]\)?", _simple(expected)) is not None
    )


def check_expected(expected: str) -> None:
    """Raise ValueError for an expected answer that no judge can compare with."""
    if not expected.strip() or len(expected) > MAX_CHARS:
        raise ValueError(
            f"an answer must have from 1 to {MAX_CHARS} characters, got {len(expected)}"
        )
    if not judged_by_text(expected) and missing_from("math"):
        raise ValueError(f"only math-verify can judge {expected!r:.80}: {how_to_install('math')}")


def boxed_reward(record: Mapping[str, Any], answer: str) -> Score:
    r"""Return 1 if the last `\boxed{…}` of the agent's answer is `equivalent` to the
    record's `answer`, or in verl's form its `reward_model.ground_truth`, else 0: a
    reward function of the environment `jsonl`.

    The agent's thoughts before `</think>` do not count as an answer. Raises ValueError
    for a record without an answer, RewardError without a judge.
    """
    expected = _expected_in(record)
    visible = answer.rpartition("</think>")[2]
    given = None if "<think>" in visible else boxed_answer(visible)
    verdict = Verdict(equal=False) if given is None else equivalent(given, expected)
    return verdict.score


def check_record(record: Mapping[str, Any]) -> None:
    """Check a record for `boxed_reward` before a run. Raises ValueError."""
    check_expected(_expected_in(record))


boxed_reward.check_record = check_record  # type: ignore[attr-defined]


def within_tolerance(given: str, expected: str, *, tolerance: float) -> Verdict | None:
    """Return whether the answer is a number that differs from the expected one by at
    most the relative `tolerance`. A unit may follow it. None if the expected answer is
    not a number.
    """
    value = parse_number(expected)
    if value is None:
        return None
    answer = parse_number(given)
    if answer is None and len(given) <= MAX_CHARS:
        answer = parse_number(_UNIT.sub("", given.strip().removesuffix("$").strip()))
    near = answer is not None and abs(answer - value) <= Fraction(tolerance) * abs(value)
    return Verdict(equal=near)


def _expected_in(record: Mapping[str, Any]) -> str:
    expected = record.get("answer")
    if expected is None and isinstance(graded := record.get("reward_model"), Mapping):
        expected = graded.get("ground_truth")
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        raise ValueError(f"a record must have an answer, text or a number, got {expected!r:.80}")
    return str(expected)


def _at_once(given: str, expected: str) -> Verdict | None:
    """Return the verdict if text and plain numbers decide it; None if math-verify has
    to decide. Raises RewardError if math-verify is needed and not installed.
    """
    if len(given) > MAX_CHARS:
        return Verdict(equal=False, reason=f"the answer has more than {MAX_CHARS} characters")
    answer_text, text = _simple(given), _simple(expected)
    if not answer_text or answer_text == text:
        return Verdict(equal=answer_text == text)
    (answer, answer_sign), (value, value_sign) = _measured(given), _measured(expected)
    if answer is not None and value is not None and not ("=" in given and "=" in expected):
        pairs = [(answer, value)]
        if answer_sign != value_sign:
            percent, plain = (answer, value) if answer_sign else (value, answer)
            pairs = [(plain, percent), (plain, percent / 100)]
        if any(number == other for number, other in pairs):
            return Verdict(equal=True)
        if not any(abs(number - other) <= NEAR * abs(other) for number, other in pairs):
            return Verdict(equal=False)
    if _is_words(expected):
        return Verdict(equal=False)
    if not missing_from("math"):
        return None
    if not judged_by_text(expected):
        raise RewardError(f"only math-verify can judge {expected!r:.80}: {how_to_install('math')}")
    return Verdict(equal=False)


def _bare(text: str) -> str:
    r"""Return the text without the full stop of its sentence, and without a `\text{…}`
    around the whole text.
    """
    bare = text.strip()
    bare = bare if bare.endswith("..") else bare.removesuffix(".")
    whole = _TEXT.fullmatch(bare)
    return bare if whole is None else whole[1].strip()


def _measured(text: str) -> tuple[Fraction | None, bool]:
    """Return the number that the text is, and whether a percent sign follows it."""
    if len(text) > MAX_CHARS:
        return None, False
    bare = text.strip().removesuffix("$").rstrip()
    number = _PERCENT.sub("", bare)
    return (parse_number(number), True) if number != bare else (parse_number(text), False)


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
    words = _TEXT.sub(r"\1", _MARKUP.sub("", text))
    return re.sub(r"\s+", " ", words).strip().rstrip(".").casefold()


def _is_words(text: str) -> bool:
    """Return whether the text is words. math-verify would take words for products of
    variables, so that "listen" would equal "silent".
    """
    simple = _simple(text)
    return _WORDS.fullmatch(simple) is not None and _WORD.search(simple) is not None
