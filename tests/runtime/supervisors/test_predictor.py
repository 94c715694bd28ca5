"""The predictor's seat, in a process and in a thread: it answers, nobody waits for it,
and its child may do what it likes.
"""

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollweave.core.policy.predict import MIN_PAIRS, PRIOR_TOKENS, ProgressivePredictor
from rollweave.runtime.supervisors import predictor as live
from rollweave.runtime.supervisors.predictor import (
    PredictorSupervisor,
    ProcessPredictor,
    in_process,
    in_thread,
)
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import FitPredictor, Harvest, Predict, Warn
from rollweave.schema.events import PredictionReady
from rollweave.schema.prediction import LengthContext, PredictorReport, PredictorSpec
from rollweave.train.lengths import build_regressor
from tests.train.lengths.worlds import trajectories

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


class Desk:
    """A seat, what it posts and what it warns of, and the links that it opened."""

    def __init__(
        self, open_link: live.OpenPredictor, tasks: Tasks, *, silent_s: float = live.SILENT_S
    ) -> None:
        self.posted: asyncio.Queue[PredictionReady] = asyncio.Queue()
        self.warnings: asyncio.Queue[Warn] = asyncio.Queue()
        self.links: list[live.PredictorLink] = []

        def opened(on_report: Callable[[PredictorReport], None]) -> live.PredictorLink:
            self.links.append(open_link(on_report))
            return self.links[-1]

        self.seat = PredictorSupervisor(
            opened,
            tasks=tasks,
            post=self.posted.put_nowait,
            warn=self.warnings.put_nowait,
            silent_s=silent_s,
        )
        self.seat.start()

    def ask(self, number: int, context: LengthContext = CONTEXT) -> None:
        command = ask(number, context)
        self.seat.predict(command, command.context)

    async def answer(self) -> PredictionReady:
        async with asyncio.timeout(60):
            return await self.posted.get()

    async def warning(self) -> str:
        async with asyncio.timeout(60):
            warned = await self.warnings.get()
        assert warned.component == "predictor"
        return warned.message

    @property
    def pid(self) -> int:
        link = self.links[-1]
        assert isinstance(link, ProcessPredictor)
        return link.pid


Open = Callable[..., Desk]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Open]:
    made: list[Desk] = []

    def start(kind: str, regressor: str = "ridge", *, silent_s: float = live.SILENT_S) -> Desk:
        spec, log = PredictorSpec(regressor=regressor), tmp_path / "predictor.log"
        odd = functools.partial(in_process, module="tests.runtime.odd_predictor")
        link = (
            in_thread(spec)
            if kind == "thread"
            else (in_process if kind == "process" else odd)(spec, log=log)
        )
        made.append(Desk(link, tasks, silent_s=silent_s))
        return made[-1]

    async with Tasks() as tasks:
        yield start
        for each in made:
            await each.seat.close()
        tasks.cancel_all()


@pytest.mark.parametrize("kind", KINDS)
async def test_its_answers_are_those_of_the_predictor_itself(desk: Open, kind: str) -> None:
    """Before the first fit and after it."""
    here, there = ProgressivePredictor(lambda: build_regressor("ridge")), desk(kind)
    for number, one in enumerate(trajectories(30, seed=1)):
        for context in one.contexts:
            expected = here.predict((f"t{number}", 0), context)
            there.ask(number, context)
            found = await there.answer()
            assert (found.trajectory_id, found.attempt, found.turn) == (
                f"t{number}",
                0,
                context.turn,
            )
            assert found.remaining_tokens == expected
        total = one.tokens if number % 5 else None
        here.observe((f"t{number}", 0), total)
        there.seat.harvest(over(number, total))
        if number in (14, 25):
            here.fit()
            there.seat.fit(FitPredictor(step=number))
    stats = there.seat.stats()
    assert (here.fits, stats.fits, stats.failed, stats.lost, stats.dropped, stats.restarts) == (
        2,
        2,
        0,
        0,
        0,
        0,
    )
    assert stats.asked == stats.answered == 180
    assert stats.fit_s > 0
    assert stats.mean_ms > 0
    assert stats.p99_ms > 0


