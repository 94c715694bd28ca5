"""Partial turns that continue elsewhere: whatever engines report, lose and answer,
never from a wrong token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.client import EngineClient, in_process, in_thread
from rollweave.io.child import child_of
from rollweave.record.turn_log import TurnAnswer, TurnTokens, context_digest
from rollweave.rollout.driver import TurnResult
from rollweave.rollout.turn_parts import PartialTurn, ProgressReporter, RecordedTurns
from rollweave.rollout.turns import Turns
from rollweave.rollout.worker import RemoteTurns
from rollweave.schema import events as e
from rollweave.schema import serving as s
from rollweave.schema.base import EngineId, GroupId, TaskId
from rollweave.schema.commands import AbortTurn, RerankTurn, StartInit, StartTurn
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.rollouts import AnswerTurn, AttemptReport, StreamTurn, TurnAsked, TurnGivenUp
from rollweave.schema.work import Purpose, Task
from tests.support.engines import environment, real_loop, tiny_checkpoint
from tests.support.pipelines import TRAJECTORY, NoSpans, OneWordEngine

PROMPT = (5, 6)
IDLE: Any = SimpleNamespace(budget_s=600.0, reward=0.0)
"""The part of an episode that a turn uses. No turn of a real engine outlasts it on a
busy machine.
"""
TRUTH = tuple(range(10, 30))
"""The tokens of the complete turn."""


def logprobs_of(tokens: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(-token / 100 for token in tokens)


def delta(start: int, end: int, *, version: int = 3, id: str = "r", **changes: Any) -> s.TokenDelta:
    tokens = TRUTH[start:end]
    parts: dict[str, Any] = {
        "tokens": tokens,
        "logprobs": logprobs_of(tokens),
        "versions": (s.VersionSpan(start=start, end=end, version=version),) if end > start else (),
        "generate_s": float(end),
    }
    return s.TokenDelta(id=id, start=start, **(parts | changes))


def result(
    end: int, *, finish: s.FinishReason = s.FinishReason.ABORTED, version: int = 3, **changes: Any
) -> s.GenerateResult:
    complete = delta(0, end, version=version)
    parts: dict[str, Any] = {
        name: getattr(complete, name) for name in ("tokens", "logprobs", "versions", "generate_s")
    }
    return s.GenerateResult(id="r", finish=finish, **(parts | changes))


def partial(end: int) -> s.PartialOutput:
    complete = delta(0, end)
    return s.PartialOutput(
        tokens=complete.tokens,
        logprobs=complete.logprobs,
        versions=complete.versions,
        generate_s=complete.generate_s,
    )


# What is known.


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 6), st.integers(2, 3)), max_size=12))
def test_deltas_in_any_order_are_a_prefix_or_nothing(reported: list[tuple[int, int, int]]) -> None:
    """Deltas may be lost, repeated or reordered: once one does not begin where the last
    one ended, nothing can be resumed.
    """
    partial_turn, versions, broken = PartialTurn(), list[int](), False
    for start, count, version in reported:
        end = min(start + count, len(TRUTH))
        broken = broken or start != len(versions)
        partial_turn.append(delta(start, end, version=version, generate_s=0.0))
        if not broken:
            versions += [version] * (end - start)
        output = partial_turn.partial
        if broken or not versions:
            assert (output, len(partial_turn)) == (None, 0)
        else:
            assert output.tokens == TRUTH[: len(versions)]
            assert output.logprobs == logprobs_of(output.tokens)
            assert [
                span.version for span in output.versions for _ in range(span.end - span.start)
            ] == versions
            assert all(
                one.version != other.version
                for one, other in zip(output.versions, output.versions[1:], strict=False)
            )


@pytest.mark.parametrize(
    "changes",
    [
        *({"logprobs": (-1.0,)}, {"versions": ()}),
        {"versions": (s.VersionSpan(start=0, end=2, version=3),)},
        *({"versions": (s.VersionSpan(start=2, end=5, version=3),)}, {"generate_s": 1.0}),
        {"generate_s": float("nan")},
    ],
)
def test_an_inconsistent_delta_discards_the_partial_turn(changes: dict[str, Any]) -> None:
    partial_turn = PartialTurn()
    partial_turn.append(delta(0, 2))
    partial_turn.append(delta(2, 4, **changes))
    assert partial_turn.partial is None
    partial_turn.append(delta(2, 4))
    assert partial_turn.partial is None, "what is broken stays so"


@pytest.mark.parametrize(
    ("answer", "kept_tokens"),
    [
        (result(7), 7),
        (result(4), 4),
        (result(9, finish=s.FinishReason.STOP), 9),  # it ended as it was aborted: that is all of it
        (result(3), 0),  # less than was reported
        (result(7, tokens=(1, *TRUTH[1:7])), 0),
        (result(7, logprobs=(-1.0, *logprobs_of(TRUTH[1:7]))), 0),
        *((result(7, logprobs=()), 0), (result(7, versions=()), 0)),
        *((result(7, finish=s.FinishReason.ERROR), 0), (result(0), 0)),
    ],
)
def test_the_answer_to_an_abort_replaces_the_partial_turn_or_discards_it(
    answer: s.GenerateResult, kept_tokens: int
) -> None:
    partial_turn = PartialTurn(partial(2))
    partial_turn.append(delta(2, 4))
    partial_turn.finish(answer)
    assert partial_turn.partial == (partial(kept_tokens) if kept_tokens else None)


# Turns, with an engine whose every word a test decides.


def unread(_: s.TokenDelta) -> None:
    raise AssertionError("the token after a prompt has no reader")


class Puppet(OneWordEngine):
    """An engine that answers only when the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[s.GenerateRequest, asyncio.Future[s.GenerateResult], OnTokens]] = []
        self.aborted: list[str] = []
        self.intervals: list[float] = []
        """`report_s` of the calls."""

    def generate(
        self,
        request: s.GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = s.STREAM_S,
    ) -> asyncio.Future[s.GenerateResult]:
        future: asyncio.Future[s.GenerateResult] = asyncio.get_running_loop().create_future()
        self.calls.append((request, future, on_tokens or unread))
        self.intervals.append(report_s)
        return future

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    @property
    def resumed(self) -> s.PartialOutput | None:
        """Return the partial output that the newest request resumes."""
        return self.calls[-1][0].resumed


