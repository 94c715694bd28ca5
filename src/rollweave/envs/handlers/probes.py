"""Tests whose verdict the tested code cannot forge: it is made here, of values, and
what is expected never enters the sandbox.

A test file is ordinary `unittest`. `probed` takes from it what each assertion expects:
`self.assertEqual(split(9, 2), [5, 4])` becomes a note of what `split(9, 2)` is. These
probes run in the sandbox beside the code that an agent wrote, each in a process of its
own (`envs/handlers/probe.py`), and the notes come back as text. They are compared with
the notes that the right code makes. So code that ends the interpreter, prints "OK",
patches `unittest` or writes to whatever descriptor it finds has nothing to write: it
would have to know the right values, and to know them is to be right.

What remains: where an assertion is of a truth or an exception alone the note can be
guessed, so tests should ask for values.
"""

import ast
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollweave.envs.handlers.probe import END
from rollweave.sandbox.base import Sandbox, SandboxSpec
from rollweave.sandbox.rootfs import python_of

Seen = dict[str, list[str]]
"""What each test noted, by `module.Class.method`."""

TEST_S = 5.0
"""Seconds of one test. Ours take milliseconds."""

ALL_S = 40.0
"""Seconds of all tests of a repository together; beyond that none has passed. Less than
a stage has by default (`step_s`): code without an end is the agent's failure, not the
environment's.
"""

BASES = ("TestCase", "IsolatedAsyncioTestCase")


def tests_in(source: str) -> list[tuple[ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The test methods of a file, with their classes."""
    return [
        (case, method)
        for case in ast.parse(source).body
        if isinstance(case, ast.ClassDef) and any(_is_base(base) for base in case.bases)
        for method in case.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
        and method.name.startswith("test")
    ]


def names_in(module: str, source: str) -> list[str]:
    """`module.Class.method` of each."""
    return [f"{module}.{case.name}.{method.name}" for case, method in tests_in(source)]


@functools.lru_cache(64)
def probed(source: str) -> str:
    """The file without what it expects.

    Raises ValueError for an assertion that is not understood.
    """
    tree = _Probing().visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree))


def without(source: str, module: str, hidden: frozenset[str]) -> str:
    """The file without these tests, as an agent may see it; "" where none is left."""
    lines = source.split("\n")
    left = {case.name: 0 for case, _ in tests_in(source)}
    cut: list[tuple[int, int]] = []
    for case, method in tests_in(source):
        if f"{module}.{case.name}.{method.name}" in hidden:
            cut.append((method.lineno - 1, method.end_lineno or method.lineno))
        else:
            left[case.name] += 1
    for case in {case.name: case for case, _ in tests_in(source)}.values():
        if not left[case.name]:
            cut.append((case.lineno - 1, case.end_lineno or case.lineno))
    if not any(left.values()):
        return ""
    # with the empty line after it
    gone = {number for start, end in cut for number in range(start, end + 1)}
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


async def look(sandbox: Sandbox, spec: SandboxSpec, tests: Mapping[str, str], *, root: str) -> Seen:
    """What the tests note in the sandbox, whose code lies at `root`. `tests` has the
    files' sources, {module: source}.

    The interpreter imports only the standard library when it starts, whatever files the
    code has. A test that noted nothing, or nothing readable, has an empty list. Raises
    SandboxError.
    """
    sources = {module: probed(source) for module, source in tests.items()}
    names = [name for module, source in tests.items() for name in names_in(module, source)]
    job = {"root": root, "sources": sources, "tests": names, "seconds": TEST_S}
    program = [python_of(spec), "-I", "-S", "-c", _program()]
    found = await sandbox.exec(program, stdin=json.dumps(job).encode(), cwd=root, timeout_s=ALL_S)
    try:
        seen = msgspec.json.decode(found.stdout, type=Seen)
    except (
        msgspec.MsgspecError
    ):  # the tested code ended or flooded what it runs beside: that is no answer
        seen = {}
    return {name: seen.get(name, []) for name in names}


def passed(seen: Seen, expected: Seen) -> dict[str, bool]:
    """Which tests noted what they should, and came to their end."""
    return {
        name: bool(notes) and notes[-1] == END and seen.get(name) == notes
        for name, notes in expected.items()
    }


@functools.lru_cache(1)
def _program() -> str:
    return Path(__file__).with_name("probe.py").read_text()


def _is_base(base: ast.expr) -> bool:
    return isinstance(base, ast.Attribute) and base.attr in BASES


class _Probing(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> ast.stmt | None:
        node.names = [alias for alias in node.names if alias.name != "unittest"]
        return node if node.names else None

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        return None if "__main__" in ast.unparse(node.test) else self.generic_visit(node)  # type: ignore[return-value]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [
            ast.Name("Probe", ast.Load()) if _is_base(base) else base for base in node.bases
        ]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _of_self(node.func):
            return self.generic_visit(node)
        assert isinstance(node.func, ast.Attribute)
        arguments = [self.visit(argument) for argument in node.args]
        match node.func.attr, arguments:
            case "assertEqual", [value, _]:
                return _noted("saw", value)
            case "assertTrue" | "assertFalse", [value]:
                return _noted("saw", ast.Call(ast.Name("bool", ast.Load()), [value], []))
            case "assertRaises", [_]:
                return _noted("raised")
            case name, _ if name.startswith("assert") or name in ("fail", "subTest", "skipTest"):
                raise ValueError(
                    "a test may use assertEqual, assertTrue, assertFalse and assertRaises, got "
                    f"{ast.unparse(node)}"
                )
        return self.generic_visit(node)


def _of_self(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _noted(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(
        ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()), list(arguments), []
    )
