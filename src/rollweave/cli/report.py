"""`rollweave report`: writes the report of a run as one HTML file."""

from rich.markup import escape

from rollweave.cli.console import err, out
from rollweave.cli.runs import find_run
from rollweave.record.report.page import write_report
from rollweave.schema.text import human_bytes


def report(name: str) -> None:
    """Write `report.html` and print its path."""
    run = find_run(name)
    run.must_be_writable()
    path = write_report(
        run, lambda line: err.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    )
    out.print(f"{escape(str(path))} ({human_bytes(path.stat().st_size)})", soft_wrap=True)
