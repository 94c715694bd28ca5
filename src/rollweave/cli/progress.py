"""The display of a run's progress: a small panel on a terminal, plain lines everywhere
else.

Invariants: implements `runtime.metrics.Progress`; never raises for an unknown line; a
terminal is redrawn at most `REFRESH_PER_S` times a second; plain output shows at most
one step in `PLAIN_EVERY_S` seconds, all evaluations, and at most `WARNINGS_SHOWN`
warnings of each component.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollweave.record.summary import cut_turns_line, headline_figures, scheduling_line
from rollweave.schema.text import human_seconds, shortened

REFRESH_PER_S = 4
"""Maximum number of redraws of the panel in a second."""

PLAIN_EVERY_S = 5.0
"""Minimum seconds between two plain lines of steps, so that a log can be followed."""

WARNINGS_SHOWN = 3
"""Maximum number of warnings in the panel, and of one component in plain output."""

FAILURE_CHARS = 300
"""Maximum length of a failure's description in the line of an evaluation."""

SPARK = "▁▂▃▄▅▆▇█"
"""Blocks of a sparkline, from the lowest to the highest value."""

CURVE_POINTS = 40
"""Maximum number of blocks of a sparkline."""

AVERAGED_STEPS = 10
"""Number of steps over which the panel averages: single batches are too noisy to
read.
"""


class Display(Protocol):
    """A `Progress` that is a context manager."""

    def __enter__(self) -> Self:
        """Start to show progress."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the last state and stop."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Show a new line of metrics.jsonl."""

    def phase(self, text: str) -> None:
        """Show the current phase of the run."""


def display(console: Console, *, name: str, steps: int) -> Display:
    """Return the display that suits the console.

    `name` is the run's name. If `steps` is 0, the run only evaluates, and `name` is
    what the run evaluates.
    """
    return (
        Terminal(console, name=name, steps=steps)
        if console.is_terminal
        else Plain(console, name=name, steps=steps)
    )


class Plain:
    """Prints plain lines, for logs and pipes."""

    def __init__(
        self,
        console: Console,
        *,
        name: str,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._steps, self._clock = console, steps, clock
        self._subject = None if steps else name
        self._printed_at = float("-inf")
        self._warnings: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def line(self, line: Mapping[str, Any]) -> None:
        match line.get("kind"):
            case "step":
                now = self._clock()
                if now - self._printed_at >= PLAIN_EVERY_S or line["step"] + 1 >= self._steps:
                    self._printed_at = now
                    self._print(step_text(line, self._steps))
            case "evaluation":
                self._print(evaluation_text(line, self._subject))
            case "warning":
                self._warn(line)
            case "waiting":
                self._print(str(line["message"]))
            case _:
                pass

    def phase(self, text: str) -> None:
        self._print(text)

    def _warn(self, line: Mapping[str, Any]) -> None:
        component = str(line["component"])
        self._warnings[component] += 1
        if self._warnings[component] <= WARNINGS_SHOWN:
            self._print(f"warning: {component}: {line['message']}")
        elif self._warnings[component] == WARNINGS_SHOWN + 1:
            self._print(f"warning: {component}: further warnings are only in metrics.jsonl")

    def _print(self, text: str) -> None:
        # a log on a full disk must not end the run
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)


