"""Fixing bugs: the tasks, and attempts by scripted agents in real sandboxes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Job, LimitError
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, SandboxLostError, SandboxSpoiledError
from rollweave.schema.work import StopReason, Task
from rollweave_envs.probes import Notes, names_in, passed, run_probes
from rollweave_envs.swe import ROOT, SPEC, Swe
from rollweave_envs.swe_bugs import (
    broken,
    bugs,
    bugs_of,
    files_of,
    module_of,
    repos,
    suite_sources,
    visible_files,
)
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes
from tests.support.variants import mostly_slow

BUG = next(
    bug
    for bug in bugs().values()
    if bug.repo == "ledger" and bug.kind == "off by one" and len(bug.fails) == 3
)
TASK = new_task(bug=BUG.id)
EDIT = BUG.edits[0]
EDITOR = "str_replace_editor"

MEND = calls(
    (
        EDITOR,
        {"command": "str_replace", "path": EDIT.path, "old_str": EDIT.new, "new_str": EDIT.old},
    )
)
SUBMIT = calls(("submit", {}))


def shell(command: str) -> Message:
    return calls(("bash", {"command": command}))


def names_of_tests(repo: str) -> list[str]:
    """Return `module.Class.method` of all tests of a repository."""
    return [
        name for module, source in suite_sources(repo).items() for name in names_in(module, source)
    ]


# --- the tasks ---


def test_there_are_enough_of_many_kinds_in_every_split() -> None:
    assert len(bugs()) >= 100
    assert len({bug.kind for bug in bugs().values()}) >= 15
    assert len(bugs_of(Split.TRAIN)) >= 60
    for split in (Split.VALIDATION, Split.TEST):
        assert len(bugs_of(split)) >= 8
        assert len({bug.repo for bug in bugs_of(split)}) >= 4


JUDGE = """
import json, os, sys, tempfile, unittest
for name, files in json.load(sys.stdin).items():
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    sys.path.insert(0, os.getcwd())
    with open(os.devnull, "w") as null:
        result = unittest.TextTestRunner(null).run(unittest.defaultTestLoader.discover("."))
    broken = sorted(case.id().removeprefix("tests.") for case, _ in [*result.failures, *result.errors])
    print(json.dumps([name, result.testsRun, broken]))
    sys.stdout.flush()
    os._exit(0)
