"""RollArt's evaluation (§3.1, §7.2, §7.3): modes, sizes, hardware, staleness bounds.

Unless a function states otherwise: 128 GPUs, batches of 512 in groups of 8, 32K tokens
of context, tasks drawn evenly, an engine on 1, 2 and 4 GPUs for Qwen3-8B/14B/32B, and
where training has its own GPUs, 32 H800 (§7.1). SWE is trained with 32B alone.
"""

import functools
from collections.abc import Iterator

from rollweave_papers import rollart_costs, rollart_parts
from rollweave_papers.cluster import (
    NarrowOutputs,
    Pace,
    Ratio,
    Setup,
    mean_of,
    pace,
    ratio_of,
    rollouts,
)
from rollweave_papers.results import Experiment, Row

CONTEXT, BATCH, GPUS, TRAINER_GPUS = 32_768, 512, 128, 32

GAMES = ("webshop", "frozenlake", "gem-math", "gem-game")
"""Tasks of RollArt Table 1 without SWE."""

MODELS = {"8B": ("qwen3-8b", 1), "14B": ("qwen3-14b", 2), "32B": ("qwen3-32b", 4)}
"""Shape and GPUs of an engine."""

NO_AFFINITY = "96 H800 for rollouts, where the paper has 64 and 32 H20, by task"

WINDOW = "by our count, RollArt admits data of two versions before, and AReaL of one (decision 2)"

QUICK = 4
"""Divisor of GPUs and batch in quick forms."""


def mixture(size: str) -> tuple[str, ...]:
    return ("swe", *GAMES) if size == "32B" else GAMES


def base(size: str, *, shrink: int = 1) -> Setup:
    """Return RollArt's cluster for a model, `shrink` times smaller, with separate
    rollout and training.
    """
    model, tp = MODELS[size]
    return Setup(
        model=model,
        tasks=mixture(size),
        context=CONTEXT,
        rollout_gpus=(GPUS - TRAINER_GPUS) // shrink,
        trainer_gpus=TRAINER_GPUS // shrink,
        batch=BATCH // shrink,
        tp=tp,
    )


def monolithic(setup: Setup) -> Setup:
    """Return a cluster that uses all GPUs for rollout and training in turn: Sync and
    Sync+ (§7.1, "a strengthened monolithic baseline" in §1).
    """
    gpus = setup.rollout_gpus + setup.trainer_gpus
    return setup.but(rollout_gpus=gpus, trainer_gpus=gpus, colocated=True)


def scale(shrink: int, steps: int) -> str:
    """Describe the reductions against the paper, for a note."""
    smaller = f"GPUs and batch divided by {shrink}, " if shrink > 1 else ""
    return f"{smaller}{mean_of(steps, 'step')}"


# Fig. 4.


def fig4(quick: bool) -> list[Row]:
    """Reproduce RollArt §3.1: Qwen3-8B/32K with prefix caching, on two H800 or six H20,
    at several batch sizes (ours, because the text has none).
    """
    steps, sizes = (2, (32, 128)) if quick else (5, (32, 64, 128, 256))
    h800 = Setup(
        model="qwen3-8b",
        tasks=("frozenlake",),
        context=CONTEXT,
        rollout_gpus=2,
        trainer_gpus=2,
        batch=8,
        slots=256,
    )
    h20 = h800.but(gpu="h20", rollout_gpus=6)

    def over(above: Setup, below: Setup, task: str, batch: int) -> Ratio:
        return ratio_of(
            *(rollouts(one.but(tasks=(task,), batch=batch), steps=steps) for one in (above, below))
        )

    bare, bare_h20 = (one.but(without=("prefix_cache",)) for one in (h800, h20))
    lake = {size: over(h800, h20, "frozenlake", size) for size in sizes}
    uncached = {
        size: over(bare, bare_h20, "frozenlake", size) for size in sizes[: 1 if quick else 2]
    }
    math_ratios = {size: over(h20, h800, "gem-math", size) for size in sizes}
    row = functools.partial(Row, note=mean_of(steps, "rollout"))
    least = min(lake.values(), key=lambda one: one.mean)
    return [
        row(row="FrozenLake, H800 time over H20 time, minimum", ours=least.mean, seeds=least.seeds),
        *(
            row(row=f"{what}, batch {size}", ours=one.mean, seeds=one.seeds)
            for what, ratios in (
                ("FrozenLake", lake),
                ("FrozenLake without prefix caching", uncached),
                ("GEM-math, H20 time over H800 time", math_ratios),
            )
            for size, one in ratios.items()
        ),
    ]


