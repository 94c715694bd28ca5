"""Measure the tests by mutants: change one place of the code, and see whether a test
fails.

    python -m tests.mutants                          a sample of every package
    python -m tests.mutants core train --sample all  every mutant of two packages
    python -m tests.mutants core --only policy/retry.py --sample all

The mutants are those of `mutations.py` in all of `src/rollweave` and in the packages
`BESIDE` it, except `NOT_RUN`.
Each runs the fast tests of its package's own folder (`runner.py`). A sample is spread
evenly over the functions of a package, and the same for the same seed and code.
`equivalent.toml` lists mutants that no test can notice, each with the reason; an entry
that matches no mutant is an error. `--json FILE` adds the numbers of each package.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.mutants.mutations import mutations
from tests.mutants.runner import BESIDE, ROOT, SOURCE, Mutant, Runner, name_of

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
PACKAGES = tuple(sorted([*(path.parent.name for path in SOURCE.glob("*/__init__.py")), *BESIDE]))
NOT_RUN = {
    "core/reading/checks.py": "invariants, which are assertions of tests",
    "core/mechanisms/*/check.py": "invariants, which are assertions of tests",
    "engine/cuda_graphs.py": "needs a GPU",
    "ray/agents.py": "needs Ray",
    "sandboxes/inside/*.py": "runs in a sandbox, with an interpreter of its own",
    "servers/plugin/rollweave_vllm_weights.py": "needs vLLM",
    "servers/plugin/rollweave_vllm_routes.py": "needs vLLM",
}
"""Files without mutants, by a pattern of their path, each with the reason."""
SAMPLE = 40
BUDGET_S = 60.0
"""Seconds of the tests of one mutant, after which no further test starts."""


def sources(package: str) -> list[Path]:
    """Return the files of a package that have mutants."""
    return [
        path
        for path in sorted(BESIDE.get(package, SOURCE / package).rglob("*.py"))
        if not any(Path(name_of(path)).match(pattern) for pattern in NOT_RUN)
    ]


def mutants_of(package: str) -> list[Mutant]:
    return [
        Mutant(name_of(path), index, change)
        for path in sources(package)
        for index, change in enumerate(mutations(ast.parse(path.read_text())))
    ]


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


def explained(package: str, mutants: Collection[Mutant]) -> set[tuple[str, str, str, str]]:
    """Read the mutants of a package that no test can notice; stop if one does not
    exist.
    """
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    keys = {(e["file"], e["function"], e["before"], e["after"]) for e in entries}
    own = {key for key in keys if key[0].split("/")[0] == package}
    if stale := own - {mutant.key for mutant in mutants}:
        sys.exit("no such mutant:\n" + "\n".join(map(repr, sorted(stale))))
    return own


def measured(package: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Try a sample of a package's mutants, print the survivors, and return the
    numbers.
    """
    everything = mutants_of(package)
    known = explained(package, everything)
    mutants = [m for m in everything if arguments.only is None or arguments.only in m.file]
    number = len(mutants) if arguments.sample == "all" else int(arguments.sample)
    drawn = sampled(mutants, number, arguments.seed)
    tried = [mutant for mutant in drawn if mutant.key not in known]
    print(f"{package}: {len(drawn)} of {len(mutants)} mutants", flush=True)
    runner = Runner(tried, sources(package), arguments.jobs, arguments.budget, ROOT / ".mutants")
    marks = "not slow and not extended and not cluster and not vllm"
    top = BESIDE.get(package)
    folder = ROOT / "tests" / package if top is None else top.parents[1] / "tests"
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-m", marks, "-s", "--tb=no"]
    pytest.main([*options, str(folder)], plugins=[runner])
    if len(runner.results) < len(tried):
        sys.exit(f"the mutants of {package} were not tried to the end")
    survivors = [result.mutant for result in runner.results if result.killed_by is None]
    for mutant in sorted(survivors, key=lambda mutant: (mutant.file, mutant.mutation.line)):
        print("survived:", mutant)
    killed = len(tried) - len(survivors)
    return {
        "package": package,
        "mutants": len(mutants),
        "tried": len(tried),
        "explained": len(drawn) - len(tried),
        "killed": killed,
        "by a limit": sum(result.by_limit for result in runner.results),
        "seconds": round(sum(result.seconds for result in runner.results)),
    }


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return the numbers of the packages as a Markdown table."""
    lines = [
        "| package | mutants | tried | explained | killed | by a limit | share |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        share = f"{row['killed'] / row['tried']:.1%}" if row["tried"] else "-"
        names = ("package", "mutants", "tried", "explained", "killed", "by a limit")
        lines.append("| " + " | ".join([*(f"{row[name]}" for name in names), share]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="*", default=PACKAGES, metavar="PACKAGE")
    parser.add_argument("--sample", default=str(SAMPLE), help="mutants per package, or 'all'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a part of the path below src/rollweave")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds per mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="a file for the numbers of the packages")
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - set(PACKAGES):
        parser.error(f"no such package: {', '.join(sorted(unknown))}; there are {PACKAGES}")
    if len(arguments.packages) == 1:
        rows = [measured(arguments.packages[0], arguments)]
    else:
        rows = [row for package in arguments.packages for row in _apart(package, arguments)]
    print("\n" + table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    return int(len(rows) < len(arguments.packages))


def _apart(package: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure a package in a separate process, with a pytest session of its own. Return
    no row if that fails.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        options = {**vars(arguments), "json": file.name}
        del options["packages"]
        command = [sys.executable, "-m", "tests.mutants", package]
        for name, value in options.items():
            command += [f"--{name}", str(value)] if value is not None else []
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{package}: not measured", flush=True)
            return []
        return json.loads(file.read())


if __name__ == "__main__":
    sys.exit(main())
