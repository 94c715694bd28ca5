"""Run the tests of mutants, each in a fork of one pytest session.

pytest collects the tests of a package once. They run once to learn which of them run
which lines. Then each mutant has a fork of this process, which replaces the code of the
changed function in its own memory, and runs the tests of its lines, the likeliest
first, until one fails. A test that imports the changed file anew gets the mutant, too.
Processes that a test starts import it from a tree of links to the sources, which stands
first in their PYTHONPATH.

A mutant whose lines run in other processes only has all tests of the package in place
of those of its lines, those of the file's own name first. A mutant counts as killed
when a test fails, or when a test needs several times its processor time or its time.

Each fork has a parent of its own, which adopts what the tests leave behind. It ends the
fork after its limit, and then all that is left, whatever session that has moved to.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import coverage
import pytest

from tests.mutants.mutations import Mutation, mutations
from tests.support.forking import adopt_orphans
from tests.support.processes import descendants

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rollweave"
BESIDE = {
    "collective": ROOT / "packages/collective/src/rollweave_collective",
    "environments": ROOT / "packages/envs/src/rollweave_envs",
    "papers": ROOT / "packages/papers/src/rollweave_papers",
    "ray": ROOT / "packages/ray/src/rollweave_ray",
    "sandboxes": ROOT / "packages/sandbox/src/rollweave_sandbox",
    "servers": ROOT / "packages/servers/src/rollweave_servers",
    "service": ROOT / "packages/service/src/rollweave_service",
    "sim": ROOT / "packages/sim/src/rollweave_sim",
    "ui": ROOT / "packages/ui/src/rollweave_ui",
}
"""Packages of further distributions that have mutants: all of `packages`."""
MEMORY = 4 << 30
"""Maximum number of bytes that the tests of a mutant may allocate."""
FIRST_LIMIT_S = 120.0
"""Seconds until the first test must begin, and for a test that has never run."""
ENDING_S = 10.0
"""Seconds in which processes that are killed must end."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The mutation number `index` of a file, which `place_of` finds."""

    file: str
    index: int
    mutation: Mutation

    @property
    def key(self) -> tuple[str, str, str, str]:
        change = self.mutation
        return self.file, change.function, change.before, change.after

    def __str__(self) -> str:
        change = self.mutation
        return (
            f"{self.file}:{change.line} {change.function}\n  - {change.before}\n  + {change.after}"
        )


@dataclasses.dataclass
class Result:
    """`killed_by` is the test that failed, or None; `tests` tests ran. `by_limit` tells
    whether that test did not fail, but needed too much time.
    """

    mutant: Mutant
    killed_by: str | None
    seconds: float
    tests: int
    by_limit: bool


