"""Instances in the format of SWE-bench: their files, and attempts by scripted agents in
real sandboxes.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import LimitError
from rollweave.schema.chat import Message
from rollweave.schema.errors import (
    ConfigError,
    RewardError,
    SandboxError,
    SandboxSpoiledError,
)
from rollweave.schema.work import StopReason
from rollweave_envs.pytest_judge import matched
from rollweave_envs.swe_bench import SweBench, printed_outcomes
from rollweave_envs.swe_instances import folder_of, instances
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes
from tests.support.variants import mostly_slow

CALC = """def total(prices):
    result = 0
    for price in prices[1:]:
        result += price
    return result


def mean(prices):
    return total(prices) / len(prices)
"""

OLD_TEST = """from calc import total


def test_empty():
    assert total([]) == 0
"""

TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
 from calc import total
 
 
+def test_some():
+    assert total([1, 2]) == 3
+
+
 def test_empty():
     assert total([]) == 0
diff --git a/tests/test_mean.py b/tests/test_mean.py
new file mode 100644
--- /dev/null
+++ b/tests/test_mean.py
@@ -0,0 +1,8 @@
+import pytest
+
+from calc import mean
+
+
+@pytest.mark.parametrize("prices", [(2, 4), (6, 0)], ids=["both prices", "one"])
+def test_mean(prices):
+    assert mean(prices) == 3
"""

SOME = "tests/test_calc.py::test_some"
EMPTY = "tests/test_calc.py::test_empty"
BOTH = "tests/test_mean.py::test_mean[both prices]"
ONE = "tests/test_mean.py::test_mean[one]"


def shell(command: str) -> Message:
    return calls(("bash", {"command": command}))


