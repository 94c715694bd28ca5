"""Measure the tests by mutants: change one place of the code, and see whether a test
fails.

    python -m tests.mutants                 a sample of 400 mutants
    python -m tests.mutants --sample all    every mutant
    python -m tests.mutants --only core/policy/retry.py --sample all

The mutants are those of `mutations.py` in `core/` and in the trainer's advantages,
losses and packing, except checks of invariants, which are assertions of tests. A
sample is spread evenly over all functions, and the same for the same seed and code.
`equivalent.toml` lists mutants that no test can notice, each with the reason; an entry
that matches no mutant is an error.

pytest runs in this process, once to learn which tests run which lines, then per mutant
in a fork that replaces the function's code and runs the tests of its line, the
likeliest first, until one fails. A mutant that needs several times the test's processor
time counts as killed.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import coverage
import pytest

from tests.mutants.mutations import Mutation, mutations

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rollweave"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
TARGETS = ("core/**/*.py", "train/advantages.py", "train/losses.py", "train/packing.py")
EXCLUDED = {
    "core/mechanisms/cluster/check.py",
    "core/mechanisms/relays/check.py",
    "core/reading/checks.py",
}
TESTS = (
    "tests/core",
    "tests/train/test_advantages.py",
    "tests/train/test_losses.py",
    "tests/train/test_packing.py",
)
SAMPLE = 400
BUDGET_S = 120.0
"""Processor time of the tests of one mutant, in seconds, after which no further test
starts.
"""
MEMORY = 4 << 30
"""Maximum number of bytes that the tests of a mutant may allocate."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The mutation number `index` of a file."""

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


def _targets() -> list[Path]:
    return sorted({path for pattern in TARGETS for path in SOURCE.glob(pattern)})


def all_mutants() -> list[Mutant]:
    mutants = []
    for path in _targets():
        file = path.relative_to(SOURCE).as_posix()
        if file in EXCLUDED:
            continue
        tree = ast.parse(path.read_text())
        mutants += [Mutant(file, index, change) for index, change in enumerate(mutations(tree))]
    return mutants


