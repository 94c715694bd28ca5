"""Choose how much of each task domain's work each pool of engines does, so that the
last pool is done as early as possible (RollArt §9, learned hardware affinity).

    minimize T,  where  Σ_domain share · seconds ≤ T  for each pool,
                 and the shares of each domain, none negative, sum to 1

The dual of this linear program has a start at zero and no equations:

    maximize Σ_domain u,  where  u ≤ weight · seconds  for each domain and pool,
                          and the weights of the pools sum to 1 at most

The simplex method solves it in whole numbers, without rounding, by Bland's rule, which
always terminates; the prices of its constraints are the shares. At most one domain
fewer than there are pools is divided, whatever the number of domains.
"""

from collections.abc import Mapping
from fractions import Fraction

from rollweave.schema.base import Struct

RESOLUTION = 1 << 32
"""Seconds are rounded to this fraction of the largest seconds, so that they are whole
numbers.
"""

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds that all engines of a pool together need for all work of a task domain, by
domain and pool. A domain must not run on a pool that it does not list.
"""

Shares = Mapping[str, Mapping[str, float]]
"""Share of a task domain's work that runs on a pool, by domain and pool. The shares of
a domain sum to 1; a domain without shares runs on any engine.
"""


class Assignment(Struct, frozen=True, kw_only=True):
    """The shares of least makespan, without shares of 0."""

    shares: dict[str, dict[str, float]]
    makespan_s: float


def assign(seconds: Seconds) -> Assignment:
    """Return the shares of least makespan. Raises ValueError if a domain may use no
    pool, or needs no time or an infinite one.
    """
    for domain, by_pool in seconds.items():
        if not by_pool or not all(0 < needed < float("inf") for needed in by_pool.values()):
            raise ValueError(
                f"seconds must be positive, for one pool or more, got {dict(by_pool)} for {domain}"
            )
    shares: dict[str, dict[str, float]] = {}
    left = seconds
    while left:
        chosen, busiest = _least_makespan(left)
        # A domain that may use a pool outside `busiest` runs in none of the busiest.
        left = {
            domain: {pool: needed for pool, needed in by_pool.items() if pool not in busiest}
            for domain, by_pool in left.items()
            if busiest.isdisjoint(chosen[domain])
        }
        shares |= {domain: by_pool for domain, by_pool in chosen.items() if domain not in left}
    return Assignment(shares=shares, makespan_s=makespan(seconds, shares))


def _least_makespan(seconds: Seconds) -> tuple[dict[str, dict[str, float]], set[str]]:
    """Return shares of least makespan, and the pools that determine it. The domains
    that are in none of these pools are divided among the other pools in any way that is
    done in time.
    """
    domains, cells = list(seconds), [(name, pool) for name in seconds for pool in seconds[name]]
    pools = list(dict.fromkeys(pool for _, pool in cells))
    largest = max(needed for by_pool in seconds.values() for needed in by_pool.values())
    rows = []
    for domain, pool in cells:
        whole = max(1, round(seconds[domain][pool] / largest * RESOLUTION))
        row = [0] * (len(domains) + len(pools) + 1)
        row[domains.index(domain)], row[len(domains) + pools.index(pool)] = 1, -whole
        rows.append(row)
    rows.append([0] * len(domains) + [1] * (len(pools) + 1))
    objective = [1] * len(domains) + [0] * len(pools)
    weights, prices = solve(rows, objective)
    shares: dict[str, dict[str, float]] = {}
    for domain in domains:
        # More than all of a domain may be assigned where that costs nothing.
        price_of = {
            pool: price
            for (name, pool), price in zip(cells, prices[:-1], strict=True)
            if name == domain and price
        }
        total = sum(price_of.values(), start=Fraction())
        shares[domain] = {pool: float(price / total) for pool, price in price_of.items()}
    return shares, {
        pool for pool, weight in zip(pools, weights[len(domains) :], strict=True) if weight
    }


def solve(rows: list[list[int]], objective: list[int]) -> tuple[list[Fraction], list[Fraction]]:
    """Return the best x of this linear program, and the price of each constraint:
    maximize objective · x where row · x ≤ bound for each row, whose last number is its
    bound, and no x is negative. No bound may be negative, and the objective must be
    bounded.

    All numbers of the tableau are over one denominator, the last pivot, so that they
    stay whole (Edmonds).
    """
    count, width = len(rows), len(objective)
    table = [
        [*row[:-1], *(int(slack == number) for slack in range(count)), row[-1]]
        for number, row in enumerate(rows)
    ]
    last = [-gain for gain in objective] + [0] * (count + 1)
    basis, denominator = [width + number for number in range(count)], 1
    while True:
        # Bland: the first column that gains and, of the basic variables that reach zero
        # first, the one with the lowest index.
        column = next((index for index, gain in enumerate(last[:-1]) if gain < 0), None)
        if column is None:
            basic = dict(zip(basis, (row[-1] for row in table), strict=True))
            best = [Fraction(basic.get(index, 0), denominator) for index in range(width)]
            return best, [Fraction(price, denominator) for price in last[width:-1]]
        leaving = min(
            (number for number in range(count) if table[number][column] > 0),
            key=lambda number: (Fraction(table[number][-1], table[number][column]), basis[number]),
        )
        pivot = table[leaving]
        by = pivot[column]
        for row in (*table, last):
            if row is not pivot:
                times = row[column]
                row[:] = [
                    (value * by - times * of_pivot) // denominator
                    for value, of_pivot in zip(row, pivot, strict=True)
                ]
        basis[leaving], denominator = column, by


def makespan(seconds: Seconds, shares: Shares) -> float:
    """Return the seconds until the last pool has done its shares.

    Domains without shares run on any engine that is free. So all pools that run such
    domains finish at the same time, and each pool runs the same mixture of them.
    """
    loads: dict[str, float] = {}
    mixture: dict[str, float] = {}
    for domain, by_pool in seconds.items():
        if own := shares.get(domain):
            for pool, share in own.items():
                loads[pool] = loads.get(pool, 0.0) + share * by_pool[pool]
        else:
            for pool, needed in by_pool.items():
                mixture[pool] = mixture.get(pool, 0.0) + needed
    until = max(loads.values(), default=0.0)
    if not mixture:
        return until
    # The mixture fills the pools that are free first, level by level.
    free = sorted((loads.get(pool, 0.0), needed) for pool, needed in mixture.items())
    speed = begun = 0.0
    level = 0.0
    for number, (load, needed) in enumerate(free):
        speed += 1 / needed
        begun += load / needed
        level = (1 + begun) / speed
        if number + 1 == len(free) or level <= free[number + 1][0]:
            break
    return max(until, level)
