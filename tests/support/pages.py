"""What pages of docs/ say, for tests that hold them to the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def documented_metrics() -> dict[str, set[str]]:
    """Return the keys of docs/METRICS.md by section."""
    found: dict[str, set[str]] = {}
    section = ""
    for line in (ROOT / "docs/METRICS.md").read_text().splitlines():
        if heading := re.fullmatch(r"#+ (.*)", line):
            name = heading[1].replace("`", "").removeprefix("Lines of kind ")
            section = {"Other lines": "other", "Stop reasons": "stop_reasons"}.get(name, name)
        elif group := re.fullmatch(r"`([a-z_.]+)`:", line):
            section = group[1]
        elif row := re.match(r"\| `([^`]+)` \|", line):
            found.setdefault(section, set()).add(row[1])
    return found


def table_rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of a page's tables, without heads."""
    lines = page.splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for number, line in enumerate(lines)
        if line.startswith("|")
        and not line.startswith("|--")
        and not lines[min(number + 1, len(lines) - 1)].startswith("|--")
    ]


def inline_code(page: str) -> list[str]:
    """Return the inline code of a page."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
