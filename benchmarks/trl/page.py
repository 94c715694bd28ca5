"""The page of the learning curves: success of each variant over seconds and over steps,
with the time to the target and staleness beside it.

A curve is the mean over seeds, and its band the 95 % confidence interval of that mean
by Student's t; a single seed has no band. Between two evaluations of a seed, its
success is interpolated; after its training has ended at the target, it stays.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.trl.curve import Evaluation, LearningCurve
from rollweave.io.disk import replace_file
from rollweave.record.report.svg import Frame, escape, path
from rollweave.runtime.preflight.machine import describe

COLORS: Final = ("#3f6fc9", "#d07a1f", "#2f8f66", "#7d5bbf", "#c2504a", "#6b7280")
"""Colors of the variants, readable on white and on black."""

STYLE: Final = (
    "<style>text { font: 12px sans-serif; fill: #6b7280 } "
    ".grid { stroke: #9aa1a9; stroke-opacity: .35 }</style>"
)
POINTS: Final = 200
"""Number of points of a curve."""

CONFIDENCE: Final = 0.95
WIDTH: Final = 760
FOLDER: Final = "figures"


class Band(NamedTuple):
    """The mean over seeds at each `x`, and its confidence interval."""

    x: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval: infinite for
    a single value.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    from scipy.stats import t as student  # a second, and only here

    quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(len(values))


def band(runs: Sequence[LearningCurve], over: Callable[[Evaluation], float], last: float) -> Band:
    """Return the band of a variant from its seeds' first common evaluation to `last`.
    `over` is the abscissa of an evaluation.
    """
    first = max(over(run.curve[0]) for run in runs)
    x = np.linspace(first, max(first, last), POINTS)
    curves = [
        np.interp(x, [over(one) for one in run.curve], [one.success for one in run.curve])
        for run in runs
    ]
    bounds = [interval([float(curve[i]) for curve in curves]) for i in range(len(x))]
    mean = np.array([center for center, _ in bounds])
    half = np.array([half if math.isfinite(half) else 0.0 for _, half in bounds])
    return Band(x, mean, np.clip(mean - half, 0, 1), np.clip(mean + half, 0, 1))


def chart(
    learned: Mapping[str, Sequence[LearningCurve]],
    over: Callable[[Evaluation], float],
    *,
    label: str,
    target: float,
) -> str:
    """Return the learning curves of all variants as an SVG file."""
    last = max(over(run.curve[-1]) for runs in learned.values() for run in runs)
    frame = Frame(x=(0, last), y=(0, 1), width=WIDTH, height=340, top=26)
    parts = [STYLE, frame.axes(x_label=label, y_format=lambda value: f"{value:.0%}")]
    parts.append(
        path(frame, [(0, target), (last, target)], 'stroke="#9aa1a9" stroke-dasharray="5"')
    )
    bands = {name: band(runs, over, last) for name, runs in learned.items()}
    for (name, one), color in zip(bands.items(), itertools.cycle(COLORS), strict=False):
        edge = [*zip(one.x, one.high, strict=True), *zip(one.x[::-1], one.low[::-1], strict=True)]
        places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in edge)
        parts.append(f'<polygon fill="{color}" fill-opacity=".12" points="{places}"/>')
        parts.append(
            path(
                frame, list(zip(one.x, one.mean, strict=True)), f'stroke="{color}" stroke-width="2"'
            )
        )
        left = frame.left + 110 * list(bands).index(name)
        parts.append(
            f'<rect x="{left}" y="6" width="12" height="12" fill="{color}"/>'
            f'<text x="{left + 17}" y="16">{escape(name)}</text>'
        )
    drawing = frame.wrap(*parts, title=f"held-out success over {label}, mean and 95 % interval")
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def table(learned: Mapping[str, Sequence[LearningCurve]]) -> Iterable[str]:
    """Yield the lines of the table, one for each variant."""
    columns = (
        "seeds at the target",
        "seconds to the target",
        "steps to the target",
        "seconds per step",
    )
    yield f"| | {' | '.join((*columns, 'staleness', 'inherent staleness'))} |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, runs in learned.items():
        reached = [run for run in runs if run.steps is not None]
        cells = [
            f"{len(reached)} of {len(runs)}",
            _with_interval([run.seconds or 0.0 for run in reached]),
            _with_interval([float(run.steps or 0) for run in reached]),
            f"{statistics.median(s for run in runs for s in run.step_s):.2f}",
            *(
                _mean_age(sum((getattr(run, kind) for run in runs), Counter()))
                for kind in ("staleness", "inherent")
            ),
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


def page(
    learned: Mapping[str, Sequence[LearningCurve]], *, target: float, conditions: Mapping[str, Any]
) -> str:
    """Return the page, which shows the two figures of `FOLDER`."""
    machine = describe()
    where = (
        f"{machine['cpu']} with {machine['cores']} cores and {machine['memory_gib']} GiB of "
        f"memory, {machine['system']}, Python {machine['python']} and PyTorch {machine['torch']}"
    )
    differences = "\n".join(f"- {text}" for text in conditions["differences"])
    settings = "\n".join(
        f"- `{name}`: {', '.join(f'`{one}`' for one in variant)}"
        for name, variant in conditions["variants"].items()
    )
    return f"""# Learning curves

This page shows how fast agents learn the fixed frozen lake in each mode of Rollweave,
and with TRL {conditions["trl"]}. All start from the same warmed-up checkpoint of their
seed, and train until a held-out evaluation at the sampling temperature has a success of
{target}. Lines are means over the seeds, bands the 95 % confidence intervals of these means
(none for a single seed). A seed that has reached the target keeps its success.

![success over seconds]({FOLDER}/learning-seconds.svg)

![success over steps]({FOLDER}/learning-steps.svg)

{chr(10).join(table(learned))}

Seconds and steps to the target are means over the seeds that reached it, ± half the
95 % interval. Seconds per step are the median over all steps. *Staleness* is the mean
number of steps between the weights that started a trajectory and the step that trained
on it; *inherent staleness* the mean number of versions that were published during a
trajectory's rollout. TRL is on policy.

What is the same: {conditions["same"]}.

Differences that remain:

{differences}

Settings of the variants:

{settings}

Measured on {where}.
To write this page, run `make trl` once, and then:

```
rollweave bench trl --seeds {len(conditions["seeds"])} --write docs/LEARNING.md
```
"""


def write_page(
    file: Path,
    learned: Mapping[str, Sequence[LearningCurve]],
    *,
    target: float,
    conditions: Mapping[str, Any],
) -> None:
    """Write the page, and its figures into `FOLDER` beside it."""
    folder = file.parent / FOLDER
    folder.mkdir(exist_ok=True)
    for name, over in (("seconds", lambda one: one.seconds), ("steps", lambda one: one.step)):
        drawing = chart(learned, over, label=f"{name} of training", target=target)
        replace_file(folder / f"learning-{name}.svg", drawing.encode())
    replace_file(file, page(learned, target=target, conditions=conditions).encode())


def _with_interval(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.0f} ± {half:.0f}" if math.isfinite(half) else f"{mean:.0f}"


def _mean_age(counts: Counter[int]) -> str:
    total = counts.total()
    return f"{sum(age * n for age, n in counts.items()) / total:.2f}" if total else "-"