# Fig. 10.


def modes(setup: Setup, steps: int) -> dict[str, Pace]:
    """Return the five systems of §7.1, and ours, whose engines are updated at
    publication.

    Sync steps its environments by batches and scores after the rollout; the others do
    neither. Engines receive weights while they generate in RollArt alone (§7.4).
    """
    alone, stopping = monolithic(setup), setup.but(without=("staging",))
    runs = {
        "Sync": alone.but(without=("free_stepping", "reward_overlap")),
        "Sync+": alone,
        "One-off": stopping.but(mode="one_step"),
        "AReaL": stopping.but(mode="partial"),
        "RollArt": setup.in_rollarts_order(),
        "bounded, α=1": setup.but(mode="bounded"),
        "bounded, α=2": setup.but(mode="bounded", alpha=2),
    }
    return {name: pace(run, steps=steps) for name, run in runs.items()}


STEPS_10B = (
    ("Sync+", "Sync"),
    ("One-off", "Sync+"),
    ("AReaL", "One-off"),
    ("RollArt", "AReaL"),
    ("RollArt", "Sync"),
)
"""Systems whose throughputs are compared (§7.2, "Throughput Efficiency")."""

STEPS_10A = (
    ("RollArt", "Sync+"),
    ("RollArt", "One-off"),
    ("RollArt", "AReaL"),
    ("One-off", "Sync+"),
)
"""Systems whose step times are compared with 32B (§7.2, "Model Convergence")."""

FIRST_DONE = (
    "ours trains on the first complete groups, and defers the long tail to a later step or drops it"
)


def fig10b(quick: bool, *, size: str) -> list[Row]:
    """Reproduce tokens of a global batch over step time, as means of five iterations
    (§7.1).
    """
    shrink, steps = (QUICK, 2) if quick else (1, 5)
    paces = modes(base(size, shrink=shrink), steps)
    note = scale(shrink, steps)
    rows = [
        Row(
            row=f"{size} throughput, {ours} over {peer}",
            ours=paces[ours].tokens_per_s / paces[peer].tokens_per_s,
            note="; ".join([note, *_conditions(paces, ours, peer)]),
        )
        for ours, peer in STEPS_10B
    ]
    rows += [
        Row(
            row=f"{size} step time, {peer} over {ours} (Fig. 10a)",
            ours=paces[peer].step_s / paces[ours].step_s,
            note="; ".join([note, *_conditions(paces, ours, peer)]),
        )
        for ours, peer in (STEPS_10A if size == "32B" else ())
    ]
    rows += [
        Row(
            row=f"{size} throughput, {name}, updated at publication, over AReaL",
            ours=paces[name].tokens_per_s / paces["AReaL"].tokens_per_s,
            note=note,
            own=True,
        )
        for name in ("bounded, α=1", "bounded, α=2")
    ]
    return rows


def _conditions(paces: dict[str, Pace], ours: str, peer: str) -> Iterator[str]:
    """Yield conditions of a row that differ from the paper's, and what was measured."""
    if ours == "RollArt":
        yield NO_AFFINITY
        yield WINDOW
    if ours in ("AReaL", "RollArt") and peer != "AReaL":
        yield f"{FIRST_DONE} ({dropped(paces[ours]):.0%} of the started trajectories)"
    if ours == "One-off":
        share = paces[peer].outcome.idle("trainer")["busy"]
        yield f"training is {share:.0%} of the time of our {peer}"
    if ours == "Sync+":
        yield "our Sync has no GPUs set apart for judging"


TRAINING = 0.23
"""Share of training in a synchronous step (§3.1, Fig. 3)."""