MEND = shell("sed -i 's/prices.1:./prices/' calc/__init__.py")
SUBMIT = calls(("submit", {}))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository whose newest commit resolves the issue of the one before."""
    folder = tmp_path / "repos" / "shop__calc"
    for path, text in {
        "calc/__init__.py": CALC,
        "tests/test_calc.py": OLD_TEST,
        "run.sh": "#!/bin/sh\necho 1\n",
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        ".gitattributes": "tests export-ignore\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    (folder / "calc/__init__.py").write_text(CALC.replace("[1:]", ""))
    git(folder, "commit", "-qam", "solution")
    return folder


def record(repository: Path, **fields: Any) -> dict[str, Any]:
    commit = git(repository, "rev-parse", "HEAD~1") if (repository / ".git").exists() else "x"
    return {
        "instance_id": "shop__calc-1",
        "repo": "shop/calc",
        "base_commit": commit,
        "problem_statement": "The {total} leaves out the first price.",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": json.dumps([SOME, BOTH, ONE]),
        "PASS_TO_PASS": [EMPTY],
        "version": "1.0",
    } | fields


def written(folder: Path, *records: dict[str, Any]) -> dict[str, Any]:
    """Return options with a file of these records."""
    path = folder / "instances.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in records))
    return {"instances": str(path), "repositories": str(folder / "repos")}


async def tried(
    replies: Scripted | Sequence[Any], options: dict[str, Any], row: int = 0
) -> tuple[Score, dict[str, Any]]:
    handler = SweBench(**options)
    agent = replies if isinstance(replies, Scripted) else Scripted(replies)
    async with sandboxes() as boxes:
        score = await attempt(handler, new_task(file=options["instances"], row=row), agent, boxes)
    return score, handler.final_result()


# --- attempts ---


async def test_a_resolved_issue_is_a_success(repository: Path, tmp_path: Path) -> None:
    options = written(tmp_path, record(repository)) | {"check_base": True}
    look = shell("ls -A; python -m pytest -q tests 2>&1 | tail -1; rm -r .pytest_cache; ./run.sh")
    edit = shell("chmod +x run.sh; echo '# a' >> run.sh; echo n > notes.txt; printf '\\xff' > bin")
    agent = Scripted([look, MEND, edit, SUBMIT])
    score, result = await tried(agent, options)
    assert score == Score(reward=1.0, success=True)
    assert "The {total} leaves out the first price." in agent.messages[0].content
    shown = agent.messages[2].content
    assert shown.split()[:5] == [".gitattributes", "calc", "pyproject.toml", "run.sh", "tests"]
    assert "1 passed" in shown
    assert result["FAIL_TO_PASS"] == {SOME: True, BOTH: True, ONE: True}
    assert result["PASS_TO_PASS"] == {EMPTY: True}
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    git(clone, "checkout", "-q", "HEAD~1")
    (tmp_path / "patch").write_text(result["git_patch"])
    git(clone, "apply", str(tmp_path / "patch"))
    assert (clone / "calc/__init__.py").read_text() == CALC.replace("[1:]", "")
    changed = git(clone, "status", "--porcelain")
    assert changed.split() == ["M", "calc/__init__.py", "M", "run.sh", "??", "notes.txt"]


@pytest.mark.slow
async def test_a_plain_folder_and_partial_reward(repository: Path, tmp_path: Path) -> None:
    plain = tmp_path / "repos" / "shop__calc-1"
    git(repository, "checkout", "-q", "HEAD~1")
    shutil.move(repository, plain)
    shutil.rmtree(plain / ".git")
    options = written(tmp_path, record(plain)) | {"partial": True}
    half = shell(
        "sed -i 's/\\[1:\\]/[1:] if len(prices) > 1 and prices[0] == 0 else prices/' calc/*"
    )
    half_too = shell("sed -i 's/result = 0/result = 1 if prices == [1, 2] else 0/' calc/*")
    score, result = await tried([half, half_too, SUBMIT], options)
    assert result["FAIL_TO_PASS"] == {SOME: False, BOTH: True, ONE: True}
    assert score == Score(reward=2 / 3, success=False)
    regression = shell("echo 'assert 0' >> calc/__init__.py")
    score, result = await tried([MEND, regression, SUBMIT], options)
    assert score == Score(reward=0.0, success=False)
    assert result["PASS_TO_PASS"] == {EMPTY: False}


CHEATS = {
    "tests": "for f in tests/test_calc.py tests/test_mean.py; do echo 'def test_some(): pass\n"
    "def test_mean(): pass' > $f; done",
    "conftest": "echo 'import os; print(\"PASSED x\"); os._exit(0)' > conftest.py; "
    "cp conftest.py tests; cp conftest.py sitecustomize.py",
    "exit": "echo 'import os; os._exit(0)' >> calc/__init__.py",
    "endless": "echo 'while True: pass' >> calc/__init__.py",
    "removed": "rm -rf tests pyproject.toml",
    "blocked": "rm -r tests; echo > tests",
}


@pytest.mark.parametrize("cheat", mostly_slow(CHEATS, {"conftest"}))
async def test_what_resolves_nothing_earns_nothing(
    cheat: str, repository: Path, tmp_path: Path
) -> None:
    options = written(tmp_path, record(repository)) | {"test_s": 10.0}
    score, result = await tried([shell(CHEATS[cheat]), SUBMIT], options)
    assert score == Score(reward=0.0, success=False)
    assert "conftest" not in result["git_patch"]
    assert "test_mean" not in result["git_patch"]


async def test_an_unchanged_repository_runs_no_test(repository: Path, tmp_path: Path) -> None:
    score, result = await tried(["I cannot."], written(tmp_path, record(repository)))
    assert score == Score(reward=0.0, success=False)
    assert result["FAIL_TO_PASS"] == {SOME: None, BOTH: None, ONE: None}


@pytest.mark.slow
async def test_changes_before_a_limit_count(repository: Path, tmp_path: Path) -> None:
    agent = Scripted([MEND, LimitError(StopReason.MAX_TOKENS, "full")])
    score, _ = await tried(agent, written(tmp_path, record(repository)))
    assert score.success


@pytest.mark.extended
async def test_a_command_of_the_users(repository: Path, tmp_path: Path) -> None:
    names = ["adds", "divides"]
    script = "import calc; print('PASSED adds' if calc.total([1, 2]) == 3 else 'FAILED adds - no')"
    options = written(
        tmp_path, record(repository, test_patch="", FAIL_TO_PASS=["adds"], PASS_TO_PASS=[])
    )
    options |= {"test": ["python", "-c", script], "check_base": True}
    score, result = await tried([MEND, SUBMIT], options)
    assert (score.reward, result["FAIL_TO_PASS"]) == (1.0, {"adds": True})
    printed = printed_outcomes("PASSED adds\nERROR divides\nPASSED divides")
    assert matched(printed or [], names) == {
        "adds": True,
        "divides": False,
    }


@pytest.mark.extended
async def test_tests_that_cannot_run_give_no_reward(repository: Path, tmp_path: Path) -> None:
    options = written(tmp_path, record(repository)) | {"test": ["python", "-m", "no_pytest"]}
    with pytest.raises(RewardError, match=r"jsonl:1: options.test must .* No module named"):
        await tried([MEND, SUBMIT], options)


@pytest.mark.slow
async def test_the_base_is_checked(repository: Path, tmp_path: Path) -> None:
    solved = record(repository, base_commit="HEAD")
    broken = record(repository, PASS_TO_PASS=[EMPTY, "tests/test_calc.py::test_none"])
    options = written(tmp_path, solved, broken) | {"check_base": True}
    rule = "FAIL_TO_PASS must fail at the base, got 3 of 3 that do not, such as"
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"jsonl:1: {rule} {SOME}"):
            await tried([MEND], options)
    with pytest.raises(ConfigError, match=r"jsonl:2: PASS_TO_PASS must pass at .*::test_none"):
        await tried([MEND], options, row=1)


async def test_an_instance_that_does_not_fit_its_repository(
    repository: Path, tmp_path: Path
) -> None:
    other = record(repository, base_commit="0123abc")
    patch = record(repository, test_patch=TEST_PATCH.replace("total([])", "total(())"))
    options = written(tmp_path, other, patch)
    with pytest.raises(ConfigError, match=r"jsonl:1: base_commit must be a commit of .*'0123abc'"):
        await tried([MEND], options)
    with pytest.raises(ConfigError, match=r"jsonl:2: test_patch must apply at the base.*test_calc"):
        await tried([MEND], options, row=1)


async def test_a_spoiled_base_is_no_fault_of_the_agent(repository: Path, tmp_path: Path) -> None:
    options = written(tmp_path, record(repository)) | {"test": ["sh", "-c", "kill -9 -1"]}
    with pytest.raises(SandboxError, match=r"jsonl:1: the tests at the base: ") as raised:
        await tried([MEND, SUBMIT], options)
    assert not isinstance(raised.value, SandboxSpoiledError)


@pytest.mark.slow
async def test_a_change_that_spoils_the_sandbox_earns_nothing(
    repository: Path, tmp_path: Path
) -> None:
    options = written(tmp_path, record(repository))
    handler = SweBench(**options)
    kill = shell("echo 'import os; os.kill(-1, 9)' >> calc/__init__.py")
    async with sandboxes() as boxes:
        task = new_task(file=options["instances"], row=0)
        with pytest.raises(SandboxSpoiledError) as raised:
            await attempt(handler, task, Scripted([kill, SUBMIT]), boxes)
        assert await handler.eval_exception(raised.value) == Score(reward=0.0, success=False)
    assert "os.kill" in handler.final_result()["git_patch"]


# --- outcomes ---


def test_outcomes_are_read_from_the_summary() -> None:
    output = f"""FAILED {EMPTY}
