"""Invented worlds: articles about planets, elements, minerals and compounds that do not
exist, and questions about them.

So an answer cannot be known, only found: by searching one to three articles, and a
calculation. The worlds are generated from a seed.

Invariants: a world is a function of its seed, a question of its world and the
generator; every number that a question needs is in the articles, and the answer is
computed from the numbers as they are written there.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from rollweave_envs.corpus import Document
from rollweave_envs.questions import Question

AVOGADRO = 6.022e23

YEARS = 2110, 2290
"""Range of the years of first descriptions."""

_STARTS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "h",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "th",
    "v",
    "z",
)
_MIDDLES = ("a", "e", "i", "o", "u", "ae", "ei", "ou")
_ENDS = ("l", "m", "n", "r", "s", "t", "v", "nd", "rk", "ss")


@dataclass(frozen=True)
class Planet:
    name: str
    gravity: float  # m/s²
    day_h: float
    year_h: int
    moons: int


@dataclass(frozen=True)
class Element:
    name: str
    molar: float  # g/mol
    half_life_h: int
    described: int  # year


@dataclass(frozen=True)
class Mineral:
    name: str
    density: float  # g/cm³
    hardness: float
    melting: int  # °C
    planet: Planet
    described: int  # year


@dataclass(frozen=True)
class Compound:
    name: str
    parts: tuple[tuple[Element, int], ...]
    heat: float  # J/(g·K)
    mineral: Mineral
    share: float  # percent of the mineral's mass


@dataclass(frozen=True)
class World:
    """An invented world; `documents` contain all its facts."""

    planets: tuple[Planet, ...]
    elements: tuple[Element, ...]
    minerals: tuple[Mineral, ...]
    compounds: tuple[Compound, ...]
    documents: tuple[Document, ...]


@functools.lru_cache(64)
def world(seed: int) -> World:
    """Return the world of a seed: 10 planets, 12 elements, 18 minerals, 16 compounds,
    and an article on each.
    """
    rng = random.Random(seed)
    names: set[str] = set()
    planets = tuple(_planet(rng, _name(rng, names, "a")) for _ in range(10))
    elements = tuple(
        Element(
            _name(rng, names, "ium"),
            _round(rng, 12, 290, 1),
            rng.randint(3, 900),
            rng.randint(*YEARS),
        )
        for _ in range(12)
    )
    densities = rng.sample(range(180, 1500), 18)  # all different: one is the densest
    minerals = tuple(
        Mineral(
            name=_name(rng, names, "ite"),
            density=density / 100,
            hardness=_round(rng, 1, 10, 1),
            melting=rng.randint(300, 3200),
            planet=rng.choice(planets),
            described=rng.randint(*YEARS),
        )
        for density in densities
    )
    compounds = tuple(
        Compound(
            name=_name(rng, names, "ane"),
            parts=tuple((element, rng.randint(1, 4)) for element in rng.sample(elements, 2)),
            heat=_round(rng, 0.2, 5, 3),
            mineral=rng.choice(minerals),
            share=_round(rng, 2, 60, 1),
        )
        for _ in range(16)
    )
    articles = [
        *(_about_planet(rng, planet) for planet in planets),
        *(_about_element(rng, element) for element in elements),
        *(_about_mineral(rng, mineral) for mineral in minerals),
        *(_about_compound(rng, compound) for compound in compounds),
    ]
    rng.shuffle(articles)
    return World(planets, elements, minerals, compounds, tuple(articles))


def question(of: World, rng: random.Random) -> Question:
    """Return a question about a world. Its answer is a number, or the name of a
    mineral.
    """
    text, answer = rng.choice(KINDS)(of, rng)
    return Question(question=text, answer=answer if isinstance(answer, str) else f"{answer:.9g}")


def cube_mass(of: World, rng: random.Random) -> tuple[str, float]:
    mineral, side = rng.choice(of.minerals), rng.randint(2, 40)
    return (
        f"What is the mass in grams of a solid cube of {mineral.name} with sides of {side} cm?",
        mineral.density * side**3,
    )


def densest(of: World, rng: random.Random) -> tuple[str, str]:
    some = rng.sample(of.minerals, 3)
    first, second, third = (mineral.name for mineral in some)
    text = f"Which mineral is the densest: {first}, {second} or {third}? Answer with its name."
    return text, max(some, key=lambda mineral: mineral.density).name


def weight(of: World, rng: random.Random) -> tuple[str, float]:
    mineral, volume = rng.choice(of.minerals), rng.randint(50, 5000)
    text = (
        f"A block of {mineral.name} has a volume of {volume} cm³. What does it weigh, in newtons, "
        "where it is mined?"
    )
    return text, mineral.density * volume / 1000 * mineral.planet.gravity


def days(of: World, rng: random.Random) -> tuple[str, float]:
    mineral = rng.choice(of.minerals)
    text = (
        f"How many of its own days does one year have on the planet where {mineral.name} is "
        "mined? Give a decimal."
    )
    return text, mineral.planet.year_h / mineral.planet.day_h


def fall(of: World, rng: random.Random) -> tuple[str, float]:
    planet, height = rng.choice(of.planets), rng.randint(5, 2000)
    text = (
        f"How many seconds does a stone fall, from rest and without air, {height} m down to the "
        f"ground of {planet.name}?"
    )
    return text, math.sqrt(2 * height / planet.gravity)


def decay(of: World, rng: random.Random) -> tuple[str, float]:
    element, grams = rng.choice(of.elements), rng.randint(5, 500)
    hours = rng.randint(element.half_life_h // 3, 4 * element.half_life_h)
    text = f"How many grams of {element.name} are left of {grams} g after {hours} hours?"
    return text, grams * 0.5 ** (hours / element.half_life_h)


def warming(of: World, rng: random.Random) -> tuple[str, float]:
    compound, grams, kelvin = rng.choice(of.compounds), rng.randint(10, 900), rng.randint(3, 80)
    return (
        f"How many joules warm {grams} g of {compound.name} by {kelvin} K?",
        compound.heat * grams * kelvin,
    )


def moles(of: World, rng: random.Random) -> tuple[str, float]:
    compound, grams = rng.choice(of.compounds), rng.randint(10, 900)
    return f"How many moles are {grams} g of {compound.name}?", grams / _molar(compound)


def atoms(of: World, rng: random.Random) -> tuple[str, float]:
    compound, grams = rng.choice(of.compounds), rng.randint(10, 900)
    element, count = rng.choice(compound.parts)
    text = (
        f"How many atoms of {element.name} are in {grams} g of {compound.name}? (Avogadro's "
        "number is 6.022e23.)"
    )
    return text, grams / _molar(compound) * count * AVOGADRO


def extraction(of: World, rng: random.Random) -> tuple[str, float]:
    compound, volume = rng.choice(of.compounds), rng.randint(50, 5000)
    ore = f"{volume} cm³ of the mineral that it is extracted from"
    return (
        f"How many grams of {compound.name} does one get from {ore}?",
        compound.mineral.density * volume * compound.share / 100,
    )


def years_between(of: World, rng: random.Random) -> tuple[str, float]:
    element, mineral = rng.choice(of.elements), rng.choice(of.minerals)
    text = (
        f"How many years lie between the first descriptions of {element.name} and of "
        f"{mineral.name}?"
    )
    return text, abs(element.described - mineral.described)


KINDS: tuple[Callable[[World, random.Random], tuple[str, float | str]], ...] = (
    *(cube_mass, densest, weight, days, fall, decay),
    *(warming, moles, atoms, extraction, years_between),
)


def _molar(compound: Compound) -> float:
    return sum(element.molar * count for element, count in compound.parts)


def _planet(rng: random.Random, name: str) -> Planet:
    day_h = _round(rng, 6, 90, 1)
    return Planet(name, _round(rng, 1, 30, 2), day_h, rng.randint(1000, 30_000), rng.randint(0, 30))


def _about_planet(rng: random.Random, planet: Planet) -> Document:
    facts = [
        f"Bodies fall on {planet.name} with an acceleration of {planet.gravity} m/s².",
        f"A day of {planet.name} takes {planet.day_h} hours.",
        f"It goes once around its star, which is its year, in {planet.year_h} hours.",
        f"{planet.name} has {planet.moons} known moons.",
    ]
    return _article(
        rng, planet.name, f"{planet.name} is a rocky planet with a thin atmosphere.", facts
    )


def _about_element(rng: random.Random, element: Element) -> Document:
    facts = [
        f"Its molar mass is {element.molar} g/mol.",
        f"{element.name} decays with a half-life of {element.half_life_h} hours.",
        f"It was first described in {element.described}.",
    ]
    return _article(rng, element.name, f"{element.name} is a radioactive element.", facts)


def _about_mineral(rng: random.Random, mineral: Mineral) -> Document:
    facts = [
        f"Its density is {mineral.density} g/cm³.",
        f"On the scratch scale it has a hardness of {mineral.hardness}.",
        f"{mineral.name} melts at {mineral.melting} °C.",
        f"It is mined on {mineral.planet.name} and nowhere else.",
        f"It was first described in {mineral.described}.",
    ]
    return _article(rng, mineral.name, f"{mineral.name} is a mineral.", facts)


def _about_compound(rng: random.Random, compound: Compound) -> Document:
    (first, many), (second, more) = compound.parts
    facts = [
        f"A molecule has {many} of {first.name} and {more} of {second.name}, by number of atoms.",
        f"Its specific heat capacity is {compound.heat} J/(g·K).",
        f"{compound.name} is extracted from {compound.mineral.name}, of whose mass it makes up "
        f"{compound.share} %.",
    ]
    return _article(rng, compound.name, f"{compound.name} is a compound of two elements.", facts)


def _article(rng: random.Random, title: str, opening: str, facts: list[str]) -> Document:
    return Document(title=title, text=" ".join([opening, *rng.sample(facts, len(facts))]))


def _round(rng: random.Random, least: float, most: float, places: int) -> float:
    return round(rng.uniform(least, most), places)


def _name(rng: random.Random, taken: set[str], ending: str) -> str:
    while True:
        syllables = (rng.choice(_STARTS) + rng.choice(_MIDDLES) for _ in range(rng.randint(1, 2)))
        name = ("".join(syllables) + rng.choice(_ENDS) + ending).capitalize()
        if name not in taken:
            taken.add(name)
            return name