class Stage:
    """`Turns` of one attempt, its engines, and its events.

    The open turn is turn 0. If it is `streamed`, a program reads its tokens, which are
    then in `received`, in a run that keeps no others.
    """

    def __init__(self, *, streamed: bool = False, recorded: RecordedTurns | None = None) -> None:
        self.streamed = streamed
        self.received: list[s.TokenDelta] = []
        self.events: list[e.Event] = []
        self.engines: dict[str, Any] = {"e0": Puppet(), "e1": Puppet()}
        task = Task(id=TaskId("t"), env="scripted", seed=1, tag="scripted")
        self.init = StartInit(
            trajectory_id=TRAJECTORY,
            attempt=0,
            group_id=GroupId("g0"),
            member=0,
            task=task,
            purpose=Purpose.TRAIN,
            initiated_version=3,
        )
        self.progress = ProgressReporter(self.events.append)
        self.turns = Turns(
            command=self.init,
            engine=self.engines.get,  # type: ignore[arg-type]
            post=self.events.append,
            clock=asyncio.get_running_loop().time,
            spans=NoSpans(),
            answer=self._answer,
            progress=None if streamed else self.progress,
            recorded=recorded or RecordedTurns(),
        )
        self.relay = RemoteTurns((TRAJECTORY, 0), self._report, episode=lambda: IDLE)
        self.task: asyncio.Task[TurnResult] | None = None

    def ask(
        self, sampling: s.Sampling | None = None, tokens: tuple[int, ...] = PROMPT
    ) -> asyncio.Task[TurnResult]:
        on_tokens = self.received.append if self.streamed else None
        turn = self.relay.turn(0, tokens, sampling or s.Sampling(max_tokens=20), on_tokens)
        self.task = asyncio.get_running_loop().create_task(turn)
        return self.task

    def start(
        self, engine: str, dispatch: int, *, resume: bool = False, prefill: bool = False
    ) -> None:
        self.turns.start(
            StartTurn(
                trajectory_id=TRAJECTORY,
                attempt=0,
                turn=0,
                engine_id=EngineId(engine),
                rank=0.0,
                dispatch=dispatch,
                resume=resume,
                prefill=prefill,
            )
        )

    def abort(self, engine: str, dispatch: int) -> None:
        self.turns.abort(
            AbortTurn(
                trajectory_id=TRAJECTORY,
                attempt=0,
                turn=0,
                engine_id=EngineId(engine),
                dispatch=dispatch,
            )
        )

    def _answer(self, command: AnswerTurn | StreamTurn) -> None:
        if isinstance(command, StreamTurn):
            self.relay.stream(command)
        else:
            self.relay.answer(command)

    def _report(self, report: AttemptReport) -> None:
        match report:
            case TurnAsked():
                self.turns.request(report)
            case TurnGivenUp(turn=number):
                self.turns.withdraw(number)
            case _:
                raise AssertionError(f"a turn reports no {report}")

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def settle(rounds: int = 4) -> None:
    """Let callbacks run."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def streaming_turn(*, streamed: bool = False) -> tuple[Stage, Puppet, Puppet]:
    """Return a stage whose turn is with the first engine, which has reported four
    tokens.
    """
    stage = Stage(streamed=streamed)
    stage.ask()
    await settle()
    assert [type(event) for event in stage.events] == [e.TurnRequested]
    stage.start("e0", 0)
    first: Puppet = stage.engines["e0"]
    first.calls[0][2](delta(0, 2))
    first.calls[0][2](delta(2, 4))
    return stage, first, stage.engines["e1"]


async def finished(stage: Stage, puppet: Puppet, resumed: int) -> None:
    """Let the engine complete the turn, and check the result."""
    puppet.calls[-1][1].set_result(result(20, finish=s.FinishReason.LENGTH, resumed_tokens=resumed))
    assert stage.task is not None
    answer = await stage.task
    assert (answer.result.tokens, answer.result.logprobs) == (TRUTH, logprobs_of(TRUTH))
    (done,) = stage.of(e.TurnDone)
    assert done.output_tokens == len(TRUTH)
    assert stage.turns._open is None


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("resume", [False, True])
async def test_a_lost_engine_loses_only_unreported_tokens(resume: bool, at_once: bool) -> None:
    """This also holds if the core dispatches the turn before its owner learns of the
    loss.
    """
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_exception(EngineLostError("killed"))
    if not at_once:
        await settle()
    first.calls[0][2](delta(4, 6))  # from beyond
    stage.start("e1", 1, resume=resume)
    assert second.resumed == (partial(6) if resume else None)
    assert stage.of(e.TurnFailed) == []
    await finished(stage, second, 6 if resume else 0)


@pytest.mark.parametrize("order", ["answered first", "started first"])
async def test_an_aborted_turn_resumes_from_all_sampled_tokens(order: str) -> None:
    stage, first, second = await streaming_turn()
    stage.abort("e0", 0)
    assert first.aborted == [first.calls[0][0].id]
    if order == "started first":
        stage.start("e1", 1, resume=True)
        await settle()
        assert second.calls == []
        stage.turns.rerank(
            RerankTurn(
                trajectory_id=TRAJECTORY,
                attempt=0,
                turn=0,
                engine_id=EngineId("e1"),
                dispatch=1,
                rank=9.0,
            )
        )
    first.calls[0][1].set_result(result(7))
    await settle()
    if order == "answered first":
        stage.start("e1", 1, resume=True)
    assert second.resumed == partial(7)
    assert second.calls[0][0].rank == (9.0 if order == "started first" else 0.0)
    assert stage.turns.known_context == PROMPT + TRUTH[:7]
    second.calls[0][2](delta(7, 9))
    await finished(stage, second, 7)


def received(stage: Stage) -> list[tuple[int, tuple[int, ...]]]:
    """Return start and tokens of each delta that the program has received."""
    for piece in stage.received:
        assert piece.logprobs == logprobs_of(piece.tokens)
    return [(piece.start, piece.tokens) for piece in stage.received]


@pytest.mark.parametrize("how", ["lost", "aborted"])
async def test_a_program_reads_each_token_once_though_engines_change(how: str) -> None:
    stage, first, second = await streaming_turn(streamed=True)
    assert [event.streamed for event in stage.of(e.TurnRequested)] == [True]
    assert first.intervals == [s.STREAM_S]
    if how == "lost":
        first.calls[0][1].set_exception(EngineLostError("killed"))
    else:
        stage.abort("e0", 0)
        first.calls[0][1].set_result(result(7))
    await settle()
    stage.start("e1", 1, resume=True)
    known = 4 if how == "lost" else 7
    assert second.resumed == partial(known)
    second.calls[0][2](delta(known, 9))
    second.calls[0][2](delta(9, 10))
    # The tokens that the abort has brought to light come with the next ones.
    assert received(stage) == [(0, TRUTH[:2]), (2, TRUTH[2:4]), (4, TRUTH[4:9]), (9, TRUTH[9:10])]
    await finished(stage, second, known)
    assert stage.of(e.TurnsProgressed) == []


@pytest.mark.parametrize("how", ["computed", "refused", "lost", "aborted"])
async def test_a_program_reads_each_token_once_though_a_prompt_is_computed_elsewhere(
    how: str,
) -> None:
    """The engine of the turn is lost; another one computes the prompt for a third."""
    stage, first, second = await streaming_turn(streamed=True)
    first.calls[0][1].set_exception(EngineLostError("killed"))
    await settle()
    stage.start("e1", 1, resume=True, prefill=True)
    request, prefilled, on_tokens = second.calls[0]
    assert (request.tokens, request.resumed, on_tokens) == (PROMPT + TRUTH[:4], None, unread)
    outcomes: dict[str, Callable[[], None]] = {
        "computed": lambda: prefilled.set_result(result(1)),
        "refused": lambda: prefilled.set_exception(EngineError("no room")),
        "lost": lambda: prefilled.set_exception(EngineLostError("killed")),
        "aborted": lambda: stage.abort("e1", 1),
    }
    outcomes[how]()
    await settle()
    assert len(stage.of(e.PrefillDone)) == (how == "computed")
    assert len(stage.of(e.TurnFailed)) == (how == "refused")
    third = stage.engines["e2"] = Puppet()
    stage.start("e2", 2, resume=True)
    assert third.resumed == partial(4)
    third.calls[0][2](delta(4, 9))
    assert received(stage) == [(0, TRUTH[:2]), (2, TRUTH[2:4]), (4, TRUTH[4:9])]
    await finished(stage, third, 4)


@pytest.mark.parametrize("dispatches", [1, 2])
async def test_a_program_reads_the_recorded_tokens_of_its_turn_and_then_the_others(
    dispatches: int,
) -> None:
    """The controller was lost in the middle of the turn, and perhaps the engine that
    continued it.
    """
    sampling = s.Sampling(max_tokens=20)
    digest = context_digest(PROMPT, sampling)
    known = TurnTokens(
        trajectory_id=TRAJECTORY, attempt=0, turn=0, context=digest, delta=delta(0, 4)
    )
    stage = Stage(streamed=True, recorded=RecordedTurns([known], version=3))
    stage.ask(sampling)
    await settle()
    assert stage.received == []
    for dispatch in range(dispatches):
        puppet: Puppet = stage.engines[f"e{dispatch}"]
        stage.start(f"e{dispatch}", dispatch, resume=dispatch > 0)
        assert puppet.resumed == partial(4 + 5 * dispatch)
        puppet.calls[0][2](delta(4 + 5 * dispatch, 9 + 5 * dispatch))
        if dispatch < dispatches - 1:
            puppet.calls[0][1].set_exception(EngineLostError("killed"))
            await settle()
    assert received(stage) == [(0, TRUTH[:9]), (9, TRUTH[9:14])][:dispatches]
    await finished(stage, puppet, 4 + 5 * (dispatches - 1))


async def test_a_program_reads_a_recorded_answer_without_an_engine() -> None:
    digest = context_digest(PROMPT, s.Sampling(max_tokens=20))
    known = TurnAnswer(
        trajectory_id=TRAJECTORY,
        attempt=0,
        turn=0,
        context=digest,
        result=result(20, finish=s.FinishReason.LENGTH),
    )
    stage = Stage(streamed=True, recorded=RecordedTurns([known], version=3))
    asked = stage.ask()
    await settle()
    stage.start("e0", 0)
    assert (await asked).result.tokens == TRUTH
    (done,) = stage.of(e.TurnDone)
    assert done.replayed
    assert stage.engines["e0"].calls == []


@pytest.mark.parametrize("how", ["refused", "restarted", "inconsistent"])
async def test_a_program_learns_that_its_turn_begins_anew(how: str) -> None:
    """Then it has tokens that the engine does not continue."""
    stage, first, second = await streaming_turn(streamed=True)
    if how == "refused":
        first.calls[0][1].set_exception(EngineError("the model's logits are not finite"))
        await settle()
    elif how == "inconsistent":
        first.calls[0][2](delta(5, 6))
        first.calls[0][2](delta(6, 8))
        first.calls[0][1].set_exception(EngineLostError("killed"))
        await settle()
    else:
        stage.abort("e0", 0)
    stage.start("e1", 1, resume=how != "restarted")
    assert second.resumed is None
    second.calls[0][2](delta(0, 3))
    second.calls[0][2](delta(3, 6))
    assert received(stage)[2:] == [(0, TRUTH[:3]), (3, TRUTH[3:6])]
    await finished(stage, second, 0)


async def test_nothing_reaches_a_program_after_its_answer_or_its_end() -> None:
    stage, first, _ = await streaming_turn(streamed=True)
    late = first.calls[0][2]
    await finished(stage, first, 0)
    late(delta(4, 6))
    stage.relay.stream(StreamTurn(trajectory_id=TRAJECTORY, attempt=0, turn=0, delta=delta(4, 6)))
    assert len(stage.received) == 2


async def test_an_abort_without_an_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.rollout.turn_parts.ABORT_S", 0.01)
    stage, first, second = await streaming_turn()
    stage.abort("e0", 0)
    stage.start("e1", 1, resume=True)
    await asyncio.wait({first.calls[0][1]})
    assert first.calls[0][1].cancelled()
    await settle()
    assert second.resumed == partial(4)
    await finished(stage, second, 4)


@pytest.mark.parametrize("how", ["lost", "refused", "cancelled", "nonsense"])
async def test_after_any_answer_to_an_abort_the_turn_resumes_or_restarts(how: str) -> None:
    stage, first, second = await streaming_turn()
    stage.abort("e0", 0)
    stage.start("e1", 1, resume=True)
    future = first.calls[0][1]
    if how == "lost":
        future.set_exception(EngineLostError("gone"))
    elif how == "refused":
        future.set_exception(EngineError("the model's logits are not finite"))
    elif how == "cancelled":
        future.cancel()
    else:
        future.set_result(result(7, tokens=tuple(range(7))))
    await settle()
    kept_tokens = 4 if how in ("lost", "cancelled") else 0
    assert second.resumed == (partial(kept_tokens) if kept_tokens else None)
    await finished(stage, second, kept_tokens)


async def test_a_restarted_turn_does_not_wait_for_the_abort() -> None:
    stage, first, second = await streaming_turn()
    stage.abort("e0", 0)
    stage.start("e1", 1)
    assert second.resumed is None
    await settle()
    assert first.calls[0][1].cancelled()
    await finished(stage, second, 0)


async def test_an_abort_cancels_a_waiting_start() -> None:
    stage, first, second = await streaming_turn()
    stage.abort("e0", 0)
    stage.start("e1", 1, resume=True)
    stage.abort("e1", 1)
    first.calls[0][1].set_result(result(7))
    await settle()
    assert second.calls == []
    stage.start("e0", 2, resume=True)
    assert first.resumed == partial(7)
    # what the first request still answers cannot be taken for the second's
    assert first.calls[0][0].id != first.calls[1][0].id
    await finished(stage, first, 7)


@pytest.mark.parametrize("requests_again", [False, True])
async def test_an_answer_that_crosses_an_abort_is_repeated(requests_again: bool) -> None:
    """So is the attempt's next request, if any: the core has received neither."""
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_result(result(20, finish=s.FinishReason.LENGTH))
    assert stage.task is not None
    await stage.task
    if requests_again:
        following = asyncio.get_running_loop().create_task(
            stage.relay.turn(1, PROMPT, s.Sampling())
        )
        await settle()
    stage.abort("e0", 0)
    stage.events.clear()
    stage.start("e1", 1, resume=True)
    assert second.calls == []
    assert [type(event) for event in stage.events] == [e.TurnDone, e.TurnRequested][
        : 1 + requests_again
    ]
    assert (stage.events[0].dispatch, stage.events[0].output_tokens) == (1, 20)  # type: ignore[union-attr]
    if requests_again:
        assert stage.events[1].turn == 1  # type: ignore[union-attr]
        following.cancel()
        await asyncio.wait({following})


