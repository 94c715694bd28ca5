"""Draw the packages of a source tree and their imports as an SVG figure.

    .venv/bin/python docs/figures/packages.py src docs/figures/packages.svg

Packages stand on levels: a package stands one level above the highest one that it
imports. A line leads from a package to each one that it imports; its width grows with
the number of imports between their modules. An import between packages of one cycle is
red.
"""

import collections
import html
import sys
from pathlib import Path

import grimp

WIDTH, BOX, HEIGHT, MARGIN = 1000, (112, 30), 78, 40
"""Width of the figure, size of a box, distance of two levels, and margin, in pixels."""


def imports_between(src: Path, root: str = "rollweave") -> collections.Counter[tuple[str, str]]:
    """Count the imports between modules of two packages directly below `root`."""
    sys.path.insert(0, str(src))
    graph = grimp.build_graph(root, cache_dir=None)
    packages = {module for module in graph.find_children(root) if graph.find_children(module)}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = (".".join(name.split(".")[:2]) for name in (module, imported))
            if one != other and {one, other} <= packages:
                counts[one.split(".")[1], other.split(".")[1]] += 1
    return counts


def levels(names: set[str], counts: collections.Counter[tuple[str, str]]) -> dict[str, int]:
    """Return the level of each package, 0 at the bottom; a cycle is cut where it
    closes.
    """
    level: dict[str, int] = {}

    def visit(name: str, above: tuple[str, ...]) -> int:
        if name in above:
            return -1
        if name not in level:
            below = [visit(to, (*above, name)) for one, to in sorted(counts) if one == name]
            level[name] = 1 + max(below, default=-1)
        return level[name]

    for name in sorted(names):
        visit(name, ())
    return level


def drawn(counts: collections.Counter[tuple[str, str]]) -> str:
    """Return the figure."""
    names = {name for pair in counts for name in pair}
    level = levels(names, counts)
    rows = collections.defaultdict(list)
    for name in sorted(names):
        rows[level[name]].append(name)
    top = max(rows)
    at = {
        name: (WIDTH * (index + 1) / (len(row) + 1), MARGIN + HEIGHT * (top - level))
        for level, row in rows.items()
        for index, name in enumerate(row)
    }
    parts = []
    for (one, other), count in sorted(counts.items()):
        (x0, y0), (x1, y1) = at[one], at[other]
        bend = (x0 + x1) / 2 + (90 if abs(x0 - x1) < 1 and abs(y0 - y1) > HEIGHT else 0)
        color = "#c33" if level[one] <= level[other] else "#567"
        parts.append(
            f'<path d="M{x0:.0f} {y0 + BOX[1] / 2:.0f} Q{bend:.0f} {(y0 + y1) / 2:.0f} '
            f'{x1:.0f} {y1 - BOX[1] / 2:.0f}" stroke="{color}" stroke-width="'
            f'{0.6 + count**0.5 / 4:.1f}" stroke-opacity=".45" fill="none"/>'
        )
    for name, (x, y) in sorted(at.items()):
        parts.append(
            f'<rect x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" width="{BOX[0]}" '
            f'height="{BOX[1]}" rx="6" fill="#eef3f8" stroke="#345"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'font-family="sans-serif" font-size="14" fill="#123">{html.escape(name)}</text>'
        )
    height = 2 * MARGIN + HEIGHT * top
    title = f"{len(names)} packages, {len(counts)} arrows, {top + 1} levels"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{title}"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    Path(target).write_text(drawn(imports_between(source)), encoding="utf-8")
