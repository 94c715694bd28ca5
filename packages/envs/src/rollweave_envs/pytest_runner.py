"""Inside a sandbox: runs tests by pytest beside code that an agent wrote, and reports
their outcomes on a channel that no other code knows. Needs Python 3.6, its standard
library and pytest.

`python -I -S -c SOURCE` reads a job from standard input: `{"key", "tag", "root",
"config", "files", "folders", "changed"}`: the files of tests, the folders of tests, and
the files that the agent wrote. The interpreter runs no code when it starts: no
`sitecustomize`, no module of the work folder. Standard output becomes the channel, and
what tests print goes to standard error.

Tests are imported as they were before any other code ran. Code under test may run
before a test file is imported, because a `conftest.py` or another test imports it. It
could replace the file, its cached code, its module or pytest's rewriting of assertions.

A line of the channel is `NUMBER STATUS KIND NAME MAC`: the numbers count up, NAME is
hexadecimal, and the MAC shows that the writer has the key. KIND is `f` for a function,
`c` for a control and `o` for anything else. The last line has the status `end`.

Among the tests of each module stands a control: a test that must fail. Where it passes,
the code under test has changed how tests run.
"""

import ast
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import random
import site
import sys
import types
from typing import Any, Callable  # noqa: UP035 (for Python 3.6)

CHANNEL = 300
"""Minimum number of the channel's descriptor: tests that close descriptors close lower
ones.
"""

OPTIONS = (
    *("-rA", "--tb=short", "--show-capture=no", "--continue-on-collection-errors"),
    *("--maxfail=0", "-p", "no:cacheprovider"),
)

CONTROLS = {
    "": "def {name}():\n    value = [{number}]\n    assert value == [0], value\n",
    "unittest": ("def {name}(self):\n    value = [{number}]\n    self.assertEqual(value, [0])\n"),
}
"""The sources of controls: of a module, and of a class of unittest. The error of one
that fails as it should has the number.
"""

Tell = Callable[[str, str, str], None]


def main() -> None:
    channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, CHANNEL)
    os.dup2(2, 1)
    with open(0, closefd=False) as stdin:
        job = json.load(stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    tell = teller(channel, bytes.fromhex(job.pop("key")))
    os.chdir(job["root"])
    find_packages()
    # Last, so that no module of the repository takes the place of pytest's.
    sys.path.append(job["root"])
    import pytest

    arguments = [*OPTIONS, "-c", job["config"], "--rootdir", os.path.dirname(job["config"])]
    if importlib.util.find_spec("xdist"):  # tests would run in other processes
        arguments += ["-n", "0"]
    sys.argv = ["pytest", *arguments]
    changed = {os.path.realpath(path) for path in job["changed"]}
    kept = read_sources(job["files"], job["folders"])
    control = "test_" + job.pop("tag")
    loaded = {}  # type: ignore[var-annotated]
    plugins = [
        make_importer(pytest, job["root"], job["files"], kept, loaded),
        make_plugin(pytest, tell, control, changed, kept, loaded),
    ]
    status = pytest.main([*arguments, *job["files"]], plugins=plugins)
    sys.stdout.flush()
    sys.stderr.flush()
    tell("end", "o", str(int(status)))
    os._exit(0)


def teller(channel: int, key: bytes) -> Tell:
    """Return a function that writes a line of the channel: status, kind and name.

    All that it calls is bound here, before any other code runs, and written in C.
    """
    write, digest, count = os.write, hashlib.blake2b, [0]

    def tell(status: str, kind: str, name: str) -> None:
        line = f"{count[0]} {status} {kind} {name.encode('utf-8', 'replace').hex()}"
        count[0] += 1
        mac = digest(line.encode(), key=key, digest_size=16).hexdigest()
        write(channel, f"{line} {mac}\n".encode())

    return tell


def find_packages() -> None:
    """Find packages as an interpreter does, but run no module that it would run when it
    starts, such as `sitecustomize`.
    """
    site.ENABLE_USER_SITE = False
    for name in ("execsitecustomize", "execusercustomize"):
        setattr(site, name, lambda: None)
    site.main()


def read_sources(files: "list[str]", folders: "list[str]") -> "dict[str, bytes]":
    """Return the sources of tests and of modules in their folders, by real path."""
    paths = [path for path in files if path.endswith(".py")]
    for top in folders:
        for folder, _, names in os.walk(top):
            paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    sources = {}
    for path in map(os.path.realpath, paths):
        try:
            with open(path, "rb") as file:
                sources[path] = file.read()
        except OSError:  # a directory, a broken link
            continue
    return sources


def rewritten(files: "list[str]", sources: "dict[str, bytes]", config: Any) -> "dict[str, Any]":
    """Return the code of the files of tests, as pytest rewrites their assertions."""
    from _pytest.assertion.rewrite import rewrite_asserts

    codes = {}
    for path in map(os.path.realpath, files):
        try:
            source = sources[path]
            tree = ast.parse(source, filename=path)
            rewrite_asserts(tree, source, path, config)
            codes[path] = compile(tree, path, "exec", dont_inherit=True)
        except (KeyError, SyntaxError, ValueError):  # pytest reports it
            continue
    return codes


def make_finder(
    sources: "dict[str, bytes]", codes: "dict[str, Any]", loaded: "dict[str, Any]"
) -> Any:
    """Return a finder of modules that runs kept code, or else compiles kept sources,
    and notes in `loaded` which modules it made from which path.
    """
    find, real = importlib.machinery.PathFinder.find_spec, os.path.realpath
    build, run = compile, exec
    stems = {os.path.basename(path)[: -len(".py")] for path in sources}
    stems.update(os.path.basename(os.path.dirname(path)) for path in sources)

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module: types.ModuleType) -> None:
            path = real(self.path)
            code = codes.get(path) or build(sources[path], path, "exec", dont_inherit=True)
            loaded.setdefault(path, []).append(module)
            run(code, module.__dict__)

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            spec = find(name, path, target) if name.rpartition(".")[2] in stems else None
            if spec is None or spec.origin is None or real(spec.origin) not in sources:
                return None
            spec.loader = Loader(name, spec.origin)
            return spec

    return Finder()