async def test_what_the_world_adds_to_the_context_is_what_is_asked(desk: Open) -> None:
    """Siblings that it alone knows of, say."""
    there = desk("thread", "history")
    known = LengthContext(
        **{**{name: getattr(CONTEXT, name) for name in CONTEXT.__struct_fields__}, **SIBLINGS}
    )
    there.seat.predict(ask(0), known)
    assert (await there.answer()).remaining_tokens == 85.0


SIBLINGS = {"siblings": 2, "sibling_mean": 90.0, "sibling_longest": 100}


async def test_the_books_go_on_over_a_restart(desk: Open) -> None:
    there = desk("process")
    for number in range(MIN_PAIRS):
        there.ask(number)
        there.seat.harvest(over(number, 105))
    there.seat.fit(FitPredictor(step=1))
    there.ask(0)
    for _ in range(MIN_PAIRS + 1):
        await there.answer()
    before = there.seat.stats()
    assert (before.fits, before.pairs) == (1, MIN_PAIRS)
    os.kill(there.pid, signal.SIGKILL)
    await there.warning()
    there.ask(1)
    await there.answer()
    after = there.seat.stats()
    assert (after.fits, after.fit_s, after.answered, after.pairs) == (
        1,
        before.fit_s,
        MIN_PAIRS + 2,
        0,
    )


async def test_a_killed_one_is_started_again_with_nothing_harvested(desk: Open) -> None:
    there = desk("process")
    there.ask(0)
    await there.answer()
    there.seat.harvest(over(0, 105))
    there.ask(1)
    assert (await there.answer()).remaining_tokens == 100.0  # the domain's mean
    assert there.seat.stats().pairs == 1
    os.kill(there.pid, signal.SIGKILL)
    there.ask(2)  # into the void, or to the next one: nobody waits for it
    message = await there.warning()
    assert "SIGKILL" in message
    assert "restarted (1 of 3 times), without its observations" in message
    there.ask(3)
    assert (await there.answer()).remaining_tokens == PRIOR_TOKENS
    stats = there.seat.stats()
    assert (stats.restarts, stats.pairs) == (1, 0)
    assert stats.asked == stats.answered + stats.lost == 4


async def test_a_hung_one_holds_up_nobody_and_goes_on_where_it_stopped(desk: Open) -> None:
    there = desk("process")
    there.ask(0)
    await there.answer()
    os.kill(there.pid, signal.SIGSTOP)
    beyond = 10
    for number in range(live.MAX_REQUESTS + beyond):
        there.ask(number)
    for number in range(live.MAX_MESSAGES):
        there.seat.harvest(over(number, 50))
    stats = there.seat.stats()
    assert stats.answered == 1
    assert stats.dropped == beyond + live.MAX_REQUESTS
    os.kill(there.pid, signal.SIGCONT)
    for _ in range(live.MAX_REQUESTS):
        await there.answer()
    there.ask(0)
    assert (await there.answer()).remaining_tokens >= 1.0
    assert (there.seat.stats().restarts, there.seat.stats().lost) == (0, 0)


async def test_one_that_hangs_for_too_long_is_replaced(desk: Open) -> None:
    there = desk("odd", "mute", silent_s=0.2)
    there.ask(0)
    assert "no report for 0.2 s, killed" in await there.warning()
    async with asyncio.timeout(60):
        while len(there.links) < 2:  # noqa: ASYNC110 (the start has no event)
            await asyncio.sleep(0.01)
    assert there.seat.stats().lost == 1