=== short test summary info ===
PASSED {EMPTY}
PASSED {SOME}
ERROR {SOME} - RuntimeError: teardown
FAILED {BOTH} - AssertionError: assert 2 == 3
XFAIL {ONE} - known
SKIPPED [1] tests/test_x.py:3: no
=== 1 failed ===
"""
    short = BOTH.partition(" ")[0]
    names = [EMPTY, SOME, BOTH, ONE, short, "tests/test_x.py::test_missing"]
    assert matched(printed_outcomes(output) or [], names) == dict(
        zip(names, [True, False, False, True, False, False], strict=True)
    )
    assert printed_outcomes("no module named pytest") is None


# --- the files ---


def test_tasks_cover_their_split(repository: Path, tmp_path: Path) -> None:
    options = written(tmp_path, *(record(repository, instance_id=f"i-{n}") for n in range(60)))
    rows = {
        split: {
            payload_of(SweBench.make_task(index=n, seed=1, split=split, options=options))["row"]
            for n in range(60)
        }
        for split in Split
    }
    assert set.union(*rows.values()) == set(range(60))
    assert sum(map(len, rows.values())) == 60


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"repo": "shop/other"}, "repo must be a folder in options.repositories, .*'shop/other'"),
        ({"repo": "../repos"}, "repo must be a folder"),
        ({"problem_statement": None}, "problem_statement must be text, got None"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS must have at least one test"),
        ({"FAIL_TO_PASS": "tests/a.py::b"}, "FAIL_TO_PASS must be a list of names of tests"),
        ({"PASS_TO_PASS": ["--pdb"]}, "PASS_TO_PASS must be a list of names of tests"),
        ({"test_patch": ...}, "must have test_patch, got FAIL_TO_PASS, "),
    ],
)
def test_an_invalid_instance_is_one_line(
    fields: dict[str, Any], error: str, repository: Path, tmp_path: Path
) -> None:
    bad = {k: v for k, v in record(repository, **fields).items() if v is not ...}
    options = written(tmp_path, record(repository), bad)
    with pytest.raises(ConfigError, match=rf"instances\.jsonl:2: {error}") as caught:
        SweBench.make_task(index=0, seed=0, split=Split.TRAIN, options=options)
    assert "\n" not in str(caught.value)


def test_folders_and_images_of_instances(repository: Path, tmp_path: Path) -> None:
    options = written(tmp_path, record(repository, image="a.tar.gz"), record(repository))
    options |= {"image_field": "image", "image": "b.toml"}
    assert list(SweBench.images(options)) == ["b.toml", "a.tar.gz"]
    first = instances(options["instances"], options["repositories"], "image")[0]
    assert folder_of(options["repositories"], first) == repository
    (tmp_path / "repos" / "shop" / "calc").mkdir(parents=True)
    assert folder_of(options["repositories"], first) == tmp_path / "repos" / "shop" / "calc"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, r"options\.repositories must be a folder"),
        ({"repositories": "r", "test": "x"}, r"options\.test must be a command, a list, got 'x'"),
        ({"repositories": "r", "python": []}, r"options\.python must be a command, a list"),
        ({"repositories": "r", "test_s": 0}, r"options\.test_s must be positive"),
        ({"image": "no path"}, "options of the sandbox: image must be"),
        ({"repositories": "r", "limits": {"memory": 1}}, "options of the sandbox: .*memory"),
        ({"repositories": "r", "tools": ["browser"]}, "tools must be some of"),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        SweBench(instances="i.jsonl", **options)