async def test_an_answer_that_is_not_consumed_yet_is_not_requested_again() -> None:
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_result(result(20, finish=s.FinishReason.LENGTH))
    await asyncio.sleep(0)
    assert not stage.task.done()
    stage.start("e1", 1, resume=True)
    assert second.calls == []
    assert [done.dispatch for done in stage.of(e.TurnDone)] == [0, 1]


async def test_a_refused_turn_restarts() -> None:
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_exception(EngineLostError("killed"))
    await settle()
    stage.start("e1", 1, resume=True)
    second.calls[0][1].set_exception(EngineError("resumed.tokens must end where the turn stops"))
    await settle()
    assert [failed.dispatch for failed in stage.of(e.TurnFailed)] == [1]
    stage.start("e1", 2, resume=True)
    assert second.resumed is None
    await finished(stage, second, 0)


@pytest.mark.parametrize(
    ("answer", "kept_tokens"),
    [
        (result(9), 9),  # aborted by itself
        (
            result(20, finish=s.FinishReason.LENGTH, resumed_tokens=3),
            0,
        ),  # continued from another position
        (result(20, finish=s.FinishReason.LENGTH, resumed_tokens=4, tokens=(1, *TRUTH[1:])), 0),
        (result(20, finish=s.FinishReason.LENGTH, resumed_tokens=4, version=-1), 0),
    ],
)
async def test_an_inconsistent_answer_fails_the_turn(
    answer: s.GenerateResult, kept_tokens: int
) -> None:
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_exception(EngineLostError("killed"))
    await settle()
    stage.start("e1", 1, resume=True)
    second.calls[0][1].set_result(answer)
    await settle()
    assert len(stage.of(e.TurnFailed)) == 1
    stage.start("e0", 2, resume=True)
    assert first.resumed == (partial(kept_tokens) if kept_tokens else None)
    await finished(stage, first, kept_tokens)


