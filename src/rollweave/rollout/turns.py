"""The agent's turns of one attempt: each is requested, dispatched to an engine by the
core, and answered once.

Invariants: one turn is open at a time, and each requested turn ends in `TurnDone`, in
`TurnWithdrawn`, or with its attempt; a command for another turn or dispatch changes
nothing; an abandoned turn generates nothing.

Where partial turns are kept (`progress`), a turn that is aborted, or whose engine is
lost, continues where it stood if the core permits. A turn that an engine refuses
restarts, since the partial output may be the reason for the refusal.

Where turns are recorded (`log`), engines report their tokens, too, and the turns of an
attempt that continues one of a lost controller begin with what is recorded.

A turn whose tokens an agent program reads while they are sampled (`streamed`) is kept
in every run, and its tokens are sent to the attempt's worker.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

import msgspec

from rollweave.engine.clients.base import Generates, Reranks
from rollweave.record.turn_log import (
    TurnAnswer,
    TurnLog,
    TurnTokens,
    context_digest,
)
from rollweave.rollout.chat.conversation import PLAN_TOKENS
from rollweave.rollout.partial import PartialTurn
from rollweave.rollout.progress import ProgressReporter
from rollweave.rollout.recorded import RecordedTurns, as_delta, replayed
from rollweave.schema.base import EngineId
from rollweave.schema.commands import AbortTurn, RerankTurn, StartInit, StartTurn
from rollweave.schema.errors import DiskError, EngineError, EngineLostError
from rollweave.schema.events import (
    Event,
    PrefillDone,
    TurnDone,
    TurnFailed,
    TurnRequested,
    TurnReturned,
    TurnWithdrawn,
)
from rollweave.schema.rollouts import AnswerTurn, StreamTurn, TurnAsked
from rollweave.schema.serving import (
    PROGRESS_S,
    STREAM_S,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PartialOutput,
    Sampling,
    TokenDelta,
    spans_cover,
)
from rollweave.schema.text import shortened
from rollweave.schema.work import Purpose, StopReason

LEAST_BUDGET_S = 1e-3
"""Smallest generation budget in seconds, used when an attempt has no time left: an
engine takes 0 as unbounded.
"""


ABORT_S = 2.0
"""Seconds that an engine has to answer an aborted turn with its partial output, which
it does between two steps. After that, the tokens that it has streamed are used.
"""


class Spans(Protocol):
    """Receives the durations of an attempt's phases; `record/trace.py` draws them."""

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        """Record one phase of the attempt `lane`."""

    def episode_over(self, lane: str) -> None:
        """Record that the attempt is over."""


@dataclasses.dataclass(slots=True)
class _OpenTurn:
    """The turn that has been requested and not answered.

    An engine samples it (`generating`), or is aborting it (`aborting`), or neither.
    `next` is dispatched once the abort has completed. With `prefilling`, the engine
    computes only the KV of its context.
    """

    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    budget_s: float
    routes_from: int = 0
    streamed: bool = False
    sent: int = 0
    """Number of tokens of `partial_turn` that the worker has."""
    dispatch: int = -1
    request_id: str = ""
    partial_turn: PartialTurn = dataclasses.field(default_factory=PartialTurn)
    generating: asyncio.Future[GenerateResult] | None = None
    aborting: asyncio.Future[GenerateResult] | None = None
    next: StartTurn | None = None
    context: bytes = b""
    """The digest of `tokens`, if turns are recorded."""
    answer: GenerateResult | None = None
    """The recorded answer of this turn."""
    recorded: PartialOutput | None = None
    """The recorded tokens with which this turn begins."""
    prefilling: bool = False

    def forget(self) -> None:
        """Stop the generation, if any, and discard its answer."""
        futures, self.generating, self.aborting, self.next = (
            (self.generating, self.aborting),
            None,
            None,
            None,
        )
        for future in futures:
            if future is not None:
                future.cancel()


