"""Bench `dapo`: what asynchronous DAPO saves against DAPO batch by batch (ProRL §3.4),
on rollouts with a long tail.

On a virtual clock, rollouts take random times, training takes a fixed one, and
`core/policy/dapo.py` decides as it does for a live trainer; `live` measures a real
service. Invariant: all variants draw the same prompts, with the same times and
outcomes, on equally many slots, and a slot is never faster for being alone. So they
differ only in what waits for what.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.contract import Figure, Result
from benchmarks.dapo.live import live_conditions, live_figures
from rollweave.core.policy.dapo import Dapo, DapoRule

GROUPS, MEMBERS = 32, 8
"""Informative prompts of a step, and attempts at each."""

SLOTS = 2 * GROUPS
"""Prompts rolled out concurrently."""

INFORMATIVE = 0.5
"""Probability that a group's rewards differ."""

SIGMA = 1.0
"""Sigma of the log-normal time of a rollout, whose median is the unit of time: of 256
rollouts the slowest takes about 16.
"""

TRAIN_S = 4.0
"""Duration of a training step, in that unit."""


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt's rollouts: the seconds of each, and whether their rewards differ."""

    times: tuple[float, ...]
    informative: bool

    @property
    def seconds(self) -> float:
        return max(self.times)

    def work(self, seconds: float = math.inf) -> float:
        """Return the seconds of rollout until then."""
        return math.fsum(min(time, seconds) for time in self.times)


def groups(seed: int) -> Iterator[Group]:
    """Draw the groups, which are the same in every variant."""
    rng = random.Random(seed)
    while True:
        times = tuple(rng.lognormvariate(0.0, SIGMA) for _ in range(MEMBERS))
        yield Group(times, rng.random() < INFORMATIVE)


@dataclass(slots=True)
class VariantRun:
    """Measurements of several steps: seconds in all, those for which the trainer
    waited, those of rollouts, and the groups trained on.
    """

    seconds: float = 0.0
    waited: float = 0.0
    worked: float = 0.0
    used: list[Group] = field(default_factory=list)
    stale: int = 0  # groups that were trained on at a later version than they started under

    def train(self, batch: list[Group]) -> None:
        self.used += batch[:GROUPS]
        self.seconds += TRAIN_S


Variant = Callable[[int, int], VariantRun]
"""A variant: a function of a seed and a number of steps."""


def in_rounds(size: int) -> Variant:
    """Run batch by batch: roll out `size` prompts, wait for all, filter; repeat until
    the batch is full. Surplus is dropped.
    """

    def run(seed: int, steps: int) -> VariantRun:
        drawn, result = groups(seed), VariantRun()
        for _ in range(steps):
            batch: list[Group] = []
            while len(batch) < GROUPS:
                batch_groups = list(itertools.islice(drawn, size))
                result.waited += max(group.seconds for group in batch_groups)
                result.worked += math.fsum(group.work() for group in batch_groups)
                batch += [group for group in batch_groups if group.informative]
            result.train(batch)
        result.seconds += result.waited
        return result

    return run


def replenished(seed: int, steps: int) -> VariantRun:
    """Replace each finished prompt until the batch is full; then the step waits for the
    rest, and drops it.
    """
    drawn, result = groups(seed), VariantRun()
    for _ in range(steps):
        number, batch = itertools.count(), list[Group]()
        under_way = [
            (group.seconds, next(number), group) for group in itertools.islice(drawn, SLOTS)
        ]
        heapq.heapify(under_way)
        clock = 0.0
        while under_way:
            clock, _, group = heapq.heappop(under_way)
            result.worked += group.work()
            batch += [group] if group.informative else []
            if len(batch) < GROUPS:
                following = next(drawn)
                heapq.heappush(under_way, (clock + following.seconds, next(number), following))
        result.waited += clock
        result.train(batch)
    result.seconds += result.waited
    return result