"""
"""Runs the tests of several versions of a repository with plain unittest."""


@pytest.mark.parametrize(
    "repo",
    mostly_slow(repos(), {"ledger"}),
)
def test_every_bug_fails_exactly_its_listed_tests(repo: str, tmp_path: Path) -> None:
    """Covers all splits, with plain unittest."""
    of_repo = {name: bug for name, bug in bugs().items() if bug.repo == repo}
    versions = {
        "right": dict(files_of(repo)),
        **{name: broken(bug) for name, bug in of_repo.items()},
    }
    versions |= {f"{name} shown": visible_files(bug) for name, bug in of_repo.items()}
    command = [sys.executable, "-B", "-W", "ignore", "-c", JUDGE, str(tmp_path)]
    done = subprocess.run(
        command, input=json.dumps(versions), capture_output=True, text=True, check=True, timeout=100
    )
    outcomes = {
        name: (ran, failed) for name, ran, failed in map(json.loads, done.stdout.splitlines())
    }
    count = len(names_of_tests(repo))
    assert outcomes.pop("right") == (count, [])
    expected = {name: (count, sorted(bug.fails)) for name, bug in of_repo.items()}
    expected |= {f"{name} shown": (count - len(bug.fails), []) for name, bug in of_repo.items()}
    assert outcomes == expected
    assert all(bug.fails for bug in of_repo.values())


@pytest.mark.extended
@pytest.mark.variants
@pytest.mark.parametrize("repo", repos())
async def test_probes_agree_with_unittest(repo: str) -> None:
    async with sandboxes() as boxes:
        box = await boxes.start(SPEC)

        async def seen(files: Mapping[str, str]) -> Notes:
            for path, text in files.items():
                await box.write(f"{ROOT}/{path}", text.encode())
            return await run_probes(box, SPEC, suite_sources(repo), root=ROOT)

        right = await seen(files_of(repo))
        assert [name for name, ok in passed(right, right).items() if not ok] == []
        for bug in [bug for bug in bugs().values() if bug.repo == repo][::7]:
            outcome = passed(await seen(broken(bug)), right)
            assert tuple(test for test, ok in outcome.items() if not ok) == bug.fails


@pytest.mark.extended
def test_visible_files_have_the_bug_but_no_failing_tests() -> None:
    for bug in bugs().values():
        files = visible_files(bug)
        tests = {path: text for path, text in files.items() if path.startswith("tests/")}
        left = {name for path, text in tests.items() for name in names_in(module_of(path), text)}
        assert left == set(names_of_tests(bug.repo)) - set(bug.fails)
        assert all(edit.new in files[edit.path] for edit in bug.edits)


def test_tasks_are_drawn_by_seed_and_cover_their_split() -> None:
    for split in Split:
        count = len(bugs_of(split))
        drawn = [
            Swe.make_task(index=index, seed=5, split=split, options={})
            for index in range(2 * count)
        ]
        again = [
            Swe.make_task(index=index, seed=5, split=split, options={})
            for index in range(2 * count)
        ]
        assert drawn == again
        for part in (drawn[:count], drawn[count:]):
            assert {payload_of(task)["bug"] for task in part} == {bug.id for bug in bugs_of(split)}
    names = [{bug.id for bug in bugs_of(split)} for split in Split]
    assert sum(map(len, names)) == len(set.union(*names)) == len(bugs())


# --- attempts ---


async def tried(
    agent: Scripted | Sequence[Any], task: Task = TASK, *, options: dict[str, Any] | None = None
) -> tuple[Score, dict[str, Any]]:
    handler = Swe(**(options or {}))
    async with sandboxes() as boxes:
        score = await attempt(
            handler, task, agent if isinstance(agent, Scripted) else Scripted(agent), boxes
        )
    return score, handler.final_result()


async def test_a_fixed_bug_is_a_success() -> None:
    agent = Scripted([shell("python3 -m unittest 2>&1 | tail -1; ls"), MEND, SUBMIT])
    score, result = await tried(agent)
    assert score == Score(reward=1.0, success=True)
    assert agent.messages[0].role == "user"
    assert BUG.issue in agent.messages[0].content
    assert agent.messages[2].content == "OK\nREADME.md  ledger  tests"
    assert set(result["FAIL_TO_PASS"]) == set(BUG.fails)
    assert all(result["FAIL_TO_PASS"].values())
    assert all(result["PASS_TO_PASS"].values())
    assert len(result["PASS_TO_PASS"]) + len(result["FAIL_TO_PASS"]) == len(
        names_of_tests("ledger")
    )
    assert f"--- a/{EDIT.path}\n+++ b/{EDIT.path}\n" in result["git_patch"]
    assert EDIT.old in result["git_patch"]


@pytest.mark.extended
@pytest.mark.parametrize("bug", ["flow", "routes", "shelf", "textkit"])
async def test_judges_the_other_repositories(bug: str) -> None:
    entry_ = next(entry for entry in bugs().values() if entry.repo == bug and len(entry.edits) == 1)
    edit = entry_.edits[0]
    move = calls(
        (
            EDITOR,
            {"command": "str_replace", "path": edit.path, "old_str": edit.new, "new_str": edit.old},
        )
    )
    score, _ = await tried([move, "Done."], new_task(bug=entry_.id))
    assert score.success


@pytest.mark.extended
async def test_an_unchanged_project_is_no_success() -> None:
    for replies in (["I cannot."], [SUBMIT], [shell("touch x; python3 -m unittest"), SUBMIT]):
        score, result = await tried(replies)
        assert score == Score(reward=0.0, success=False)
        assert not any(result["FAIL_TO_PASS"].values())


async def test_a_regression_is_no_success() -> None:
    score, result = await tried(
        [MEND, shell("sed -i 's/def show/def display/' ledger/money.py"), SUBMIT],
        options={"partial": True},
    )
    assert score == Score(reward=0.0, success=False)
    assert not all(result["PASS_TO_PASS"].values())


@pytest.mark.extended
async def test_partial_reward() -> None:
    # every share is right but for amounts that do not divide by the number of shares
    half = shell(f"sed -i 's/(1 if number <= rest else 0)/0/' {EDIT.path}")
    assert (await tried([half, SUBMIT]))[0] == Score(reward=0.0, success=False)
    score, result = await tried([half, SUBMIT], options={"partial": True})
    assert result["FAIL_TO_PASS"] == {name: name.endswith("test_even") for name in BUG.fails}
    assert score == Score(reward=1 / 3, success=False)


CHEATS = {
    "tests": "rm -r tests; mkdir tests; echo 'pass' > tests/test_money.py",
    "exit": "sed -i '1i import sys; sys.exit(0)' ledger/__init__.py",
    "exit at once": "sed -i '1i import os; os._exit(0)' ledger/money.py",
    "unittest": "echo 'import unittest; unittest.TestCase.assertEqual = lambda *a: None' >> "
    "ledger/money.py",
    "site": "for n in sitecustomize usercustomize conftest unittest json; do echo 'import os; "
    "os._exit(0)' > $n.py; done",
    "output": "echo 'print(\"Ran 45 tests\\n\\nOK\"); import os; os._exit(0)' >> ledger/money.py",
    "result": 'echo \'{}\' > result.json; echo \'open("/tmp/result.json", "w").write("1.0")\' >> '
    "ledger/money.py",
    "equality": (
        "printf 'class E(int):\\n    def __eq__(s, o): return True\\n    def __iter__(s): return "
        "iter([s])\\n"
        "split = lambda c, p: E()\\n' >> ledger/money.py"
    ),
    "link": "rm ledger/money.py; ln -s /etc/passwd ledger/money.py",
    "outside": "mkdir -p ~/.local; echo 'import os; os._exit(0)' > ~/sitecustomize.py; alias "
    "python3=true",
}


@pytest.mark.variants
@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_earns_nothing(cheat: str) -> None:
    score, result = await tried([shell(CHEATS[cheat]), SUBMIT])
    assert score == Score(reward=0.0, success=False)
    assert "tests/" not in result["git_patch"]


async def test_too_much_is_refused() -> None:
    score, result = await tried(
        [MEND, shell("head -c 400000 /dev/zero | tr '\\0' x > big.txt"), SUBMIT]
    )
    assert score == Score(reward=0.0, success=False)
    assert result["refused"].startswith("at most")
    assert result["git_patch"] == ""


async def test_other_files_do_no_harm() -> None:
    extra = (
        "echo x > notes.txt; printf '\\xff' > bin; ln -s / root; mkfifo pipe; mkdir .git; echo y "
        "> .git/config"
    )
    score, result = await tried([MEND, shell(extra), SUBMIT])
    assert score.success
    assert "+++ b/notes.txt" in result["git_patch"]
    assert "config" not in result["git_patch"]


@pytest.mark.extended
async def test_changes_before_a_limit_count() -> None:
    score, _ = await tried(Scripted([MEND], turns=1))
    assert score.success
    score, _ = await tried(Scripted([MEND, LimitError(StopReason.MAX_TOKENS, "full")]))
    assert score.success


async def test_calls_in_text() -> None:
    mend = (
        f"import pathlib; p = pathlib.Path({EDIT.path!r}); "
        f"p.write_text(p.read_text().replace({EDIT.new!r}, {EDIT.old!r}))"
    )
    agent = Scripted(
        [f"I mend it.\n```bash\npython3 -c {shlex.quote(mend)}\n```", "```submit\n```"]
    )
    score, _ = await tried(agent, options={"calls": "text"})
    assert score.success
    assert "```TOOL\nTEXT\n```" in agent.messages[0].content
    assert agent.messages[2] == Message(role="user", content="(no output)")


async def test_a_lost_sandbox_gives_no_reward() -> None:
    async with sandboxes() as boxes:
        handler = Swe()
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))

        def speak(messages: Sequence[Message]) -> Message:
            os.kill(handler._sandbox.pid, signal.SIGKILL)  # type: ignore[union-attr]
            return shell("ls")

        with pytest.raises(SandboxLostError) as caught:
            await handler.run(Scripted(speak))
        assert await handler.run_exception(caught.value) is None
        await handler.close()


async def test_an_overflowing_sandbox_is_the_agents_failure() -> None:
    async with sandboxes() as boxes:
        handler = Swe()
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
        hog = shell(
            'for i in 1 2 3 4; do python3 -c \'x = b"x" * (600 << 20); import time; '
            "time.sleep(60)' & done; wait"
        )
        with pytest.raises(SandboxLostError, match="memory") as caught:
            await handler.run(Scripted([hog]))
        assert await handler.run_exception(caught.value) == Score(reward=0.0, success=False)
        await handler.close()


@pytest.mark.variants
@pytest.mark.parametrize(
    "command",
    ["chmod 000 .", "rm -rf $PWD", "cd / && rm -rf $OLDPWD && echo > $OLDPWD", "chmod 000 /"],
)
async def test_a_folder_that_the_agent_made_unusable_is_its_failure(command: str) -> None:
    async with sandboxes() as boxes:
        handler = Swe()
        agent = Scripted([calls(("bash", {"command": command})), calls(("submit", {}))])
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
        with pytest.raises(SandboxSpoiledError, match="what the agent left prevents") as raised:
            await handler.run(agent)
        await handler.close()
        assert await handler.run_exception(raised.value) == Score(reward=0.0, success=False)


async def test_kill_and_close_release_the_sandbox() -> None:
    async with sandboxes() as boxes:
        handler = Swe()
        handler.kill()
        assert handler.final_result() == {}
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
        box = handler._sandbox
        assert box is not None
        handler.kill()
        await handler.close()
        await handler.close()
        assert box.ended
        with pytest.raises(SandboxLostError):
            await box.exec(["true"])


async def test_refuses_invalid_options() -> None:
    with pytest.raises(ConfigError, match="calls must be native or text"):
        Swe(calls="json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tools must be some of"):
        Swe(tools=["browser"])
    with pytest.raises(ConfigError, match="more than one text"):
        Swe(tools=[EDITOR], calls="text")
    with pytest.raises(ConfigError, match=r"options\.timeout_s must be positive and finite, got 0"):
        Swe(timeout_s=0)
    with pytest.raises(
        ConfigError,
        match=r"options\.output_bytes must be positive and finite, got -1",
    ):
        Swe(output_bytes=-1)
    async with sandboxes() as boxes:
        with pytest.raises(
            ValueError,
            match=r"task\.payload\.bug must be the id of a bug, got 'none'",
        ):
            await Swe().init(Job(task=new_task(bug="none"), seed=0, sandboxes=boxes))
