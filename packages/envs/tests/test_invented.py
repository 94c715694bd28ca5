"""Invented worlds: the articles alone suffice to answer every question."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable

import pytest

from rollweave.envs.handlers.answers import equivalent, within_tolerance
from rollweave_envs import invented
from rollweave_envs.corpus import Bm25
from rollweave_envs.invented import World, question, world

SEEDS = range(8)


class Reader:
    """Knows only the articles' texts."""

    def __init__(self, of: World) -> None:
        self.texts = {document.title: document.text for document in of.documents}

    def value(self, name: str, pattern: str) -> float:
        match = re.search(pattern, self.texts[name])
        assert match is not None, (name, pattern)
        return float(match[1])

    def density(self, mineral: str) -> float:
        return self.value(mineral, r"density is ([\d.]+) g/cm³")

    def planet(self, mineral: str) -> str:
        match = re.search(r"mined on (\w+) and", self.texts[mineral])
        assert match is not None
        return match[1]

    def gravity(self, planet: str) -> float:
        return self.value(planet, r"acceleration of ([\d.]+) m/s²")

    def parts(self, compound: str) -> list[tuple[int, str]]:
        match = re.search(r"has (\d) of (\w+) and (\d) of (\w+)", self.texts[compound])
        assert match is not None
        return [(int(match[1]), match[2]), (int(match[3]), match[4])]

    def molar(self, compound: str) -> float:
        return sum(
            count * self.value(element, r"molar mass is ([\d.]+) g/mol")
            for count, element in self.parts(compound)
        )

    def ore(self, compound: str) -> tuple[str, float]:
        match = re.search(
            r"extracted from (\w+), of whose mass it makes up ([\d.]+) %", self.texts[compound]
        )
        assert match is not None
        return match[1], float(match[2]) / 100

    def half_life(self, name: str) -> float:
        return self.value(name, r"described in (\d+)\.")


def days(read: Reader, mineral: str) -> float:
    planet = read.planet(mineral)
    return read.value(planet, r"in (\d+) hours") / read.value(planet, r"takes ([\d.]+) hours")


def extracted(read: Reader, compound: str, volume: str) -> float:
    mineral, share = read.ore(compound)
    return float(volume) * read.density(mineral) * share


ANSWERS: dict[str, tuple[str, Callable[..., float | str]]] = {
    "cube_mass": (
        r"cube of (\w+) with sides of (\d+) cm",
        lambda read, m, s: read.density(m) * int(s) ** 3,
    ),
    "densest": (r"densest: (\w+), (\w+) or (\w+)\?", lambda read, *m: max(m, key=read.density)),
    "weight": (
        r"block of (\w+) has a volume of (\d+)",
        lambda read, m, v: int(v) / 1e6 * read.density(m) * 1000 * read.gravity(read.planet(m)),
    ),
    "days": (r"planet where (\w+) is mined", days),
    "fall": (
        r"air, (\d+) m down to the ground of (\w+)\?",
        lambda read, h, p: math.sqrt(2 * int(h) / read.gravity(p)),
    ),
    "decay": (
        r"grams of (\w+) are left of (\d+) g after (\d+)",
        lambda read, e, g, h: (
            int(g) * math.exp(-math.log(2) * int(h) / read.value(e, r"half-life of (\d+) hours"))
        ),
    ),
    "warming": (
        r"warm (\d+) g of (\w+) by (\d+) K",
        lambda read, g, c, k: int(g) * int(k) * read.value(c, r"capacity is ([\d.]+) J"),
    ),
    "moles": (r"moles are (\d+) g of (\w+)\?", lambda read, g, c: int(g) / read.molar(c)),
    "atoms": (
        r"atoms of (\w+) are in (\d+) g of (\w+)\?",
        lambda read, e, g, c: (
            6.022e23 * int(g) / read.molar(c) * {b: a for a, b in read.parts(c)}[e]
        ),
    ),
    "extraction": (r"grams of (\w+) does one get from (\d+) cm³", extracted),
    "years_between": (
        r"descriptions of (\w+) and of (\w+)\?",
        lambda read, a, b: abs(read.half_life(a) - read.half_life(b)),
    ),
}


def test_every_kind_has_a_reader() -> None:
    assert ANSWERS.keys() == {kind.__name__ for kind in invented.KINDS}


@pytest.mark.parametrize("kind", invented.KINDS, ids=lambda kind: kind.__name__)
def test_a_reader_of_the_articles_finds_the_answer(
    kind: Callable[[World, random.Random], tuple[str, float | str]],
) -> None:
    pattern, answer = ANSWERS[kind.__name__]
    for seed in SEEDS:
        question, right = kind(world(seed), random.Random(seed))
        match = re.search(pattern, question)
        assert match is not None, question
        read = answer(Reader(world(seed)), *match.groups())
        assert (
            read == right
            if isinstance(right, str)
            else math.isclose(float(read), float(right), rel_tol=1e-9)
        )


@pytest.mark.extended
def test_answers_are_readable_and_differ() -> None:
    drawn = [question(world(seed), random.Random(seed)) for seed in range(200)]
    for each in drawn:
        verdict = within_tolerance(each.answer, each.answer, tolerance=0)
        assert (verdict or equivalent(each.answer, each.answer)).equal
    assert Counter(one.answer for one in drawn).most_common(1)[0][1] <= 3
    assert drawn == [question(world(seed), random.Random(seed)) for seed in range(200)]


def test_a_world_depends_on_its_seed() -> None:
    assert len(world(1).documents) == len({document.title for document in world(1).documents}) == 56
    assert world(1) == world.__wrapped__(1)
    titles = [{document.title for document in world(seed).documents} for seed in (1, 2)]
    assert len(titles[0] & titles[1]) < 6


async def test_a_name_finds_its_article_first() -> None:
    for seed in (1, 2):
        index = Bm25(world(seed).documents)
        for document in world(seed).documents:
            assert (await index.find(document.title, 1))[0] == document
