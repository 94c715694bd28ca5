r"""Answers: what stands in \boxed{}, numbers read exactly, texts compared; nothing that
is only partly a number.
"""

import contextlib
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.base import Score
from rollweave.envs.handlers import answers
from rollweave.envs.handlers.answers import (
    boxed_answer,
    boxed_reward,
    check_expected,
    check_record,
    equivalent,
    judged,
    judged_by_text,
    parse_number,
    parse_numbers,
    within_tolerance,
)
from rollweave.envs.handlers.math_judge import Verdict
from rollweave.schema.errors import RewardError

fractions = st.fractions(max_denominator=10**6)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(("", None), ("42", None), (r"\boxed{42}", "42")),
        (r"first \boxed{1}, then \fbox{ 2 }.", "2"),
        (r"\boxed {\frac{1}{\sqrt{2}}} and {more}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ x \right.}, \{", r"\left\{ x \right."),
        *((r"\boxed{" + "{}" * 3000 + "}", "{}" * 500 + "{"), (r"\boxed{1} \boxed{2", None)),
        *((r"\boxed{}", ""), (r"\boxed 3", None)),
    ],
)
def test_boxed_answers(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("7", 7), (" +7. ", 7), ("-0.25", Fraction(-1, 4)), (".5", Fraction(1, 2)), ("−3", -3)),
        ("$1{,}234{,}567.5$", Fraction(2469135, 2)),
        *(("1,234", 1234), (r"1\,000", 1000), (r"\frac{3}{-4}", Fraction(-3, 4))),
        *((r"-\dfrac{3}{4}", Fraction(-3, 4)), (r"\tfrac12", Fraction(1, 2))),
        *(("6 / 4", Fraction(3, 2)), ("x = 3", 3), ("1.5e3", 1500)),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        ("2*10**4", 20000),
        ("5" + " " * 999, 5),
    ],
)
def test_parses_numbers(text: str, value: Fraction | int) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "9" * 1001, "12 or 13", "1 1/2", "1 2", "- -1/2", "x >= 3"),
        *("x", "1+1", "2^3", "1,23", "1/0", "1/2/3", "--1", "-/2", "½", "²", "٣", "nan"),
        *("3.4.5", "1e999", "0x10", "1_000"),
        *(r"\sqrt{4}", r"\frac{1}{0}", r"\frac{1}{2}3", "__import__('os')"),
    ],
)
def test_refuses_other_text_than_numbers(text: str) -> None:
    assert parse_number(text) is None
    assert not equivalent(text, "12").equal


@given(
    fractions,
    st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"$\dfrac{{{}}}{{{}}}$", " {} / {} "]),
)
def test_parses_a_fraction_in_any_form(value: Fraction, dress: str) -> None:
    assert parse_number(dress.format(value.numerator, value.denominator)) == value
    assert parse_number(dress.format(value.numerator * 6, value.denominator * 6)) == value


@given(st.integers(), st.integers(0, 12))
def test_a_decimal_is_exact(digits: int, places: int) -> None:
    text = f"{abs(digits):0{places + 1}d}"
    text = f"{text[:-places]}.{text[-places:]}" if places else text
    assert parse_number(f"-{text}") == -Fraction(abs(digits), 10**places)
    assert parse_number(f"{int(abs(digits)):,}") == abs(digits)


@given(st.lists(fractions, min_size=2, max_size=4))
def test_tuples(values: list[Fraction]) -> None:
    text = f"({', '.join(map(str, values))})"
    assert (
        parse_numbers(text)
        == parse_numbers(rf"\left({','.join(map(str, values))}\right)")
        == parse_numbers(f"(x, y) = {text}")
        == tuple(values)
    )
    assert equivalent(text, text).equal
    assert parse_numbers(text[1:-1]) is parse_numbers(text[1:]) is parse_numbers(text[:-1]) is None


@given(st.text(max_size=60) | st.text("0123456789.,/-+e{}()\\frac times^$ ", max_size=60))
def test_parsing_any_text_never_raises(text: str) -> None:
    value = parse_number(text)
    assert value is None or any(digit.isdigit() for digit in text)
    assert equivalent(text, text).equal or value is not None or parse_numbers(text) is None
    boxed_answer(text)
    within_tolerance(text, "3", tolerance=0.1)


def test_words_are_equal_except_for_markup() -> None:
    assert equivalent(r"\text{The Answer}.", "the  answer").equal
    assert equivalent("$x^2 + 1$", "x^2 + 1").equal
    assert not equivalent("the answer is yes", "yes").equal
    assert equivalent("a" * 1000, "A" * 1000).equal
    assert parse_numbers(f"({'1,' * 500}1)") is None
    reason = "the answer has more than 1000 characters"
    assert equivalent("a" * 1001, "a" * 1001) == Verdict(equal=False, reason=reason)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(("100", True), ("101", True), ("99.0", True), ("101.01", False), ("98.9", False)),
        *(("100 g", True), ("100 kg/m^3", True), (r"$100\ \text{N}$", True)),
        *((r"100\,\mathrm{kJ}", True), ("100%", True), ("100 or 5", False), ("5 100", False)),
        *(("100 - 1", False), ("about", False), ("100" + " " * 996 + "g", True)),
        *(("100" + " " * 997 + "g", False), ("", False)),
    ],
)
def test_close_to_100(answer: str, right: bool) -> None:
    assert within_tolerance(answer, "100", tolerance=0.01) == Verdict(equal=right)


