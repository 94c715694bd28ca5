"""Tests without their expected values, and the notes that are compared instead."""

import os
import select
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.sandbox.base import SandboxSpec
from rollweave_envs.probe import END, Probe, describe, run
from rollweave_envs.probes import names_in, passed, run_probes, to_probes, without_tests
from tests.envs.handlers.agents import sandboxes

TESTS = textwrap.dedent(
    """
    import unittest

    from thing import f


    class FTest(unittest.TestCase):
        def setUp(self):
            self.x = 3

        def test_value(self):
            self.assertEqual(f(self.x), [9, "secret"])

        def test_raises(self):
            with self.assertRaises(KeyError):
                f(None)

        def test_truth(self):
            self.assertTrue(f(1) != "secret")


    class LaterTest(unittest.IsolatedAsyncioTestCase):
        async def test_waits(self):
            self.assertEqual(f(4), [16, "secret"])


    if __name__ == "__main__":
        unittest.main()
    """
)

RIGHT = "def f(x):\n    if x is None:\n        raise KeyError(x)\n    return [x * x, 'secret']\n"

NAMES = [
    "test_f.FTest.test_value",
    "test_f.FTest.test_raises",
    "test_f.FTest.test_truth",
    "test_f.LaterTest.test_waits",
]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe leaves its working folder, which outside of a sandbox nobody removes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_probes_contain_no_expected_value() -> None:
    source = to_probes(TESTS)
    assert "self.note(f(self.x))" in source
    assert "self.note(bool(f(1) != 'secret'))" in source
    assert "[9" not in source
    assert "KeyError" not in source
    assert "unittest" not in source
    assert names_in("test_f", TESTS) == NAMES


@pytest.mark.parametrize(
    "line",
    [
        "self.assertIn(1, [1])",
        "self.fail()",
        "self.assertEqual(1, 2, 'why')",
        "self.assertRaises(E, f)",
    ],
)
def test_refuses_unsupported_assertions(line: str) -> None:
    with pytest.raises(ValueError, match="a test may use assertEqual"):
        to_probes(
            f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        {line}\n"
        )


def test_removes_hidden_tests() -> None:
    visible = without_tests(TESTS, "test_f", frozenset(NAMES[:1] + NAMES[3:]))
    assert names_in("test_f", visible) == NAMES[1:3]
    assert 'secret"]' not in visible
    assert "LaterTest" not in visible
    compile(visible, "shown", "exec")
    assert without_tests(TESTS, "test_f", frozenset(NAMES)) == ""
    assert without_tests(TESTS, "test_f", frozenset()) == TESTS


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


def plain(value: object) -> object:
    """Return a value with the equality of `describe`: booleans are not numbers."""
    match value:
        case bool():
            return ("bool", value)
        case list() | tuple():
            return (type(value), [plain(part) for part in value])
        case dict():
            return (dict, {(type(key), key): plain(part) for key, part in value.items()})
    return value


@given(VALUES, VALUES)
def test_equal_texts_are_equal_values(one: object, other: object) -> None:
    assert (describe(one) == describe(other)) == (plain(one) == plain(other))
    assert describe(one) == describe(one)


def test_unordered_values_are_equal_in_any_order() -> None:
    assert (
        describe({"b": {3, 1, 2}, "a": 1})
        == describe({"a": 1.0, "b": {2, 3, 1}})
        == "{'a': 1, 'b': {1, 2, 3}}"
    )
    assert describe([1, 2]) != describe([2, 1])


def test_a_value_that_equals_everything_does_not_pass() -> None:
    class Any:
        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "[9, 'secret']"

        __hash__ = None  # type: ignore[assignment]

    class Text(str):
        def __repr__(self) -> str:
            return "'secret'"

        __slots__ = ()

    assert describe(Any()) == "<Any>"
    assert describe(Text("other")) == "'other'"


def test_a_probe_notes_exceptions() -> None:
    probe = Probe()
    with probe.raised():
        raise SystemExit(0)
    with probe.raised():
        pass
    probe.note(1 < 2)
    assert probe.notes == ["raised SystemExit", "raised nothing", "True"]


WRITES = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, {data})
    except OSError:
        pass
