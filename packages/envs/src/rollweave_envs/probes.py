"""Tests whose verdict the tested code cannot forge: the verdict is made outside the
sandbox, from values, and the expected values never enter it.

A test file is ordinary `unittest`. `to_probes` removes what each assertion expects:
`self.assertEqual(split(9, 2), [5, 4])` becomes a note of the value of `split(9, 2)`.
These probes run in the sandbox beside the code that an agent wrote, each in a separate
process (`probe.py`), and the notes are returned as text. They are
compared with the notes that the correct code makes. So code that ends the interpreter,
prints "OK", patches `unittest` or writes to any open descriptor has nothing useful to
write: it would have to know the right values, and to know them is to be right.

One weakness remains: the note of an assertion of only a truth value or an exception can
be guessed, so tests should compare values.
"""

import ast
import functools
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollweave.sandbox.base import Sandbox, SandboxSpec
from rollweave_envs.probe import END

Notes = dict[str, list[str]]
"""The notes of each test, by `module.Class.method`."""

TEST_S = 5.0
"""Time limit of one test in seconds. The built-in tests take milliseconds."""

ALL_S = 40.0
"""Time limit in seconds of all tests of a repository together; beyond it none has
passed. It is less than the default limit of a stage (`step_s`), so that code that does
not end is the agent's failure, not the environment's.
"""

BASES = ("TestCase", "IsolatedAsyncioTestCase")


def tests_in(source: str) -> list[tuple[ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the test methods of a file, with their classes."""
    return [
        (case, method)
        for case in ast.parse(source).body
        if isinstance(case, ast.ClassDef) and any(_is_base(base) for base in case.bases)
        for method in case.body
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef))
        and method.name.startswith("test")
    ]


def names_in(module: str, source: str) -> list[str]:
    """Return `module.Class.method` of each test."""
    return [f"{module}.{case.name}.{method.name}" for case, method in tests_in(source)]


@functools.lru_cache(64)
def to_probes(source: str) -> str:
    """Return the file without its expected values.

    Raises ValueError for an unsupported assertion.
    """
    tree = _Probing().visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree))


def without_tests(source: str, module: str, hidden: frozenset[str]) -> str:
    """Return the file without these tests, for an agent to see; "" if none is left."""
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
    # Remove the empty line after each test as well.
    removed = {number for start, end in cut for number in range(start, end + 1)}
    return "\n".join(line for number, line in enumerate(lines) if number not in removed)


async def run_probes(
    sandbox: Sandbox, spec: SandboxSpec, tests: Mapping[str, str], *, root: str
) -> Notes:
    """Return the notes of the tests in the sandbox, whose code is in `root`. `tests`
    has the files' sources, {module: source}.

    The interpreter imports only the standard library when it starts, whatever files the
    code has. A test without notes, or with unreadable ones, has an empty list. Raises
    SandboxError.
    """
    sources = {module: to_probes(source) for module, source in tests.items()}
    names = [name for module, source in tests.items() for name in names_in(module, source)]
    job = {"root": root, "sources": sources, "tests": names, "seconds": TEST_S}
    program = [spec.python(), "-I", "-S", "-c", _program()]
    result = await sandbox.exec(program, stdin=json.dumps(job).encode(), cwd=root, timeout_s=ALL_S)
    try:
        notes = msgspec.json.decode(result.stdout, type=Notes)
    except msgspec.MsgspecError:  # the tested code ended the prober or flooded its output
        notes = {}
    return {name: notes.get(name, []) for name in names}


def passed(actual: Notes, expected: Notes) -> dict[str, bool]:
    """Return which tests made the expected notes and ran to their end."""
    return {
        name: bool(notes) and notes[-1] == END and actual.get(name) == notes
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
                return _noted("note", value)
            case "assertTrue" | "assertFalse", [value]:
                return _noted("note", ast.Call(ast.Name("bool", ast.Load()), [value], []))
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
