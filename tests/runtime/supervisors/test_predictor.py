"""The supervisor of the predictor, in a process and in a thread: it answers, never
blocks, and survives any misbehavior of its child.
"""

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollweave.core.policy.predict import MIN_PAIRS, PRIOR_TOKENS, ProgressivePredictor
from rollweave.runtime.supervisors import predictor
from rollweave.runtime.supervisors import predictor as live
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import FitPredictor, Harvest, Predict, Warn
from rollweave.schema.events import PredictionReady
from rollweave.schema.training import (
    LengthContext,
    PredictedLength,
    PredictorReport,
    PredictorSpec,
    PredictorStats,
)
from rollweave.train.lengths import build_regressor
from tests.support.revealed_lengths import trajectories

KINDS = ("thread", "process")
CONTEXT = LengthContext(
    domain="a",
    prompt_tokens=10,
    turn=1,
    output_tokens=5,
    last_output_tokens=5,
    observation_tokens=1,
    tool_s=0.1,
    siblings=0,
    sibling_mean=0.0,
    sibling_longest=0,
)


def ask(number: int, context: LengthContext = CONTEXT) -> Predict:
    return Predict(
        trajectory_id=TrajectoryId(f"t{number}"), attempt=0, turn=context.turn, context=context
    )


def over(number: int, tokens: int | None) -> Harvest:
    return Harvest(trajectory_id=TrajectoryId(f"t{number}"), attempt=0, output_tokens=tokens)


WAIT_S = 240.0
"""Seconds after which a test gives up; a busy machine starts processes slowly."""


class Bench:
    """A supervisor, the events and warnings that it sends, and the links that it
    opened.
    """

    def __init__(
        self, open_link: live.OpenPredictor, tasks: Tasks, *, silent_s: float = live.SILENT_S
    ) -> None:
        self.posted: asyncio.Queue[PredictionReady] = asyncio.Queue()
        self.warnings: asyncio.Queue[Warn] = asyncio.Queue()
        self.links: list[live.PredictorLink] = []

        def opened(on_report: Callable[[PredictorReport], None]) -> live.PredictorLink:
            self.links.append(open_link(on_report))
            return self.links[-1]

        self.supervisor = predictor.PredictorSupervisor(
            opened,
            tasks=tasks,
            post=self.posted.put_nowait,
            warn=self.warnings.put_nowait,
            silent_s=silent_s,
        )
        self.supervisor.start()

    def ask(self, number: int, context: LengthContext = CONTEXT) -> None:
        command = ask(number, context)
        self.supervisor.predict(command, command.context)

    async def answer(self) -> PredictionReady:
        async with asyncio.timeout(WAIT_S):
            return await self.posted.get()

    async def warning(self) -> str:
        async with asyncio.timeout(WAIT_S):
            warned = await self.warnings.get()
        assert warned.component == "predictor"
        return warned.message

    @property
    def pid(self) -> int:
        link = self.links[-1]
        assert isinstance(link, predictor.ProcessPredictor)
        return link.pid


Open = Callable[..., Bench]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Open]:
    benches: list[Bench] = []

    def start(kind: str, regressor: str = "ridge", *, silent_s: float = live.SILENT_S) -> Bench:
        spec, log = PredictorSpec(regressor=regressor), tmp_path / "predictor.log"
        own = {"module": "tests.runtime.odd_predictor"} if kind == "odd" else {}
        link = (
            functools.partial(predictor.ThreadPredictor, spec)
            if kind == "thread"
            else functools.partial(predictor.ProcessPredictor, spec, log=log, **own)
        )
        benches.append(Bench(link, tasks, silent_s=silent_s))
        return benches[-1]

    async with Tasks() as tasks:
        yield start
        for each in benches:
            await each.supervisor.close()
        tasks.cancel_all()


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
async def test_answers_as_the_predictor_itself(start: Open, kind: str) -> None:
    """This holds before the first fit and after it."""
    reference, bench = ProgressivePredictor(lambda: build_regressor("ridge")), start(kind)
    for number, one in enumerate(trajectories(30, seed=1)):
        for context in one.contexts:
            expected = reference.predict((f"t{number}", 0), context)
            bench.ask(number, context)
            answer = await bench.answer()
            assert answer.trajectory_id == f"t{number}"
            assert answer.attempt == 0
            assert answer.turn == context.turn
            assert answer.remaining_tokens == expected
        total = one.tokens if number % 5 else None
        reference.observe((f"t{number}", 0), total)
        bench.supervisor.harvest(over(number, total))
        if number in (14, 25):
            reference.fit()
            bench.supervisor.fit(FitPredictor(step=number))
    stats = bench.supervisor.stats()
    assert reference.fits == 2
    assert stats.fits == 2
    assert stats.failed == 0
    assert stats.lost == 0
    assert stats.dropped == 0
    assert stats.restarts == 0
    assert stats.requests == stats.answered == 180
    assert stats.fit_s > 0
    assert stats.mean_ms > 0
    assert stats.p99_ms > 0


