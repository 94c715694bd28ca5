"""Draw the packages of a source tree, or the modules of its core, and their imports as
an SVG figure.

    .venv/bin/python docs/figures/packages.py src docs/figures/packages.svg
    .venv/bin/python docs/figures/packages.py src docs/figures/core.svg rollweave.core

Packages stand on levels: a package stands one level above the highest one that it
imports. A line leads from a package to each one that it imports; its width grows with
the number of imports between their modules. An import between packages of one cycle is
red. Mechanisms of the core have another color.
"""

import collections
import html
import sys
from collections.abc import Container
from pathlib import Path

import grimp

WIDTH, BOX, HEIGHT, MARGIN = 1000, (112, 30), 78, 40
"""Width of the figure, size of a box, distance of two levels, and margin, in pixels."""


def imports_between(src: Path, parent: str) -> collections.Counter[tuple[str, str]]:
    """Count the imports between the packages, or modules, directly below `parent`."""
    sys.path.insert(0, str(src))
    graph = grimp.build_graph("rollweave", cache_dir=None)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            one, other = (box_of(name, parent, graph) for name in (module, imported))
            if one and other and one != other:
                counts[one, other] += 1
    return counts


def box_of(module: str, parent: str, graph: grimp.ImportGraph) -> str:
    """Return the name of the box in which a module stands; "" if there is none. Beside
    packages single modules have none, and each mechanism of the core has its own.
    """
    if not module.startswith(f"{parent}."):
        return ""
    first, *rest = module.removeprefix(f"{parent}.").split(".")
    if first == "mechanisms" and rest:
        return rest[0]
    is_package = bool(graph.find_children(f"{parent}.{first}"))
    return first if is_package or parent != "rollweave" else ""


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


def drawn(counts: collections.Counter[tuple[str, str]], what: str, rooms: Container[str]) -> str:
    """Return the figure. `what` names the contents of its boxes; `rooms` are boxes of
    another color.
    """
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
            f'height="{BOX[1]}" rx="6" fill="{"#f6ecd9" if name in rooms else "#eef3f8"}" '
            f'stroke="#345"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" '
            f'font-family="sans-serif" font-size="14" fill="#123">{html.escape(name)}</text>'
        )
    height = 2 * MARGIN + HEIGHT * top
    title = f"{len(names)} {what}, {len(counts)} arrows, {top + 1} levels"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{title}"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def figure(src: Path, parent: str = "rollweave") -> str:
    """Return the figure of what stands directly below `parent`."""
    mechanisms = src.joinpath(*parent.split("."), "mechanisms")
    modules = {*mechanisms.glob("[a-z]*.py"), *(path.parent for path in mechanisms.glob("*/*.py"))}
    rooms = {path.stem for path in modules}
    what = "packages" if parent == "rollweave" else "modules and mechanisms"
    return drawn(imports_between(src, parent), what, rooms)


if __name__ == "__main__":
    source, target, *parents = sys.argv[1:]
    Path(target).write_text(figure(Path(source), *parents), encoding="utf-8")
