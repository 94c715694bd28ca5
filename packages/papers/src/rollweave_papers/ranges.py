"""Rows of the papers over the numbers of workloads that their texts leave open: each is
simulated at several values, and is the range of the results.

The values lie in what the constraints leave (`rollweave reproduce --constraints`), and
where these leave any, from little to much. Clusters are small, since each row is
simulated several times.
"""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rollweave_papers import heddle, rollart, rose
from rollweave_papers.cluster import Setup, pace, rollouts
from rollweave_papers.heddle_runs import (
    HYBRID,
    OURS,
    PAPERS,
    SLIME,
    VERL,
    Case,
    System,
    measure,
)
from rollweave_papers.results import Experiment, Row
from rollweave_sim.families import FAMILIES, TAIL_SIGMA, Family, LogNormal, averaging
from rollweave_sim.workload import Drawn, Workload

SPREADS = {"σ 0.25": 0.25, "σ 0.99": TAIL_SIGMA, "σ 1.5": 1.5}
"""Spreads of outputs, on a logarithmic scale with their mean kept: any are left."""

LAKE_OUTPUTS = (8.0, 28.0, 64.0, 110.0)
"""Mean tokens of an output of FrozenLake, with ROSE's share of prefill: 28 is the most
with which three of four trajectories stay below 9,994 tokens, 64 is ours, and with more
than 110 the mean trajectory leaves no room in the context.
"""

LAKE_SHARE = 0.77
"""Share of prefill of FrozenLake (ROSE §2.2)."""

SEARCH_OUTPUTS = (200.0, 500.0, 800.0)
"""Mean tokens of an output of search. Hard tasks have more turns and longer ones, so
that the mean of all outputs is a third higher: 270 with 200, with which a turn takes
ten seconds (Heddle §7.5).
"""

SEARCH_RESPONSE = 9_000.0
"""Mean tokens of a response of search before the same effect, with which it is shorter
than one of coding (Heddle §7.1).
"""

MATH_OUTPUTS = (200.0, 350.0, 500.0)
"""Mean tokens of an output of GEM-math: with 500, the longest of 84 has 9,300, which
one GPU decodes in 73 s (RollArt Fig. 12: a rollout of 77 s). Ours are 2,100.
"""

Vary = Callable[[Workload], Workload]


def spread(law: LogNormal, sigma: float) -> LogNormal:
    """Return the distribution with another spread and the same mean before the cap."""
    mean = math.exp(law.mu + law.sigma**2 / 2)
    return averaging(mean, sigma=sigma, high=law.high)


def meaning(law: LogNormal, mean: float) -> LogNormal:
    """Return the distribution with another mean before the cap and the same spread."""
    return averaging(mean, sigma=law.sigma, high=law.high)


def _varied(change: Callable[[Family], Family]) -> Vary:
    """Return what replaces the family of a workload."""

    def vary(work: Workload) -> Workload:
        assert isinstance(work, Drawn), "set-ups name families"
        return Drawn(change(work.family))

    return vary


def _lengths(output: float, observation: float | None = None) -> Vary:
    """Return what gives outputs, and observations unless None, these mean tokens."""

    def change(family: Family) -> Family:
        seen = family.observation
        return msgspec.structs.replace(
            family,
            output=meaning(family.output, output),
            observation=seen if observation is None else meaning(seen, observation),
        )

    return _varied(change)


def _spread(sigma: float) -> Vary:
    return _varied(
        lambda family: msgspec.structs.replace(family, output=spread(family.output, sigma))
    )


def over(
    row: str,
    values: Mapping[str, float],
    *,
    ours: str,
    note: str,
    unit: str = "×",
    own: bool = False,
) -> Row:
    """Return the row of the results at several values, of which `ours` names the one
    that is nearest to our family's.
    """
    results = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    return Row(
        row=row,
        ours=values[ours],
        open_range=(min(values.values()), max(values.values())),
        unit=unit,
        note=f"{results}; {note}",
        own=own,
    )


def rollart_spread(quick: bool) -> list[Row]:
    """Simulate RollArt Fig. 10b for 8B over spreads of outputs, of which the text has
    none for these tasks.
    """
    shrink, steps = (16, 1) if quick else (8, 2)
    setup = rollart.base("8B", shrink=shrink)
    alone = rollart.monolithic(setup)
    systems = {
        "Sync": alone.but(without=("free_stepping", "reward_overlap")),
        "Sync+": alone,
        "AReaL": setup.but(mode="partial", without=("staging",)),
        "RollArt": setup.in_rollarts_order(),
    }
    speeds = {
        name: {
            system: pace(one, steps=steps, vary=_spread(sigma)).tokens_per_s
            for system, one in systems.items()
        }
        for name, sigma in SPREADS.items()
    }
    scale = rollart.scale(shrink, steps)
    return [
        over(
            f"8B throughput, {above} over {below}",
            {name: one[above] / one[below] for name, one in speeds.items()},
            ours="σ 0.99",
            note=f"{scale}; spread of all outputs, with their means",
        )
        for above, below in (("Sync+", "Sync"), ("RollArt", "AReaL"), ("RollArt", "Sync"))
    ]


