"""Every family against a slow reference that reads only the question."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.envs.handlers.answers import parse_numbers
from rollweave_envs.math_problems import FAMILIES
from tests.support.properties import examples

INTEGER = re.compile(r"-?\d+")


def ints(text: str) -> list[int]:
    return [int(digits) for digits in INTEGER.findall(text)]


def modular_power(question: str) -> Any:
    base, power, modulus = ints(question)
    value = 1
    for bit in bin(power)[2:]:
        value = value * value * (base if bit == "1" else 1) % modulus
    return value


def congruences(question: str) -> Any:
    numbers = ints(question)
    number, step = 0, 1
    for rest, modulus in zip(numbers[::2], numbers[1::2], strict=True):
        while number % modulus != rest:
            number += step
        step *= modulus
    return number


def linear_system(question: str) -> Any:
    left = [
        part.split("=")
        for part in question.removeprefix("Solve the system ").split(". ")[0].split(";")
    ]
    solution = sympy.Matrix([ints(one) for one, _ in left]).LUsolve(
        sympy.Matrix([int(other) for _, other in left])
    )
    return tuple(Fraction(int(value.p), int(value.q)) for value in solution)


def divisible(question: str) -> Any:
    _, bound, first, second, third = ints(question)
    number = np.arange(1, bound + 1)
    return int((((number % first == 0) | (number % second == 0)) & (number % third != 0)).sum())


def lattice_paths(question: str) -> Any:
    _, _, _, _, width, height, x, y = ints(question)
    ways = [[0] * (height + 1) for _ in range(width + 1)]
    ways[0][0] = 1
    for i, j in itertools.product(range(width + 1), range(height + 1)):
        if (i, j) != (0, 0):
            ways[i][j] = (i > 0 and ways[i - 1][j]) + (j > 0 and ways[i][j - 1])
        if (i, j) == (x, y):
            ways[i][j] = 0
    return ways[width][height]


def recurrence(question: str) -> Any:
    _, first, _, second, p, _, q, _, _, place, modulus = ints(
        question.replace("(n-1)", "(1)").replace("(n-2)", "(2)")
    )
    step = np.array([[p, q], [1, 0]], dtype=object)
    power, left, bits = np.array([[1, 0], [0, 1]], dtype=object), step, place - 2
    while bits:
        power = power.dot(left) % modulus if bits & 1 else power
        left, bits = left.dot(left) % modulus, bits >> 1
    return int(power.dot(np.array([second, first], dtype=object))[0] % modulus)


def polygon(question: str) -> Any:
    numbers = ints(question)
    area = sympy.Polygon(*zip(numbers[::2], numbers[1::2], strict=True)).area
    return abs(Fraction(int(area.p), int(area.q)))


def point_and_line(question: str) -> Any:
    px, py, ax, ay, bx, by = ints(question)
    square = sympy.Line((ax, ay), (bx, by)).distance(sympy.Point(px, py)) ** 2
    return Fraction(int(square.p), int(square.q))


def divisors(question: str) -> Any:
    return int(sympy.divisor_sigma(*ints(question)))


def change(question: str) -> Any:
    amount, *coins = ints(question)
    series = Counter({0: 1})
    for coin in coins:
        more: Counter[int] = Counter()
        for total, ways in series.items():
            for paid in range(total, amount + 1, coin):
                more[paid] += ways
        series = more
    return series[amount]


def dice(question: str) -> Any:
    count, _, sides, target = ints(question)
    one = np.array([1] * sides, dtype=object)
    every = np.array([1], dtype=object)
    for _ in range(count):
        every = np.convolve(every, one)
    return Fraction(int(sum(every[max(0, target - count) :])), sides**count)


def roots(question: str) -> Any:
    power = int(re.search(r"r\^(\d+)", question)[1])  # type: ignore[index]
    factors = [int(digits) for digits in re.findall(r"\((-?\d+)\)x", question)]
    degree = len(factors) - 1
    companion = sympy.zeros(degree)
    for place in range(degree):
        companion[0, place] = sympy.Rational(-factors[place + 1], factors[0])
        if place:
            companion[place, place - 1] = 1
    trace = (companion**power).trace()
    return Fraction(int(trace.p), int(trace.q))


def digits(question: str) -> Any:
    base, power = ints(question)
    value, total = base**power, 0
    while value:
        value, last = divmod(value, 10)
        total += last
    return total


REFERENCES: dict[str, Callable[[str], Any]] = {
    reference.__name__: reference
    for reference in (
        *(
            modular_power,
            congruences,
            linear_system,
            divisible,
            lattice_paths,
            recurrence,
            polygon,
            point_and_line,
        ),
        *(divisors, change, dice, roots, digits),
    )
}


def test_every_family_has_a_reference() -> None:
    assert REFERENCES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32), level=st.integers(1, 3))
def test_answers_are_right(family: str, seed: int, level: int) -> None:
    problem = FAMILIES[family](random.Random(seed), level)
    assert problem == FAMILIES[family](random.Random(seed), level)
    expected = REFERENCES[family](problem.question)
    assert parse_numbers(problem.answer) == (
        expected if isinstance(expected, tuple) else (Fraction(expected),)
    )
    assert len(problem.question) < 500


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_guess_is_rarely_right(family: str) -> None:
    for level in (1, 2, 3):
        answers = Counter(
            FAMILIES[family](random.Random(seed), level).answer for seed in range(200)
        )
        assert answers.most_common(1)[0][1] <= 60 / level, (level, answers.most_common(1))