async def test_a_turn_that_a_lent_engine_returns_continues_from_all_of_its_tokens() -> None:
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_result(result(9, finish=s.FinishReason.RETURNED))
    await settle()
    (returned,) = stage.of(e.TurnReturned)
    assert (returned.turn, returned.dispatch) == (0, 0)
    assert stage.of(e.TurnFailed) == []
    stage.start("e1", 1, resume=True)
    assert second.resumed == partial(9)
    await finished(stage, second, 9)


async def test_a_missing_engine_fails_the_dispatch_and_keeps_the_partial_turn() -> None:
    stage, first, second = await streaming_turn()
    first.calls[0][1].set_exception(EngineLostError("killed"))
    await settle()
    removed = stage.engines.pop("e1")
    stage.start("e1", 1, resume=True)
    assert [failed.error for failed in stage.of(e.TurnFailed)] == ["the engine is gone"]
    stage.engines["e1"] = removed
    stage.start("e1", 2, resume=True)
    assert second.resumed == partial(4)
    await finished(stage, second, 4)


@pytest.mark.parametrize("when", ["generating", "leaving", "waiting to start"])
async def test_an_ended_attempt_releases_everything(when: str) -> None:
    stage, first, second = await streaming_turn()
    if when != "generating":
        stage.abort("e0", 0)
    if when == "waiting to start":
        stage.start("e1", 1, resume=True)
    stage.turns.close()
    stage.relay.ending = True
    stage.task.cancel()
    await asyncio.wait({stage.task})
    await settle()
    assert first.calls[0][1].cancelled()
    assert second.calls == []
    assert stage.progress._turns == {}