def gem_math(quick: bool) -> list[Row]:
    """Simulate RollArt Fig. 12 and Fig. 14b over lengths with which Fig. 12's seconds
    are possible.
    """
    steps = 1 if quick else 6
    judged = Setup(
        model="qwen3-8b",
        tasks=("gem-math",),
        context=16_384,
        rollout_gpus=8,
        trainer_gpus=8,
        batch=84,
        group_size=4,
        serverless=True,
    )
    plain = Setup(
        model="qwen3-8b",
        tasks=("gem-math",),
        context=32_768,
        rollout_gpus=4 if quick else 8,
        trainer_gpus=2,
        batch=32 if quick else 64,
    )
    groups = plain.batch // plain.group_size
    spare = plain.but(
        environments=2 * groups * 2 * plain.group_size,
        rollout={"spare_groups": groups, "spare_members": plain.group_size},
    )
    seconds, gains = {}, {}
    for mean in MATH_OUTPUTS:
        vary = _lengths(mean)
        name = f"{mean:.0f} tokens"
        seconds[name] = statistics.fmean(rollouts(judged, steps=steps, vary=vary))
        before, after = (
            pace(one.in_rollarts_order(), steps=steps, vary=vary).step_s for one in (plain, spare)
        )
        gains[name] = before / after
    ours = f"{MATH_OUTPUTS[-1]:.0f} tokens"
    return [
        over(
            "rollout, serverless judges",
            seconds,
            ours=ours,
            unit="s",
            note="as rollart-fig12; mean tokens of an output",
        ),
        over(
            "maximum speed-up of rollouts",
            gains,
            ours=ours,
            note=f"as rollart-fig14b with twice the groups and members, {plain.rollout_gpus} GPUs "
            f"and {groups} groups; mean tokens of an output",
        ),
    ]


def lake(quick: bool) -> list[Row]:
    """Simulate ROSE Fig. 1c and Fig. 14 over lengths of FrozenLake, with its share of
    prefill kept.
    """
    shrink, steps = (4, 1) if quick else (2, 2)
    setup = rose.FROZENLAKE.but(
        rollout_gpus=8 // shrink,
        trainer_gpus=8 // shrink,
        batch=256 // shrink,
        group_size=8,
    )
    caching, borrowing, seconds = {}, {}, {}
    for mean in LAKE_OUTPUTS:
        vary = _lengths(mean, mean * LAKE_SHARE / (1 - LAKE_SHARE))
        run = functools.partial(rollouts, steps=steps, vary=vary)
        name = f"{mean:.0f} tokens"
        crowded = setup.but(slots=256)
        alone = statistics.fmean(run(setup))
        seconds[name] = statistics.fmean(run(crowded))
        caching[name] = (
            statistics.fmean(run(crowded.but(without=("prefix_cache",)))) / seconds[name]
        )
        borrowing[name] = alone / statistics.fmean(run(setup.but(rollout_gpus=16 // shrink)))
    scale = f"GPUs and batch divided by {shrink}; mean tokens of an output"
    row = functools.partial(over, ours="64 tokens", note=scale)
    return [
        row("rollout without over with prefix caching, 8 GPUs", caching),
        row("rollout on 8 GPUs", seconds, unit="s"),
        row("rollout speed-up with 8 borrowed GPUs", borrowing),
    ]


def search(quick: bool) -> list[Row]:
    """Simulate Heddle Fig. 12 for search over lengths that its sentences leave."""
    parts, steps = (heddle.QUICK_PARTS, 2) if quick else (heddle.QUICK_PARTS // 2, 3)
    systems = {"ours": OURS, "Heddle": PAPERS, "Verl": VERL, "Verl*": HYBRID, "Slime": SLIME}
    gains: dict[str, dict[str, float]] = {"ours": {}, "Heddle": {}}
    for mean in SEARCH_OUTPUTS[:2] if quick else SEARCH_OUTPUTS:
        seconds = {name: _search_s(system, mean, parts, steps) for name, system in systems.items()}
        best = min(seconds[name] for name in ("Verl", "Verl*", "Slime"))
        for name, found in gains.items():
            found[f"{mean:.0f} tokens"] = best / seconds[name]
    note = f"one part of {parts} of the GPUs and batch; mean tokens of an output"
    row = functools.partial(over, ours="200 tokens", note=note)
    return [
        row("search: Heddle over the best baseline", gains["Heddle"]),
        row("search: ours over the best baseline", gains["ours"], own=True),
    ]


def _search_s(system: System, mean: float, parts: int, steps: int) -> float:
    """Return the mean seconds of a rollout of search with such outputs."""
    case = Case(task="search", model="qwen3-14b", system=system, parts=parts, steps=steps)
    turns = sum(FAMILIES["search"].turns) / 2
    seen = max(10.0, (SEARCH_RESPONSE - turns * mean) / (turns - 1))
    return measure(case.setup, steps=steps, vary=_lengths(mean, seen)).seconds


EXPERIMENTS: Sequence[Experiment] = (
    Experiment(
        "ranges-rollart",
        "RollArt's systems over the spread of outputs",
        "RollArt Fig. 10b, §7.2",
        rollart_spread,
    ),
    Experiment(
        "ranges-gem-math",
        "GEM-math over the length of outputs",
        "RollArt Fig. 12 and 14b, §7.3, §7.4",
        gem_math,
    ),
    Experiment(
        "ranges-frozenlake",
        "FrozenLake over the length of outputs",
        "ROSE Fig. 1c and 14, §2.2, App. E",
        lake,
    ),
    Experiment(
        "ranges-search",
        "Heddle's search over the length of outputs",
        "Heddle Fig. 12, §7.1",
        search,
    ),
)
