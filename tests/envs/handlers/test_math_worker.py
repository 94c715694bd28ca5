"""The judge's process limits each call, and writes what it found in two lines."""

import resource
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from rollweave.envs.handlers import math_worker as worker

USED = SimpleNamespace(ru_utime=1.25, ru_stime=0.5)
SOFT = int(1.75 + worker.CPU_S + worker.GRACE_S) + 1


@pytest.mark.parametrize(("hard", "soft"), [(-1, SOFT), (SOFT + 9, SOFT), (2, 2)])
def test_a_call_has_a_limit_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int
) -> None:
    limit, timer = Mock(), Mock()
    monkeypatch.setattr(resource, "getrusage", {resource.RUSAGE_SELF: USED}.__getitem__)
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_CPU: (1, hard)}.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limit)
    monkeypatch.setattr(signal, "setitimer", timer)
    for error, result in (
        (None, (3, "")),
        (worker._LimitError, (None, f"takes more than {worker.CPU_S:g} s")),
        (MemoryError, (None, "exceeds its limits (MemoryError)")),
    ):
        assert worker._limited(Mock(return_value=3, side_effect=error)) == result
        limit.assert_called_with(resource.RLIMIT_CPU, (soft, hard))
        assert timer.call_args_list[-2].args[:2] == (signal.ITIMER_VIRTUAL, worker.CPU_S)
        timer.assert_called_with(signal.ITIMER_VIRTUAL, 0)


def test_an_answer_is_two_lines_and_one_if_the_expected_one_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, lines = list[tuple[object, str]](), list[object]()
    monkeypatch.setattr(worker, "_write", lines.append)
    monkeypatch.setattr(worker, "_limited", lambda call: results.pop(0))
    judge = worker._Judge.__new__(worker._Judge)
    for found, written in (
        ([(9, ""), (True, "")], ["", [True, ""]]),
        ([(9, ""), (False, "")], ["", [False, ""]]),
        ([(9, ""), (None, "fails")], ["", [False, "comparing the answer fails"]]),
        ([(None, "fails")], ["reading it fails"]),
    ):
        results[:], lines[:] = found, []
        judge.answer("1", "2")
        assert lines == written