# What the core is reported.


async def test_long_turns_are_reported_periodically() -> None:
    stage = Stage()
    stage.ask()
    await settle()
    stage.start("e0", 0)
    _, future, on_tokens = stage.engines["e0"].calls[0]
    on_tokens(delta(0, 2))
    stage.progress.report()
    assert stage.of(e.TurnsProgressed) == []  # not long yet
    on_tokens(delta(2, 4))
    on_tokens(delta(4, 6))
    stage.progress.report()
    stage.progress.report()
    reported = e.TurnProgress(
        trajectory_id=TRAJECTORY, attempt=0, turn=0, dispatch=0, output_tokens=6
    )
    # once, for nothing came to it
    assert stage.of(e.TurnsProgressed) == [e.TurnsProgressed(turns=(reported,))]
    on_tokens(delta(6, 8))
    stage.progress.report()
    assert len(stage.of(e.TurnsProgressed)) == 2
    on_tokens(delta(8, 10))
    future.set_result(result(20, finish=s.FinishReason.LENGTH))
    assert stage.task is not None
    await stage.task
    stage.progress.report()
    assert len(stage.of(e.TurnsProgressed)) == 2
    assert stage.progress._timer is None  # no timer without progress


async def test_a_turn_without_an_engine_is_not_reported() -> None:
    stage = Stage()
    stage.ask()
    await settle()
    stage.start("e0", 0)
    _, future, on_tokens = stage.engines["e0"].calls[0]
    on_tokens(delta(0, 2))
    stage.progress.report()
    stage.abort("e0", 0)
    on_tokens(delta(2, 4))
    stage.progress.report()
    assert stage.of(e.TurnsProgressed) == []
    future.set_result(result(5))
    await settle()
    stage.start("e1", 1, resume=True)
    stage.engines["e1"].calls[0][2](delta(5, 9))
    stage.progress.report()
    stage.progress.report()
    (event,) = stage.of(e.TurnsProgressed)
    assert [(reported.dispatch, reported.output_tokens) for reported in event.turns] == [(1, 9)]
    await finished(stage, stage.engines["e1"], 5)