def status_of(reports: "list[Any]", raised: bool, marked: bool) -> str:
    """Return the outcome of a test by the reports of its phases, which code under test
    may have changed, by whether its body `raised`, and by whether it is `marked` as one
    that fails: code under test can claim that by itself.
    """
    calls = [report for report in reports if report.when == "call"]
    if any(report.failed for report in reports if report.when != "call"):
        return "ERROR"
    if not calls or any(report.skipped for report in reports):
        expected = any(hasattr(report, "wasxfail") for report in reports)
        return "XFAIL" if expected and marked else "SKIPPED"
    if raised or any(report.failed for report in calls):
        return "FAILED"
    return "XPASS" if hasattr(calls[-1], "wasxfail") else "PASSED"


def control_status_of(reports: "list[Any]", raised: str, number: str) -> str:
    """Return `FAILED` for a control that failed as it should, `ERROR` or `SKIPPED` for
    a control whose body its module never ran, and otherwise `BROKEN`.
    """
    if number in raised:
        return "FAILED"
    status = "BROKEN" if any(report.when == "call" for report in reports) else "SKIPPED"
    return "ERROR" if any(report.failed for report in reports) and status == "SKIPPED" else status


def code_of(item: Any) -> Any:
    return getattr(getattr(item, "obj", None), "__code__", None)


def source_of(item: Any) -> str:
    """Return the file of a test's function, within all decorators; "" if it has
    none.
    """
    function = getattr(item, "obj", None)
    for _ in range(100):  # a chain may be endless
        function = getattr(function, "__wrapped__", function)
    return str(getattr(getattr(function, "__code__", None), "co_filename", ""))


def is_marked(item: Any) -> bool:
    """Return whether the test's own file says that it fails."""
    own = getattr(getattr(item, "obj", None), "__unittest_expecting_failure__", False)
    return bool(own) or item.get_closest_marker("xfail") is not None


def unittest_of(item: Any) -> Any:
    """Return the class of a test of unittest, or None."""
    kind = getattr(item, "cls", None)
    return kind if hasattr(kind, "assertEqual") else None


def make_control(module: types.ModuleType, kind: str, name: str, number: str) -> Any:
    """Return the function of a control, as if the module had it itself."""
    space = {}  # type: ignore[var-annotated]
    source = CONTROLS[kind].format(name=name, number=number)
    exec(compile(source, module.__file__ or "", "exec"), module.__dict__, space)
    return space[name]


def control_item(pytest: Any, test: Any, function: Any) -> Any:
    """Return an item that runs a control as the test beside it is run."""
    kind, how = pytest.Function, {"name": function.__name__, "callobj": function}
    how["parent"] = test.getparent(pytest.Module)
    if unittest_of(test):
        setattr(test.cls, function.__name__, function)
        kind, how = type(test), {"name": function.__name__, "parent": test.parent}
    return kind.from_parent(**how) if hasattr(kind, "from_parent") else kind(**how)


