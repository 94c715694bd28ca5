"""Bench `agents`: clients × features of the gateway: what works, what is refused with
the name of its field, and what is ignored in silence, which must be nothing.

The four APIs are asked over the wire. (Tests run programs with the vendors' own
clients.)
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.agents.feature_table import FEATURES
from benchmarks.agents.features import Cell, Outcome, try_feature
from benchmarks.agents.wire import PATHS
from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress

Columns = dict[str, dict[str, Cell]]


def bench_agents(
    *,
    quick: bool = False,
    progress: Progress = print,
    real: bool = False,
    programs: Path | None = None,
    install: bool = False,
) -> Result:
    """Ask for each feature through each API. With `real`, run the programs of the
    package indexes that are installed in the folder `programs` instead; with `install`,
    programs that are missing are installed there.
    """
    if real:
        from benchmarks.agents.real import bench_real

        return bench_real(programs, quick=quick, install=install, progress=progress)
    columns = asyncio.run(ask_apis())
    progress(table(columns))
    cells = [cell for column in columns.values() for cell in column.values()]
    counts = Counter(cell.outcome for cell in cells)
    figures: dict[str, Figure] = {
        "works": counts[Outcome.WORKS],
        "refused": counts[Outcome.REFUSED],
        "recorded": counts[Outcome.RECORDED],
        "silently_ignored": counts[Outcome.IGNORED],
        "failed": counts[Outcome.FAILED],
        "apis": len(PATHS),
    }
    conditions: dict[str, Any] = {
        feature.name: _line(columns, feature.name) for feature in FEATURES
    }
    conditions["cells"] = {
        column: {name: [cell.outcome.value, cell.detail] for name, cell in row.items()}
        for column, row in columns.items()
    }
    return Result(bench="agents", figures=figures, conditions=conditions)


async def ask_apis() -> Columns:
    """Ask for each feature through each API that has it."""
    return {
        api: {
            feature.name: await try_feature(feature, api)
            for feature in FEATURES
            if api in feature.asks
        }
        for api in PATHS
    }


def _line(columns: Columns, feature: str) -> str:
    """Return what came of a feature, client by client."""
    having = {column: row[feature] for column, row in columns.items() if feature in row}
    by_outcome = {
        outcome: [column for column, cell in having.items() if cell.outcome is outcome]
        for outcome in Outcome
    }
    parts = [f"{outcome}: {', '.join(names)}" for outcome, names in by_outcome.items() if names]
    return "; ".join(parts)


def table(columns: Columns) -> str:
    """Return the outcomes of the APIs as a table of `docs/GATEWAY.md`."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for feature in FEATURES:
        row = [columns[api].get(feature.name) for api in columns]
        words = ["–" if cell is None else cell.outcome.value for cell in row]
        lines.append(f"| {feature.name} | {' | '.join(words)} |")
    return "\n".join(lines)