def varied(quick: bool) -> list[Row]:
    """Vary one assumption of Fig. 10b at a time, with Qwen3-14B on a quarter of the
    GPUs: how long training takes, and AReaL's window.
    """
    steps = 2
    setup = base("14B", shrink=QUICK)
    stopping = setup.but(without=("staging",))
    plain = pace(monolithic(setup), steps=steps)
    share = plain.outcome.idle("trainer")["busy"]
    factor = TRAINING * (1 - share) / (share * (1 - TRAINING))
    one_off = stopping.but(mode="one_step")
    rollart = pace(setup.in_rollarts_order(), steps=steps).tokens_per_s
    areal = {
        alpha: pace(stopping.but(mode="partial", alpha=alpha), steps=steps).tokens_per_s
        for alpha in (1, 2)
    }
    row = functools.partial(Row, own=True)
    note = scale(QUICK, steps)
    return [
        row(
            row="One-off over Sync+",
            ours=pace(one_off, steps=steps).tokens_per_s / plain.tokens_per_s,
            note=f"{note}; training is {share:.0%} of the time of Sync+",
        ),
        row(
            row=f"One-off over Sync+, training {TRAINING:.0%} of the time of Sync+",
            ours=pace(one_off, steps=steps, training=factor).tokens_per_s
            / pace(monolithic(setup), steps=steps, training=factor).tokens_per_s,
            note=f"{note}; training takes {factor:.1f} times as long, for the share of §3.1",
        ),
        row(row="RollArt over AReaL", ours=rollart / areal[1], note=note),
        row(
            row="RollArt over AReaL, both with a window of two versions",
            ours=rollart / areal[2],
            note=f"{note}; AReaL with η = 2",
        ),
    ]


def dropped(measured: Pace) -> float:
    """Return the share of started trajectories that were dropped, in these runs as too
    old.
    """
    account = measured.outcome.summary.account
    return float(sum(account.dropped.values()) / account.started)


NARROW = 0.5
"""Share of the spread of outputs that the last rows of Fig. 10c keep."""


def fig10c(quick: bool) -> list[Row]:
    """Reproduce Qwen3-14B on 64, 96 and 128 H800, normalized to Sync+ on 64.

    By our reading, training has a quarter of them (§7.1: 32 of 128), and RollArt's
    1.33-2.08 are the ends of its curve. Then the fewest GPUs once more, with outputs of
    less spread, to which the gain is owed.
    """
    shrink, steps = (QUICK, 1) if quick else (1, 3)
    gpus = (64, 128) if quick else (64, 96, 128)
    rates: dict[tuple[str, int], float] = {}
    setups = {
        count: base("14B", shrink=shrink).but(
            rollout_gpus=count * 3 // 4 // shrink, trainer_gpus=count // 4 // shrink
        )
        for count in gpus
    }
    for count, setup in setups.items():
        stopping = setup.but(without=("staging",))
        runs = {
            "Sync+": monolithic(setup),
            "One-off": stopping.but(mode="one_step"),
            "AReaL": stopping.but(mode="partial"),
            "RollArt": setup.in_rollarts_order(),
        }
        for name, run in runs.items():
            rates[name, count] = pace(run, steps=steps).tokens_per_s
    return [
        *_by_gpus(rates, scale(shrink, steps)),
        _narrow(setups[gpus[0]], shrink=shrink, steps=steps),
    ]


def _narrow(setup: Setup, *, shrink: int, steps: int) -> Row:
    """Return RollArt over Sync+, both with outputs of less spread."""
    narrow = functools.partial(NarrowOutputs, factor=NARROW)
    ours, peer = (
        pace(run, steps=steps, vary=narrow).tokens_per_s
        for run in (setup.in_rollarts_order(), monolithic(setup))
    )
    return Row(
        row=f"RollArt, 64 GPUs, over Sync+ on 64, both with {NARROW:.0%} of the spread of outputs",
        ours=ours / peer,
        note=f"{scale(shrink, steps)}; on a logarithmic scale, and with the same mean",
        own=True,
    )


def _by_gpus(rates: dict[tuple[str, int], float], note: str) -> list[Row]:
    return [
        Row(
            row=f"{name}, {count} GPUs, over Sync+ on 64",
            ours=value / rates["Sync+", 64],
            note=note,
        )
        for (name, count), value in rates.items()
        if (name, count) != ("Sync+", 64)
    ]


# Fig. 13.