def with_controls(
    pytest: Any, items: "list[Any]", controls: "dict[str, Any]"
) -> "tuple[list[Any], list[Any]]":
    """Return the items with a control after the last test of each module and each class
    of unittest, and these controls. `controls` has the functions of each module.
    """
    ordered, added, placed = [], [], set()
    for item in reversed(items):
        module = item.getparent(pytest.Module)
        made = controls.get(module.nodeid) if module is not None else None
        if made and isinstance(item, pytest.Function):
            for place, kind in ((module, ""), (unittest_of(item), "unittest")):
                if place is not None and place not in placed:
                    placed.add(place)
                    control = control_item(pytest, item if kind else module, made[kind])
                    added.append(control)
                    ordered.append(control)
        ordered.append(item)
    return ordered[::-1], added


def error_of(item: Any, outcome: Any) -> "str | None":
    """Return the text of what a test's body raised, or None. Tests of unittest keep
    their errors.
    """
    kept = [each.value for each in getattr(item, "_excinfo", None) or ()]
    raised = [outcome.excinfo[1]] if outcome.excinfo is not None else kept
    try:
        return str(raised[0]) if raised else None
    except Exception:  # the error is one of the code under test
        return ""


def make_importer(
    pytest: Any, root: str, files: "list[str]", kept: "dict[str, bytes]", loaded: "dict[str, Any]"
) -> Any:
    """Return the plugin that has tests imported as they are now, and notes in `loaded`
    which modules were.
    """

    class Importer:
        @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_load_initial_conftests(self, early_config: Any) -> None:
            """Import from the work folder, as `python -m pytest` does, now that all
            plugins are loaded, and tests as they are now.
            """
            plain = early_config.known_args_namespace.assertmode == "plain"
            codes = {} if plain else rewritten(files, kept, early_config)
            sys.meta_path.insert(0, make_finder(kept, codes, loaded))
            sys.path.insert(0, root)

    return Importer()


def make_plugin(
    pytest: Any,
    tell: Tell,
    control: str,
    changed: "set[str]",
    kept: "dict[str, bytes]",
    loaded: "dict[str, Any]",
) -> Any:
    """Return the plugin that tells outcomes. What it knows is in variables of this
    function, not in attributes, which other code could find by their names.
    """
    phases: dict[str, Any] = {}
    raised: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    controls: dict[str, Any] = {}
    number = str(random.SystemRandom().randrange(1 << 60, 1 << 61))

    class Plugin:
        @pytest.hookimpl(hookwrapper=True, trylast=True)  # type: ignore[untyped-decorator]
        def pytest_make_collect_report(self, collector: Any) -> Any:
            """Make the controls of a module together with its tests; none in a module
            that is not the kept one, whose tests are then not believed.
            """
            yield
            module = getattr(collector, "obj", None)
            if not isinstance(collector, pytest.Module) or not isinstance(module, types.ModuleType):
                return
            path = os.path.realpath(str(collector.fspath))
            if path not in kept or any(module is each for each in loaded.get(path, ())):
                controls[collector.nodeid] = {
                    kind: make_control(module, kind, control, number) for kind in CONTROLS
                }

        def pytest_itemcollected(self, item: Any) -> None:
            own = os.path.realpath(source_of(item)) not in changed
            known[item] = code_of(item) if own else None, is_marked(item)

        @pytest.hookimpl(trylast=True)  # type: ignore[untyped-decorator]
        def pytest_collection_modifyitems(self, items: "list[Any]") -> None:
            """Put the controls among the tests."""
            items[:], added = with_controls(pytest, items, controls)
            known.update((item, (code_of(item), False)) for item in added)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_call(self, item: Any) -> Any:
            replaced = item in known and known[item][0] is not code_of(item)
            outcome = yield
            raised[item.nodeid] = "replaced" if replaced else error_of(item, outcome)

        @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
            """Run a control without a report to others."""
            phases[item.nodeid] = item, []
            if item.name != control:
                return None
            from _pytest.runner import runtestprotocol

            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            error = raised.get(item.nodeid) or ""
            tell(control_status_of(reports, error, number), "c", item.nodeid)
            return True

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.nodeid in phases:
                phases[report.nodeid][1].append(report)

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            if nodeid in phases:
                item, reports = phases.pop(nodeid)
                marked = item in known and known[item][1]
                status = status_of(reports, raised.get(nodeid, "") is not None, marked)
                tell(status, "f" if isinstance(item, pytest.Function) else "o", nodeid)

    return Plugin()


if __name__ == "__main__":
    main()
