"""`rollweave trace`: lists a run's trajectories, or shows one of them turn by turn."""

import json
import operator
import re
from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollweave.cli.console import err, out
from rollweave.cli.runs import find_run
from rollweave.record.store import StoredAttempt, TrajectoryReader
from rollweave.record.transcript import (
    TokenDecoder,
    TokenSpan,
    attempt_line,
    cut_turns,
    spans,
    template_arguments,
    tokenizer_of,
    transcript,
    versions,
)
from rollweave.schema.base import as_json
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_seconds
from rollweave.schema.work import (
    Purpose,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
)

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
TOKENS_PER_ROW = 8
"""Number of tokens in a row of the token table, which fits 100 columns."""


def trace(
    name: str,
    trajectory: str | None,
    *,
    task: str | None,
    stop: str | None,
    reward: str | None,
    step: int | None,
    limit: int,
    json_: bool = False,
) -> None:
    """List trajectories, or show `trajectory` (`g12.3`, or `g12.3/1` for its second
    attempt). With `json_`, print one line of JSON.
    """
    run = find_run(name)
    if not run.trajectories.is_dir():
        raise ConfigError(f"{run.path} must hold trajectories, got none yet")
    reader = TrajectoryReader(run.trajectories)
    for line in reader.damaged:
        text = f"[yellow]warning:[/] {escape(line)}; it and the rest of this file cannot be shown"
        err.print(text, soft_wrap=True)
    if trajectory is not None:
        entry = _find(reader, trajectory)
        decoder, arguments = TokenDecoder(tokenizer_of(run)), template_arguments(run)
        if json_:
            shown = transcript(entry, reader.load(entry), decoder)
            _print_json({**shown, "template_arguments": arguments})
        else:
            _show(entry, reader.load(entry), decoder, arguments)
        return
    matches = _filter(task=task, stop=stop, reward=reward, step=step)
    newest: list[tuple[StoredAttempt, Trajectory]] = []
    matching = 0
    for entry in reversed(reader.entries):
        loaded = reader.load(entry)
        if matches(loaded):
            matching += 1
            if len(newest) < limit:
                newest.append((entry, loaded))
    if json_:
        lines = [attempt_line(*attempt) for attempt in newest[::-1]]
        _print_json({"attempts": len(reader.entries), "matching": matching, "trajectories": lines})
        return
    _list(newest[::-1], matching, len(reader.entries))
    out.print(
        f"[dim]to show one: rollweave trace {escape(name)} "
        f"{newest[-1][1].id if newest else 'TRAJECTORY'}[/]",
        soft_wrap=True,
    )
    if run.trace.exists():
        out.print(
            f"[dim]timeline: open {escape(str(run.trace.resolve()))} in https://ui.perfetto.dev[/]",
            soft_wrap=True,
        )


