"""The commands that write a file about a run, which may be over or under way:
`rollweave report` writes the run's report as one HTML file, and `rollweave export`
writes its trajectories for other programs.
"""

from pathlib import Path

from rich.markup import escape

from rollweave.cli.console import err, out
from rollweave.cli.runs import find_run
from rollweave.io.extras import command
from rollweave.record.export import SUFFIXES, Export
from rollweave.record.report.page import write_report
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_bytes

WORKLOAD = "workload"
"""The format of the simulator's traces, which its own distribution writes."""


def report(name: str) -> None:
    """Write `report.html` and print its path."""
    run = find_run(name)
    run.must_be_writable()
    path = write_report(
        run, lambda line: err.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    )
    out.print(f"{escape(str(path))} ({human_bytes(path.stat().st_size)})", soft_wrap=True)


def export(name: str, *, format_: str, output: Path | None) -> None:
    """Write all attempts of the run to one file, and print its path."""
    suffixes = SUFFIXES | {WORKLOAD: ".workload.jsonl"}
    if format_ not in suffixes:
        raise ConfigError(f"--format must be one of {', '.join(suffixes)}, got {format_!r}")
    write_workload = command(WORKLOAD, "export --format workload") if format_ == WORKLOAD else None
    run = find_run(name)
    if not run.trajectories.is_dir():
        raise ConfigError(f"{run.path} must hold trajectories, got none yet")
    path = output or Path(run.path.resolve().name + suffixes[format_])
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--output must be a file in a directory that exists, got {str(path)!r}")
    target = path.resolve()
    if target.is_relative_to(run.path.resolve()):
        raise ConfigError(f"--output must not be among the files of the run, got {str(path)!r}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"--output must be a regular file, got {str(path)!r}")
    if write_workload is not None:
        count = write_workload(run.path, target)
        out.print(f"{escape(str(path))} ({count:,} attempts)", soft_wrap=True)
        return
    exported = Export(run)
    for line in exported.damaged:
        text = f"[yellow]warning:[/] {escape(line)}; it and the rest of this file are left out"
        err.print(text, soft_wrap=True)
    exported.write(target, format_)
    size = human_bytes(path.stat().st_size)
    out.print(f"{escape(str(path))} ({exported.attempts:,} attempts, {size})", soft_wrap=True)
