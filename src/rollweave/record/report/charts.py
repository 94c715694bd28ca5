"""The charts of a report: which figures are drawn, in which colors."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollweave.record.report.data import RunData
from rollweave.record.report.svg import (
    Frame,
    area,
    dots,
    escape,
    number,
    path,
    smoothed,
    stacked_over,
)

TASK_COLOURS = ("--blue", "--orange", "--green", "--purple", "--red", "--gray")
ENGINE_CAUSES = {
    "busy": "--green",
    "environment": "--blue",
    "stragglers": "--cyan",
    "prompts": "--pink",
    "reward": "--orange",
    "window": "--purple",
    "weights": "--red",
    "training": "--olive",
    "starting": "--gray",
}
TRAINER_CAUSES = {
    "busy": "--green",
    "batch": "--blue",
    "measuring": "--cyan",
    "publishing": "--purple",
    "saving": "--orange",
    "evaluation": "--red",
    "starting": "--gray",
}
COLUMNS = 80
"""Maximum number of columns in a chart over steps: more columns would be thinner than a
pixel on a small screen.
"""

SIGNALS = {
    "loss": "loss",
    "kl_rollout": "KL to the rollout policy (k3)",
    "entropy": "entropy, nats",
    "clip_fraction": "clipped tokens",
    "mask_fraction": "masked tokens",
    "ess": "effective sample size",
    "grad_norm": "gradient norm",
    "logprob_gap_mean": "trainer–engine log-prob gap",
    "train_s": "training seconds a step",
}


def learning_curve(data: RunData) -> str:
    """Draw the success of the task domains that define success, then the reward of all
    domains. Training is drawn as lines (thin: each step; thick: smoothed), and held-out
    evaluations as dots. Dots of the reward are drawn only for domains without success.
    """
    colors = dict(_colored(data.tasks))
    legend = "".join(
        f'<li><i style="background:var({color})"></i>{escape(task)}</li>'
        for task, color in colors.items()
    )
    note = (
        '<li class="dim">line: training batches, at the sampling temperature · dots: held-out '
        "evaluations</li>"
    )
    key = f'<ul class="legend">{legend}{note}</ul>'
    succeeding = [task for task, kind in data.measures.items() if kind == "success"]
    rewarded = [task for task in data.tasks if task not in succeeding]
    reward = _curves(data, "reward", data.tasks, dotted=rewarded, height=170 if succeeding else 300)
    reward = reward or '<p class="dim">no step was trained</p>'
    if not succeeding:
        return f"{reward}{key}"
    return (
        f"{_curves(data, 'success', succeeding, dotted=succeeding, height=300)}{key}<h3>Training "
        f"reward</h3>{reward}"
    )


def _curves(
    data: RunData, kind: str, tasks: Sequence[str], *, dotted: Sequence[str], height: int
) -> str:
    """Draw one figure of `tasks` over the steps, with the evaluations of the tasks in
    `dotted`; "" without a value.
    """
    last = max(
        [line["step"] + 1 for line in data.steps] + [line["step"] for line in data.evaluations],
        default=1,
    )
    points = {
        task: [(line["step"] + 1, line[kind][task]) for line in data.steps if task in line[kind]]
        for task in tasks
    }
    marks = {
        task: [(line["step"], line[kind][task]) for line in data.evaluations if task in line[kind]]
        for task in dotted
    }
    values = [y for figures in (points, marks) for of_task in figures.values() for _, y in of_task]
    if not values:
        return ""
    share = kind == "success"
    frame = Frame(
        x=(0, last), y=(0, 1) if share else (min(0.0, *values), max(values)), height=height
    )
    if share:
        parts = [frame.axes(x_label="training step", y_format=lambda value: f"{value:.0%}")]
    else:
        parts = [frame.axes(x_label="training step", y_ticks=3)]
    for task, color in _colored(data.tasks):
        of_task = points.get(task, [])
        smooth = smoothed([y for _, y in of_task], max(1, len(of_task) // 20))
        parts.append(
            path(frame, of_task, f'stroke="var({color})" stroke-width="1" stroke-opacity=".28"')
        )
        parts.append(
            path(frame, [(x, y) for (x, _), y in zip(of_task, smooth, strict=True)], _stroke(color))
        )
        labels = [f"{task} at step {x}: {y:.3f} held out" for x, y in marks.get(task, [])]
        style = f'fill="var({color})" stroke="var(--page)" stroke-width="1.5"'
        parts.append(dots(frame, marks.get(task, []), style, labels))
    return frame.wrap(*parts, title="success by task" if share else "training reward by task")


def evaluation_chart(data: RunData) -> str:
    """Draw success against wall time, for which a user pays; "" without success or with
    too few points.
    """
    measured = any(line["success"] for line in data.evaluations)
    if len(data.evaluations) < 3 or not measured:
        return ""
    frame = Frame(x=(0, max(line["at"] for line in data.evaluations)), y=(0, 1), height=200)
    parts = [frame.axes(x_label="seconds", y_format=lambda value: f"{value:.0%}")]
    for task, color in _colored(data.tasks):
        marks = [
            (line["at"], line["success"][task])
            for line in data.evaluations
            if task in line["success"]
        ]
        labels = [f"{task} after {x:.0f} s: {y:.3f}" for x, y in marks]
        parts.append(path(frame, marks, _stroke(color)))
        parts.append(
            dots(
                frame,
                marks,
                f'fill="var({color})" stroke="var(--page)" stroke-width="1.5"',
                labels,
            )
        )
    return frame.wrap(*parts, title="held-out success over wall time")


def idle_over_steps(data: RunData) -> str:
    """Draw the shares of the engines' and the trainer's time by cause, step by step."""
    if len(data.steps) < 2:
        return ""
    figures = []
    for component, colors in (("engines", ENGINE_CAUSES), ("trainer", TRAINER_CAUSES)):
        steps, columns = _binned(data.steps, component)
        chart = stacked_over(
            columns,
            colors,
            x=steps,
            label="training step",
            title=f"{component} by cause over steps",
        )
        figures.append(
            f"<figure>{chart}<figcaption>{component.capitalize()} over training"
            "</figcaption></figure>"
        )
    return "".join(figures)


def signals(data: RunData) -> str:
    """Draw small charts of the trainer's metrics."""
    figures = []
    for name, title in SIGNALS.items():
        points = [
            (line["step"] + 1, line["trainer"][name])
            for line in data.steps
            if name in line["trainer"]
        ]
        if len(points) < 2 or not any(y for _, y in points):
            continue
        values = [y for _, y in points]
        frame = Frame(
            x=(points[0][0], points[-1][0]),
            y=(min(0.0, *values), max(values)),
            width=310,
            height=130,
            left=52,
        )
        chart = frame.wrap(
            frame.axes(x_label="", x_ticks=4, y_ticks=2),
            area(frame, points, 'fill="var(--blue)" fill-opacity=".12"'),
            path(frame, points, 'stroke="var(--blue)" stroke-width="1.4"'),
            title=title,
        )
        caption = f"{escape(title)} <span class=dim>last {number(values[-1])}</span>"
        figures.append(f"<figure><figcaption>{caption}</figcaption>{chart}</figure>")
    return f'<div class="triple">{"".join(figures)}</div>' if figures else ""


def _binned(
    steps: Sequence[Mapping[str, Any]], component: str
) -> tuple[list[float], list[dict[str, float]]]:
    """Return the first step of each of at most `COLUMNS` bins of steps, and the bin's
    seconds by cause.
    """
    count = min(COLUMNS, len(steps))
    firsts, columns = [], []
    for index in range(count):
        part = steps[index * len(steps) // count : (index + 1) * len(steps) // count]
        summed: dict[str, float] = {}
        for line in part:
            for cause, seconds in line["idle"].get(component, {}).items():
                summed[cause] = summed.get(cause, 0.0) + seconds
        firsts.append(float(part[0]["step"] + 1))
        columns.append(summed)
    return firsts, columns


def _colored(tasks: Sequence[str]) -> list[tuple[str, str]]:
    return [(task, TASK_COLOURS[index % len(TASK_COLOURS)]) for index, task in enumerate(tasks)]


def _stroke(color: str) -> str:
    return (
        f'stroke="var({color})" stroke-width="2.2" stroke-linejoin="round" stroke-linecap="round"'
    )
