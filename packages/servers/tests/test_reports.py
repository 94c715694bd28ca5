"""Deltas are sent together, in time, and never behind their result; the line about an
update in the log of an engine is read as it was written.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.servers.benchmarks.phases import read_updates
from rollweave.schema.serving import Progress, TokenDelta, VersionSpan
from rollweave_servers.reports import PHASES, ProgressReports, UpdateTimes


def delta(id: str, start: int, *tokens: int, version: int = 0) -> TokenDelta:
    end = start + len(tokens)
    return TokenDelta(
        id=id,
        start=start,
        tokens=tokens,
        logprobs=tuple(-token / 10 for token in tokens),
        versions=(VersionSpan(start=start, end=end, version=version),),
        generate_s=float(end),
    )


async def test_the_deltas_of_a_request_are_joined() -> None:
    sent = list[Progress]()
    reports = ProgressReports(sent.append)
    first, second = reports.of("a", 100.0), reports.of("b", 100.0)
    for each in (delta("a", 3, 1, 2), delta("a", 5, 3), delta("a", 6, 4, version=2)):
        first(each)
    second(delta("b", 0, 9))
    assert not sent
    reports.flush()
    (message,) = sent
    joined = TokenDelta(
        id="a",
        start=3,
        tokens=(1, 2, 3, 4),
        logprobs=(-0.1, -0.2, -0.3, -0.4),
        versions=(
            VersionSpan(start=3, end=6, version=0),
            VersionSpan(start=6, end=7, version=2),
        ),
        generate_s=7.0,
    )
    assert message.pieces == (joined, delta("b", 0, 9))
    reports.flush()
    assert len(sent) == 1


async def test_the_shortest_time_of_a_request_decides() -> None:
    sent: asyncio.Queue[Progress] = asyncio.Queue()
    reports = ProgressReports(sent.put_nowait)
    reports.of("slow", 1000.0)(delta("slow", 0, 1))
    reports.of("quick", 0.001)(delta("quick", 0, 2))
    assert [each.id for each in (await sent.get()).pieces] == ["slow", "quick"]


async def test_one_timer_waits_at_a_time() -> None:
    """That of the request which has the least time left."""
    timers = list[Any]()

    def call_at(at: float, send: object) -> Any:
        timers.append(SimpleNamespace(when=lambda: at, cancel=lambda: timers.remove(timer)))
        timer = timers[-1]
        return timer

    sent = list[Progress]()
    reports = ProgressReports(sent.append)
    now = 0.0
    clock = SimpleNamespace(time=lambda: now, call_at=call_at)
    reports._loop = clock  # type: ignore[assignment]
    for report_s, at in ((5.0, 5.0), (7.0, 5.0), (3.0, 3.0)):
        reports.of("a", report_s)(delta("a", 0, 1))
        assert [timer.when() for timer in timers] == [at]
    now = 2.0
    reports.of("a", 1.0)(delta("a", 1, 1))
    assert [timer.when() for timer in timers] == [3.0]
    reports.flush()
    assert (timers, len(sent)) == ([], 1)


async def test_nothing_is_sent_behind_a_result() -> None:
    sent = list[Progress]()
    reports = ProgressReports(sent.append)
    reports.of("a", 100.0)(delta("a", 0, 1))
    reports.of("b", 100.0)(delta("b", 0, 1))
    reports.drop("a")
    reports.drop("unknown")
    reports.flush()
    assert [each.id for each in sent[0].pieces] == ["b"]


def test_an_update_is_read_from_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = UpdateTimes()
    with pytest.raises(ValueError, match="refused"), times.measured("swap"):
        raise ValueError("refused")
    times.seconds["pause"] = 1.5
    times.report(7)
    log = tmp_path / "e0.log"
    log.write_text(f"INFO: started\n{capsys.readouterr().err}weights v8 were lost\n")
    (update,) = read_updates(log)
    assert tuple(update) == PHASES
    assert update["pause"] == 1.5
    assert 0 <= update["swap"] < 1
    assert update["bring"] == 0.0