async def test_text_and_plain_numbers_need_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "math_judge", None)
    assert (await judged("25%.", r"\text{1/4}")).equal
    assert not (await judged("three", "four")).equal
    assert not (await judged("25", "1/4")).equal
    # Numbers that are near, also as a percentage, are left to the judge.
    for pair in (("0.3333333", "1/3"), ("33.33333%", "1/3"), ("x = 4", "y = 4"), ("x", "y + 1")):
        with pytest.raises(AttributeError):
            await judged(*pair)


@pytest.mark.parametrize(
    ("expected", "by_text"),
    [("3", True), ("25%", True), ("velite", True), ("(B)", True), ("x", True), ("x+1", False)],
)
def test_what_is_judged_by_text(
    monkeypatch: pytest.MonkeyPatch, expected: str, by_text: bool
) -> None:
    assert judged_by_text(expected) is by_text
    check_expected(expected)
    monkeypatch.setattr(answers, "missing_from", {"math": ["math_verify"]}.__getitem__)
    rule = f"only math-verify can judge {re.escape(repr(expected))}: pip install "
    with contextlib.nullcontext() if by_text else pytest.raises(ValueError, match=rule):
        check_expected(expected)
    with contextlib.nullcontext() if by_text else pytest.raises(RewardError, match=rule):
        assert not equivalent("z - 1", expected).equal


def test_an_expected_answer_has_a_bounded_length() -> None:
    check_expected("x" * 1000)
    for text in ("", "  ", "x" * 1001):
        rule = f"an answer must have from 1 to 1000 characters, got {len(text)}"
        with pytest.raises(ValueError, match=rule):
            check_expected(text)


def test_close_to_words() -> None:
    assert within_tolerance(r"\text{Velite}", "velite", tolerance=0.01) is None
    assert equivalent(r"\text{Velite}", "velite").equal
    assert not equivalent("velites", "velite").equal


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        *(("25%", "25%", True), (r"25\%", "25 %", True), (r"$25\%$", "1/4", True)),
        *((r"25\text{%}", "0.25", True), ("0.25", "25%", True), (r"\frac{1}{4}", "25%", True)),
        *(("25", "25%", True), ("25%", "25", True), ("12.5%", r"\frac18", True)),
        *(("1,250%", "12.5", True), ("25%", "2500", False), ("25", "1/4", False)),
        *(("2.5%", "25%", False), ("25%%", "25", False), ("%", "0", False)),
        *(("25 percent", "25", True), (r"\$1,250.50", "1250.5", True), (r"$\$18$", "18", True)),
        *(("100% sure", "100%", False), ("sure %", "sure %", True)),
    ],
)
def test_percentages_and_amounts(answer: str, expected: str, right: bool) -> None:
    assert equivalent(answer, expected).equal is right


@given(fractions)
def test_a_percentage_is_a_hundred_times_the_number(value: Fraction) -> None:
    text = f"{value * 100}%"
    assert equivalent(text, str(value)).equal
    assert equivalent(str(value), text).equal
    assert equivalent(str(value * 100), text).equal
    assert equivalent(text, str(value * 100)).equal
    assert equivalent(text, str(value * 10)).equal == (value == 0)


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        (r"So it is \boxed{1{,}250}.", "1250", 1.0),
        (r"\boxed{3} at first, but \boxed{\dfrac{7}{2}}", 3.5, 1.0),
        *((r"\boxed{3.50}", 3.5, 1.0), (r"<think>\boxed{4}</think> \boxed{5}", 5, 1.0)),
        (r"<think>maybe \boxed{5}</think> It is 5.", 5, 0.0),
        *((r"<think>maybe \boxed{5}", 5, 0.0), (r"</think>\boxed{5}</think>\boxed{6}", 6, 1.0)),
        *(("5", "5", 0.0), ("", "5", 0.0), (r"\boxed{}", "5", 0.0)),
        *((r"\boxed{5} \boxed{6", "5", 0.0), (r"\boxed{4 or 5}", "5", 0.0)),
    ],
)
def test_a_reward_for_what_is_boxed(answer: str, expected: str | float, reward: float) -> None:
    check_record({"reward_model": {"ground_truth": expected}})
    assert boxed_reward({"answer": expected}, answer) == Score(reward=reward, success=reward == 1.0)


@pytest.mark.parametrize("record", [{}, {"answer": None}, {"answer": ["5"]}, {"answer": True}])
def test_a_record_without_an_answer_is_an_error(record: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a record must have an answer, text or a number, got"):
        boxed_reward(record, r"\boxed{5}")
