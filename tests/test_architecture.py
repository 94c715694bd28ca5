"""The shape of the code: no two modules import each other in a circle, and functions
stay short. Contracts in pyproject.toml say which packages import which.
"""

import ast
import functools
import graphlib
import re
import runpy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in (ROOT / "src", *ROOT.glob("packages/*/src"))
    for path in sorted(folder.rglob("*.py"))
    if "swe_repos" not in path.parts
]
BENCHMARKS = [
    path
    for folder in (ROOT / "benchmarks", *sorted(ROOT.glob("packages/*/benchmarks")))
    for path in sorted(folder.rglob("*.py"))
]
LONGEST_FUNCTION = 80
"""Maximum number of lines of a function."""
FRAGMENT = re.compile(
    r"(And|Also|As|But|By|For|How|Nobody|Of|Or|That|Those|What|When|Where|Whether|Which|Who"
    r"|Whose)\b"
)
"""The beginning of a docstring that continues a name, and is no sentence."""


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("rollweave", cache_dir=None)
    assert (
        circles({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
        == []
    )


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(imports) == [{"b", "c"}]


def circles(imports: Mapping[str, Collection[str]]) -> list[set[str]]:
    """The modules of a circle of imports, if there is one."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return [set(error.args[1])]
    return []


@pytest.mark.parametrize(
    ("name", "parent"), [("packages", "rollweave"), ("core", "rollweave.core")]
)
def test_a_figure_of_imports_shows_all_of_them(name: str, parent: str) -> None:
    """Widths of lines are not compared: they change with every new import."""
    figures = ROOT / "docs" / "figures"
    drawn = runpy.run_path(str(figures / "packages.py"))["figure"](ROOT / "src", parent)
    committed = (figures / f"{name}.svg").read_text(encoding="utf-8")
    assert without_widths(committed) == without_widths(drawn), "`make figures` draws it anew"


def without_widths(figure: str) -> str:
    return re.sub(r'stroke-width="[0-9.]+"', "", figure)


class Contents(NamedTuple):
    """What the tests here look at in a file."""

    functions: tuple[tuple[str, int], ...]
    """Each function, with its number of lines."""
    imported: tuple[str, ...]
    """Each module that the file may import, also from a package."""
    docstrings: tuple[tuple[int, str], ...]
    """Each string that is a statement, also behind a value, with its line."""


@functools.cache
def contents(path: Path) -> Contents:
    functions, names, docstrings = list[tuple[str, int]](), list[str](), list[tuple[int, str]]()
    folder = path.relative_to(ROOT).parent.parts
    for node in statements(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                assert node.end_lineno is not None
                functions.append((node.name, node.end_lineno - node.lineno + 1))
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom():
                above = folder[: len(folder) - node.level + 1] if node.level else ()
                module = ".".join([*above, *([node.module] if node.module else [])])
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Expr(value=ast.Constant(value=str() as text), lineno=line) if text.strip():
                docstrings.append((line, text))
    return Contents(tuple(functions), tuple(names), tuple(docstrings))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield every statement of a file. Expressions contain none, so that nine tenths of
    the nodes need not be looked at.
    """
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, [])
            todo += inner if isinstance(inner, list) else []


def test_every_statement_of_a_file_is_looked_at() -> None:
    for path in SOURCES[::20]:
        tree = ast.parse(path.read_text())
        assert set(statements(tree)) == {
            node for node in ast.walk(tree) if isinstance(node, ast.stmt)
        }


def test_functions_are_short() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path in SOURCES
        for name, lines in contents(path).functions
        if lines > LONGEST_FUNCTION
    ]
    assert too_long == []


def test_no_module_of_tests_is_a_library_of_another() -> None:
    """Helpers of several test modules are in `tests/support`, or in a module beside
    them.
    """
    folders = (ROOT / "tests", *ROOT.glob("packages/*/tests"))
    modules = [*BENCHMARKS, *(path for folder in folders for path in folder.rglob("*.py"))]
    imports = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules
        for name in contents(path).imported
        if re.fullmatch(r"(packages|tests)\..*\btest_\w+", name)
        and (ROOT / f"{name.replace('.', '/')}.py").exists()
    ]
    assert imports == []


def test_a_benchmark_that_needs_a_distribution_stands_in_it() -> None:
    imports = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "benchmarks").rglob("*.py")
        for name in contents(path).imported
        if name.startswith(("rollweave_", "packages."))
    ]
    assert imports == []


def test_docstrings_are_no_fragments() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text:.40}"
        for path in [*SOURCES, *BENCHMARKS]
        for line, text in contents(path).docstrings
        if FRAGMENT.match(text)
    ]
    assert fragments == []