@dataclasses.dataclass(slots=True, kw_only=True)
class Turns:
    """The turns of the attempt that `command` started. `engine` returns the live engine
    with an id, or None; `answer` sends answers and streamed tokens to the attempt's
    worker.

    With `progress`, partial turns are kept, and their progress is reported to it. Turns
    are recorded in `log`, and `recorded` are those of the attempt that this one
    continues.
    """

    command: StartInit
    engine: Callable[[EngineId], Generates | None]
    post: Callable[[Event], None]
    clock: Callable[[], float]
    spans: Spans
    answer: Callable[[AnswerTurn | StreamTurn], None]
    progress: ProgressReporter | None = None
    log: TurnLog | None = None
    recorded: RecordedTurns = dataclasses.field(default_factory=RecordedTurns)
    abort_s: float = ABORT_S
    reward: float = 0.0
    """The reward before the last turn that was requested."""
    plan: tuple[int, ...] = ()
    """The first tokens of the first turn."""
    last_failure: str = ""
    """Why the last turn failed that an engine did not answer."""
    _closed: bool = False
    _contexts: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Context and answer of each turn by number: of the last one, and of earlier ones
    as long as the worker may refer to them.
    """
    _open: _OpenTurn | None = None
    _done: TurnDone | None = None  # the last one
    _requests: int = 0

    @property
    def lane(self) -> str:
        """The attempt's name in the trace."""
        return f"{self.command.trajectory_id}/{self.command.attempt}"

    @property
    def known_context(self) -> tuple[int, ...] | None:
        """The tokens of the attempt that engines are known to have processed; None
        before the first turn begins.
        """
        turn = self._open
        if turn is not None and turn.request_id:
            partial = turn.partial_turn.partial
            return turn.tokens + (partial.tokens if partial is not None else ())
        return self._contexts[max(self._contexts)] if self._contexts else None

    # Called for the reports of the attempt's worker.

    def request(self, asked: TurnAsked) -> None:
        """Open a turn, and request it from the core."""
        if self._closed:
            return
        for number in [number for number in self._contexts if number < asked.base]:
            del self._contexts[number]
        context = self._contexts[asked.base][: asked.kept] if asked.kept else ()
        turn = self._open = _OpenTurn(
            number=asked.turn,
            tokens=context + asked.tokens,
            sampling=asked.sampling,
            budget_s=asked.budget_s,
            # no engine has processed the last token of the former answer
            routes_from=max(0, len(context) - 1),
            streamed=asked.streamed,
        )
        self.reward = asked.reward
        if self.log is not None:
            turn.context = context_digest(turn.tokens, turn.sampling)
        recorded = self.recorded.take(turn.number, turn.tokens, turn.sampling)
        if recorded is not None:
            turn.answer, turn.recorded = recorded.answer, recorded.partial
            turn.partial_turn = PartialTurn(turn.recorded)
        self._request(turn)

    def withdraw(self, number: int) -> None:
        """Close the open turn: an agent program has given up this call, or its prompt
        fits into no engine. A turn that is answered already stays answered.
        """
        if self._open is None or self._open.number != number:
            return
        self._leave(self._open)
        self.post(
            TurnWithdrawn(
                trajectory_id=self.command.trajectory_id,
                attempt=self.command.attempt,
                turn=number,
            )
        )

    def close(self) -> None:
        """Give up the open turn, if any, because the attempt ends; open no other."""
        self._closed = True
        if self._open is not None:
            self._leave(self._open)
        self._contexts.clear()

    def _leave(self, turn: _OpenTurn) -> None:
        self._open = None
        turn.forget()
        self._stop_reporting()

    # Called for the core's commands.

    def start(self, command: StartTurn) -> None:
        """Dispatch the open turn to an engine; a resumed turn waits until the previous
        engine has answered the abort.
        """
        turn = self._open
        if turn is None or turn.number != command.turn:
            self._repeat_answer(command)
            return
        if turn.generating is not None:
            if not _was_lost(turn.generating):
                return
            turn.generating = None  # the core has learned of the loss before this process
            self._stop_reporting()
        turn.dispatch = command.dispatch
        if turn.answer is not None:
            result = replayed(turn.answer, id=self.lane, context_tokens=len(turn.tokens))
            self._finish(turn, command, result, replay=True)
            return
        if not command.resume:
            turn.forget()
            turn.partial_turn, turn.sent = PartialTurn(turn.recorded), 0
        if turn.aborting is None:
            self._dispatch(turn, command)
        else:
            turn.next = command

    def _repeat_answer(self, command: StartTurn) -> None:
        """Post the answer again: the turn was answered while the core was giving it up.

        The core has received neither that answer nor the request that followed it.
        """
        if self._done is None or self._done.turn != command.turn:
            return  # the attempt has ended, which its own event reports
        self.post(msgspec.structs.replace(self._done, dispatch=command.dispatch))
        if self._open is not None and self._open.number != command.turn:
            self._request(self._open)

    def _request(self, turn: _OpenTurn) -> None:
        self.post(
            TurnRequested(
                trajectory_id=self.command.trajectory_id,
                attempt=self.command.attempt,
                turn=turn.number,
                context_tokens=len(turn.tokens),
                streamed=turn.streamed,
            )
        )

    def _dispatch(self, turn: _OpenTurn, command: StartTurn) -> None:
        backend = self.engine(command.engine_id)
        if backend is None:
            self._failed(command, "the engine is gone")
            return
        resumed = turn.partial_turn.partial
        self._requests += 1
        turn.request_id = f"{self.lane}/{turn.number}/{self._requests}"
        turn.prefilling = command.prefill
        if command.prefill:
            self._prefill(turn, command, backend, resumed)
            return
        known = turn.partial_turn = PartialTurn(resumed)
        if resumed is None:
            turn.sent = 0
        request = GenerateRequest(
            id=turn.request_id,
            tokens=turn.tokens,
            sampling=turn.sampling,
            rank=command.rank,
            budget_s=max(LEAST_BUDGET_S, turn.budget_s),
            resumed=resumed,
            routes_from=turn.routes_from,
        )
        started, progress = self.clock(), self.progress
        if resumed is not None:
            self._record_tokens(turn, as_delta(resumed, turn.request_id))

        def on_tokens(piece: TokenDelta) -> None:
            known.append(piece)
            if turn.partial_turn is not known:
                return
            if turn.streamed and self._open is turn:
                self._send_tokens(turn)
            if turn.generating is not None:
                self._record_tokens(turn, piece)
                if progress is not None:
                    progress.on_tokens(command, len(known))

        def done(future: asyncio.Future[GenerateResult]) -> None:
            if turn.generating is future:  # otherwise the turn was aborted or reset
                turn.generating = None
                self._stop_reporting()
                self._generated(turn, command, started, future, resumed)

        try:
            turn.generating = backend.generate(
                request,
                on_tokens if self._keeps(turn) or self.log is not None else None,
                report_s=STREAM_S if turn.streamed else PROGRESS_S,
            )
        except Exception as error:  # a request that cannot be sent fails only its turn
            self._failed(command, f"the request cannot be sent: {type(error).__name__}: {error}")
            return
        turn.generating.add_done_callback(done)

    def _prefill(
        self,
        turn: _OpenTurn,
        command: StartTurn,
        backend: Generates,
        resumed: PartialOutput | None,
    ) -> None:
        """Let the engine compute the KV of the context and of the tokens that the turn
        resumes. It also samples a token, which is discarded: the engine that then has
        the turn samples all of them.
        """
        request = GenerateRequest(
            id=turn.request_id,
            tokens=turn.tokens + (resumed.tokens if resumed is not None else ()),
            sampling=Sampling(max_tokens=1),
            rank=command.rank,
        )
        started = self.clock()

        def done(future: asyncio.Future[GenerateResult]) -> None:
            if turn.generating is not future or future.cancelled() or self._open is not turn:
                return
            turn.generating = None
            raised = future.exception()
            if isinstance(raised, EngineLostError):
                return  # `EngineLost` gives up all prompts of the engine at once
            if raised is not None:
                self._failed(command, str(raised))
                return
            result = future.result()
            if not result.tokens:
                self._failed(command, result.error or f"the engine returned {result.finish}")
                return
            self.post(
                PrefillDone(
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    turn=command.turn,
                    dispatch=command.dispatch,
                    cached_tokens=result.cached_tokens,
                )
            )
            with contextlib.suppress(DiskError):  # the next writer reports it
                name = f"prompt {turn.number} {command.engine_id}"
                self.spans.episode_span(self.lane, name, started, self.clock())

        try:
            turn.generating = backend.generate(request, None)
        except Exception as error:
            self._failed(command, f"the request cannot be sent: {type(error).__name__}: {error}")
            return
        turn.generating.add_done_callback(done)

    def abort(self, command: AbortTurn) -> None:
        """Abort the dispatch; the turn stays open.

        Where partial turns are kept, the engine's answer is what the turn resumes from.
        """
        turn = self._addressed(command)
        if turn is None:
            return
        turn.next = None
        backend, generating = self.engine(command.engine_id), turn.generating
        if generating is None:
            return
        self._stop_reporting()
        if backend is None or turn.prefilling or not self._keeps(turn):
            turn.forget()
            return
        turn.generating, turn.aborting = None, generating
        backend.abort(turn.request_id)
        deadline = asyncio.get_running_loop().call_later(self.abort_s, generating.cancel)

        def aborted(future: asyncio.Future[GenerateResult]) -> None:
            deadline.cancel()
            raised = None if future.cancelled() else future.exception()
            if turn.aborting is not future:
                return  # the turn has been reset
            turn.aborting = None
            if raised is not None and not isinstance(raised, EngineLostError):
                turn.partial_turn = PartialTurn()
            elif raised is None and not future.cancelled():
                turn.partial_turn.finish(future.result())
            following, turn.next = turn.next, None
            if following is not None:
                self._dispatch(turn, following)

        generating.add_done_callback(aborted)

    def rerank(self, command: RerankTurn) -> None:
        """Pass the new rank to the engine, if ranks can change there."""
        turn, backend = self._addressed(command), self.engine(command.engine_id)
        if turn is None or backend is None:
            return
        if turn.generating is not None:
            if isinstance(backend, Reranks):
                backend.rerank(turn.request_id, command.rank)
        elif turn.next is not None:
            turn.next = msgspec.structs.replace(turn.next, rank=command.rank)

    def _record_tokens(self, turn: _OpenTurn, delta: TokenDelta) -> None:
        if self.log is not None:
            self.log.append(
                TurnTokens(
                    trajectory_id=self.command.trajectory_id,
                    attempt=self.command.attempt,
                    turn=turn.number,
                    context=turn.context,
                    delta=delta,
                )
            )

    def _record_answer(self, turn: _OpenTurn, result: GenerateResult) -> None:
        if self.log is not None:
            self.log.append(
                TurnAnswer(
                    trajectory_id=self.command.trajectory_id,
                    attempt=self.command.attempt,
                    turn=turn.number,
                    context=turn.context,
                    result=result,
                )
            )

    def _keeps(self, turn: _OpenTurn) -> bool:
        """Return whether the turn can continue after the tokens so far."""
        return turn.streamed or self.progress is not None

    def _send_tokens(self, turn: _OpenTurn) -> None:
        """Send the worker the tokens that it lacks."""
        delta = turn.partial_turn.since(turn.sent)
        if delta is None:
            return
        turn.sent = delta.start + len(delta.tokens)
        self.answer(
            StreamTurn(
                trajectory_id=self.command.trajectory_id,
                attempt=self.command.attempt,
                turn=turn.number,
                delta=delta,
            )
        )

    def _stop_reporting(self) -> None:
        if self.progress is not None:
            self.progress.remove(self.command.trajectory_id)

    def _addressed(self, command: AbortTurn | RerankTurn) -> _OpenTurn | None:
        """Return the open turn if the command addresses it and its latest dispatch."""
        turn = self._open
        named = turn is not None and (turn.number, turn.dispatch) == (
            command.turn,
            command.dispatch,
        )
        return turn if named else None

    def _generated(
        self,
        turn: _OpenTurn,
        command: StartTurn,
        started: float,
        future: asyncio.Future[GenerateResult],
        resumed: PartialOutput | None,
    ) -> None:
        """Handle the engine's answer, its refusal, or its loss."""
        if future.cancelled() or self._open is not turn:
            return
        raised = future.exception()
        if isinstance(raised, EngineLostError):
            return  # `EngineLost` fails all turns of the engine at once
        if isinstance(raised, EngineError):
            turn.partial_turn, turn.recorded = PartialTurn(), None
            self._failed(command, str(raised))
            return
        result = future.result()
        if result.finish is FinishReason.TIME:
            text = f"the active time ran out in turn {turn.number}"
            self._leave(turn)
            self._answer(command, stop=StopReason.TIME_BUDGET, error=text)
            return
        if result.finish is FinishReason.REFUSED:
            self.withdraw(turn.number)
            self._answer(command, result=result)
            return
        if result.finish is FinishReason.RETURNED:
            turn.partial_turn.finish(result)
            self.post(
                TurnReturned(
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    turn=command.turn,
                    dispatch=command.dispatch,
                )
            )
            return
        flaw = _result_error(result, resumed)
        if flaw:
            if result.finish is FinishReason.ABORTED:
                turn.partial_turn.finish(result)
            else:
                turn.partial_turn, turn.recorded = PartialTurn(), None
            self._failed(command, flaw)
            return
        self._record_answer(turn, result)
        self._finish(turn, command, result)
        # No caller here can handle a trace that cannot be written: the next writer
        # reports the failure.
        with contextlib.suppress(DiskError):
            self.spans.episode_span(
                self.lane, f"turn {turn.number} {command.engine_id}", started, self.clock()
            )

    def _finish(
        self, turn: _OpenTurn, command: StartTurn, result: GenerateResult, *, replay: bool = False
    ) -> None:
        """Answer the turn. With `replay`, the answer is a recorded one."""
        self._leave(turn)
        self._contexts[turn.number] = turn.tokens + result.tokens
        self.plan = self.plan or result.tokens[:PLAN_TOKENS]
        limit = self.command.task.limits.max_turn_tokens
        self._done = TurnDone(
            trajectory_id=command.trajectory_id,
            attempt=command.attempt,
            turn=command.turn,
            dispatch=command.dispatch,
            output_tokens=len(result.tokens),
            cached_tokens=result.cached_tokens,
            version=result.versions[-1].version,
            queue_s=result.queue_s,
            cut=result.finish is FinishReason.LENGTH
            and turn.sampling.max_tokens == limit <= len(result.tokens),
            replayed=replay,
        )
        self.post(self._done)
        if self.command.purpose is not Purpose.TRAIN and result.routes is not None:
            result = msgspec.structs.replace(result, routes=None)
        self._answer(command, result=result)

    def _answer(
        self,
        command: StartTurn,
        *,
        result: GenerateResult | None = None,
        stop: StopReason | None = None,
        error: str = "",
    ) -> None:
        """Send the answer to the worker."""
        self.answer(
            AnswerTurn(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                engine_id=command.engine_id,
                result=result,
                stop=stop,
                error=error,
            )
        )

    def _failed(self, command: StartTurn, error: str) -> None:
        self.last_failure = shortened(error)
        self.post(
            TurnFailed(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                dispatch=command.dispatch,
                error=self.last_failure,
            )
        )


def _was_lost(future: asyncio.Future[GenerateResult]) -> bool:
    return (
        future.done() and not future.cancelled() and isinstance(future.exception(), EngineLostError)
    )


def _result_error(result: GenerateResult, resumed: PartialOutput | None) -> str:
    """Return what is wrong with an engine's answer, "" if nothing is."""
    if result.finish is FinishReason.ABORTED:
        return "the engine aborted the turn"
    if not result.tokens or len(result.tokens) != len(result.logprobs):
        return (
            f"the engine returned {len(result.tokens)} tokens with {len(result.logprobs)} log-probs"
        )
    prefix = resumed.tokens if resumed is not None and result.resumed_tokens else ()
    if result.resumed_tokens != len(prefix) or result.tokens[: len(prefix)] != prefix:
        return f"the engine continued other tokens than the {len(prefix)} that it was given"
    count = len(result.tokens)
    if not spans_cover(result.versions, count):
        return f"version spans must cover the engine's {count} tokens, got {result.versions}"
    if any(span.version < 0 for span in result.versions):
        return f"versions must be 0 or more in the engine's spans, got {result.versions}"
    return ""