class Runner:
    """The pytest plugin that runs mutants in place of the tests.

    `sources` are the files whose mutants these are. No further test of a mutant starts
    after `budget_s` seconds. What the tests cover is kept in the folder `cache`.
    """

    def __init__(
        self,
        mutants: Sequence[Mutant],
        sources: Sequence[Path],
        jobs: int,
        budget_s: float,
        cache: Path,
    ) -> None:
        self._mutants = mutants
        self._sources = sources
        self._jobs = jobs
        self._budget_s = budget_s
        self._cache = cache
        self._failed: str | None = None
        self._kills: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.results: list[Result] = []

    def pytest_configure(self) -> None:
        """Take the examples of `make test`, but do not shrink those that fail."""
        from hypothesis import HealthCheck, Phase, settings  # after pytest has prepared it

        settings.register_profile(
            "mutants",
            settings.get_profile("dev"),
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        # else each fork would empty the folder in which the others work
        self._temporary = session.config._tmp_path_factory  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as scratch:
            self._scratch = Path(scratch)
            self._tests, self._cost = self._coverage()
            for source in self._sources:  # also those that a test would import later
                with contextlib.suppress(ImportError):
                    importlib.import_module(_module_of(source))
            self._functions = _functions_by_place()
            gc.freeze()
            self._stdout = os.dup(1)
            for mutant, folder, status, seconds in self._done(self._mutants, self._try):
                self._note(mutant, folder, status, seconds)
        return True

    def _coverage(self) -> tuple[dict[str, dict[int, set[str]]], dict[str, list[float]]]:
        """Return the tests that run each line of each file, and each test's seconds, of
        the processor and elapsed.

        They are measured anew for test modules that have changed, or all if the code or
        what tests share has.
        """
        shared = hashlib.sha256()
        tests_and_tables = [
            path
            for top in (ROOT / "tests", *(ROOT / "packages").glob("*/tests"))
            for path in (*top.rglob("*.py"), *top.rglob("*.toml"))
        ]
        code = [path for top in (SOURCE, *BESIDE.values()) for path in sorted(top.rglob("*.py"))]
        for path in [*code, *sorted(tests_and_tables)]:
            if not path.name.startswith("test_") and "mutants" not in path.parts:
                shared.update(path.read_bytes())
        modules: dict[Path, list[pytest.Item]] = {}
        for item in self._items.values():
            modules.setdefault(item.path, []).append(item)
        tests: dict[str, dict[int, set[str]]] = {}
        cost: dict[str, list[float]] = {}
        self._cache.mkdir(exist_ok=True)
        places: dict[Path, Path] = {}
        for path in modules:
            digest = hashlib.sha256(str(path).encode() + path.read_bytes() + shared.digest())
            places[path] = self._cache / f"{path.stem}.{digest.hexdigest()[:16]}.json"
        missing = [path for path in modules if not places[path].exists()]

        def measure(path: Path, folder: Path) -> None:
            self._measure(modules[path], places[path], folder)

        for path, folder, status, _ in self._done(missing, measure):
            if status:
                last = json.loads((folder / "report").read_text())[0]
                sys.exit(f"the tests of {path} could not be measured: {last}, status {status}")
        for cached in places.values():
            measured = json.loads(cached.read_text())
            cost |= measured["cost"]
            for file, lines in measured["tests"].items():
                for line, names in lines.items():
                    tests.setdefault(file, {}).setdefault(int(line), set()).update(names)
        return tests, cost

    def _done(
        self, works: Sequence[T], do: Callable[[T, Path], None]
    ) -> Iterator[tuple[T, Path, int, float]]:
        """Do each of the works in a fork, `jobs` of them at a time. Yield each work, as
        it ends, with its folder, which is removed then, its wait status and seconds.
        """
        running: dict[int, tuple[T, Path, float]] = {}

        def ended() -> Iterator[tuple[T, Path, int, float]]:
            work, folder, begin = running.pop(os.wait()[0])
            status = int((folder / "status").read_text())
            yield work, folder, status, time.monotonic() - begin
            shutil.rmtree(folder, ignore_errors=True)

        for work in works:
            if len(running) == self._jobs:
                yield from ended()
            folder = Path(tempfile.mkdtemp(dir=self._scratch))
            pid = os.fork()
            if not pid:
                with _ending_here():
                    self._temporary._basetemp = folder / "t"
                    (folder / "t").mkdir()
                    _contain(functools.partial(do, work, folder), folder)
            running[pid] = work, folder, time.monotonic()
        while running:
            yield from ended()

    def _measure(self, items: Sequence[pytest.Item], cached: Path, folder: Path) -> None:
        """Run the tests of a module without a mutant; a test that fails is left out."""
        _use_tree(folder, None)
        measure = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=list(map(str, self._sources)),
            messages=False,
        )
        measure.set_option("run:disable_warnings", ["no-data-collected"])
        cost = {}
        measure.start()
        for item in items:
            self._failed = None
            (folder / "report").write_text(json.dumps([item.nodeid]))
            _set_limit(folder, FIRST_LIMIT_S)
            measure.switch_context(item.nodeid)
            begin = time.process_time(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self._failed:
                print(f"\n{self._failed} fails without a mutant: left out", file=sys.stderr)
            else:
                cost[item.nodeid] = [time.process_time() - begin[0], time.monotonic() - begin[1]]
        measure.stop()
        data = measure.get_data()
        tests = {
            name_of(Path(file)): data.contexts_by_lineno(file) for file in data.measured_files()
        }
        cached.write_text(json.dumps({"tests": tests, "cost": cost}))

    def _order(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, those first that kill most per second."""
        lines = self._tests.get(mutant.file, {})
        names = {
            name
            for line in range(mutant.mutation.first, mutant.mutation.last + 1)
            for name in lines.get(line, ())
            if name in self._cost
        } or self._cost.keys()
        kills = self._kills[mutant.file]
        mirror = "test_" + Path(mutant.file).stem

        def usefulness(name: str) -> float:
            near = 3 if mirror in name else 1
            return (near + 5 * kills[name]) / (self._cost[name][1] + 0.02)

        return sorted(names, key=lambda name: (-usefulness(name), name))

    def _try(self, mutant: Mutant, folder: Path) -> None:
        """Run the tests of one mutant in this process, a fork."""
        os.dup2(0, 1)
        os.dup2(0, 2)
        self._failed = None
        report = folder / "report"
        count, begin, killed_by = 0, time.monotonic(), None
        report.write_text(json.dumps(["the start", 0.0, 0]))
        try:
            self._apply(mutant, folder)
        except (ValueError, SyntaxError) as error:
            killed_by = f"not a program: {error}"
        for name in self._order(mutant):
            if killed_by or time.monotonic() - begin > self._budget_s:
                break
            item = self._items[name]
            report.write_text(json.dumps([name, time.monotonic() - begin, count]))
            cpu_s, elapsed_s = self._cost[name]
            signal.setitimer(signal.ITIMER_PROF, 5 + 3 * cpu_s)
            _set_limit(folder, 20 + 5 * elapsed_s)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            count += 1
            killed_by = self._failed
        signal.setitimer(signal.ITIMER_PROF, 0)
        report.write_text(json.dumps([killed_by, time.monotonic() - begin, count]))

    def _apply(self, mutant: Mutant, folder: Path) -> None:
        path = Path(*place_of(mutant.file))
        tree = ast.parse(path.read_text())
        for _ in itertools.islice(mutations(tree), mutant.index, mutant.index + 1):
            _use_tree(folder, (mutant.file, ast.unparse(tree)))
            sys.path.insert(0, str(folder))  # which children of `io/child` get, too
            for known in list(sys.modules.values()):  # the path that isolated children get
                if vars(known).get("DIRECTORY") == SOURCE == place_of(mutant.file)[0]:
                    known.DIRECTORY = folder / SOURCE.name  # type: ignore[attr-defined]
            module = compile(tree, str(path), "exec", dont_inherit=True)
            _import_as(path, module)
            for code in _code_objects(module):
                if code.co_qualname == mutant.mutation.function:
                    place = str(path), code.co_firstlineno, code.co_qualname
                    for function in self._functions.get(place, ()):
                        function.__code__ = code

    def _note(self, mutant: Mutant, folder: Path, status: int, elapsed_s: float) -> None:
        """Add the result of a mutant, and print it."""
        killed_by, seconds, tests = "a test that deletes its folder", 0.0, 1
        with contextlib.suppress(FileNotFoundError):
            killed_by, seconds, tests = json.loads((folder / "report").read_text())
        by_limit = False
        if os.WIFSIGNALED(status):
            number = signal.Signals(os.WTERMSIG(status))
            by_limit = number in (signal.SIGPROF, signal.SIGKILL)
            killed_by = f"{killed_by} ({number.name})"
        elif status:  # the mutant broke the process in which the test runs
            killed_by = f"{killed_by} (status {os.WEXITSTATUS(status)})"
        elif killed_by is not None:
            self._kills[mutant.file][killed_by] += 1
        self.results.append(Result(mutant, killed_by, seconds, tests, by_limit))
        verdict = "killed" if killed_by else "survived" if tests else "not covered"
        head = f"[{len(self.results)}/{len(self._mutants)}] {verdict}"
        times = f"{seconds:.1f} s, {elapsed_s:.1f} s in all, {tests} tests"
        line = f"{head} ({times}) {mutant}" if not killed_by else f"{head} ({times}) by {killed_by}"
        os.write(self._stdout, (line + "\n").encode())


def _contain(do: Callable[[], None], folder: Path) -> None:
    """Do something in a fork that ends at the limit in `folder`, and end all processes
    that it leaves. Write its wait status to the file `status`. Tests are measured under
    the same limits: those that fail under them are left out.
    """
    adopt_orphans(True)
    limit = time.monotonic() + FIRST_LIMIT_S
    worker = os.fork()
    if not worker:
        adopt_orphans(False)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # as pytest does if it captures
        most = _address_space() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with _ending_here():
            do()
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == worker:
            break
        if not pid:
            with contextlib.suppress(OSError, ValueError):  # a mutant may delete the file
                limit = float((folder / "limit").read_text())
            if time.monotonic() > limit:
                os.kill(worker, signal.SIGKILL)
            time.sleep(0.02)
    folder.mkdir(exist_ok=True)
    (folder / "status").write_text(str(status))
    _end_descendants()


def _set_limit(folder: Path, seconds: float) -> None:
    (folder / "limit").write_text(str(time.monotonic() + seconds))


def _end_descendants() -> None:
    """Kill and reap all descendants, of which this process adopts the orphans."""
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        for child in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.005)


def _use_tree(folder: Path, changed: tuple[str, str] | None) -> None:
    """Let processes that start from now on import the package from a tree of links, in
    which one file has another text.
    """
    source, file = place_of(changed[0] if changed else "")
    package = folder / source.name
    parts = Path(file).parts or ("",)
    for part in parts:
        package.mkdir(parents=True, exist_ok=True)
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                with contextlib.suppress(FileExistsError):
                    (package / entry.name).symlink_to(entry)
        package, source = package / part, source / part
    if changed:
        package.write_text(changed[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(folder), os.environ.get("PYTHONPATH", "")))
    )


def _import_as(path: Path, code: types.CodeType) -> None:
    """Let this process import a file as `code` from now on."""
    loader, own = importlib.machinery.SourceFileLoader, str(path)
    known = loader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType | None:
        return code if self.path == own else known(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]


def place_of(name: str) -> tuple[Path, str]:
    """Return the folder of the top package of a file, and the file's path in it."""
    package, _, file = name.partition("/")
    return (BESIDE[package], file) if package in BESIDE else (SOURCE, name)


def name_of(path: Path) -> str:
    """Return a file's path below `SOURCE`, or below its package of `BESIDE`, which
    comes first.
    """
    for package, top in BESIDE.items():
        if path.is_relative_to(top):
            return f"{package}/{path.relative_to(top).as_posix()}"
    return path.relative_to(SOURCE).as_posix()


@contextlib.contextmanager
def _ending_here() -> Iterator[None]:
    """End a fork without running what its parent is to run at exit."""
    try:
        yield
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _module_of(source: Path) -> str:
    top, file = place_of(name_of(source))
    parts = (top.name, *Path(file).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _functions_by_place() -> Mapping[tuple[str, int, str], Sequence[types.FunctionType]]:
    gc.unfreeze()  # frozen objects are not listed
    places = collections.defaultdict(list)
    for function in gc.get_objects():
        if type(function) is types.FunctionType:  # some proxies warn if asked for their class
            code = function.__code__
            places[code.co_filename, code.co_firstlineno, code.co_qualname].append(function)
    return dict(places)


def _code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _code_objects(constant)
