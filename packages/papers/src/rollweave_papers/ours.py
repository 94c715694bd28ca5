"""Our own claims: each policy of ours against the one of a paper that it is said to
beat, on the same small simulated runs, those included in which it loses.

Invariants: both runs of a pair differ in the policy alone, and have the same seeds. All
claims about one mode have the same workloads, which were chosen before any result.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
from scipy import stats

from rollweave.schema.base import Struct
from rollweave_papers.cluster import Setup, geometric_mean, steps_of
from rollweave_papers.results import NO_DIFFERENCE, Experiment, Row, span
from rollweave_sim.families import FAMILIES

MEASURED, SEEDS = 3, 2
"""Steps of a run that count, after the first, and seeds of a workload."""

CONFIDENCE = 0.95

QUICK_WORKLOADS = 3
"""Workloads of a quick form, with one seed."""

TASKS = ("webshop", "alfworld", "gem-math", "coding", "search", "math", "tool-calling")
"""Families of the workloads: two or more of each paper that names families."""

Pair = tuple[Setup, Setup]
"""The run with our policy and the run with theirs."""


class Workload(Struct, frozen=True, kw_only=True):
    """A run of some tasks, by the name that tables give it."""

    name: str
    setup: Setup


def _workload(label: str, *tasks: str, **changes: object) -> Workload:
    setup = Setup(
        model="qwen3-8b",
        tasks=tasks,
        context=max(FAMILIES[task].max_context for task in tasks),
        rollout_gpus=4,
        trainer_gpus=4,
        batch=32,
        group_size=4,
    )
    return Workload(name=f"{' and '.join(tasks)}, {label}", setup=setup.but(**changes))


CROWDED, ROOMY = "few slots", "slots for all"
"""Engines with slots for three quarters of a batch, and for more than a batch."""

MIXED = ("webshop", "gem-math")

WORKLOADS: Sequence[Workload] = tuple(
    _workload(label, *tasks, **changes)
    for label, changes in (
        (f"sync, {CROWDED}", {"slots": 6}),
        (f"bounded, {ROOMY}", {"mode": "bounded", "model": "qwen3-14b", "slots": 16}),
    )
    for tasks in (*((task,) for task in TASKS), MIXED)
)
"""Eight sets of tasks with two modes, models and numbers of slots each."""


def in_mode(mode: str, **changes: object) -> Sequence[Workload]:
    """Return the same tasks, models and slots in one mode."""
    return tuple(
        Workload(
            name=one.name.replace("sync, ", "").replace("bounded, ", ""),
            setup=one.setup.but(mode=mode, **changes),
        )
        for one in WORKLOADS
    )


PREFILLED = ("webshop", "alfworld", "search")
"""Tasks that read much: RollArt gives them the GPUs that compute faster (§5.2)."""

POOLED: Sequence[Workload] = tuple(
    _workload(mode, reads, thinks, mode=mode, slots=16, kinds={"h800": 2, "h20": 2})
    for mode in ("sync", "bounded")
    for reads in PREFILLED
    for thinks in ("gem-math", "coding")
)
"""One task that reads much and one that writes much, on two H800 and two H20."""


class Claim(Struct, frozen=True, kw_only=True):
    """`ours` is said to be faster than `theirs`; `pair` makes both runs."""

    name: str
    title: str
    source: str
    ours: str
    theirs: str
    pair: Callable[[Setup], Pair]
    workloads: Sequence[Workload] = WORKLOADS

    def rows(self, quick: bool) -> list[Row]:
        """Return the mean ratio of step times with its interval, and that of each
        workload.
        """
        chosen = self.workloads
        if quick:
            chosen = chosen[:: len(chosen) // QUICK_WORKLOADS][:QUICK_WORKLOADS]
        seeds = range(1 if quick else SEEDS)
        ratios = {one.name: self._ratios(one, seeds) for one in chosen}
        means = {name: geometric_mean(values) for name, values in ratios.items()}
        what = f"{self.theirs} over {self.ours}"
        return [
            Row(
                row=f"{what}, mean of {len(means)} workloads",
                ours=geometric_mean(list(means.values())),
                note=summary(means),
                own=True,
            ),
            *(
                Row(row=f"{what}: {name}", ours=means[name], seeds=span(values), own=True)
                for name, values in ratios.items()
            ),
        ]

    def _ratios(self, workload: Workload, seeds: Sequence[int]) -> list[float]:
        """Return the step time with theirs over that with ours, by seed."""
        ours, theirs = self.pair(workload.setup)
        return [step_s(theirs, seed) / step_s(ours, seed) for seed in seeds]


_known: dict[tuple[bytes, int], float] = {}
"""Step times of this process, by set-up and seed: claims share runs."""


def step_s(setup: Setup, seed: int) -> float:
    """Return the mean seconds of the measured steps. The last steps of an asynchronous
    run do not count: nothing is launched any more that a later step could use.
    """
    key = (msgspec.json.encode(setup, order="sorted"), seed)
    if key not in _known:
        _known[key] = _step_s(setup, seed)
    return _known[key]


def _step_s(setup: Setup, seed: int) -> float:
    ahead = 0 if setup.mode == "sync" else max(1, setup.alpha)
    outcome = steps_of(setup, steps=MEASURED + 1 + ahead, seed=seed)
    return statistics.fmean(outcome.step_s[:MEASURED])


class Interval(Struct, frozen=True):
    """The ends of a confidence interval of a mean ratio."""

    low: float
    high: float


def interval(ratios: Sequence[float]) -> Interval:
    """Return the interval of the geometric mean by Student's t of the log ratios.
    Raises ValueError with fewer than two.
    """
    if len(ratios) < 2:
        raise ValueError(f"an interval needs at least two ratios, got {len(ratios)}")
    logs = [math.log(one) for one in ratios]
    reach = stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * statistics.stdev(logs)
    reach /= math.sqrt(len(logs))
    middle = statistics.fmean(logs)
    return Interval(math.exp(middle - reach), math.exp(middle + reach))


def summary(ratios: Mapping[str, float]) -> str:
    """Return the interval of a mean ratio, wins and losses, and where ours loses."""
    ends = interval(list(ratios.values()))
    losses = {name: one for name, one in ratios.items() if one < 1 - NO_DIFFERENCE}
    wins = sum(one > 1 + NO_DIFFERENCE for one in ratios.values())
    worst = sorted(losses.items(), key=lambda item: item[1])
    where = "; ".join(f"{name} {one:.2f}" for name, one in worst)
    equal = len(ratios) - wins - len(losses)
    return (
        f"{CONFIDENCE:.0%} interval {ends.low:.2f} to {ends.high:.2f}; wins {wins}, losses "
        f"{len(losses)}, within {NO_DIFFERENCE:.1%}: {equal}"
        + (f"; ours loses with {where}" if where else "")
    )


def _policies(ours: Sequence[str], theirs: Sequence[str]) -> Callable[[Setup], Pair]:
    """Return what makes a pair of runs with these policies."""
    return lambda setup: (setup.but(policies=tuple(ours)), setup.but(policies=tuple(theirs)))


TRAJECTORY = ("longest_first", "partition", "gain")


def _updates(setup: Setup) -> Pair:
    return setup.but(alpha=2), setup.but(alpha=2, without=("early_updates",))


def _places(setup: Setup) -> Pair:
    return setup, setup.but(without=("buffer_places",))


def _spare(setup: Setup) -> Pair:
    """Return runs that draw other groups in place of equal ones: one with as many spare
    groups as were equal in the step before, and one with none.
    """
    drawn = {"dynamic_sampling": True}
    alive = setup.but(environments=2 * setup.batch)
    return alive.but(rollout={**drawn, "spare_groups": "learned"}), alive.but(rollout=drawn)


def _pools(setup: Setup) -> Pair:
    reads, thinks = setup.tasks
    return (
        setup.but(rollout={"affinity": "learned"}),
        setup.but(prefers={reads: "h800", thinks: "h20"}),
    )


CLAIMS = (
    Claim(
        name="ours-trajectory",
        title="Scheduling by trajectory against scheduling by turn",
        source="docs/SCHEDULING.md",
        ours="`trajectory`",
        theirs="`turn`",
        pair=_policies(TRAJECTORY, ()),
    ),
    Claim(
        name="ours-heddle",
        title="Our scheduling against Heddle's",
        source="docs/SCHEDULING.md; Heddle §4.2, §5",
        ours="`trajectory`",
        theirs="`heddle`",
        pair=_policies(TRAJECTORY, ("longest_first", "presorted", "rank")),
    ),
    Claim(
        name="ours-placement",
        title="Placement by work against presorted placement",
        source="docs/decisions/0005-place-by-work.md; Heddle §5.2",
        ours="`partition`",
        theirs="`presorted`",
        pair=_policies(TRAJECTORY, ("longest_first", "presorted", "gain")),
    ),
    Claim(
        name="ours-migration",
        title="Migration where it gains against migration by rank",
        source="docs/SCHEDULING.md; Heddle §5.3",
        ours="`gain`",
        theirs="`rank`",
        pair=_policies(TRAJECTORY, ("longest_first", "partition", "rank")),
    ),
    Claim(
        name="ours-earliest",
        title="The engine of the earliest finish against the affine engine",
        source="docs/SCHEDULING.md; ROSE §4.3",
        ours="`earliest`",
        theirs="`affinity`",
        pair=_policies(("earliest",), ("affinity",)),
    ),
    Claim(
        name="ours-updates",
        title="Updates at publication against updates at the next batch",
        source="docs/decisions/0002-strict-staleness.md; RollArt §6.2",
        ours="early updates",
        theirs="RollArt's order",
        pair=_updates,
        workloads=in_mode("bounded"),
    ),
    Claim(
        name="ours-places",
        title="A buffer with places against eviction",
        source="docs/decisions/0006-at-its-own-pace.md; Laminar §3",
        ours="places",
        theirs="eviction",
        pair=_places,
        workloads=in_mode("decoupled", model="qwen3-8b", rollout_gpus=8, trainer_gpus=2),
    ),
    Claim(
        name="ours-priority",
        title="Priority by trajectory in mode decoupled",
        source="docs/SCHEDULING.md",
        ours="`longest_first`",
        theirs="`fcfs`",
        pair=_policies(("longest_first",), ("fcfs",)),
        workloads=in_mode("decoupled"),
    ),
    Claim(
        name="ours-spare",
        title="Learned spare groups against none",
        source="docs/TUNING.md; ROSE §6",
        ours="learned",
        theirs="none",
        pair=_spare,
    ),
    Claim(
        name="ours-affinity",
        title="Learned affinity against declared affinity",
        source="docs/CLUSTER.md; RollArt §5.2, §9",
        ours="learned",
        theirs="declared",
        pair=_pools,
        workloads=POOLED,
    ),
)


def _experiment(claim: Claim) -> Experiment:
    return Experiment(claim.name, claim.title, claim.source, functools.partial(claim.rows))


EXPERIMENTS: Sequence[Experiment] = tuple(_experiment(claim) for claim in CLAIMS)
