"""Choose which groups of the experience buffer a training step uses, and which are
evicted (Laminar §3.1, §6).

Invariants: chosen ids are ids of the given experiences, each at most once; a batch has
exactly the requested number of groups, or none; equal inputs give equal choices (random
draws are an input); ties go to the earlier arrival.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Literal, get_args

from rollweave.core.policy.modes import staleness
from rollweave.schema.base import GroupId, Struct
from rollweave.schema.work import Measures

STALENESS_WEIGHT = 2.0
"""Factor by which the probability of a group falls with each version of age."""


class Experience(Struct, frozen=True, kw_only=True):
    """A group in the buffer. `arrived` grows with each arrival; `initiated` is the
    oldest version that its members started on.

    `tokens` is the sum over all members. `measures` has what the trainer measured, if
    the strategy is measured (`is_measured`) and there was a choice.
    """

    id: GroupId
    arrived: int
    initiated: int
    rewards: tuple[float, ...]
    tokens: int
    measures: Measures = Measures()


Measured = Literal["ratio", "entropy", "td_error"]
"""Strategies that choose by what the trainer measures before the step, each named like
its field of `Measures`.
"""

SampleName = Literal["fifo", "newest", "advantage", Measured, "staleness"]
"""fifo: first arrival first; newest: last arrival first; advantage: greatest
|advantage| first; ratio: nearest to 1 first; entropy and td_error: greatest first;
staleness: drawn at random, fresher groups more often.
"""

Rule = Callable[[Sequence[Experience], int], Sequence[GroupId]]
"""A user's function from the buffer, in order of arrival, and the current version to
ids, the most urgent first. Its attribute `measures`, if it has one, says whether
groups are measured for it.
"""


def is_measured(strategy: str | Rule) -> bool:
    """Return whether groups are measured before the strategy chooses among them."""
    asks = bool(getattr(strategy, "measures", False))
    return asks if callable(strategy) else strategy in get_args(Measured)


def advantage(experience: Experience) -> float:
    """Return the mean |reward - mean of the group|, not divided by their deviation."""
    size, total = len(experience.rewards), math.fsum(experience.rewards)
    # Divided last, so that nothing is rounded before: mirrored rewards, 2 of 3 and 1 of
    # 3, are a tie.
    return math.fsum(abs(size * reward - total) for reward in experience.rewards) / max(1, size**2)


def sample(
    experiences: Sequence[Experience],
    wanted: int,
    *,
    strategy: SampleName | Rule,
    version: int,
    draws: Sequence[float] = (),
) -> list[GroupId]:
    """Return the groups of the next batch in the order of choice, or no groups if there
    are too few, or a user's function names too few.

    `staleness` draws without replacement, each group with a probability proportional to
    `STALENESS_WEIGHT` ** -staleness; `draws` supplies a number in [0, 1) for each
    group. A user's function may name more than requested; the first are taken. Raises
    ValueError for ids or draws that violate this, and for invalid bounds.
    """
    if wanted < 1:
        raise ValueError(f"wanted must be at least 1, got {wanted}")
    buffer = _in_order(experiences)
    if callable(strategy):
        return _most(_named(strategy, buffer, version), wanted)
    if len(buffer) < wanted:
        return []
    match strategy:
        case "fifo":
            chosen = buffer
        case "newest":
            chosen = buffer[::-1]
        case "advantage":
            chosen = sorted(buffer, key=lambda group: -advantage(group))
        case "ratio" | "entropy" | "td_error":
            chosen = sorted(buffer, key=lambda group: _rank(group, strategy))
        case "staleness":
            chosen = _drawn(buffer, wanted, version, draws)
    return _most([group.id for group in chosen], wanted)


def due_now(
    left: Mapping[GroupId, int], chosen: Sequence[GroupId], *, per_step: int
) -> list[GroupId]:
    """Return the groups that a step must take so that the later ones, of `per_step`
    groups each, can train on all others: the most urgent first, of equal ones those in
    `chosen`. `left` has, by group, the number of later steps that may train on it.
    """
    ranked, due = list(dict.fromkeys([*chosen, *left])), list[GroupId]()
    for steps in range(max(left.values(), default=0) + 1):
        urgent = [name for name in ranked if left[name] <= steps and name not in due]
        due += urgent[: max(0, len(urgent) - steps * per_step)]
    return due


def evict(experiences: Sequence[Experience], *, version: int, max_groups: int) -> list[GroupId]:
    """Return the groups to evict, the stalest first, so that at most `max_groups`
    remain. Raises ValueError for a repeated id, and for an invalid bound.
    """
    if max_groups < 1:
        raise ValueError(f"max_groups must be at least 1, got {max_groups}")
    buffer = _in_order(experiences)
    buffer.sort(key=lambda group: -staleness(group.initiated, version))
    return [group.id for group in buffer[: max(0, len(buffer) - max_groups)]]


def _in_order(experiences: Sequence[Experience]) -> list[Experience]:
    """Return the experiences in order of arrival. Raises ValueError for a repeated
    id.
    """
    ids = [group.id for group in experiences]
    if len(set(ids)) < len(ids):
        raise ValueError(f"experiences must each be there once, got {ids}")
    return sorted(experiences, key=lambda one: one.arrived)


def _named(rule: Rule, buffer: list[Experience], version: int) -> list[GroupId]:
    """Return the ids that a user's function names. Raises ValueError unless they are
    ids of the buffer, each at most once.

    The function is called twice: if the answers differ, no replay could reproduce the
    choice.
    """
    named, again = (_answer(rule, buffer, version) for _ in range(2))
    if named != again:
        raise ValueError(
            "a strategy must answer the same to the same question (a chance that it draws must "
            f"follow from what it is given), got {named} and then {again}"
        )
    return named


def _answer(rule: Rule, buffer: list[Experience], version: int) -> list[GroupId]:
    answer = rule(tuple(buffer), version)
    known = {group.id for group in buffer}
    try:
        named = list(islice(answer, len(buffer) + 1))  # one more must be a repetition or unknown
        unknown = [name for name in named if name not in known]
    except TypeError as error:
        raise ValueError(f"a strategy must give a list of group ids, got {answer!r}") from error
    if unknown:
        raise ValueError(
            f"a strategy must name groups of the buffer, got {unknown[0]!r}, which is not there"
        )
    if len(set(named)) < len(named):
        twice = next(name for index, name in enumerate(named) if name in named[:index])
        raise ValueError(f"a strategy must name each group once, got {twice!r} twice")
    return named


def _most(ids: list[GroupId], wanted: int) -> list[GroupId]:
    return ids[:wanted] if len(ids) >= wanted else []


def _rank(experience: Experience, name: Measured) -> float:
    """Return a number that grows from the group to be chosen first; groups without the
    measured value come last.

    Raises ValueError for a value that is negative or not finite, and for a ratio of 0.
    """
    value: float | None = getattr(experience.measures, name)
    if value is None:
        return math.inf
    if not 0 <= value < math.inf or (name == "ratio" and not value):
        least = "above 0" if name == "ratio" else "at least 0"
        raise ValueError(
            f"{name} must be {least} and finite, got {value} for group {experience.id}"
        )
    return abs(math.log(value)) if name == "ratio" else -value


def _drawn(
    buffer: list[Experience], wanted: int, version: int, draws: Sequence[float]
) -> list[Experience]:
    """Draw without replacement from a line of groups, the freshest first."""
    if len(draws) < wanted:
        raise ValueError(f"draws must have a number for each of {wanted} groups, got {len(draws)}")
    if wrong := [draw for draw in draws if not 0 <= draw < 1]:
        raise ValueError(f"draws must be at least 0 and below 1, got {wrong[0]}")
    left: dict[int, list[Experience]] = {}
    for group in sorted(buffer, key=lambda group: staleness(group.initiated, version)):
        left.setdefault(staleness(group.initiated, version), []).append(group)
    chosen = []
    for draw in draws[:wanted]:
        # weights are relative to the freshest, so that only the stalest vanish
        freshest = next(iter(left))
        widths = [STALENESS_WEIGHT ** float(freshest - age) for age in left]
        ends = list(
            accumulate(width * len(same) for width, same in zip(widths, left.values(), strict=True))
        )
        at = draw * ends[-1]
        index = min(bisect_right(ends, at), len(ends) - 1)
        age, same = list(left.items())[index]
        within = (
            (at - (ends[index - 1] if index else 0.0)) / widths[index] if widths[index] else 0.0
        )
        chosen.append(same.pop(min(int(within), len(same) - 1)))
        if not same:
            del left[age]
    return chosen
