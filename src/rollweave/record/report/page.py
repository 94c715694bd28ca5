"""The report's page: one HTML file of texts, tables and charts, which loads nothing
from the network.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rollweave.io.disk import replace_file
from rollweave.record.report.charts import (
    ENGINE_CAUSES,
    SPAN_COLORS,
    SPAN_NAMES,
    TRAINER_CAUSES,
    evaluation_chart,
    idle_over_steps,
    learning_curve,
    signals,
    timeline_close_up,
    timeline_overview,
)
from rollweave.record.report.data import RunData, read_run
from rollweave.record.report.svg import bars, escape, number, stacked
from rollweave.record.rundir import RunDir
from rollweave.record.summary import cut_turns_line, headline_figures, weights_line, workers_line

TABLE_ROWS = 200
"""Maximum number of rows: a longer run lists every n-th step and the last."""


def write_report(run: RunDir, warn: Callable[[str], None] = lambda _: None) -> Path:
    """Write `report.html` into the run directory, whole or not at all. `warn` receives
    a line about each file that is left out, whole or in part.

    Raises ConfigError without a run, and DiskError.
    """
    data = read_run(run)
    replace_file(run.report, render(data).encode())
    for line in data.left_out:
        warn(line)
    return run.report


def render(data: RunData) -> str:
    """Return the page as HTML."""
    sections: list[tuple[str, str, Callable[[RunData], str]]] = [
        ("Learning", "learning", _learning),
        ("Where the time went", "time", _time),
        ("Staleness and endings", "staleness", _staleness),
        ("Timeline", "timeline", _timeline),
        ("Training signals", "signals", signals),
        ("Accounting", "accounting", _accounting),
        ("Warnings", "warnings", _warnings),
        ("Steps", "steps", _steps),
        ("Configuration", "configuration", _configuration),
    ]
    bodies = [(title, anchor, _drawn(title, make, data)) for title, anchor, make in sections]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for title, anchor, body in bodies if body)
    main = "".join(
        f'<section id="{anchor}"><h2>{title}</h2>{body}</section>'
        for title, anchor, body in bodies
        if body
    )
    style = (
        resources.files("rollweave.record.report").joinpath("style.css").read_text(encoding="utf-8")
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(data.name)} · rollweave</title><style>{style}</style></head><body>"
        f"<header>{_drawn('header', _header, data)}<nav>{links}</nav></header><main>{main}</main>"
        "<footer>Written by <b>rollweave report</b> from the files of the run "
        "directory.</footer></body></html>"
    )


def _drawn(title: str, make: Callable[[RunData], str], data: RunData) -> str:
    """Return a part of the page, or a line about the damage that keeps the part from
    being drawn.
    """
    try:
        return make(data)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        text = f"it does not suffice for the part {title!r} ({reason})"
        data.left_out.append(f"metrics.jsonl or summary.json: {text}")
        return f"<p>Left out: metrics.jsonl or summary.json is damaged ({escape(reason)}).</p>"


def _header(data: RunData) -> str:
    summary = data.summary
    tiles = []
    latest = data.evaluations[-1] if data.evaluations else None
    if latest is not None and not data.simulated:
        what = "final evaluation" if latest["final"] else f"evaluation at step {latest['step']}"
        for task, (kind, value) in headline_figures(latest["success"], latest["reward"]).items():
            title = f"{task}: {'success' if kind == 'success' else 'mean reward'}"
            note = f"{latest['episodes'][task]} held-out episodes, {what}"
            tiles.append((_figure(kind, value), title, note))
    elif data.steps and not data.simulated:
        last = data.steps[-1]
        for task, (kind, value) in headline_figures(last["success"], last["reward"]).items():
            tiles.append((_figure(kind, value), f"{task}: training {kind}", "last step"))
    lives = f"{data.generations} lives" if data.generations > 1 else ""
    tiles.append((_duration(data.wall_s), "wall time", lives))
    steps = data.steps[-1]["step"] + 1 if data.steps else 0
    if summary is not None:
        steps = summary["steps"]
    best = data.best if data.best is not None else (summary or {}).get("best_step")
    checkpoint = f"best checkpoint: step {best}" if best is not None else ""
    notes = (checkpoint, (summary or {}).get("ended_by"))
    tiles.append((number(steps), "training steps", "; ".join(filter(None, notes))))
    if summary is not None:
        rate = summary["tokens"] / summary["wall_s"] if summary["wall_s"] else 0.0
        sampled = f"{number(summary['tokens'])} sampled tokens"
        tiles.append((number(summary["trajectories"]), "trajectories", sampled))
        tiles.append((number(rate), "sampled tokens/s", "over the whole run"))
    world = '<span class="badge">simulated</span>' if data.simulated else ""
    state = "" if summary is not None else '<span class="badge">not finished</span>'
    if summary is not None and summary.get("error"):
        state = (
            f'<span class="badge bad">failed</span><p class="error">{escape(summary["error"])}</p>'
        )
    boxes = "".join(
        f'<div class="tile"><div class="big">{value}</div><div>{escape(name)}</div><div '
        f'class="dim">{escape(note)}</div></div>'
        for value, name, note in tiles
    )
    return f'<h1>{escape(data.name)} {world} {state}</h1><div class="tiles">{boxes}</div>'


def _learning(data: RunData) -> str:
    if data.simulated or (not data.steps and not data.evaluations):
        return ""
    parts = [learning_curve(data)]
    if data.evaluations:
        failed = any(line["failed"] for line in data.evaluations)
        rows = [
            [
                f"{line['step']}{' · final' if line['final'] else ''}"
                f"{' · target' if line.get('target_reached') else ''}",
                f"{line['at']:.0f} s",
                *(_rate(line, task) for task in data.tasks),
                *([str(sum(line["failed"].values()))] if failed else []),
            ]
            for line in data.evaluations
        ]
        headings = ["step", "at", *data.tasks, *(["failed"] if failed else [])]
        parts.append(
            f"<h3>Held-out evaluations</h3>{evaluation_chart(data)}{_table(headings, rows)}"
        )
    return "".join(parts)


def _rate(line: Mapping[str, Any], task: str) -> str:
    figure = headline_figures(line["success"], line["reward"]).get(task)
    if figure is None:
        return ""
    kind, value = figure
    note = f"{'' if kind == 'success' else 'mean reward '}of {line['episodes'][task]}"
    return f"{value:.3f} <span class=dim>{note}</span>"


def _figure(kind: str, value: float) -> str:
    return f"{value:.1%}" if kind == "success" else f"{value:.3f}"


def _time(data: RunData) -> str:
    engines, trainer = data.idle("engines"), data.idle("trainer")
    if not sum(engines.values()) and not sum(trainer.values()):
        return ""
    totals = stacked({"engines": engines}, ENGINE_CAUSES) + _legend(ENGINE_CAUSES, engines)
    totals += stacked({"trainer": trainer}, TRAINER_CAUSES) + _legend(TRAINER_CAUSES, trainer)
    if weights := weights_line(data.weights()):
        totals += f"<p>New weights: {escape(weights)}.</p>"
    if workers := workers_line(data.workers(), data.wall_s):
        totals += f"<p>Rollout workers: {escape(workers)}.</p>"
    return f"{totals}<div class=pair>{idle_over_steps(data)}</div>"


LEGENDS = {
    "busy": "working",
    "environment": "waiting for environments",
    "stragglers": "waiting for turns on other engines",
    "prompts": "prefill engines without prompts",
    "reward": "waiting for rewards",
    "window": "nothing to start: enough trajectories are in flight",
    "weights": "loading new weights",
    "training": "waiting for a step that is trained on their devices",
    "starting": "starting and warm-up",
    "batch": "waiting for a batch",
    "measuring": "measuring the buffered trajectories",
    "publishing": "publishing weights",
    "saving": "saving a checkpoint",
    "evaluation": "final evaluation and end",
}


def _legend(colors: Mapping[str, str], values: Mapping[str, float]) -> str:
    items = "".join(
        f'<li><i style="background:var({color})"></i>{escape(LEGENDS.get(cause, cause))} '
        f"<b>{values[cause]:.1f} s</b></li>"
        for cause, color in colors.items()
        if values.get(cause, 0) >= 0.05
    )
    return f'<ul class="legend">{items}</ul>'


def _staleness(data: RunData) -> str:
    ages, reasons = data.staleness(), data.stop_reasons()
    if not ages and not reasons:
        return ""
    launched, inherent = (
        "steps between launch and training",
        "versions published during the rollout",
    )
    figures = [
        (_ages(ages), launched, "--blue", "Staleness of trained trajectories"),
        (_ages(data.inherent_staleness()), inherent, "--blue", "Inherent staleness of rollouts"),
    ]
    most_common = dict(reasons.most_common(6))
    if len(reasons) > len(most_common):
        most_common["other"] = sum(reasons.values()) - sum(most_common.values())
    names = {name.replace("_", " "): float(count) for name, count in most_common.items()}
    figures.append((names, "why trajectories ended", "--green", "Stop reasons"))
    drawn = [
        f"<figure>{bars(values, label=label, color=color)}"
        f"<figcaption>{caption}</figcaption></figure>"
        for values, label, color, caption in figures
        if values
    ]
    return f'<div class="pair">{"".join(drawn)}</div>'


def _ages(ages: Counter[int]) -> dict[str, float]:
    return {str(age): float(ages[age]) for age in sorted(ages)}


def _timeline(data: RunData) -> str:
    overview = timeline_overview(data)
    if not overview:
        return ""
    close_up, window = timeline_close_up(data)
    kinds = "".join(
        f'<li><i style="background:var({SPAN_COLORS[kind]})"></i>{name}</li>'
        for kind, name in SPAN_NAMES.items()
    )
    near = (
        f'<h3>Close-up <span class="dim">{window}</span></h3>{close_up}'
        f'<ul class="legend">{kinds}</ul>'
        if close_up
        else ""
    )
    hint = (
        '<p class="dim">Every box of the run: open <code>trace.json</code> in ui.perfetto.dev.</p>'
    )
    return f"<h3>The whole run</h3>{overview}{near}{hint}"


def _accounting(data: RunData) -> str:
    if data.summary is None:
        return ""
    account = data.summary["account"]
    rows = [["started", number(account["started"])], ["trained", number(account["trained"])]]
    rows += [
        [f"dropped: {reason.replace('_', ' ')}", number(count)]
        for reason, count in sorted(account["dropped"].items())
    ]
    rows += [
        ["cancelled", number(account["cancelled"])],
        ["buffered at the end", number(account["buffered"])],
    ]
    dropped = sum(account["dropped"].values())
    parts = account["trained"] + dropped + account["cancelled"] + account["buffered"]
    balanced = parts == account["started"]
    verdict = "every trajectory is accounted for" if balanced else "the account does not balance"
    extra = [
        [f"{what}: {name.replace('_', ' ')}", number(count)]
        for what in ("retried", "watchdog", "engines")
        for name, count in sorted(data.summary.get(what, {}).items())
        if count
    ]
    note = f"<p>started = trained + dropped + cancelled + buffered: <b>{verdict}</b>.</p>"
    if cut := cut_turns_line(data.summary.get("cut_turns", {}), data.summary.get("turns", 0)):
        note += f'<p class="error">{escape(cut)}</p>'
    more = (
        f"<h3>Retries, watchdog, and engines joined and left</h3>{_table(['what', 'count'], extra)}"
        if extra
        else ""
    )
    return f"{note}{_table(['trajectories', 'count'], rows)}{more}"


def _warnings(data: RunData) -> str:
    rows = [
        [f"{line['at']:.1f} s", escape(line["component"]), escape(line["message"])]
        for line in data.warnings[:TABLE_ROWS]
    ]
    return (
        _folded(f"{len(data.warnings)} warnings", _table(["at", "component", "message"], rows))
        if rows
        else ""
    )


def _steps(data: RunData) -> str:
    if not data.steps:
        return ""
    every = -(-len(data.steps) // TABLE_ROWS)
    chosen = [
        line
        for index, line in enumerate(data.steps)
        if index % every == 0 or index == len(data.steps) - 1
    ]
    headings = [
        "step",
        "at",
        *(f"{kind} {task}" for task, kind in data.measures.items()),
        "reward",
        "staleness",
        "tokens/s",
        "turns",
        "step took",
    ]
    rows = [
        [
            str(line["step"] + 1),
            f"{line['at']:.1f} s",
            *(
                f"{line[kind][task]:.2f}" if task in line[kind] else ""
                for task, kind in data.measures.items()
            ),
            f"{sum(line['reward'].values()) / max(1, len(line['reward'])):.2f}",
            escape(", ".join(f"{age}: {count}" for age, count in line["staleness"].items())),
            number(line["tokens_per_s"]),
            f"{line['turns_mean']:.1f}",
            f"{line['wall_s']:.2f} s",
        ]
        for line in chosen
    ]
    note = f" (every {every}th)" if every > 1 else ""
    return _folded(f"{len(data.steps)} steps{note}", _table(headings, rows))


def _configuration(data: RunData) -> str:
    return (
        _folded("config.toml, as resolved", f"<pre>{escape(data.config)}</pre>")
        if data.config
        else ""
    )


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Cells are markup already."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        "<div "
        f'class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes}:{rest:02d} min" if minutes else f"{seconds:.1f} s"