async def test_one_that_has_nothing_to_do_may_be_silent(desk: Open) -> None:
    there = desk("odd", "echo")
    there.ask(0)
    await there.answer()
    there.seat.silent_s = 0.1
    await asyncio.sleep(0.3)
    there.seat.silent_s = live.SILENT_S
    there.ask(1)
    await there.answer()
    assert there.seat.stats().restarts == 0


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("crash", "exit status 3"),
        ("garbage", "no frame of ours"),
        ("noise", "no frame of ours"),
        ("boast", "report.processed must be from 0 to 1"),
        ("stillborn", "cannot start"),
    ],
)
async def test_one_that_always_fails_is_given_up_after_some_restarts(
    desk: Open, kind: str, told: str
) -> None:
    there = desk("odd", kind)
    for restart in range(live.MAX_RESTARTS):
        there.ask(restart)
        message = await there.warning()
        assert told in message
        assert f"restarted ({restart + 1} of {live.MAX_RESTARTS} times)" in message
    there.ask(live.MAX_RESTARTS)
    assert "lengths are no longer predicted" in await there.warning()
    before = there.seat.stats()
    there.ask(9)
    there.seat.harvest(over(9, 5))
    there.seat.fit(FitPredictor(step=1))
    after = there.seat.stats()
    assert (after.dropped, after.asked) == (before.dropped + 3, before.asked)
    assert (after.lost, after.answered, after.restarts) == (
        live.MAX_RESTARTS + 1,
        0,
        live.MAX_RESTARTS,
    )
    assert there.posted.empty()


@pytest.mark.parametrize("kind", ["nan", "stranger"])
async def test_what_is_no_answer_is_not_posted(desk: Open, kind: str) -> None:
    there = desk("odd", kind)
    there.ask(0)
    async with asyncio.timeout(60):
        while not there.seat.stats().lost:  # noqa: ASYNC110 (what is lost is told to nobody)
            await asyncio.sleep(0.01)
    assert there.posted.empty()
    assert there.seat.stats().restarts == 0


async def test_a_question_is_answered_once(desk: Open) -> None:
    there = desk("odd", "echo")
    for number in range(20):
        there.ask(number)
    found = [await there.answer() for _ in range(20)]
    assert [one.trajectory_id for one in found] == [f"t{number}" for number in range(20)]
    assert {one.remaining_tokens for one in found} == {7.0}
    assert there.posted.empty()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_is_answered_as_far_as_it_was_taken(desk: Open, kind: str) -> None:
    there = desk(kind)
    for number in range(3 * live.MAX_REQUESTS):
        there.ask(number)
    for _ in range(live.MAX_REQUESTS):
        await there.answer()
    stats = there.seat.stats()
    assert (stats.asked, stats.answered, stats.dropped) == (
        live.MAX_REQUESTS,
        live.MAX_REQUESTS,
        2 * live.MAX_REQUESTS,
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_after_close_nothing_is_said_and_nothing_is_left(desk: Open, kind: str) -> None:
    there = desk(kind)
    there.ask(0)
    await there.answer()
    there.ask(1)
    await there.seat.close()
    there.ask(2)
    if kind == "process":
        with pytest.raises(ProcessLookupError):
            os.kill(there.pid, 0)
    await asyncio.sleep(0)
    assert there.posted.empty()
    assert there.warnings.empty()
    assert len(there.links) == 1


async def test_a_stopped_one_does_not_hold_up_the_end(desk: Open) -> None:
    there = desk("process")
    there.ask(0)
    await there.answer()
    os.kill(there.pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        await there.seat.close()


async def test_where_no_process_can_be_made_the_run_goes_on(tmp_path: Path) -> None:
    def refuse(_: object) -> live.PredictorLink:
        raise OSError("no processes left")

    async with Tasks() as tasks:
        there = Desk(refuse, tasks)
        assert "cannot be started: no processes left" in await there.warning()
        there.ask(0)
        assert there.seat.stats().dropped == 1
        await there.seat.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_regressor_that_cannot_be_built_is_told(desk: Open, kind: str) -> None:
    there = desk(kind, "rigde")
    assert "rollout.predictor must be one of" in await there.warning()
