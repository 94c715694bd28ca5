"""Mathematics problems with exact answers, drawn from families with parameters.

Invariants: a problem is a function of its family, its level and the generator; its
answer is an integer, a fraction or a tuple of those, in the form that the problem
requests, so that `answers.parse_numbers` decides. At levels 2 and 3 the problems exceed
mental arithmetic, and a few lines of Python solve them.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

LEVELS = 3
"""Number of levels; the sizes of the parameters grow with the level, from 1."""


@dataclass(frozen=True)
class Problem:
    """A question and its answer, in the form of `answers.parse_numbers`."""

    question: str
    answer: str


def modular_power(rng: random.Random, level: int) -> Problem:
    base, power = rng.randint(2, 10**level), rng.randint(10**level, 10 ** (2 * level))
    modulus = rng.randint(10, 10 ** (level + 1))
    return Problem(
        f"What is the remainder when {base}^{power} is divided by {modulus}?",
        str(pow(base, power, modulus)),
    )


def congruences(rng: random.Random, level: int) -> Problem:
    moduli = _coprime(rng, level + 1)
    number = rng.randrange(math.prod(moduli))
    text = ", ".join(f"{number % modulus} modulo {modulus}" for modulus in moduli)
    return Problem(f"What is the smallest non-negative integer that is {text}?", str(number))


def linear_system(rng: random.Random, level: int) -> Problem:
    size = 2 if level == 1 else 3
    while True:
        rows = [[rng.randint(-9 * level, 9 * level) for _ in range(size)] for _ in range(size)]
        solution = [Fraction(rng.randint(-20, 20), rng.randint(1, level + 1)) for _ in range(size)]
        if _determinant(rows):
            break
    names = "xyz"[:size]
    equations = []
    for row in rows:
        right = sum(
            (factor * value for factor, value in zip(row, solution, strict=True)), Fraction()
        )
        scale = right.denominator
        left = " + ".join(
            f"({factor * scale}){name}" for factor, name in zip(row, names, strict=True)
        )
        equations.append(f"{left} = {right * scale}")
    unknowns = ", ".join(names)
    return Problem(
        f"Solve the system {'; '.join(equations)}. Give the solution as ({unknowns}).",
        _tuple(solution),
    )


def divisible(rng: random.Random, level: int) -> Problem:
    bound = rng.randint(10 ** (level + 1), 10 ** (level + 2))
    first, second, third = rng.sample(range(3, 10 + 5 * level), 3)
    either = bound // first + bound // second - bound // math.lcm(first, second)
    both = sum(bound // math.lcm(third, one) for one in (first, second)) - bound // math.lcm(
        first, second, third
    )
    condition = f"divisible by {first} or by {second}, but not by {third}"
    return Problem(f"How many integers from 1 to {bound} are {condition}?", str(either - both))


def lattice_paths(rng: random.Random, level: int) -> Problem:
    width, height = (rng.randint(3 * level, 5 * level) for _ in range(2))
    x, y = rng.randint(1, width - 1), rng.randint(1, height - 1)
    free = math.comb(width + height, width) - math.comb(x + y, x) * math.comb(
        width + height - x - y, width - x
    )
    steps = "steps of 1 to the right or of 1 up"
    return Problem(
        f"How many paths of {steps} lead from (0, 0) to ({width}, {height}) without "
        f"visiting ({x}, {y})?",
        str(free),
    )


def recurrence(rng: random.Random, level: int) -> Problem:
    p, q, first, second = (rng.randint(1, 4 * level) for _ in range(4))
    place, modulus = rng.randint(10**level, 2 * 10**level), rng.randint(50, 10 ** (level + 1))
    before, value = first, second
    for _ in range(place - 2):
        before, value = value, (p * value + q * before) % modulus
    rule = f"a_1 = {first}, a_2 = {second}, and a_n = {p} a_(n-1) + {q} a_(n-2)"
    return Problem(
        f"Let {rule} for n > 2. What is the remainder of a_{place} modulo {modulus}?",
        str(value % modulus),
    )


def polygon(rng: random.Random, level: int) -> Problem:
    """Return a polygon that is star-shaped around a point inside: its corners are in
    the order of their angles.
    """
    count, reach = 3 + level, 10 * level
    while True:
        offsets = {
            (rng.randint(-reach, reach), rng.randint(-reach, reach)) for _ in range(count)
        } - {(0, 0)}
        ring = sorted(offsets, key=lambda point: math.atan2(point[1], point[0]))
        turns = [_cross(one, other) for one, other in zip(ring, ring[1:] + ring[:1], strict=True)]
        if len(ring) == count and min(turns) > 0:
            break
    middle = rng.randint(-reach, reach), rng.randint(-reach, reach)
    corners = ", ".join(f"({middle[0] + x}, {middle[1] + y})" for x, y in ring)
    return Problem(
        f"What is the area of the polygon with the corners {corners}, in this order?",
        str(Fraction(sum(turns), 2)),
    )


def point_and_line(rng: random.Random, level: int) -> Problem:
    reach = 10**level
    (px, py), (ax, ay) = (
        (rng.randint(-reach, reach), rng.randint(-reach, reach)) for _ in range(2)
    )
    dx, dy = rng.randint(1, reach), rng.choice((-1, 1)) * rng.randint(1, reach)
    square = Fraction(_cross((dx, dy), (px - ax, py - ay)) ** 2, dx * dx + dy * dy)
    line = f"the line through ({ax}, {ay}) and ({ax + dx}, {ay + dy})"
    return Problem(
        f"What is the square of the distance from ({px}, {py}) to {line}? Give an exact fraction.",
        str(square),
    )


def divisors(rng: random.Random, level: int) -> Problem:
    primes = rng.sample((2, 3, 5, 7, 11, 13), level + 1)
    powers = [rng.randint(1, 4) for _ in primes]
    number = math.prod(prime**power for prime, power in zip(primes, powers, strict=True))
    total = math.prod(
        (prime ** (power + 1) - 1) // (prime - 1)
        for prime, power in zip(primes, powers, strict=True)
    )
    return Problem(f"What is the sum of all positive divisors of {number}?", str(total))


def change(rng: random.Random, level: int) -> Problem:
    coins = sorted(rng.sample(range(2, 12 + 4 * level), 2 + level))
    amount = rng.randint(10 * level**2, 60 * level**2)
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    text = ", ".join(map(str, coins))
    return Problem(
        f"In how many ways can {amount} be paid with coins of {text}? Their order does not matter.",
        str(ways[amount]),
    )


def dice(rng: random.Random, level: int) -> Problem:
    count, sides = rng.randint(2, 2 * level + 1), rng.choice((4, 6, 8, 10, 12))
    target = rng.randint(count + 1, count * sides - 1)
    ways = {0: 1}
    for _ in range(count):
        more: dict[int, int] = {}
        for total, number in ways.items():
            for face in range(1, sides + 1):
                more[total + face] = more.get(total + face, 0) + number
        ways = more
    likely = Fraction(
        sum(number for total, number in ways.items() if total >= target), sides**count
    )
    condition = f"{count} fair dice with the faces 1 to {sides} show at least {target} in sum"
    return Problem(
        f"What is the probability that {condition}? Give an exact fraction.", str(likely)
    )


def roots(rng: random.Random, level: int) -> Problem:
    """Return power sums of a polynomial's roots, by Newton's identities."""
    degree, power = level + 1, rng.randint(2, level + 2)
    lead, rest = rng.randint(1, 3 * level), [rng.randint(-9, 9) for _ in range(degree)]
    elementary = [
        Fraction(1),
        *(Fraction((-1) ** place * rest[place - 1], lead) for place in range(1, degree + 1)),
    ]
    elementary += [Fraction()] * power
    sums = [Fraction(degree)]
    for k in range(1, power + 1):
        known = sum(
            ((-1) ** (i - 1) * elementary[i] * sums[k - i] for i in range(1, k)), Fraction()
        )
        sums.append(known + (-1) ** (k - 1) * k * elementary[k])
    terms = " + ".join(
        f"({factor})x^{degree - place}" for place, factor in enumerate([lead, *rest])
    )
    condition = (
        f"the sum of the powers r^{power} over all complex roots r, with multiplicity, of {terms}"
    )
    return Problem(f"What is {condition}? Give an exact fraction.", str(sums[power]))


def digits(rng: random.Random, level: int) -> Problem:
    base, power = rng.randint(2, 20), rng.randint(5 * level, 40 * level**2)
    return Problem(
        f"What is the sum of the decimal digits of {base}^{power}?",
        str(sum(map(int, str(base**power)))),
    )


FAMILIES: dict[str, Callable[[random.Random, int], Problem]] = {
    "modular_power": modular_power,
    "congruences": congruences,
    "linear_system": linear_system,
    "divisible": divisible,
    "lattice_paths": lattice_paths,
    "recurrence": recurrence,
    "polygon": polygon,
    "point_and_line": point_and_line,
    "divisors": divisors,
    "change": change,
    "dice": dice,
    "roots": roots,
    "digits": digits,
}


def _coprime(rng: random.Random, count: int) -> list[int]:
    """Return pairwise coprime numbers."""
    numbers: list[int] = []
    while len(numbers) < count:
        number = rng.randint(5, 99)
        if math.gcd(number, math.prod(numbers)) == 1:
            numbers.append(number)
    return numbers


def _determinant(rows: Sequence[Sequence[int]]) -> int:
    if len(rows) == 1:
        return rows[0][0]
    minors = ([[*row[:place], *row[place + 1 :]] for row in rows[1:]] for place in range(len(rows)))
    return sum(
        (-1) ** place * rows[0][place] * _determinant(minor) for place, minor in enumerate(minors)
    )


def _cross(one: tuple[int, int], other: tuple[int, int]) -> int:
    return one[0] * other[1] - one[1] * other[0]


def _tuple(values: Sequence[Fraction]) -> str:
    return f"({', '.join(map(str, values))})"