async def test_asks_with_the_context_that_the_world_completed(start: Open) -> None:
    """The world may add siblings that only it knows of."""
    bench = start("thread", "history")
    completed = LengthContext(
        **{**{name: getattr(CONTEXT, name) for name in CONTEXT.__struct_fields__}, **SIBLINGS}
    )
    bench.supervisor.predict(ask(0), completed)
    assert (await bench.answer()).remaining_tokens == 85.0


SIBLINGS = {"siblings": 2, "sibling_mean": 90.0, "sibling_longest": 100}


async def test_statistics_continue_over_a_restart(start: Open) -> None:
    bench = start("process")
    for number in range(MIN_PAIRS):
        bench.ask(number)
        bench.supervisor.harvest(over(number, 105))
    bench.supervisor.fit(FitPredictor(step=1))
    bench.ask(0)
    for _ in range(MIN_PAIRS + 1):
        await bench.answer()
    before = bench.supervisor.stats()
    assert (before.fits, before.pairs) == (1, MIN_PAIRS)
    os.kill(bench.pid, signal.SIGKILL)
    await bench.warning()
    bench.ask(1)
    await bench.answer()
    after = bench.supervisor.stats()
    expected = (1, before.fit_s, MIN_PAIRS + 2, 0)
    assert (after.fits, after.fit_s, after.answered, after.pairs) == expected


async def test_a_killed_predictor_is_restarted_without_observations(start: Open) -> None:
    bench = start("process")
    bench.ask(0)
    await bench.answer()
    bench.supervisor.harvest(over(0, 105))
    bench.ask(1)
    assert (await bench.answer()).remaining_tokens == 100.0  # the domain's mean
    assert bench.supervisor.stats().pairs == 1
    os.kill(bench.pid, signal.SIGKILL)
    bench.ask(2)  # lost, or answered by the next process: nothing waits for it
    message = await bench.warning()
    assert "SIGKILL" in message
    assert "restarted (1 of 3 times), without its observations" in message
    bench.ask(3)
    assert (await bench.answer()).remaining_tokens == PRIOR_TOKENS
    stats = bench.supervisor.stats()
    assert (stats.restarts, stats.pairs) == (1, 0)
    assert stats.requests == stats.answered + stats.lost == 4


async def test_a_hung_predictor_blocks_nothing_and_continues(start: Open) -> None:
    bench = start("process")
    bench.ask(0)
    await bench.answer()
    os.kill(bench.pid, signal.SIGSTOP)
    beyond = 10
    for number in range(live.MAX_REQUESTS + beyond):
        bench.ask(number)
    for number in range(live.MAX_MESSAGES):
        bench.supervisor.harvest(over(number, 50))
    stats = bench.supervisor.stats()
    assert stats.answered == 1
    assert stats.dropped == beyond + live.MAX_REQUESTS
    os.kill(bench.pid, signal.SIGCONT)
    for _ in range(live.MAX_REQUESTS):
        await bench.answer()
    bench.ask(0)
    assert (await bench.answer()).remaining_tokens >= 1.0
    assert (bench.supervisor.stats().restarts, bench.supervisor.stats().lost) == (0, 0)


async def test_a_predictor_that_hangs_for_too_long_is_replaced(start: Open) -> None:
    bench = start("odd", "mute", silent_s=0.2)
    bench.ask(0)
    assert "no report for 0.2 s, killed" in await bench.warning()
    async with asyncio.timeout(WAIT_S):
        while len(bench.links) < 2:  # noqa: ASYNC110 (the start has no event)
            await asyncio.sleep(0.01)
    assert bench.supervisor.stats().lost == 1


async def test_an_idle_predictor_may_be_silent(start: Open) -> None:
    bench = start("odd", "echo")
    bench.ask(0)
    await bench.answer()
    bench.supervisor.silent_s = 0.1
    await asyncio.sleep(0.3)
    bench.supervisor.silent_s = live.SILENT_S
    bench.ask(1)
    await bench.answer()
    assert bench.supervisor.stats().restarts == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("crash", "exit status 3"),
        ("garbage", "sent an invalid frame"),
        ("noise", "sent an invalid frame"),
        ("boast", "report.processed must be from 0 to 1"),
        ("stillborn", "cannot start"),
    ],
)
async def test_a_predictor_that_always_fails_is_given_up(
    start: Open, kind: str, expected: str
) -> None:
    bench = start("odd", kind)
    for restart in range(live.MAX_RESTARTS):
        bench.ask(restart)
        message = await bench.warning()
        assert expected in message
        assert f"restarted ({restart + 1} of {live.MAX_RESTARTS} times)" in message
    bench.ask(live.MAX_RESTARTS)
    assert "lengths are no longer predicted" in await bench.warning()
    before = bench.supervisor.stats()
    bench.ask(9)
    bench.supervisor.harvest(over(9, 5))
    bench.supervisor.fit(FitPredictor(step=1))
    after = bench.supervisor.stats()
    assert (after.dropped, after.requests) == (before.dropped + 3, before.requests)
    assert after.lost == live.MAX_RESTARTS + 1
    assert after.answered == 0
    assert after.restarts == live.MAX_RESTARTS
    assert bench.posted.empty()


