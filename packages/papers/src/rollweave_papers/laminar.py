"""Laminar's experiments: scaling of training with GPUs, staleness, and the loss of a
machine.

Weight transfer is in `laminar_weights`. Laminar is our mode `decoupled`, with its
placement, its concurrency and engines that fetch weights from a relay beside them.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence

from rollweave_papers.laminar_runs import (
    CONCURRENCY,
    SCALES,
    SYSTEMS,
    Instant,
    Point,
    measure,
    placement,
    recover,
    repacking,
    staleness_shares,
)
from rollweave_papers.laminar_weights import fig14, fig19
from rollweave_papers.results import Experiment, Row
from rollweave_sim.fleet import RESTART_S

OURS = (
    "Laminar: our mode decoupled on its placement, 1,024 trajectories per engine, weights from a "
    "chain of relays, one on each machine"
)

Curves = Mapping[tuple[str, str], Sequence[Point]]
"""Points by system and model, in ascending order of GPUs."""


def efficiency(points: Sequence[Point]) -> float:
    """Return the strong scaling in percent: the ratio of throughputs of the largest and
    smallest scale over the ratio of their GPUs (Laminar §8.1).
    """
    first, last = points[0], points[-1]
    return 100 * (last.tokens_per_s / first.tokens_per_s) / (last.gpus / first.gpus)


def _curves(task: str, models: Sequence[str], systems: Sequence[str], *, quick: bool) -> Curves:
    return {
        (system, name): [
            measure(task, name, system, gpus, quick=quick) for gpus in _scales(name, quick=quick)
        ]
        for name in models
        for system in systems
    }


def _scales(name: str, *, quick: bool) -> Sequence[int]:
    return SCALES[name][-1:] if quick else SCALES[name]


def _ratios(curves: Curves, models: Sequence[str], other: str) -> list[tuple[int, float]]:
    """Return for every point its GPUs and Laminar's throughput over the other
    system's.
    """
    return [
        (ours.gpus, ours.tokens_per_s / theirs.tokens_per_s)
        for name in models
        for ours, theirs in zip(curves["Laminar", name], curves[other, name], strict=True)
    ]


def _scaling(curves: Curves) -> list[Row]:
    """Return a row of strong scaling for every curve, with its throughputs."""
    rows = []
    for (system, name), points in curves.items():
        line = ", ".join(f"{point.gpus}: {point.tokens_per_s:,.0f}" for point in points)
        parts = ", ".join(f"1/{point.share}" for point in points)
        busy = (
            f"at the largest scale engines work {points[-1].engines_busy:.0%} of the time, "
            f"the trainer {points[-1].trainer_busy:.0%}"
        )
        rows.append(
            Row(
                row=f"strong scaling, {name}, {system}",
                ours=efficiency(points),
                unit="%",
                note=f"tokens/s by GPUs: {line}; {busy}; simulated parts of the cluster {parts}"
                + (f"; {OURS}" if system == "Laminar" else ""),
            )
        )
    return rows


def fig11(quick: bool) -> list[Row]:
    """Reproduce training throughput on mathematical reasoning."""
    models = ("7B",) if quick else tuple(SCALES)
    systems = ("verl", "Laminar") if quick else SYSTEMS
    curves = _curves("dapo-math", models, systems, quick=quick)
    rows = list[Row]()
    note = f"{OURS}; " + ("7B at 256 GPUs only" if quick else "all models and scales")
    everything = []
    for other in systems[:-1]:
        ratios = _ratios(curves, models, other)
        everything += ratios
        values = [ratio for _, ratio in ratios]
        rows.append(_over(f"over {other}, average", statistics.fmean(values), note))
        rows.append(_over(f"over {other}, maximum", max(values), note))
    largest = [
        ratio
        for model_name in models
        for other in systems[:-1]
        for gpus, ratio in _ratios(curves, (model_name,), other)
        if gpus == SCALES[model_name][-1]
    ]
    rows.append(_over("largest scales, average", statistics.fmean(largest), note))
    if not quick:
        small = [ratio for gpus, ratio in everything if gpus <= 64]
        rows.append(_over("at most 64 GPUs, average", statistics.fmean(small), note))
        rows += [
            row for model_name in models for row in _elsewhere("dapo-math", model_name, curves)
        ]
    if not quick:
        rows += _scaling(curves)
        for system in ("Laminar", "AReaL"):
            ours = statistics.fmean(efficiency(curves[system, model_name]) for model_name in models)
            which = (
                OURS
                if system == "Laminar"
                else "mode partial, η = 4, where §8.1 has ∞; best model published 39.2 %"
            )
            rows.append(
                Row(row=f"strong scaling, average, {system}", ours=ours, unit="%", note=which)
            )
    return rows


def _elsewhere(task: str, name: str, curves: Curves) -> list[Row]:
    """Return rows of Laminar on the other placements of Table 2, at the largest scale.

    Our costs need not balance where Laminar's do.
    """
    verl, rows = curves["verl", name][-1], []
    for placed in ("AReaL", "one-step"):
        point = measure(task, name, "Laminar", verl.gpus, quick=False, placed=placed)
        training, rollout, _ = placement(name, "Laminar", verl.gpus, placed=placed)
        rows.append(
            Row(
                row=f"Laminar on {training}/{rollout} GPUs over verl, {name}",
                ours=point.tokens_per_s / verl.tokens_per_s,
                note=f"training/rollout as {placed} in Table 2; engines work "
                f"{point.engines_busy:.0%} of the time, the trainer {point.trainer_busy:.0%}",
                own=True,
            )
        )
    return rows


def _over(row: str, ours: float, note: str) -> Row:
    return Row(row=row, ours=ours, note=note)


def fig12(quick: bool) -> list[Row]:
    """Reproduce training throughput on tool calling, 7B."""
    systems = ("verl", "Laminar") if quick else SYSTEMS
    curves = _curves("tool-calling", ("7B",), systems, quick=quick)
    note = OURS + ("; against verl at 256 GPUs only" if quick else "")
    values = [ratio for other in systems[:-1] for _, ratio in _ratios(curves, ("7B",), other)]
    rows = [
        _over("over all baselines, average", statistics.fmean(values), note),
        _over("over all baselines, minimum", min(values), note),
        _over("over all baselines, maximum", max(values), note),
    ]
    if not quick:
        rows += _scaling(curves)
        rows += _elsewhere("tool-calling", "7B", curves)
    return rows


def fig10(quick: bool) -> list[Row]:
    """Reproduce inherent staleness.

    Laminar observed at most 4 in all settings; Fig. 10 may be of the throughput or the
    convergence runs.
    """
    rows = []
    for concurrency, runs in (
        (256, "convergence runs, App. A.3"),
        (CONCURRENCY, "throughput runs, App. A.3"),
    ):
        shares = staleness_shares(concurrency, quick=quick)
        note = (
            f"{concurrency:,} trajectories per engine ({runs}); 7B on 64 GPUs; versions published "
            "from launch to end"
        )
        note += "; quick: 16 prompts" if quick else ""
        under = 100 * sum(share for age, share in shares.items() if age < 3)
        greatest = functools.partial(Row, unit="steps", note=note)
        rows += [
            greatest(row=f"maximum inherent staleness, {concurrency:,} at once", ours=max(shares)),
            Row(
                row=f"share under 3 steps, {concurrency:,} at once",
                ours=under,
                unit="%",
                note=f"{note}; published: typically under 3",
            ),
        ]
    return rows


# Repack, and machines that fail.


def fig15(quick: bool) -> list[Row]:
    """Compare runs with repacking and without (§8.4)."""
    part = f"half the cluster{', 16 prompts' if quick else ''}"
    with_it, without = (repacking(repack=repack, quick=quick) for repack in (True, False))
    alone, alone_without = (
        repacking(repack=repack, quick=quick, trainer=Instant) for repack in (True, False)
    )
    note = f"{part}; {with_it.released} times repack freed an engine"
    return [
        Row(
            row="generation throughput with repack",
            ours=with_it.tokens_per_s / without.tokens_per_s,
            note=f"{note}; trained tokens per second: {with_it.tokens_per_s:,.0f} and "
            f"{without.tokens_per_s:,.0f}",
        ),
        Row(
            row="generation throughput with repack, without the trainer's time",
            ours=alone.tokens_per_s / alone_without.tokens_per_s,
            note=f"{part}; the trainer takes no time, as it keeps engines waiting on this "
            f"placement; {alone.tokens_per_s:,.0f} and {alone_without.tokens_per_s:,.0f} tokens "
            "per second",
            own=True,
        ),
        Row(row="KV in use with repack", ours=100 * with_it.kv_used, unit="%", note=note),
        Row(row="KV in use without", ours=100 * without.kv_used, unit="%", note=note),
        Row(
            row="KV in use, with repack over without",
            ours=with_it.kv_used / without.kv_used,
            note=f"{note}; published: ratio of the two shares",
        ),
        Row(
            row="overhead of a repack",
            ours=None,
            unit="s",
            note="missing: the time of planning, which takes none here",
        ),
    ]


def fig16(quick: bool) -> list[Row]:
    """Reproduce the loss of a machine with its relay and two of sixteen engines."""
    recovery = recover(quick=quick)
    machine = (
        "one of four machines, half the cluster, 16 prompts" if quick else "one of eight machines"
    )
    note = (
        f"{machine}, with its relay and two engines; mode decoupled; another machine joins at "
        f"once, and {RESTART_S:.0f} s is our assumed start of an engine there, which is nearly all "
        "of the time; Laminar's includes allocating the machine"
    )
    rows = [Row(row="recovery", ours=recovery.seconds, unit="s", note=note)]
    if recovery.slowdown is not None:
        rows.append(
            Row(
                row="step times with the failure over without",
                ours=recovery.slowdown,
                note="published: training is not affected, or drops slightly",
            )
        )
    return rows


EXPERIMENTS = [
    Experiment("laminar-fig10", "Inherent staleness", "Laminar Fig. 10, §6", fig10),
    Experiment("laminar-fig11", "Training throughput, mathematics", "Laminar Fig. 11, §8.1", fig11),
    Experiment(
        "laminar-fig12", "Training throughput, tool calling", "Laminar Fig. 12, §8.1", fig12
    ),
    Experiment("laminar-fig14", "Waiting for weights", "Laminar Fig. 14, §8.3", fig14),
    Experiment("laminar-fig15", "Repack", "Laminar Fig. 15, Table 1", fig15),
    Experiment("laminar-fig16", "A machine fails", "Laminar Fig. 16, §8.5", fig16),
    Experiment("laminar-fig19", "Chain broadcast", "Laminar Fig. 19, App. C", fig19),
]