class Terminal:
    """Shows a panel that is redrawn in place."""

    def __init__(self, console: Console, *, name: str, steps: int) -> None:
        self._console, self._name, self._steps = console, name, steps
        self._subject = None if steps else name
        self._phase = "starting"
        self._began = time.monotonic()
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=AVERAGED_STEPS)
        self._curve: dict[tuple[str, str], list[float]] = {}
        self._evaluation: Mapping[str, Any] | None = None
        self._warnings: deque[str] = deque(maxlen=WARNINGS_SHOWN)
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_S,
            get_renderable=self.draw,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def line(self, line: Mapping[str, Any]) -> None:
        match line.get("kind"):
            case "step":
                self._recent.append(line)
                for name, (kind, value) in headline_figures(
                    line["success"], line["reward"]
                ).items():
                    if kind == "success":
                        # earlier steps did not show that this task defines success
                        self._curve.pop((name, "reward"), None)
                    self._curve.setdefault((name, kind), []).append(value)
            case "evaluation":
                self._evaluation = line
                self._live.console.print(
                    f"[cyan]{escape(evaluation_text(line, self._subject))}[/]", soft_wrap=True
                )
            case "warning":
                self._warnings.append(f"{line['component']}: {line['message']}")
            case "waiting":
                self._warnings.append(str(line["message"]))
            case _:
                pass

    def phase(self, text: str) -> None:
        self._phase = text

    def draw(self) -> RenderableType:
        """Return the panel in its present state."""
        parts: list[RenderableType] = [self._header()]
        if self._recent:
            parts.append(self._figures())
        parts.extend(
            Text(f"! {warning}", style="yellow", overflow="ellipsis", no_wrap=True)
            for warning in self._warnings
        )
        return Panel(
            Group(*parts),
            title=f"[bold]{escape(self._name)}[/]",
            title_align="left",
            border_style="dim",
            padding=(0, 1),
        )

    def _header(self) -> RenderableType:
        passed = f"{human_seconds(time.monotonic() - self._began)}  [dim]{escape(self._phase)}[/]"
        if not self._steps:
            return Text.from_markup(passed)
        done = int(self._recent[-1]["step"]) + 1 if self._recent else 0
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(width=28)
        grid.add_column(no_wrap=True)
        grid.add_row(
            f"step [bold]{done}[/]/{self._steps}",
            ProgressBar(total=max(1, self._steps), completed=done, width=28),
            passed,
        )
        return grid

    def _figures(self) -> RenderableType:
        last = self._recent[-1]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for (name, kind), values in self._curve.items():
            rewards = [line["reward"][name] for line in self._recent if name in line["reward"]]
            reward = f"  reward {_mean(rewards):.2f}" if kind == "success" else ""
            grid.add_row(
                name,
                f"{kind} [bold]{_mean(values[-AVERAGED_STEPS:]):.2f}[/]  "
                f"{sparkline(values)}{reward}",
            )
        if self._evaluation is not None:
            grid.add_row(
                "held out",
                f"{_measured(self._evaluation)}  [dim]at step {self._evaluation['step']}[/]",
            )
        tokens_per_s = _mean([line["tokens_per_s"] for line in self._recent])
        waiting, running = _in_flight(last)
        grid.add_row(
            "rollout", f"{tokens_per_s:,.0f} tokens/s  {running} generating, {waiting} waiting"
        )
        if workers := last.get("workers"):
            grid.add_row(
                "workers",
                f"{workers['running']:.0f} running, {workers['wanted']:.0f} wanted, "
                f"{workers['queued']:.0f} trajectories queued",
            )
        cut = _sums([line.get("cut_turns", {}) for line in self._recent])
        if text := cut_turns_line(cut, sum(line.get("turns", 0) for line in self._recent)):
            grid.add_row("cut", f"[yellow]{escape(text)}[/]")
        grid.add_row("staleness", _staleness_text(self._recent))
        if scheduling := scheduling_line(
            _sums([line.get("scheduling", {}) for line in self._recent])
        ):
            grid.add_row("scheduling", scheduling)
        for part in ("engines", "trainer"):
            grid.add_row(part, _shares_text(self._recent, part))
        return grid