# Real engines.

LONG = 3500
"""Number of tokens of a turn that takes the embedded engine several seconds."""


@pytest.fixture
async def engine_of(tmp_path: Path) -> AsyncIterator[Callable[[str], EngineClient]]:
    """Start deterministic engines of one model, in a process or in a thread."""
    model = str(tiny_checkpoint(tmp_path, max_position_embeddings=4096))
    spec = s.EngineSpec(
        id=EngineId("e"), model=model, kv_tokens=4096, deterministic=True, version=3
    )
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ready.set_result(None)
    clients: list[EngineClient] = []

    def start(kind: str) -> EngineClient:
        if kind == "process":
            module = "rollweave.runtime.entrypoints.engine"
            link = in_process(
                spec,
                spawn=child_of(module, env=environment()),
                log=tmp_path / "log",
                model_ready=ready,
            )
        else:
            link = in_thread(spec, real_loop(), model_ready=ready)
        clients.append(EngineClient(f"engine {len(clients)}", link, start_s=60.0, reply_s=60.0))
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


class Watched:
    """An engine that reports when it has streamed its turn `times` times; `reported` is
    set then.
    """

    def __init__(self, engine: EngineClient, times: int) -> None:
        self.engine, self.left = engine, times
        self.reported = asyncio.Event()

    def generate(
        self,
        request: s.GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = s.STREAM_S,
    ) -> asyncio.Future[s.GenerateResult]:
        assert on_tokens is not None
        forward = on_tokens

        def listen(each: s.TokenDelta) -> None:
            if self.left:
                forward(each)
                self.left -= 1
                if not self.left:
                    self.reported.set()

        return self.engine.generate(request, listen, report_s=report_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["killed", pytest.param("aborted", marks=pytest.mark.slow)])
