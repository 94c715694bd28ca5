"""Programming tasks: families of small tasks with parameters, each with a correct
solution that computes the hidden cases.

Invariants: a task, its example and its cases depend on family, parameters and seed
alone; a task belongs to one split by its family and parameters. `solve` of a family is
self-contained, so its source is a correct program too (`program`).
"""

import inspect
import json
import random
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rollweave.schema.base import Struct, mix
from rollweave_envs import code_solutions as right

Params = dict[str, Any]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Family(Struct, frozen=True, kw_only=True):
    """`about` is the task's text, with the parameters in braces; `case` generates an
    input of about `size` lines.
    """

    about: str
    params: Callable[[random.Random], Params]
    case: Callable[[random.Random, Params, int], str]
    solve: Callable[..., str]


class Problem(Struct, frozen=True, kw_only=True):
    """One task: a family with parameters."""

    family: str
    params: Params

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")

    @property
    def content(self) -> str:
        return json.dumps([self.family, self.params], sort_keys=True)

    def text(self) -> str:
        """Return the task's text with an example."""
        entry = FAMILIES[self.family]
        given = entry.case(random.Random(mix("example", self.content)), self.params, 4)
        settings_text = {
            name: " ".join(value) if isinstance(value, list) else value
            for name, value in self.params.items()
        }
        about = entry.about.format(**settings_text)
        return f"{about}\n\nFor the input\n{given}\nthe output is\n{self.answer(given)}"

    def answer(self, given: str) -> str:
        """Return the output of a correct program."""
        return FAMILIES[self.family].solve(given, **self.params)

    def cases(self, seed: int, count: int) -> list[str]:
        """Return inputs, from small to larger."""
        entry, rng = FAMILIES[self.family], random.Random(mix("cases", self.content, seed))
        return [entry.case(rng, self.params, 1 + number * number) for number in range(count)]

    def program(self) -> str:
        """Return the source of a correct program."""
        source = textwrap.dedent(inspect.getsource(FAMILIES[self.family].solve))
        settings = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"import sys\n\n{source}\nprint(solve(sys.stdin.read(), {settings}))".replace(
            "def " + self.family, "def solve"
        )


def draw_problem(rng: random.Random, families: tuple[str, ...]) -> Problem:
    """Return a random problem of these families."""
    family = rng.choice(families)
    return Problem(family=family, params=FAMILIES[family].params(rng))