def step_text(line: Mapping[str, Any], steps: int) -> str:
    """Return a step as one plain line."""
    trainer = _shares(line["idle"].get("trainer", {}))
    engines = _shares(line["idle"].get("engines", {}))
    parts = [
        f"step {line['step'] + 1}/{steps}",
        f"{line['at']:.0f} s",
        *([f"success {_by_task(line['success'])}"] if line["success"] else []),
        *([f"reward {_by_task(line['reward'])}"] if line["reward"] else []),
        f"staleness {_staleness_text([line])}",
        f"{line['tokens_per_s']:,.0f} tokens/s",
        f"busy: engines {engines.get('busy', 0.0):.0%}, trainer {trainer.get('busy', 0.0):.0%}",
    ]
    if cut := cut_turns_line(line.get("cut_turns", {}), line.get("turns", 0)):
        parts.append(cut)
    return " | ".join(parts)


def evaluation_text(line: Mapping[str, Any], subject: str | None = None) -> str:
    """Return an evaluation as one line. It names `subject` if it is given, else the
    step of the run.
    """
    kind = "final evaluation" if line["final"] else "evaluation"
    title = f"{kind} at step {line['step']}" if subject is None else f"evaluation of {subject}"
    failed = sum(line["failed"].values())
    more = f", {failed} episodes failed" if failed else ""
    if failure := " ".join(line.get("last_failure", "").split()):
        more += f" (last: {shortened(failure, FAILURE_CHARS)})"
    episodes = sum(line["episodes"].values())
    if line.get("target_reached"):
        more += "; eval.stop_at is reached, training ends here"
    measured = f"{_measured(line)} over " if line["reward"] else ""
    split = "test" if line["final"] else "validation"
    tasks = sum(line.get("distinct", line["episodes"]).values())
    of = f" of {tasks} tasks" if tasks < episodes else ""
    return f"{title}: {measured}{episodes} episodes{of} of the {split} split{more}"


def sparkline(values: list[float]) -> str:
    """Draw values as at most `CURVE_POINTS` blocks, which average several values, on a
    scale from 0 to 1, or wider if needed.
    """
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    count = min(len(values), CURVE_POINTS)
    blocks = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        height = (sum(part) / len(part) - low) / (high - low)
        blocks.append(SPARK[round(height * (len(SPARK) - 1))])
    return "".join(blocks)


def _measured(line: Mapping[str, Any]) -> str:
    """Return the success rates of task domains that define success, and the mean
    rewards of the others.
    """
    measures = headline_figures(line["success"], line["reward"])
    parts = []
    for kind in ("success", "reward"):
        if values := {name: value for name, (of, value) in measures.items() if of == kind}:
            named = len(measures) > 1 and len(values) == 1
            parts.append(f"{kind} {next(iter(values)) + ' ' if named else ''}{_by_task(values)}")
    return ", ".join(parts)


def _by_task(values: Mapping[str, float]) -> str:
    if len(values) == 1:
        return f"{next(iter(values.values())):.2f}"
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items()) or "-"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _sums(tables: list[Mapping[str, float]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for table in tables:
        sums.update(table)
    return sums


def _in_flight(line: Mapping[str, Any]) -> tuple[int, int]:
    engines = line.get("engines", {}).values()
    return sum(int(e.get("waiting", 0)) for e in engines), sum(
        int(e.get("running", 0)) for e in engines
    )


def _staleness_text(lines: deque[Mapping[str, Any]] | list[Mapping[str, Any]]) -> str:
    ages: Counter[int] = Counter()
    for line in lines:
        for age, count in line["staleness"].items():
            ages[int(age)] += count
    total = sum(ages.values())
    if not total:
        return "-"
    return f"{sum(age * count for age, count in ages.items()) / total:.2f} (max {max(ages)})"


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {cause: value / total for cause, value in seconds.items()} if total > 0 else {}


def _shares_text(lines: deque[Mapping[str, Any]], part: str) -> str:
    seconds: Counter[str] = Counter()
    for line in lines:
        seconds.update(line["idle"].get(part, {}))
    shares = sorted(_shares(seconds).items(), key=lambda item: (item[0] != "busy", -item[1]))
    return "  ".join(f"{cause} {share:.0%}" for cause, share in shares if share >= 0.005) or "-"