def asynchronous(staleness: int) -> Variant:
    """Run by the policy: groups begin and are stopped as it decides, also while the
    trainer trains.
    """

    def run(seed: int, steps: int) -> VariantRun:
        dapo = Dapo(
            DapoRule(groups=GROUPS, group_size=MEMBERS, under_way=SLOTS, staleness=staleness)
        )
        drawn, result, known = groups(seed), VariantRun(), dict[int, tuple[Group, float, int]]()
        ends: list[tuple[float, int]] = []  # of groups, and with -1 of a training step
        clock = requested_at = 0.0
        step, training = 0, False
        dapo.request_batch(0)
        while step < steps:
            batch = None if training else dapo.take()
            if batch is not None:
                result.waited += clock - requested_at
                result.train([known[group][0] for group in batch])
                result.stale += sum(known[group][2] < step for group in batch)
                heapq.heappush(ends, (clock + TRAIN_S, -1))
                training = True
            for number in dapo.overdue():
                group, started_at, _ = known[number]
                result.worked += group.work(clock - started_at)
            for _ in range(dapo.room()):
                number, group = dapo.start_group(), next(drawn)
                known[number] = group, clock, dapo.version
                heapq.heappush(ends, (clock + group.seconds, number))
            clock, number = heapq.heappop(ends)
            if number < 0:
                step += 1
                dapo.request_batch(step)
                requested_at, training = clock, False
            elif number in dapo.under_way:
                group = known[number][0]
                result.worked += group.work()
                dapo.end_group(number, [0.0, float(group.informative)])
        result.seconds = clock
        return result

    return run


VARIANTS: dict[str, Variant] = {
    "rounds": in_rounds(GROUPS),
    "rounds_oversampled": in_rounds(SLOTS),
    "replenished": replenished,
    "early": asynchronous(0),
    "carried": asynchronous(1),
    "carried_4": asynchronous(4),
}
"""Compared variants. The last three are the policy with a staleness of 0, 1 and 4."""


def bench_dapo(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return by variant `step_s`, `waited_s`, `speedup` over rounds, `useful`,
    `length`, `stale`; and the `live_…` figures of a real service.
    """
    figures, conditions = simulated(quick=quick)
    figures |= live_figures(quick=quick, progress=progress)
    return Result(
        bench="dapo",
        figures=figures,
        conditions=conditions | {"live": live_conditions(quick=quick)},
    )


def simulated(*, quick: bool) -> tuple[dict[str, Figure], dict[str, str]]:
    """Return figures and conditions of the virtual clock."""
    seeds, steps = (3, 20) if quick else (9, 100)
    figures: dict[str, Figure] = {}
    results = {
        name: [variant(seed, steps) for seed in range(seeds)] for name, variant in VARIANTS.items()
    }
    drawn = itertools.islice(groups(seeds), 100_000)
    typical = statistics.fmean(group.seconds for group in drawn if group.informative)
    for name, runs in results.items():
        pairs = zip(results["rounds"], runs, strict=True)
        figures[f"step_s_{name}"] = statistics.median(run.seconds / steps for run in runs)
        figures[f"waited_s_{name}"] = statistics.median(run.waited / steps for run in runs)
        figures[f"speedup_{name}"] = statistics.median(
            slow.seconds / run.seconds for slow, run in pairs
        )
        figures[f"useful_{name}"] = statistics.median(
            math.fsum(group.work() for group in run.used) / run.worked for run in runs
        )
        figures[f"length_{name}"] = statistics.median(
            statistics.fmean(group.seconds for group in run.used) / typical for run in runs
        )
        figures[f"stale_{name}"] = statistics.median(run.stale / len(run.used) for run in runs)
    conditions = {
        "clock": "virtual; the unit is the median time of a rollout; times are log-normal with "
        f"sigma {SIGMA:g}, a group takes as long as its slowest of {MEMBERS}, a training step "
        f"{TRAIN_S:g}",
        "batch": f"{GROUPS} informative groups; {INFORMATIVE:.0%} are; {SLOTS} groups at once, "
        f"rounds: {GROUPS}",
        "training": "overlaps with rollouts in early, carried and carried_4, as far as their "
        "staleness allows; not in the others",
        "runs": f"{seeds} seeds, {steps} steps each; medians",
        "length": "seconds of the groups trained on, over those of all informative ones: below 1, "
        "long ones are missing",
        "useful": "share of the rollouts' seconds whose groups were trained on",
        "stale": "share of the groups that started under older weights than they were trained from",
    }
    return figures, conditions