def fig13(quick: bool, *, size: str) -> list[Row]:
    """Reproduce RollArt §7.3, R4: step time by the bound α.

    The number of environments is the same for all α.
    """
    shrink, steps = (QUICK, 1) if quick else (2, 4)
    bounds = (2, 4) if quick else (2, 3, 4, 6)
    setup = base(size, shrink=shrink)
    one = pace(setup.in_rollarts_order(), steps=steps)
    gains = {
        alpha: one.step_s / pace(setup.in_rollarts_order(alpha), steps=steps).step_s
        for alpha in bounds
    }
    note = scale(shrink, steps)
    what = (
        f"{note}; with α=1, {dropped(one):.0%} of the started trajectories are dropped as too old"
    )
    return [
        Row(
            row=f"{size} step time, α=1 over the best α", ours=max(1.0, *gains.values()), note=what
        ),
        *(
            Row(row=f"{size}, α=1 over α={alpha}", ours=gain, note=note)
            for alpha, gain in gains.items()
        ),
    ]


# Fig. 11a.


ON_H20 = ("gem-math", "gem-game")
"""Tasks whose turns run on H20: "mathematical and game-oriented" ones. The others are
"prefill-heavy" (§7.3).
"""

ROLLOUT_GPUS: dict[str, dict[str, int]] = {
    "mix": {"h800": 64, "h20": 24},
    "H20": {"h20": 208},
    "H800": {"h800": 72},
}
"""GPUs for rollouts of about equal cost (§7.3)."""


def fig11a(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.3, R1: step times with 64 H800 and 24 H20 by task, over
    those with 72 H800 or with 208 H20 alone. 32 H800 train.
    """
    shrink, steps = (8, 1) if quick else (1, 4)
    sizes = ("8B",) if quick else tuple(MODELS)
    rows = []
    for size in sizes:
        rows += _affinity(size, shrink=shrink, steps=steps)
    return rows


def _affinity(size: str, *, shrink: int, steps: int) -> list[Row]:
    setup = base(size, shrink=shrink).in_rollarts_order()
    kinds = {
        name: {kind: gpus // shrink for kind, gpus in counts.items()}
        for name, counts in ROLLOUT_GPUS.items()
    }
    prefers = {task: "h20" if task in ON_H20 else "h800" for task in setup.tasks}
    mix = setup.but(kinds=kinds["mix"], prefers=prefers)
    paces = {
        "mix": pace(mix, steps=steps),
        "any": pace(mix.but(prefers={}), steps=steps),
        **{name: pace(setup.but(kinds=kinds[name]), steps=steps) for name in ("H20", "H800")},
    }
    busy = ", ".join(
        f"{kind.upper()} {share:.0%}" for kind, share in paces["mix"].outcome.pools_busy.items()
    )
    note = f"{scale(shrink, steps)}; in the mix {busy} of the time at work"
    return [
        *(
            Row(
                row=f"{size} step time, {peer} alone over the mix by task",
                ours=paces[peer].step_s / paces["mix"].step_s,
                note=note,
            )
            for peer in ("H20", "H800")
        ),
        Row(
            row=f"{size} step time, H800 alone over the mix, every task on any GPU",
            ours=paces["H800"].step_s / paces["any"].step_s,
            note=scale(shrink, steps),
            own=True,
        ),
    ]


EXPERIMENTS = (
    Experiment("rollart-fig4", "H800 against H20, by task", "RollArt Fig. 4, §3.1", fig4),
    *(
        Experiment(
            f"rollart-fig10b-{size.lower()}",
            f"Throughput by mode, Qwen3-{size}",
            "RollArt Fig. 10a and 10b, §7.2",
            functools.partial(fig10b, size=size),
        )
        for size in MODELS
    ),
    Experiment(
        "rollart-fig10b-varied",
        "Throughput by mode, one assumption varied",
        "RollArt Fig. 10b, §7.2",
        varied,
    ),
    Experiment("rollart-fig10c", "Throughput by cluster size", "RollArt Fig. 10c, §7.2", fig10c),
    Experiment("rollart-fig11a", "Hardware affinity", "RollArt Fig. 11a, §7.3", fig11a),
    *(
        Experiment(
            f"rollart-fig13-{size.lower()}",
            f"The bound α, Qwen3-{size}",
            "RollArt Fig. 13, §7.3",
            functools.partial(fig13, size=size),
        )
        for size in MODELS
    ),
    *rollart_parts.EXPERIMENTS,
    *rollart_costs.EXPERIMENTS,
)
