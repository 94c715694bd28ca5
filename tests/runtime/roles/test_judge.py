"""The engine of a judge answers late, or nothing at all."""

import os
import socket
from collections.abc import Iterator

import pytest

from rollweave.runtime.roles.judge import JudgeEngine


@pytest.fixture
def silent() -> Iterator[JudgeEngine]:
    """A judge whose engine accepts requests, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        judge = JudgeEngine.__new__(JudgeEngine)
        judge._token, judge._timeout_s, judge._answered = "token", 0.1, 0.0
        judge._address = f"127.0.0.1:{server.getsockname()[1]}"
        yield judge


def test_a_late_answer_is_a_status_while_the_engine_answers_others(silent: JudgeEngine) -> None:
    silent._answered = float("inf")
    status, body = silent.complete(b"{}")
    assert status == 504
    assert b"the engine gave no answer within 0.1 s" in body


def test_a_process_whose_engine_answers_nothing_ends(
    silent: JudgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    silent.complete(b"{}")
    assert ended == [1]
