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
            parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{at:.1f}" '
                f'y2="{at:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" x="{self.left - 8}" y="{at + 4:.1f}" '
                f'text-anchor="end">{y_format(tick)}</text>'
            )
        for tick in nice_ticks(*self._x, x_ticks):
            parts.append(
                f'<text class="tick" x="{self.x(tick):.1f}" y="{self.bottom + 17}" '
                f'text-anchor="middle">{number(tick)}</text>'
            )
        parts.append(
            f'<text class="label" x="{self.right}" y="{self.bottom + 31}" '
            f'text-anchor="end">{escape(x_label)}</text>'
        )
        return "".join(parts)

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
    parts = [
        f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" '
        f'y2="{frame.bottom}"/>'
    ]
    slot = (frame.right - frame.left) / max(1, len(values))
    wide = min(64.0, slot * 0.7)
    for index, (name, value) in enumerate(values.items()):
        center, top = frame.x(index + 0.5), frame.y(value)
        parts.append(
            f'<rect x="{center - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{frame.bottom - top:.1f}" rx="3" '
            f'fill="var({color})"><title>{escape(name)}: {number(value)} '
            f"({value / total:.1%})</title></rect>"
            f'<text class="value" x="{center:.1f}" y="{top - 5:.1f}" '
            f'text-anchor="middle">{value / total:.0%}</text>'
            f'<text class="tick" x="{center:.1f}" y="{frame.bottom + 17}" '
            f'text-anchor="middle">{escape(name)}</text>'
        )
    parts.append(
        f'<text class="label" x="{frame.right}" y="{frame.bottom + 31}" '
        f'text-anchor="end">{escape(label)}</text>'
    )
    return frame.wrap(*parts, title=label)


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
        parts.append(
            f'<text class="name" x="{left - 12}" y="{y + 22}" '
            f'text-anchor="end">{escape(name)}</text>'
        )
        x = float(left)
        for cause in [cause for cause in colors if values.get(cause)]:
            share = values[cause] / total
            wide = share * (width - left)
            text = f"{name}: {cause} {values[cause]:.1f} s ({share:.1%})"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, wide - 1.5):.1f}" height="{height}" '
                'rx="3" '
                f'fill="var({colors[cause]})"><title>{escape(text)}</title></rect>'
            )
            if wide > 7.6 * len(f"{cause} {share:.0%}") + 18:
                parts.append(
                    f'<text class="on" x="{x + 9:.1f}" y="{y + 22}">{escape(cause)} '
                    f"{share:.0%}</text>"
                )
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
    title: str,
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
            parts.append(
                f'<rect x="{frame.left + index * wide:.2f}" y="{top:.1f}" width="{wide + 0.3:.2f}" '
                f'height="{frame.y(base) - top:.1f}" fill="var({colors[cause]})" '
                'shape-rendering="crispEdges">'
                f"<title>{escape(label)} {number(x[index])}: {escape(cause)} "
                f"{share:.0%}</title></rect>"
            )
            base += share
    for tick in (0, 0.5, 1):
        parts.append(
            f'<text class="tick" x="{frame.left - 8}" y="{frame.y(tick) + 4:.1f}" '
            f'text-anchor="end">{tick:.0%}</text>'
        )
    for index in sorted({0, len(columns) // 2, len(columns) - 1} if columns else set()):
        at = frame.left + (index + 0.5) * wide
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{frame.bottom + 17}" '
            f'text-anchor="middle">{number(x[index])}</text>'
        )
    parts.append(
        f'<text class="label" x="{frame.right}" y="{frame.bottom + 31}" '
        f'text-anchor="end">{escape(label)}</text>'
    )
    return frame.wrap(*parts, title=title)
