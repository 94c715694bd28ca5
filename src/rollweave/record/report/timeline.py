"""The Gantt chart of a run: the load over the whole run, and a close-up of a few
seconds.

The overview bins time, so that its sums are exact for a run of any length; the close-up
shows individual boxes, at most `MAX_BOXES`, in a window around the middle of training.
"""

from collections.abc import Iterable, Sequence

from rollweave.record.report.data import RunData, TraceSpan
from rollweave.record.report.svg import WIDTH, escape, nice_ticks, number
from rollweave.record.trace import ENGINES, ENVIRONMENTS, TRAINER

BINS = 240
MAX_BOXES = 2400
MAX_LANES = 36
"""Maximum number of environment slots in the close-up; further slots are counted and
left out.
"""

LEFT = 116
LANE = 13
KINDS = {
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
NAMES = {
    "turn": "waiting for the agent's turn",
    "step": "environment step",
    "eval": "reward",
    "train": "training",
    "init": "environment start; weights published or loaded",
    "save": "checkpoint",
}


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


def overview(data: RunData) -> str:
    """Draw rows of filled curves over the whole run: the turns of each engine,
    environments by activity, and the trainer.
    """
    spans = data.spans
    end = max((span.end for span in spans), default=0.0)
    if end <= 0:
        return ""
    rows: list[tuple[str, str, list[float]]] = []
    for engine in sorted(
        {span.engine for span in spans if span.engine}, key=lambda name: (len(name), name)
    ):
        turns = busy_bins((span for span in spans if span.engine == engine), start=0, end=end)
        rows.append((f"turns on {engine}", "--blue", turns))
    for kind, name in (("init", "env starts"), ("step", "env steps"), ("eval", "rewards")):
        of_kind = [span for span in spans if span.row == ENVIRONMENTS and span.kind == kind]
        if of_kind:
            rows.append((name, KINDS[kind], busy_bins(of_kind, start=0, end=end)))
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
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{floor}" y2="{floor}"/>'
            f'<polygon points="{LEFT},{floor} {places} {WIDTH},{floor}" fill="var({color})" '
            'fill-opacity=".75"/>'
            f'<text class="name" x="{LEFT - 12}" y="{floor - 16}" '
            f'text-anchor="end">{escape(name)}</text>'
            f'<text class="tick" x="{LEFT - 12}" y="{floor - 2}" '
            f'text-anchor="end">{_peak(name, most)}</text>'
        )
    bottom = len(rows) * (height + gap)
    parts.append(_time_axis(0, end, bottom))
    return _svg(bottom + 36, parts, "load of engines, environments and trainer over the run")


def close_up(data: RunData) -> tuple[str, str]:
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
    color = KINDS.get(span.kind, "--gray")
    return (
        f'<rect x="{left:.1f}" y="{index * LANE + 1}" width="{max(0.6, right - left):.1f}" '
        f'height="{LANE - 2}" '
        f'fill="var({color})"><title>{escape(span.name)}: {span.end - span.start:.3f} '
        "s</title></rect>"
    )


def _lane_names(lanes: Sequence[tuple[int, int, str]]) -> str:
    """Draw the lanes' names. Only the first environment slot is labeled: forty labels
    would be noise.
    """
    parts, named = [], False
    for index, (row, _, name) in enumerate(lanes):
        y = index * LANE + LANE - 3
        if row != ENVIRONMENTS:
            parts.append(
                f'<text class="tick" x="{LEFT - 12}" y="{y}" '
                f'text-anchor="end">{escape(name)}</text>'
            )
        elif not named:
            named = True
            parts.append(
                f'<text class="tick" x="{LEFT - 12}" y="{y}" text-anchor="end">environments</text>'
            )
    return "".join(parts)


def _time_axis(start: float, end: float, y: int) -> str:
    parts = []
    for tick in nice_ticks(start, end, 8):
        x = LEFT + (tick - start) / (end - start) * (WIDTH - LEFT)
        anchor = "end" if x > WIDTH - 20 else "middle"
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>'
            f'<text class="tick" x="{x:.1f}" y="{y + 19}" text-anchor="{anchor}">{number(tick)} '
            "s</text>"
        )
    return "".join(parts)


def _peak(name: str, most: float) -> str:
    return f"busy {min(1.0, most):.0%} at most" if name == "trainer" else f"at most {number(most)}"


def _svg(height: int, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