def sampled(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """Draw at equal distances from the mutants, which are mixed within each
    function.
    """
    if number >= len(mutants):
        return list(mutants)
    rng = random.Random(seed)
    by_function: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        by_function.setdefault((mutant.file, mutant.mutation.function), []).append(mutant)
    mixed = [mutant for own in by_function.values() for mutant in rng.sample(own, len(own))]
    step = len(mixed) / number
    offset = rng.random() * step
    return [mixed[int(offset + step * place)] for place in range(number)]


def explained(mutants: Collection[Mutant]) -> set[tuple[str, str, str, str]]:
    """Read the mutants that no test can notice; stop if one does not exist."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    keys = [(e["file"], e["function"], e["before"], e["after"]) for e in entries]
    stale = set(keys) - {mutant.key for mutant in mutants}
    if stale:
        sys.exit("no such mutant:\n" + "\n".join(map(repr, sorted(stale))))
    return set(keys)


@dataclasses.dataclass
class Result:
    mutant: Mutant
    killed_by: str | None
    cpu_s: float
    tests: int


class Runner:
    """The pytest plugin that runs mutants in place of the tests."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, budget_s: float, cache: Path) -> None:
        self._mutants = mutants
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
        self._tests, self._cost = self._coverage()
        self._functions = _functions_by_place()
        self._stdout = os.dup(1)
        running: dict[int, tuple[Mutant, Path, float]] = {}
        with tempfile.TemporaryDirectory() as scratch:
            for number, mutant in enumerate(self._mutants):
                if len(running) == self._jobs:
                    self._wait(running)
                path = Path(scratch) / str(number)
                pid = os.fork()
                if not pid:
                    self._try(mutant, path)
                running[pid] = mutant, path, time.monotonic()
            while running:
                self._wait(running)
        return True

    def _coverage(self) -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
        """Return the tests that run each line of each file, and the processor time of
        each test.

        They are measured anew for test modules that have changed, or all if the code or
        what tests share has.
        """
        shared = hashlib.sha256()
        for path in [*_targets(), *sorted((ROOT / "tests").rglob("*.py"))]:
            if not path.name.startswith("test_") and "mutants" not in path.parts:
                shared.update(path.read_bytes())
        modules: dict[Path, list[pytest.Item]] = {}
        for item in self._items.values():
            modules.setdefault(item.path, []).append(item)
        tests: dict[str, dict[int, set[str]]] = {}
        cost: dict[str, float] = {}
        self._cache.mkdir(exist_ok=True)
        for path, items in modules.items():
            digest = hashlib.sha256(path.read_bytes() + shared.digest()).hexdigest()
            cached = self._cache / f"{path.stem}.{digest[:16]}.json"
            if not cached.exists():
                pid = os.fork()
                if not pid:
                    with _ending_here():
                        self._measure(items, cached)
                if os.waitpid(pid, 0)[1]:
                    sys.exit("a test fails without a mutant")
            measured = json.loads(cached.read_text())
            cost |= measured["cost"]
            for file, lines in measured["tests"].items():
                for line, names in lines.items():
                    tests.setdefault(file, {}).setdefault(int(line), set()).update(names)
        return tests, cost

    def _measure(self, items: Sequence[pytest.Item], cached: Path) -> None:
        measure = coverage.Coverage(
            data_file=None, config_file=False, include=list(map(str, _targets())), messages=False
        )
        cost = {}
        measure.start()
        for item in items:
            measure.switch_context(item.nodeid)
            before = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            cost[item.nodeid] = time.process_time() - before
            if self._failed:
                print(f"\n{self._failed} fails without a mutant", file=sys.stderr)
                os._exit(1)
        measure.stop()
        data = measure.get_data()
        tests = {
            Path(file).relative_to(SOURCE).as_posix(): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        cached.write_text(json.dumps({"tests": tests, "cost": cost}))

    def _order(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, those first that kill most per second."""
        lines = self._tests.get(mutant.file, {})
        names = {
            name
            for line in range(mutant.mutation.first, mutant.mutation.last + 1)
            for name in lines.get(line, ())
            if name in self._items
        }
        kills = self._kills[mutant.file]
        mirror = "test_" + Path(mutant.file).name

        def usefulness(name: str) -> float:
            near = 3 if mirror in name else 1
            return (near + 5 * kills[name]) / (self._cost[name] + 0.02)

        return sorted(names, key=lambda name: (-usefulness(name), name))

    def _try(self, mutant: Mutant, path: Path) -> NoReturn:
        """Run the tests of one mutant in this process, a fork."""
        with _ending_here():
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            self._failed = None
            limit = _address_space() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            count, begin, killed_by = 0, time.process_time(), None
            try:
                self._apply(mutant)
            except (ValueError, SyntaxError) as error:
                killed_by = f"not a program: {error}"
            for name in self._order(mutant):
                if killed_by or time.process_time() - begin > self._budget_s:
                    break
                item = self._items[name]
                path.write_text(json.dumps([name, time.process_time() - begin, count]))
                signal.setitimer(signal.ITIMER_PROF, 5 + 3 * self._cost[name])
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                count += 1
                killed_by = self._failed
            signal.setitimer(signal.ITIMER_PROF, 0)
            path.write_text(json.dumps([killed_by, time.process_time() - begin, count]))
        raise AssertionError

    def _apply(self, mutant: Mutant) -> None:
        path = SOURCE / mutant.file
        tree = ast.parse(path.read_text())
        for _ in itertools.islice(mutations(tree), mutant.index, mutant.index + 1):
            module = compile(tree, str(path), "exec", dont_inherit=True)
            for code in _code_objects(module):
                if code.co_qualname == mutant.mutation.function:
                    place = str(path), code.co_firstlineno, code.co_qualname
                    for function in self._functions[place]:
                        function.__code__ = code

    def _wait(self, running: dict[int, tuple[Mutant, Path, float]]) -> None:
        pid, status = os.waitpid(-1, 0)
        mutant, path, begin = running.pop(pid)
        if os.WIFEXITED(status) and status:
            sys.exit(f"could not try {mutant}")
        killed_by, cpu_s, tests = json.loads(path.read_text())
        if os.WIFSIGNALED(status):
            killed_by = f"{killed_by} ({signal.Signals(os.WTERMSIG(status)).name})"
        elif killed_by is not None:
            self._kills[mutant.file][killed_by] += 1
        result = Result(mutant, killed_by, cpu_s, tests)
        self.results.append(result)
        verdict = "killed" if killed_by else "survived" if tests else "not covered"
        head = f"[{len(self.results)}/{len(self._mutants)}] {verdict}"
        times = f"{cpu_s:.1f} s, {time.monotonic() - begin:.1f} s elapsed, {tests} tests"
        line = f"{head} ({times}) {mutant}" if not killed_by else f"{head} ({times}) by {killed_by}"
        os.write(self._stdout, (line + "\n").encode())


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", default=str(SAMPLE), help="a number of mutants, or 'all'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a part of the path below src/rollweave")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="test files and folders")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds per mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    everything = all_mutants()
    known = explained(everything)
    mutants = [m for m in everything if arguments.only is None or arguments.only in m.file]
    number = len(mutants) if arguments.sample == "all" else int(arguments.sample)
    drawn = sampled(mutants, number, arguments.seed)
    tried = [mutant for mutant in drawn if mutant.key not in known]
    print(f"{len(drawn)} of {len(mutants)} mutants, {len(drawn) - len(tried)} of them explained")
    sys.stdout.flush()
    runner = Runner(tried, arguments.jobs, arguments.budget, ROOT / ".mutants")
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow", "-s", "--tb=no"]
    pytest.main([*options, *arguments.tests], plugins=[runner])
    return report(runner.results, len(tried))


def report(results: Sequence[Result], tried: int) -> int:
    if len(results) < tried:
        print("the run is incomplete")
        return 1
    by_part: dict[str, list[bool]] = {}
    survivors = []
    for result in results:
        part = str(Path(result.mutant.file).parent)
        by_part.setdefault(part, []).append(result.killed_by is not None)
        if result.killed_by is None:
            survivors.append(result.mutant)
    print("\nSurvivors:")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.file, mutant.mutation.line)):
        print(mutant)
    for part, killed in sorted(by_part.items()):
        print(f"{part}: {sum(killed)} of {len(killed)} killed, {sum(killed) / len(killed):.1%}")
    killed_in_all = tried - len(survivors)
    print(f"all: {killed_in_all} of {tried} killed, {killed_in_all / tried:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
