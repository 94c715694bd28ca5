"""The charts of a report: which figures are drawn, in which colors; and the Gantt chart
of the run: the load over the whole run, and a close-up of a few seconds.

The overview of the Gantt chart bins time, so that its sums are exact for a run of any
length; the close-up shows individual boxes, at most `MAX_BOXES`, in a window around the
middle of training.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollweave.record.report.data import RunData, TraceSpan, parts_of, totals
from rollweave.record.report.svg import (
    WIDTH,
    Frame,
    area,
    box,
    dots,
    escape,
    grid_line,
    nice_ticks,
    number,
    path,
    smoothed,
    stacked_over,
    text,
)
from rollweave.record.trace import ENGINES, ENVIRONMENTS, TRAINER

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


BINS = 240

MAX_BOXES = 2400

MAX_LANES = 36
"""Maximum number of environment slots in the close-up; further slots are counted and
left out.
"""

LEFT = 116

LANE = 13

SPAN_COLORS = {
    "turn": "--blue",
    "step": "--green",
    "init": "--purple",
    "eval": "--orange",
    "train": "--dim",
    "measure": "--cyan",
    "publish": "--purple",
    "load": "--purple",
    "save": "--gray",
    "start": "--gray",
}

SPAN_NAMES = {
    "turn": "waiting for the agent's turn",
    "step": "environment step",
    "eval": "reward",
    "train": "training",
    "init": "environment start; weights published or loaded",
    "save": "checkpoint",
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
        averaged = [(x, y) for (x, _), y in zip(of_task, smooth, strict=True)]
        labels = [f"{task} at step {x}: {y:.3f} held out" for x, y in marks.get(task, [])]
        parts += [
            path(frame, of_task, f'stroke="var({color})" stroke-width="1" stroke-opacity=".28"'),
            path(frame, averaged, _stroke(color)),
            dots(frame, marks.get(task, []), _dot(color), labels),
        ]
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
        parts += [path(frame, marks, _stroke(color)), dots(frame, marks, _dot(color), labels)]
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
            caption=f"{component} by cause over steps",
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
    firsts, columns = [], []
    for part in parts_of(steps, COLUMNS):
        firsts.append(float(part[0]["step"] + 1))
        columns.append(totals(part, "idle", component))
    return firsts, columns


def _colored(tasks: Sequence[str]) -> list[tuple[str, str]]:
    return [(task, TASK_COLOURS[index % len(TASK_COLOURS)]) for index, task in enumerate(tasks)]


def _dot(color: str) -> str:
    return f'fill="var({color})" stroke="var(--page)" stroke-width="1.5"'


def _stroke(color: str) -> str:
    return (
        f'stroke="var({color})" stroke-width="2.2" stroke-linejoin="round" stroke-linecap="round"'
    )


def busy_bins(
    spans: Iterable[TraceSpan], *, start: float, end: float, bins: int = BINS
) -> list[float]:
    """Return the mean number of open spans in each of `bins` equal parts of `[start,
    end)`.
    """
    width = (end - start) / bins
    load = [0.0] * bins
    if width <= 0:
        return load
    for span in spans:
        low, high = max(span.start, start), min(span.end, end)
        if high <= low:
            continue
        first, last = int((low - start) / width), min(bins - 1, int((high - start) / width))
        for index in range(first, last + 1):
            left = start + index * width
            load[index] += max(0.0, min(high, left + width) - max(low, left)) / width
    return load


def timeline_overview(data: RunData) -> str:
    """Draw rows of filled curves over the whole run: the turns of each engine,
    environments by activity, and the trainer.
    """
    spans = data.spans
    end = max((span.end for span in spans), default=0.0)
    if end <= 0:
        return ""
    rows: list[tuple[str, str, list[float]]] = []
    turns: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        turns[span.engine].append(span)
    turns.pop("", None)
    for engine, own in sorted(turns.items(), key=lambda item: (len(item[0]), item[0])):
        rows.append((f"turns on {engine}", "--blue", busy_bins(own, start=0, end=end)))
    for kind, name in (("init", "env starts"), ("step", "env steps"), ("eval", "rewards")):
        of_kind = [span for span in spans if span.row == ENVIRONMENTS and span.kind == kind]
        if of_kind:
            rows.append((name, SPAN_COLORS[kind], busy_bins(of_kind, start=0, end=end)))
    training = [span for span in spans if span.row == TRAINER and span.kind == "train"]
    rows.append(("trainer", "--green", busy_bins(training, start=0, end=end)))
    height, gap = 44, 12
    parts = []
    for index, (name, color, values) in enumerate(rows):
        floor = (index + 1) * (height + gap)
        most = max(max(values), 1e-9)
        places = " ".join(
            f"{LEFT + (at + 0.5) / BINS * (WIDTH - LEFT):.1f},{floor - value / most * height:.1f}"
            for at, value in enumerate(values)
        )
        parts += [
            grid_line(LEFT, WIDTH, floor, floor),
            f'<polygon points="{LEFT},{floor} {places} {WIDTH},{floor}" fill="var({color})" '
            'fill-opacity=".75"/>',
            text("name", LEFT - 12, floor - 16, escape(name), "end"),
            text("tick", LEFT - 12, floor - 2, _peak(name, most), "end"),
        ]
    bottom = len(rows) * (height + gap)
    parts.append(_time_axis(0, end, bottom))
    return _svg(bottom + 36, parts, "load of engines, environments and trainer over the run")


def timeline_close_up(data: RunData) -> tuple[str, str]:
    """Draw a short window, box by box, and return the chart with a sentence that
    describes the window.
    """
    window = choose_window(data.spans)
    if window is None:
        return "", ""
    start, end = window
    inside = [span for span in data.spans if span.start < end and span.end > start]
    lanes: list[tuple[int, int, str]] = []
    for row in (TRAINER, ENGINES, ENVIRONMENTS):
        numbers = sorted({span.lane for span in inside if span.row == row})
        lanes += [(row, lane, data.lanes.get((row, lane), str(lane))) for lane in numbers]
    environments = [lane for lane in lanes if lane[0] == ENVIRONMENTS]
    hidden = len(environments) - MAX_LANES
    lanes = [lane for lane in lanes if lane[0] != ENVIRONMENTS] + environments[:MAX_LANES]
    places = {(row, lane): index for index, (row, lane, _) in enumerate(lanes)}
    parts = [_lane_names(lanes)]
    for span in sorted(inside, key=lambda span: span.start):
        index = places.get((span.row, span.lane))
        if index is not None:
            parts.append(_box(span, index, start, end))
    bottom = len(lanes) * LANE + 6
    parts.append(_time_axis(start, end, bottom))
    sentence = f"{start:.1f} s to {end:.1f} s"
    if hidden > 0:
        sentence += f"; {hidden} more environment slots were in use"
    return _svg(bottom + 36, parts, "boxes of a short window of the run"), sentence


def choose_window(spans: Sequence[TraceSpan]) -> tuple[float, float] | None:
    """Return the longest window around the middle of training that has at most eight
    steps and `MAX_BOXES` spans.
    """
    training = sorted(
        (span for span in spans if span.row == TRAINER and span.kind == "train"),
        key=lambda span: span.start,
    )
    if not training:
        return None
    middle = len(training) // 2
    best = None
    for reach in range(1, 5):
        first, last = (
            training[max(0, middle - reach)],
            training[min(len(training) - 1, middle + reach - 1)],
        )
        start, end = first.start, max(last.end, first.end)
        count = sum(1 for span in spans if span.start < end and span.end > start)
        if best is not None and count > MAX_BOXES:
            break
        best = (start, end)
    assert best is not None, "the loop runs"
    start, end = best
    pad = (end - start) * 0.02
    return max(0.0, start - pad), end + pad


def _box(span: TraceSpan, index: int, start: float, end: float) -> str:
    left, right = (
        LEFT + (max(start, min(end, at)) - start) / (end - start) * (WIDTH - LEFT)
        for at in (span.start, span.end)
    )
    color = SPAN_COLORS.get(span.kind, "--gray")
    title = f"{span.name}: {span.end - span.start:.3f} s"
    return box(left, index * LANE + 1, max(0.6, right - left), LANE - 2, color, title)


def _lane_names(lanes: Sequence[tuple[int, int, str]]) -> str:
    """Draw the lanes' names. Only the first environment slot is labeled: forty labels
    would be noise.
    """
    parts, named = [], False
    for index, (row, _, name) in enumerate(lanes):
        y = index * LANE + LANE - 3
        if row != ENVIRONMENTS:
            parts.append(text("tick", LEFT - 12, y, escape(name), "end"))
        elif not named:
            named = True
            parts.append(text("tick", LEFT - 12, y, "environments", "end"))
    return "".join(parts)


def _time_axis(start: float, end: float, y: int) -> str:
    parts = []
    for tick in nice_ticks(start, end, 8):
        x = LEFT + (tick - start) / (end - start) * (WIDTH - LEFT)
        anchor = "end" if x > WIDTH - 20 else "middle"
        parts.append(
            grid_line(x, x, y, y + 5) + text("tick", x, y + 19, f"{number(tick)} s", anchor)
        )
    return "".join(parts)


def _peak(name: str, most: float) -> str:
    return f"busy {min(1.0, most):.0%} at most" if name == "trainer" else f"at most {number(most)}"


def _svg(height: int, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