@pytest.mark.parametrize("kind", ["nan", "stranger"])
async def test_invalid_answers_are_not_posted(start: Open, kind: str) -> None:
    bench = start("odd", kind)
    bench.ask(0)
    async with asyncio.timeout(WAIT_S):
        while not bench.supervisor.stats().lost:  # noqa: ASYNC110 (a lost request has no event)
            await asyncio.sleep(0.01)
    assert bench.posted.empty()
    assert bench.supervisor.stats().restarts == 0


async def test_each_request_is_answered_once(start: Open) -> None:
    bench = start("odd", "echo")
    for number in range(20):
        bench.ask(number)
    answers = [await bench.answer() for _ in range(20)]
    assert [one.trajectory_id for one in answers] == [f"t{number}" for number in range(20)]
    assert {one.remaining_tokens for one in answers} == {7.0}
    assert bench.posted.empty()


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_beyond_the_limit_are_dropped(start: Open, kind: str) -> None:
    bench = start(kind)
    for number in range(3 * live.MAX_REQUESTS):
        bench.ask(number)
    for _ in range(live.MAX_REQUESTS):
        await bench.answer()
    stats = bench.supervisor.stats()
    assert stats.requests == live.MAX_REQUESTS
    assert stats.answered == live.MAX_REQUESTS
    assert stats.dropped == 2 * live.MAX_REQUESTS


@pytest.mark.parametrize("kind", KINDS)
async def test_close_ends_everything(start: Open, kind: str) -> None:
    bench = start(kind)
    bench.ask(0)
    await bench.answer()
    bench.ask(1)
    await bench.supervisor.close()
    bench.ask(2)
    if kind == "process":
        with pytest.raises(ProcessLookupError):
            os.kill(bench.pid, 0)
    await asyncio.sleep(0)
    assert bench.posted.empty()
    assert bench.warnings.empty()
    assert len(bench.links) == 1


async def test_a_stopped_predictor_does_not_delay_close(start: Open) -> None:
    bench = start("process")
    bench.ask(0)
    await bench.answer()
    os.kill(bench.pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        await bench.supervisor.close()


async def test_the_run_continues_if_no_process_can_be_made(tmp_path: Path) -> None:
    def refuse(_: object) -> live.PredictorLink:
        raise OSError("no processes left")

    async with Tasks() as tasks:
        bench = Bench(refuse, tasks)
        assert "cannot be started: no processes left" in await bench.warning()
        bench.ask(0)
        assert bench.supervisor.stats().dropped == 1
        await bench.supervisor.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_warns_of_a_regressor_that_cannot_be_built(start: Open, kind: str) -> None:
    bench = start(kind, "rigde")
    assert "a predictor must be one of" in await bench.warning()


async def test_each_request_is_counted_once_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a link that answers as it is told; the time is injected."""
    loop = asyncio.get_running_loop()
    now, lost = 0.0, loop.create_future()
    sent = list[Any]()
    link = SimpleNamespace(send=sent.append, kill=lambda: None, lost=lost, close=AsyncMock())
    report = list[Callable[[PredictorReport], None]]()

    def open_link(on_report: Callable[[PredictorReport], None]) -> Any:
        report.append(on_report)
        return link

    async with Tasks() as tasks:
        bench = Bench(open_link, tasks, silent_s=WAIT_S)
        bench.ask(0)  # it waits for the start
        await asyncio.sleep(0)
        clock = SimpleNamespace(time=lambda: now, call_later=loop.call_later)
        bench.supervisor._loop = clock  # type: ignore[assignment]
        for number in range(1, 101):
            bench.ask(number)
        bench.supervisor.harvest(over(0, 7))
        bench.supervisor.fit(FitPredictor(step=0))
        async with asyncio.timeout(WAIT_S):
            while len(sent) < 103:  # noqa: ASYNC110 (the link is a list)
                await asyncio.sleep(0.001)
        assert [one.number for one in sent[:101]] == list(range(1, 102))
        assert bench.supervisor._requests.pop(1).command.trajectory_id == "t0"
        assert bench.supervisor.stats() == PredictorStats(requests=101)
        for number in range(2, 102):
            now = float(number)
            answer = PredictedLength(number=number, remaining_tokens=5.0 * number)
            answers = (answer, answer) if number < 101 else ()
            report[0](
                PredictorReport(processed=number, answers=answers, fits=2, fit_s=0.5, pairs=9)
            )
            if answers:
                assert (await bench.answer()).remaining_tokens == 5.0 * number
        assert bench.posted.empty()
        stats = bench.supervisor.stats()
        assert (stats.requests, stats.answered, stats.lost, stats.dropped) == (101, 99, 1, 0)
        assert (stats.fits, stats.fit_s, stats.pairs) == (2, 0.5, 9)
        assert stats.mean_ms == pytest.approx(1e3 * sum(range(2, 101)) / 99)
        assert stats.p99_ms == 1e3 * 100
        lost.set_result("killed")
        tasks.cancel_all()
