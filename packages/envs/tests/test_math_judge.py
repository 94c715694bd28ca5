"""The judge of mathematics: its verdicts, and who is to blame where there is none."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollweave.envs.handlers import answers, math_judge
from rollweave.envs.handlers.answers import check_expected, equivalent, judged
from rollweave.envs.jsonl import Jsonl
from rollweave.schema.errors import ConfigError, RewardError
from rollweave_envs.math_tool import MathTool
from tests.envs.handlers.answer_pairs import DIFFERENT, EQUAL, WRONG, pairs

FAKE = """
import json, os, signal, sys
print('"ready"', flush=True)
deaths = sys.argv[1]
for line in sys.stdin:
    given, expected = json.loads(line)
    if expected == "unreadable":
        print('"reading it takes more than 3 s"', flush=True)
        continue
    if expected == "deadly":
        os._exit(3)
    print('""', flush=True)
    with open(deaths, "a") as file:
        print(given, file=file)
    if given == "kills" or (given == "kills once" and open(deaths).read().count("once") == 1):
        os._exit(3)
    if given == "burns" or expected == "burning":
        os.kill(os.getpid(), signal.SIGXCPU)
    print(json.dumps([given == expected, "too long" if "late" in (given, expected) else ""]),
          flush=True)
"""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> math_judge._Judge:
    command = (sys.executable, "-c", FAKE, str(tmp_path / "asked"))
    monkeypatch.setattr(math_judge, "COMMAND", command)
    return math_judge._Judge()


def close(judge: math_judge._Judge) -> None:
    assert judge._process is not None
    judge._process.close()


def test_the_table_of_pairs() -> None:
    table = [(pair, True) for pair in pairs(EQUAL)] + [(pair, False) for pair in pairs(DIFFERENT)]
    assert len(table) > 120
    wrong = [
        (expected, given)
        for (expected, given), equal in table
        if equivalent(given, expected).equal is not equal
    ]
    assert wrong == []
    for expected, given, opinion in pairs(WRONG):
        assert equivalent(given, expected).equal is (opinion == "equal"), (expected, given)


async def test_an_event_loop_does_not_wait_for_the_judge() -> None:
    verdicts = await asyncio.gather(
        *(judged(rf"\frac{{{number}\pi}}{{7}}", r"\frac{3\pi}{7}") for number in range(6))
    )
    assert [verdict.equal for verdict in verdicts] == [False, False, False, True, False, False]


@pytest.mark.extended
def test_limits_of_processor_time() -> None:
    program = (
        "from rollweave.envs.handlers import math_worker as worker\n"
        "worker.CPU_S, worker.GRACE_S = 1, 1\n"
        "worker.main()"
    )
    asked = [["1", "x+1"], ["x+1", "x+1"], [r"\sum_{n=1}^{10^6} \frac{1}{n}", "5"], ["5", "5"]]
    killing = ["2^{10^9}", "5"]  # one step of the interpreter
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="".join(json.dumps(pair) + "\n" for pair in [*asked, killing]).encode(),
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    late = "comparing the answer takes more than 1 s"
    known = ["ready", "", [False, ""], "", [True, ""], "", [False, late], "", [True, ""], ""]
    # The system may end the computation, or the interpreter interrupt it before.
    assert lines in (known, [*known, [False, late]])


def test_an_answer_that_cannot_be_compared_is_wrong_with_a_reason(judge: math_judge._Judge) -> None:
    assert judge.verdict("3", "3") == math_judge.Verdict(equal=True)
    assert judge.verdict("late", "3").reason == "too long"
    assert judge.verdict("burns", "3").reason == math_judge.TOO_LONG
    assert judge.verdict("kills", "3").reason == "the answer ended its judge twice"
    assert judge.verdict("kills once", "kills once") == math_judge.Verdict(equal=True)
    close(judge)


@pytest.mark.parametrize("expected", ["unreadable", "deadly", "late", "burning"])
def test_what_the_answer_does_not_cause_is_no_verdict(
    judge: math_judge._Judge, expected: str
) -> None:
    problem = rf"the expected answer '{expected}' cannot be judged: "
    with pytest.raises(RewardError, match=problem):
        judge.verdict("3", expected)
    assert judge.verdict("3", "3").equal
    close(judge)


def test_a_judge_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_judge, "COMMAND", (sys.executable, "-c", "raise SystemExit('no!')"))
    with pytest.raises(
        RewardError, match=r"mathematics cannot be judged: .*\(exit status 1\): no!"
    ):
        math_judge._Judge().verdict("3", "3")
    monkeypatch.setattr(math_judge, "COMMAND", ("/nowhere/python",))
    with pytest.raises(RewardError, match="no process for the judge of mathematics"):
        math_judge._Judge().verdict("3", "3")


def test_a_silent_judge_is_ended(judge: math_judge._Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; print('1', flush=True); sys.stdin.read()"
    monkeypatch.setattr(math_judge, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setattr(math_judge, "ANSWER_S", 0.05)
    with pytest.raises(RewardError, match=r"the judge of mathematics was silent for 0\.05 s"):
        judge.verdict("3", "3")
    assert judge._process is not None
    assert not judge._process.alive


def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_judge, "WAITING", 1)
    monkeypatch.setattr(math_judge, "JUDGES", 0)
    pool = math_judge._Pool()
    pool.submit("3", "3")
    with pytest.raises(RewardError, match="more than 1 answers wait for the judges"):
        pool.submit("3", "3")


async def test_no_more_judges_start_than_are_allowed_and_none_is_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(math_judge, "JUDGES", 2)
    monkeypatch.setattr(math_judge, "WAIT_S", 0.0)
    monkeypatch.setattr(math_judge._Pool, "_work", lambda pool: None)
    monkeypatch.setattr(math_judge._shared, "pool", math_judge._Pool())
    for judges in (1, 2, 2):
        with pytest.raises(RewardError, match=math_judge._NO_VERDICT):
            await math_judge.judged("3", "3")
        assert math_judge._shared.pool._judges == judges


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_judges_of_its_own() -> None:
    assert equivalent(r"\frac{\pi}{2}", r"\pi/2").equal
    before, read, write = math_judge._shared.pool, *os.pipe()
    assert threading.active_count() > 1
    if not (child := os.fork()):
        os.write(write, b"new" if math_judge._shared.pool is not before else b"old")
        os._exit(0)
    assert os.read(read, 3) == b"new"
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


def test_a_record_that_nothing_can_judge_is_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(answers, "missing_from", lambda extra: ["math_verify"])
    reward = "rollweave.envs.handlers.answers:boxed_reward"
    for kind, record in (
        (Jsonl, {"prompt": "?", "answer": "[0, 1)"}),
        (Jsonl, {"prompt": "?", "reward_model": {"ground_truth": "[0, 1)"}}),
        (MathTool, {"question": "?", "answer": "[0, 1)"}),
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        lines = [{**record, "answer": "5"}, record]
        path.write_text("\n".join(json.dumps(line) for line in lines))
        options = {"path": str(path), **({"reward": reward} if kind is Jsonl else {})}
        with pytest.raises(
            ConfigError, match=r"jsonl:2: .*only math-verify can judge '\[0, 1\)': pip"
        ):
            kind(**options)


def test_without_the_extra_only_text_and_plain_numbers_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "missing_from", lambda extra: ["math_verify"])
    monkeypatch.setattr(math_judge, "COMMAND", ("/nowhere/python",))
    for expected in ("1,250", "3/4", "25%", "no solution", "B", r"\text{Paris}"):
        check_expected(expected)
        assert equivalent(expected, expected).equal
        assert not equivalent(r"2\sqrt{2}", expected).equal
    assert not equivalent("0.333333", "1/3").equal
    for expected in ("[0,1)", r"\frac{\pi}{2}", "x^2", "1, 234", "(1, 2)"):
        with pytest.raises(
            ValueError, match=r"only math-verify can judge .*pip install .*\[math\]"
        ):
            check_expected(expected)
        with pytest.raises(
            RewardError, match=r"only math-verify can judge .*pip install .*\[math\]"
        ):
            equivalent("3", expected)