async def test_a_turn_resumed_after_losses_equals_the_uninterrupted_one(
    engine_of: Callable[[str], EngineClient], end: str
) -> None:
    """The kernel kills an engine after its first report, the next one after its second.
    Another engine completes the turn.
    """
    sampling = s.Sampling(max_tokens=LONG, seed=11, allowed=tuple(range(2, 60)))
    doomed = [engine_of("process") for _ in range(2)]
    last = engine_of("thread")
    await asyncio.gather(*(client.ready() for client in (*doomed, last)))
    complete = await last.generate(
        s.GenerateRequest(id="complete", tokens=PROMPT, sampling=sampling)
    )
    stage = Stage()
    stage.ask(sampling)
    await settle()
    kept_tokens = 0
    for number, client in enumerate(doomed):
        watched = Watched(client, number + 1)
        stage.engines["e0"] = watched
        stage.start("e0", number, resume=number > 0)
        async with asyncio.timeout(60):
            await watched.reported.wait()
        if end == "killed":
            client.kill()
            await client.lost
        else:
            stage.abort("e0", number)
        await settle()
        assert kept_tokens < len(stage.turns._open.known) < LONG
        kept_tokens = len(stage.turns._open.known)
    stage.engines["e1"] = Watched(last, 1000)
    stage.start("e1", 2, resume=True)
    assert stage.task is not None
    answer = (await stage.task).result
    expected = (complete.tokens, complete.logprobs, complete.finish)
    assert (answer.tokens, answer.logprobs, answer.finish) == expected
    assert answer.versions == complete.versions == (s.VersionSpan(start=0, end=LONG, version=3),)
    assert kept_tokens <= answer.resumed_tokens < LONG
    (done,) = stage.of(e.TurnDone)
    assert (done.output_tokens, done.dispatch) == (LONG, 2)
    assert s.spans_cover(answer.versions, LONG)
    assert (
        msgspec.structs.replace(answer, tokens=()).resumed_tokens
        + (await last.stats()).output_tokens
        == 2 * LONG
    )