def _numbers(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    return "\n".join(
        " ".join(str(rng.randint(-99, 99)) for _ in range(rng.randint(1, 6))) for _ in range(size)
    )


def _words(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    known = ["".join(rng.choices(LETTERS, k=rng.randint(1, 5))) for _ in range(size + 2)]
    return "\n".join(" ".join(rng.choices(known, k=rng.randint(1, 6))) for _ in range(size))


def _sentences(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    return "\n".join(
        line.capitalize() + rng.choice(".!?, 7") for line in _words(rng, params, size).split("\n")
    )


def _runs(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    return "\n".join(
        "".join(rng.choice("abc") * rng.randint(1, 12) for _ in range(rng.randint(1, 5)))
        for _ in range(size)
    )


def _grid(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    side = min(30, 2 + size)
    rows = [[rng.choice("..#") for _ in range(side)] for _ in range(side)]
    rows[0][0] = rows[-1][-1] = "."
    return "\n".join("".join(row) for row in rows)


def _edges(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    nodes = 2 + size
    return "\n".join(
        [str(nodes), *(f"{rng.randint(1, nodes)} {rng.randint(1, nodes)}" for _ in range(size))]
    )


def _tasks(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    nodes = 2 + size
    pairs = {tuple(sorted(rng.sample(range(nodes), 2))) for _ in range(size)}
    names = rng.sample(range(1, nodes + 1), nodes)
    return "\n".join([str(nodes), *(f"{names[a]} {names[b]}" for a, b in sorted(pairs))])


def _brackets(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    lines = []
    for _ in range(size):
        text, opened = "", list[str]()
        for _ in range(rng.randint(1, 12)):
            if opened and rng.random() < 0.5:
                text += opened.pop()
            else:
                pair = rng.choice(params["pairs"])
                text, opened = text + pair[0], [*opened, pair[1]]
        lines.append(
            text + "".join(reversed(opened))
            if rng.random() < 0.6
            else text + rng.choice(params["pairs"])[1]
        )
    return "\n".join(lines)


def _bases(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"[: params["source"]]
    return "\n".join(
        (rng.choice(digits[1:]) + "".join(rng.choices(digits, k=rng.randint(0, 9))))
        for _ in range(size)
    )


def _intervals(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    starts = [rng.randint(0, 20 * size) for _ in range(size)]
    return "\n".join(f"{start} {start + rng.randint(1, 30)}" for start in starts)


def _sales(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    shops = ["north", "south", "east", "west", "center"]
    return "\n".join(
        f"{rng.choice(LETTERS)},{rng.choice(shops)},{rng.randint(1, 60)}" for _ in range(size)
    )


def _sums(rng: random.Random, params: Mapping[str, Any], size: int) -> str:
    def line() -> str:
        parts = [str(rng.randint(0, 20))]
        for _ in range(rng.randint(0, 6)):
            parts += [rng.choice("+-*"), str(rng.randint(0, 20))]
        return " ".join(parts)

    return "\n".join(line() for _ in range(size))


FAMILIES: dict[str, Family] = {
    "divisible": Family(
        about="Each line of the input has integers. Print, for each line, the {what} of those that "
        "are divisible by {k} (0 where there are none).",
        params=lambda rng: {
            "k": rng.randint(2, 9),
            "what": rng.choice(["sum", "count", "maximum"]),
        },
        case=_numbers,
        solve=right.divisible,
    ),
    "frequent": Family(
        about="The input is text. Print its {k} most frequent words of at least {least} letters, "
        "one a line, each with its count after a space; of equally frequent ones the first by the "
        "alphabet. Print fewer where there are not so many.",
        params=lambda rng: {"k": rng.randint(1, 6), "least": rng.randint(1, 4)},
        case=_words,
        solve=right.frequent,
    ),
    "shift": Family(
        about="Shift every letter of the input by {k} places in the alphabet, from z on to a, "
        "upper case stays upper case. Everything else stays as it is. Then reverse each {what}.",
        params=lambda rng: {
            "k": rng.randint(1, 25),
            "what": rng.choice(["line", "word of each line"]),
        },
        case=_sentences,
        solve=right.shift,
    ),
    "runs": Family(
        about="Shorten each line of the input: a run of at least {least} equal letters becomes the "
        "letter and the length of the run, with `{mark}` between them. Shorter runs stay as they "
        "are.",
        params=lambda rng: {
            "least": rng.randint(2, 7),
            "mark": rng.choice(["*", ":", "^", "x", "="]),
        },
        case=_runs,
        solve=right.runs,
    ),
    "maze": Family(
        about="The input is a square of `.` (free) and `#` (wall). Print the least number of steps "
        "from the upper left to the lower right corner over free places, each step to one of the "
        "{ways} neighbors, or {none} where there is no way.",
        params=lambda rng: {
            "ways": rng.choice([4, 8]),
            "none": rng.choice([-1, 0, 999, "none", "blocked"]),
        },
        case=_grid,
        solve=right.maze,
    ),
    "groups": Family(
        about="The first line of the input is n, the other lines are pairs of numbers from 1 to n "
        "that are connected. Print how many groups of at least {least} connected numbers there "
        "are, then the size of the {which} group of all, with a space between. A number that is "
        "connected to no other is a group of one.",
        params=lambda rng: {
            "least": rng.randint(1, 5),
            "which": rng.choice(["largest", "smallest"]),
        },
        case=_edges,
        solve=right.groups,
    ),
    "order": Family(
        about="The first line of the input is n: tasks are numbered from 1 to n. Each other line "
        "`a b` says that a must be done before b. Print an order of all tasks, with `{mark}` "
        "between them: always take the {which} number that may come next.",
        params=lambda rng: {
            "which": rng.choice(["smallest", "largest"]),
            "mark": rng.choice([" ", ",", "-", ">", ";"]),
        },
        case=_tasks,
        solve=right.order,
    ),
    "brackets": Family(
        about="Each line of the input has brackets of the kinds {pairs}. Print `{good}` for a line "
        "in which they match, else the position (from {first}) of the first bracket that closes "
        "wrongly, or `open` where some are never closed.",
        params=lambda rng: {
            "pairs": rng.sample(["()", "[]", "{}", "<>"], rng.randint(1, 3)),
            "good": rng.choice(["ok", "yes", "match"]),
            "first": rng.randint(0, 1),
        },
        case=_brackets,
        solve=right.brackets,
    ),
    "bases": Family(
        about="Each line of the input is a number in base {source}, with lower-case letters as "
        "digits beyond 9. Print each in base {target}.",
        params=lambda rng: dict(
            zip(("source", "target"), rng.sample(range(2, 37), 2), strict=True)
        ),
        case=_bases,
        solve=right.bases,
    ),
    "covered": Family(
        about="Each line of the input `a b` is a stretch from a to b. Stretches with a gap of at "
        "most {gap} between them count as one, with the gap; those that overlap too. Print the "
        "{what} of the stretches that result.",
        params=lambda rng: {
            "gap": rng.randint(0, 9),
            "what": rng.choice(["number", "total length", "greatest length"]),
        },
        case=_intervals,
        solve=right.covered,
    ),
    "sales": Family(
        about="Each line of the input is `article,shop,amount`. Print the shops whose amounts add "
        "up to at least {least}, one a line as `shop: sum`, sorted by {by}.",
        params=lambda rng: {
            "least": rng.randint(1, 80),
            "by": rng.choice(["name", "sum from the greatest, then by name"]),
        },
        case=_sales,
        solve=right.sales,
    ),
    "sums": Family(
        about="Each line of the input is a sum such as `2 + 3 * 4`. {rule} Print each result "
        "modulo {k}, from 0 to {k} - 1.",
        params=lambda rng: {
            "rule": rng.choice(
                [
                    "`*` comes before `+` and `-`.",
                    "Evaluate strictly from the left.",
                    "`+` and `-` come before `*`.",
                ]
            ),
            "k": rng.randint(7, 1000),
        },
        case=_sums,
        solve=right.sums,
    ),
}