os._exit(0)
"""

LIES = {
    "ends": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "prints": 'print(\'OK\'); print(\'{"test_f.FTest.test_value": ["[9]", "end"]}\')',
    "patches": "import unittest; unittest.TestCase.assertEqual = lambda *a: None\ndef f(x): "
    "return 0",
    "equals": "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return "
    "True\ndef f(x): return E()",
    "ends its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "leaves something behind": "import os, time\nif not os.fork():\n    os.setsid(); "
    "time.sleep(60)\ndef f(x): return 0",
    "floods": WRITES.format(data='b\'["x", "end"]\' * 100000'),
    "says it came to its end": WRITES.format(data="b'[\"end\"]'"),
    "patches the probe": (
        "import __main__\n__main__.describe = lambda value: \"[9, 'secret']\"\n"
        "__main__.Probe.note = lambda self, value: self.notes.append('True')\ndef f(x): return 0"
    ),
}


@pytest.mark.variants
@pytest.mark.parametrize("lie", LIES)
async def test_forged_results_do_not_pass(lie: str) -> None:
    async with sandboxes() as boxes:
        spec = SandboxSpec(workdir="/project")
        box = await boxes.start(spec)
        await box.write("/project/thing.py", RIGHT.encode())
        right = await run_probes(box, spec, {"test_f": TESTS}, root="/project")
        assert list(right) == NAMES
        assert all(passed(right, right).values())
        for name in ("thing", "sitecustomize", "usercustomize", "conftest", "unittest", "ast"):
            await box.write(f"/project/{name}.py", LIES[lie].encode())
        wrong = passed(await run_probes(box, spec, {"test_f": TESTS}, root="/project"), right)
    assert not wrong[NAMES[0]]
    assert not wrong[NAMES[3]]


@given(
    values=st.lists(st.text(max_size=5), max_size=5),
    cut=st.integers(0, 5),
    extra=st.text(max_size=3),
)
def test_only_a_complete_test_with_equal_values_passes(
    values: list[str], cut: int, extra: str
) -> None:
    complete = [*values, END]
    assert passed({"t": complete}, {"t": complete}) == {"t": True}
    assert passed({"t": complete[: min(cut, len(values))]}, {"t": complete}) == {"t": False}
    assert passed({"t": [*values, extra, END]}, {"t": complete}) == {"t": False}
    assert passed({}, {"t": complete}) == {"t": False}
    # the right code itself did not come to the end
    for unfinished in (values, [*values, "failed ValueError"], []):
        if unfinished[-1:] != [END]:
            assert passed({"t": unfinished}, {"t": unfinished}) == {"t": False}


WAYS = {
    "return": True,
    "raise ValueError": False,
    "raise SystemExit(0)": False,
    "raise KeyboardInterrupt": False,
    "import os; os._exit(0)": False,
    "import sys; sys.exit()": False,
    "import asyncio; raise asyncio.CancelledError": False,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": False,
}


@pytest.mark.parametrize("last", WAYS)
def test_a_test_ends_only_by_returning(last: str) -> None:
    """The last line decides, whatever was noted before."""
    source = f"class T(Probe):\n    def test(self):\n        self.note(1)\n        {last}\n"
    seen = run({"m": compile(source, "m", "exec")}, "m.T.test", "/", 20.0)
    assert isinstance(seen, list)
    assert (seen == ["1", END]) == WAYS[last]
    assert passed({"t": seen}, {"t": ["1", END]}) == {"t": WAYS[last]}


def test_notes_written_between_two_looks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test writes its notes and ends just after the pipe was found empty."""
    wait = select.select

    def empty_until_the_test_has_ended(*descriptors: Any) -> Any:
        monkeypatch.setattr(select, "select", wait)
        assert wait(*descriptors[:3], 60.0)[0]
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return [], [], []

    monkeypatch.setattr(select, "select", empty_until_the_test_has_ended)
    source = "class T(Probe):\n    def test(self):\n        self.note(1)\n"
    assert run({"m": compile(source, "m", "exec")}, "m.T.test", "/", 60.0) == ["1", END]


async def test_the_interpreter_of_probes_imports_nothing_when_it_starts() -> None:
    source = (
        "import sys, unittest\nclass Flags(unittest.TestCase):\n    def test_flags(self):\n"
        "        self.assertEqual([sys.flags.isolated, sys.flags.no_site, 'site' in sys.modules], "
        "[])\n"
    )
    async with sandboxes() as boxes:
        spec = SandboxSpec(workdir="/project")
        seen = await run_probes(
            await boxes.start(spec), spec, {"test_flags": source}, root="/project"
        )
    assert seen == {"test_flags.Flags.test_flags": ["[1, 1, False]", "end"]}


def test_the_prober_imports_nothing_of_rollweave() -> None:
    source = "import rollweave_envs.probe as p; print(p.__file__)"
    path = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.strip()
    job = '{"root": "/", "sources": {}, "tests": [], "seconds": 1}'
    done = subprocess.run(
        [sys.executable, "-I", path], input=job, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{}"
