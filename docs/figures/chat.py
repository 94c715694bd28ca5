"""Draw success over the steps of runs, with all weights and with adapters, as an SVG
figure.

    .venv/bin/python docs/figures/chat.py docs/figures/chat-tool.svg BASE RUN RUN ...

All arguments but the first are run directories: BASE is that of `rollweave eval` of the
model before training. A line is the success of the trajectories of each step, a mean of
`WINDOW` steps; a dot is the success in the final evaluation, on held-out tasks, after
training or, at step 0, before it. A run with `[lora]` has the color of adapters.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from rollweave.record.report.svg import Frame, dots, path, smoothed, text

COLORS = {"all weights": "#2563eb", "LoRA": "#ea580c", "untrained": "#6b7280"}
STYLE = (
    "text { font: 12px sans-serif; fill: #6b7280 } .grid { stroke: #9aa1a9; stroke-opacity: .35 }"
)
WIDTH, HEIGHT, WINDOW = 760, 300, 4
"""Size of the figure in pixels, and the number of steps of which a line is the mean."""


class Curve(NamedTuple):
    """A run's success in each of its steps, and at its end on held-out tasks."""

    kind: str
    steps: list[tuple[float, float]]
    end: tuple[float, float]


def curve(run: Path) -> Curve:
    """Read a run of one task domain."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    success = [next(iter(line["success"].values())) for line in lines if line["kind"] == "step"]
    (final,) = (line for line in lines if line["kind"] == "evaluation" and line["final"])
    config = tomllib.loads((run / "config.toml").read_text())
    kind = "LoRA" if "lora" in config else "all weights" if success else "untrained"
    steps = [(number + 1.0, value) for number, value in enumerate(smoothed(success, WINDOW))]
    return Curve(kind, steps, (final["step"], next(iter(final["success"].values()))))


def drawn(curves: list[Curve], title: str) -> str:
    """Return the figure."""
    last = max(of.end[0] for of in curves)
    frame = Frame(x=(0, last), y=(0, 1), width=WIDTH, height=HEIGHT, top=26)
    axes = frame.axes(x_label="steps of training", y_format="{:.0%}".format)
    parts = [f"<style>{STYLE}</style>", axes]
    kinds = list(dict.fromkeys(of.kind for of in curves))
    for place, kind in enumerate(kinds):
        mark = f'<tspan fill="{COLORS[kind]}">●</tspan> {kind}'
        parts.append(text("label", frame.left + 130 * place, 14, mark))
    for of in curves:
        stroke = f'stroke="{COLORS[of.kind]}" stroke-width="2"'
        parts.append(path(frame, of.steps, stroke))
        label = f"{of.kind}: {of.end[1]:.3f} of held-out tasks at step {of.end[0]}"
        parts.append(dots(frame, [of.end], f'fill="{COLORS[of.kind]}"', [label]))
    svg = frame.wrap(*parts, title=title)
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def main(output: str, *runs: str) -> None:
    curves = [curve(Path(run)) for run in runs]
    Path(output).write_text(drawn(curves, "success over steps, of training and of held-out tasks"))


if __name__ == "__main__":
    main(*sys.argv[1:])
