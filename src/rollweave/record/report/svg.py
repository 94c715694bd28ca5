"""Charts as inline SVG, colored by the page's CSS variables.

Small functions from numbers to markup, without state.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence

Points = Sequence[tuple[float, float]]

WIDTH = 960
"""Width of a full-width chart in user units; the page scales it."""


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def number(value: float) -> str:
    """Format a number for people: `1,234`, `0.25`, `3.1e-05`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 0.001:
        return f"{value:.3g}"
    return f"{value:.1e}"


def text(kind: str, x: float, y: float, content: str, anchor: str = "start") -> str:
    """Write `content`, which is markup already, in the style of the class `kind`."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{content}</text>'


def grid_line(x1: float, x2: float, y1: float, y2: float) -> str:
    """Draw a line of the grid or of an axis."""
    return f'<line class="grid" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def box(
    left: float, top: float, width: float, height: float, color: str, title: str, more: str = ""
) -> str:
    """Draw a filled rectangle; hovering shows its title."""
    where = f'x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {where} {more}fill="var({color})"><title>{escape(title)}</title></rect>'


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


class Frame:
    """Axes: maps values to positions and draws ticks. `x` and `y` are (low, high)."""

    def __init__(
        self,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        width: int = WIDTH,
        height: int = 260,
        left: int = 44,
        bottom: int = 34,
        top: int = 10,
        right: int = 12,
    ) -> None:
        self.width, self.height = width, height
        self.left, self.right, self.top, self.bottom = left, width - right, top, height - bottom
        self._x, self._y = _widened(x), _widened(y)

    def x(self, value: float) -> float:
        low, high = self._x
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self._y
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def axes(
        self,
        *,
        x_label: str,
        y_format: Callable[[float], str] = number,
        x_ticks: int = 8,
        y_ticks: int = 4,
    ) -> str:
        parts = []
        for tick in nice_ticks(*self._y, y_ticks):
            at = self.y(tick)
            parts.append(grid_line(self.left, self.right, at, at))
            parts.append(text("tick", self.left - 8, at + 4, y_format(tick), "end"))
        for tick in nice_ticks(*self._x, x_ticks):
            parts.append(self.x_tick(self.x(tick), number(tick)))
        return "".join([*parts, self.x_label(x_label)])

    def x_tick(self, x: float, content: str) -> str:
        """Write a tick below the chart, at a position."""
        return text("tick", x, self.bottom + 17, content, "middle")

    def x_label(self, label: str) -> str:
        return text("label", self.right, self.bottom + 31, escape(label), "end")

    def wrap(self, *parts: str, title: str) -> str:
        """Return the finished chart; screen readers read `title`."""
        body = "".join(parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(title)}">'
            f"<title>{escape(title)}</title>{body}</svg>"
        )


def _widened(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def path(frame: Frame, points: Points, style: str) -> str:
    """Draw a line through the points."""
    if not points:
        return ""
    places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline fill="none" {style} points="{places}"/>'


def area(frame: Frame, points: Points, style: str) -> str:
    """Draw the area under the points."""
    if not points:
        return ""
    floor = frame.bottom
    places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return (
        f'<polygon {style} points="{frame.x(points[0][0]):.1f},{floor} {places} '
        f'{frame.x(points[-1][0]):.1f},{floor}"/>'
    )


def dots(frame: Frame, points: Points, style: str, labels: Sequence[str]) -> str:
    """Draw a mark on each point; hovering shows its label."""
    return "".join(
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4" '
        f"{style}><title>{escape(label)}</title></circle>"
        for (x, y), label in zip(points, labels, strict=True)
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over the last `window` values."""
    out, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        out.append(total / min(index + 1, window))
    return out


def bars(
    values: Mapping[str, float], *, label: str, color: str, height: int = 220, width: int = 460
) -> str:
    """Draw vertical bars with their values, for histograms."""
    total, most = sum(values.values()) or 1, max(values.values(), default=1) or 1
    frame = Frame(
        x=(0, max(1, len(values))), y=(0, most * 1.12), width=width, height=height, left=12
    )
    parts = [grid_line(frame.left, frame.right, frame.bottom, frame.bottom)]
    slot = (frame.right - frame.left) / max(1, len(values))
    wide = min(64.0, slot * 0.7)
    for index, (name, value) in enumerate(values.items()):
        center, top = frame.x(index + 0.5), frame.y(value)
        title = f"{name}: {number(value)} ({value / total:.1%})"
        parts += [
            box(center - wide / 2, top, wide, frame.bottom - top, color, title, 'rx="3" '),
            text("value", center, top - 5, f"{value / total:.0%}", "middle"),
            frame.x_tick(center, escape(name)),
        ]
    return frame.wrap(*parts, frame.x_label(label), title=label)


def stacked(
    rows: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], *, width: int = WIDTH
) -> str:
    """Draw one horizontal bar per row. Every bar fills the width and is divided by
    share.
    """
    height, left = 34, 84
    parts = []
    for index, (name, values) in enumerate(rows.items()):
        total = sum(values.values())
        y = index * (height + 12) + 4
        parts.append(text("name", left - 12, y + 22, escape(name), "end"))
        x = float(left)
        for cause in [cause for cause in colors if values.get(cause)]:
            share = values[cause] / total
            wide = share * (width - left)
            title = f"{name}: {cause} {values[cause]:.1f} s ({share:.1%})"
            width_drawn = max(0.0, wide - 1.5)
            parts.append(box(x, y, width_drawn, height, colors[cause], title, 'rx="3" '))
            if wide > 7.6 * len(f"{cause} {share:.0%}") + 18:
                parts.append(text("on", x + 9, y + 22, f"{escape(cause)} {share:.0%}"))
            x += wide
    total_height = max(1, len(rows)) * (height + 12)
    return (
        f'<svg viewBox="0 0 {width} {total_height}" role="img" aria-label="time by '
        f'cause">{"".join(parts)}</svg>'
    )


def stacked_over(
    columns: Sequence[Mapping[str, float]],
    colors: Mapping[str, str],
    *,
    x: Sequence[float],
    label: str,
    caption: str,
) -> str:
    """Draw shares over the run: one column per step (or bin of steps), which is divided
    by share.
    """
    width = WIDTH // 2 - 10
    frame = Frame(x=(0, max(1, len(columns))), y=(0, 1), width=width, height=180)
    wide = (frame.right - frame.left) / max(1, len(columns))
    parts = []
    for index, values in enumerate(columns):
        total, base = sum(values.values()), 0.0
        for cause in [cause for cause in colors if total and values.get(cause)]:
            share = values[cause] / total
            top = frame.y(base + share)
            title, height = f"{label} {number(x[index])}: {cause} {share:.0%}", frame.y(base) - top
            left, more = frame.left + index * wide, 'shape-rendering="crispEdges" '
            parts.append(box(left, top, wide + 0.3, height, colors[cause], title, more))
            base += share
    for tick in (0, 0.5, 1):
        parts.append(text("tick", frame.left - 8, frame.y(tick) + 4, f"{tick:.0%}", "end"))
    for index in sorted({0, len(columns) // 2, len(columns) - 1} if columns else set()):
        parts.append(frame.x_tick(frame.left + (index + 0.5) * wide, number(x[index])))
    return frame.wrap(*parts, frame.x_label(label), title=caption)