def parse_reward(text: str) -> Callable[[float], bool]:
    """Parse a condition such as `1`, `>0.5` or `<=0` into a predicate. Raises
    ConfigError.
    """
    number = r"-?\d+(?:\.\d*)?(?:e-?\d+)?"
    match = re.fullmatch(rf"\s*(>=|<=|>|<|=|)\s*({number})\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f"--reward must be a number, or one after >, >=, < or <=, got {text!r}")
    compare, bound = COMPARISONS[match[1] or "="], float(match[2])
    return lambda value: compare(value, bound)


def _filter(
    *, task: str | None, stop: str | None, reward: str | None, step: int | None
) -> Callable[[Trajectory], bool]:
    if stop is not None and stop not in [reason.value for reason in StopReason]:
        raise ConfigError(f"--stop must be one of {', '.join(StopReason)}, got {stop!r}")
    compare = parse_reward(reward) if reward is not None else None

    def matches(trajectory: Trajectory) -> bool:
        return (
            (task is None or task in (trajectory.task.tag, trajectory.task.env))
            and (stop is None or trajectory.stop_reason == stop)
            and (compare is None or (trajectory.reward is not None and compare(trajectory.reward)))
            and (step is None or trajectory.initiated_version == step)
        )

    return matches


def _list(rows: list[tuple[StoredAttempt, Trajectory]], matching: int, total: int) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in (
        "trajectory",
        "task",
        "ended",
        "step",
        "weights",
        "turns",
        "tokens",
        "reward",
        "stop",
    ):
        right = heading in ("ended", "step", "turns", "tokens", "reward")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for entry, trajectory in rows:
        table.add_row(
            f"{trajectory.id}{f'/{trajectory.attempt}' if trajectory.attempt else ''}",
            escape(trajectory.task.tag or trajectory.task.env)
            + (" [dim]eval[/]" if entry.purpose is Purpose.EVAL else ""),
            f"{entry.at:.1f} s",
            str(trajectory.initiated_version),
            _versions(trajectory),
            str(sum(len(sequence.turns) for sequence in trajectory.sequences)),
            str(sum(len(sequence.tokens) for sequence in trajectory.sequences)),
            "-" if trajectory.reward is None else f"{trajectory.reward:.2f}",
            trajectory.stop_reason.value + _cut(trajectory, ", {cut} cut"),
        )
    out.print(table)
    range_text = f"{len(rows)} of {matching}" if len(rows) < matching else str(matching)
    out.print(f"[dim]{range_text} shown, {total} attempts in the run[/]")


def _versions(trajectory: Trajectory) -> str:
    """Return the lowest and the highest weight version that sampled tokens."""
    sampled = versions(trajectory)
    if sampled is None:
        return "-"
    low, high = sampled
    return str(low) if low == high else f"{low}–{high}"


def _print_json(value: dict[str, Any]) -> None:
    out.print(as_json(value).decode(), soft_wrap=True, markup=False)


def _find(reader: TrajectoryReader, name_text: str) -> StoredAttempt:
    """Return the attempt that `name_text` refers to. Raises ConfigError."""
    name, _, attempt = name_text.partition("/")
    matching = [entry for entry in reader.entries if entry.trajectory_id == name]
    if attempt:
        matching = [entry for entry in matching if str(entry.attempt) == attempt]
    if not matching:
        last = f", the newest is {reader.entries[-1].trajectory_id}" if reader.entries else ""
        raise ConfigError(
            f"TRAJECTORY must be one of this run's {len(reader.entries)} attempts, "
            f"got {name_text!r}{last}"
        )
    return matching[-1]


def _show(
    entry: StoredAttempt,
    trajectory: Trajectory,
    decoder: TokenDecoder,
    arguments: dict[str, Any],
) -> None:
    _show_summary(trajectory, entry, arguments)
    for number, sequence in enumerate(trajectory.sequences, 1):
        if sequence.origin is not None and len(trajectory.sequences) > 1:
            title = f"sequence {number} of {len(trajectory.sequences)}: {sequence.origin}"
            out.print(Rule(f"[bold]{escape(title)}[/]", align="left", style="bold"))
        for span in spans(sequence):
            _show_span(sequence, span, decoder)
    out.print(Rule(style="dim"))
    for ignored in trajectory.ignored:
        out.print(f"[yellow]not read:[/] {escape(str(ignored))}", soft_wrap=True)
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    cut = _cut(trajectory, ", [yellow]{cut} of {turns} turns cut at a token limit[/]")
    success = (
        "" if trajectory.success is None else f", success: {'yes' if trajectory.success else 'no'}"
    )
    out.print(
        f"[bold]{trajectory.stop_reason}[/] (blame: {trajectory.blame}), reward "
        f"[bold]{reward}[/]{success}{cut}"
    )
    if trajectory.rewards:
        parts = ", ".join(f"{escape(name)} {value:g}" for name, value in trajectory.rewards.items())
        out.print(f"components of the reward, unweighted: {parts}")
    if trajectory.result:
        out.print(f"result: {escape(trajectory.result)}", soft_wrap=True)
    if trajectory.error:
        out.print(f"[red]{escape(trajectory.error)}[/]")


def _cut(trajectory: Trajectory, text: str) -> str:
    """Fill `text` with the number of turns that a token limit cut and the number of all
    turns; return "" if no turn was cut.
    """
    turns = sum(len(sequence.turns) for sequence in trajectory.sequences)
    cut = cut_turns(trajectory)
    return text.format(cut=cut, turns=turns) if cut else ""


def _show_summary(trajectory: Trajectory, entry: StoredAttempt, arguments: dict[str, Any]) -> None:
    timing, task = trajectory.timing, trajectory.task
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "trajectory",
        f"[bold]{trajectory.id}[/], attempt {trajectory.attempt}, of group {trajectory.group_id}",
    )
    table.add_row("task", escape(f"{task.tag or task.env}  {task.id}  {task.payload}"))
    table.add_row(
        "weights",
        f"initiated at {trajectory.initiated_version}, sampled by {_versions(trajectory)}",
    )
    table.add_row("engine", escape(trajectory.engine or "-"))
    if arguments:
        table.add_row("template", escape(json.dumps(arguments, ensure_ascii=False)))
    parts = [
        f"init {human_seconds(timing.init_s)}",
        f"generating {human_seconds(timing.generate_s)}",
        f"environment {human_seconds(timing.env_s)}",
        f"queued {human_seconds(timing.queue_s)}",
        f"reward {human_seconds(timing.eval_s)}",
    ]
    table.add_row("time", ", ".join(parts) + f"; ended {entry.at:.1f} s into the run")
    out.print(table)


def _show_span(sequence: TokenSequence, span: TokenSpan, decoder: TokenDecoder) -> None:
    start, end = span.start, span.end
    tokens = sequence.tokens[start:end]
    if span.kind is not SegmentKind.OUTPUT:
        out.print(Rule(f"[dim]{span.kind} · tokens {start}–{end}[/]", align="left", style="dim"))
        out.print(Text(decoder.text(tokens)))
        return
    versions = ", ".join(
        f"{s.version} ({s.start}–{s.end})" if len(span.segments) > 1 else str(s.version)
        for s in span.segments
    )
    total = sum(sequence.logprobs[start:end])
    title = (
        f"turn {span.number} · tokens {start}–{end} · weights {versions} · log-prob {total:.3f} · "
        f"reward {span.reward:g}"
    )
    if span.cut:
        title += "[/] · [yellow]cut at its token limit"
    out.print(Rule(f"[cyan]{title}[/]", align="left", style="cyan"))
    out.print(Text(decoder.text(tokens), style="bold"))
    for row in range(start, end, TOKENS_PER_ROW):
        cells = [
            f"{token}[dim]:{escape(json.dumps(decoder.one(token), ensure_ascii=False)[1:-1])}[/]"
            f" {sequence.logprobs[at]:.2f}"
            for at in range(row, min(end, row + TOKENS_PER_ROW))
            for token in [sequence.tokens[at]]
        ]
        out.print("  " + "   ".join(cells), soft_wrap=True)
