"""The agent's turns of one attempt: asked for, given to an engine when the core says
so, answered once.

Invariants: one turn is open at a time, and each that was asked for ends in `TurnDone`,
in `TurnWithdrawn`, or with its attempt; a command that means another turn or try
changes nothing; a turn that nobody waits for generates nothing.

Where unfinished turns are kept (`telling`), an engine tells of them as they come. One
that is aborted, or whose engine is lost, then goes on where it stood if the core says
that it may. One that an engine refuses begins again: what it was to go on from may be
the reason.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol

import msgspec

from rollweave.engine.clients.base import EngineBackend
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.driver import Answer
from rollweave.rollout.partial import Unfinished
from rollweave.rollout.telling import Telling
from rollweave.schema.base import EngineId
from rollweave.schema.commands import AbortTurn, RerankTurn, StartInit, StartTurn
from rollweave.schema.errors import DiskError, EngineError, EngineLostError
from rollweave.schema.events import Event, TurnDone, TurnFailed, TurnRequested, TurnWithdrawn
from rollweave.schema.serving import (
    Finish,
    GenerateRequest,
    GenerateResult,
    Partial,
    Piece,
    Sampling,
)
from rollweave.schema.text import shortened
from rollweave.schema.work import Purpose, StopReason

LEAST_BUDGET_S = 1e-3
"""Seconds that a turn may be generated whose attempt has none left: the engine takes 0
for no bound.
"""


ABORT_S = 2.0
"""Seconds that an engine has to answer an aborted turn with what there is: it does so
between two steps. Then what it has told must do.
"""


class Spans(Protocol):
    """Where the pipeline says how long things took; `record/trace.py` draws it."""

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        """One phase of the attempt `lane`."""

    def episode_over(self, lane: str) -> None:
        """The attempt is over."""


@dataclasses.dataclass(slots=True)
class _Open:
    """The turn is with an engine (`generating`), or leaves one (`leaving`), or neither.

    `next` waits until it has left.
    """

    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    answer: asyncio.Future[Answer]
    dispatch: int = -1
    request_id: str = ""
    known: Unfinished = dataclasses.field(default_factory=Unfinished)
    generating: asyncio.Future[GenerateResult] | None = None
    leaving: asyncio.Future[GenerateResult] | None = None
    next: StartTurn | None = None

    def forget(self) -> None:
        """Stop the generation, if any; its answer is not wanted."""
        futures, self.generating, self.leaving, self.next = (
            (self.generating, self.leaving),
            None,
            None,
            None,
        )
        for future in futures:
            if future is not None:
                future.cancel()


@dataclasses.dataclass(slots=True, kw_only=True)
class Turns:
    """`TurnPort` of the attempt `command`. `engine` finds an engine's living process;
    `budget_s` says what is left.

    With `telling`, unfinished turns are kept, and it hears how far they have come.
    """

    command: StartInit
    engine: Callable[[EngineId], EngineBackend | None]
    post: Callable[[Event], None]
    clock: Callable[[], float]
    spans: Spans
    budget_s: Callable[[], float]
    telling: Telling | None = None
    abort_s: float = ABORT_S
    spoken: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The context of the last turn, and what was sampled in it."""
    ending: bool = False
    """The attempt is being cancelled: nobody has to hear of its open turn."""
    _open: _Open | None = None
    _done: TurnDone | None = None  # the last one
    _requests: int = 0

    @property
    def lane(self) -> str:
        """The attempt's name in the trace."""
        return f"{self.command.trajectory_id}/{self.command.attempt}"

    @property
    def seen(self) -> tuple[int, ...] | None:
        """All that engines have seen of the attempt, as far as it is known.

        None before the first turn's beginning.
        """
        turn = self._open
        over = turn is not None and self.spoken is not None and self.spoken[0] is turn.tokens
        if turn is not None and turn.request_id and not over:
            partial = turn.known.partial
            return turn.tokens + (partial.tokens if partial is not None else ())
        return sum(self.spoken, ()) if self.spoken is not None else None

    # The attempt's side.

    async def turn(self, number: int, tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        turn = self._open = _Open(number=number, tokens=tokens, sampling=sampling, answer=answer)
        name, attempt = self.command.trajectory_id, self.command.attempt
        self._ask(turn)
        try:
            return await answer
        except asyncio.CancelledError:
            # an agent program has given up this call, and goes on
            if not self.ending and answer.cancelled():
                self.post(TurnWithdrawn(trajectory_id=name, attempt=attempt, turn=number))
            raise
        finally:
            self._open = None
            turn.forget()
            self._left()

    def stepped(self, name: str, start: float, end: float) -> None:
        self.spans.episode_span(self.lane, name, start, end)

    # The core's side.

    def start(self, command: StartTurn) -> None:
        """Give the open turn to an engine; where it resumes, once the engine before has
        let go of it.
        """
        turn = self._open
        if turn is None or turn.number != command.turn or turn.answer.done():
            self._say_again(command)
            return
        if turn.generating is not None:
            if not _was_lost(turn.generating):
                return
            turn.generating = None  # the core has heard of its loss before we have
            self._left()
        turn.dispatch = command.dispatch
        if not command.resume:
            turn.forget()
            turn.known = Unfinished()
        if turn.leaving is None:
            self._give(turn, command)
        else:
            turn.next = command

    def _say_again(self, command: StartTurn) -> None:
        """The turn was answered as the core gave it up: it has not heard that, nor what
        the attempt has asked for since.
        """
        if self._done is None or self._done.turn != command.turn:
            return  # the attempt has ended meanwhile, and has said so
        self.post(msgspec.structs.replace(self._done, dispatch=command.dispatch))
        if self._open is not None and self._open.number != command.turn:
            self._ask(self._open)

    def _ask(self, turn: _Open) -> None:
        self.post(
            TurnRequested(
                trajectory_id=self.command.trajectory_id,
                attempt=self.command.attempt,
                turn=turn.number,
                context_tokens=len(turn.tokens),
            )
        )

    def _give(self, turn: _Open, command: StartTurn) -> None:
        backend = self.engine(command.engine_id)
        if backend is None:
            self._failed(command, "the engine is gone")
            return
        resumed = turn.known.partial
        known = turn.known = Unfinished(resumed)
        self._requests += 1
        turn.request_id = f"{self.lane}/{turn.number}/{self._requests}"
        request = GenerateRequest(
            id=turn.request_id,
            tokens=turn.tokens,
            sampling=turn.sampling,
            rank=command.rank,
            budget_s=max(LEAST_BUDGET_S, self.budget_s()),
            resumed=resumed,
        )
        started, telling = self.clock(), self.telling

        def heard(piece: Piece) -> None:
            known.hear(piece)
            if telling is not None and turn.known is known and turn.generating is not None:
                telling.turn_told(command, len(known))

        def done(future: asyncio.Future[GenerateResult]) -> None:
            if turn.generating is future:  # else aborted, and forgotten
                turn.generating = None
                self._left()
                self._generated(turn, command, started, future, resumed)

        try:
            turn.generating = backend.generate(request, heard if telling is not None else None)
        except Exception as error:  # a request that cannot be sent fails its turn, not all others
            self._failed(command, f"the request cannot be sent: {type(error).__name__}: {error}")
            return
        turn.generating.add_done_callback(done)

    def abort(self, command: AbortTurn) -> None:
        """The turn stays open.

        Where it is kept, the engine's answer is what it is resumed from.
        """
        turn = self._meant(command)
        if turn is None:
            return
        turn.next = None
        backend, generating = self.engine(command.engine_id), turn.generating
        if generating is None:
            return
        self._left()
        if self.telling is None or backend is None:
            turn.forget()
            return
        turn.generating, turn.leaving = None, generating
        backend.abort(turn.request_id)
        late = asyncio.get_running_loop().call_later(self.abort_s, generating.cancel)

        def left(future: asyncio.Future[GenerateResult]) -> None:
            late.cancel()
            raised = None if future.cancelled() else future.exception()
            if turn.leaving is not future:
                return  # forgotten
            turn.leaving = None
            if raised is not None and not isinstance(raised, EngineLostError):
                turn.known = Unfinished()
            elif raised is None and not future.cancelled():
                turn.known.end(future.result())
            following, turn.next = turn.next, None
            if following is not None:
                self._give(turn, following)

        generating.add_done_callback(left)

    def rerank(self, command: RerankTurn) -> None:
        """Tell the engine."""
        turn, backend = self._meant(command), self.engine(command.engine_id)
        if turn is None or backend is None:
            return
        if turn.generating is not None:
            backend.rerank(turn.request_id, command.rank)
        elif turn.next is not None:
            turn.next = msgspec.structs.replace(turn.next, rank=command.rank)

    def _left(self) -> None:
        if self.telling is not None:
            self.telling.turn_left(self.command.trajectory_id)

    def _meant(self, command: AbortTurn | RerankTurn) -> _Open | None:
        """The open turn, if the command means it and its latest try."""
        turn = self._open
        named = turn is not None and (turn.number, turn.dispatch) == (
            command.turn,
            command.dispatch,
        )
        return turn if named else None

    def _generated(
        self,
        turn: _Open,
        command: StartTurn,
        started: float,
        future: asyncio.Future[GenerateResult],
        resumed: Partial | None,
    ) -> None:
        """The engine answered, refused, or is lost."""
        if future.cancelled() or turn.answer.done():
            return
        raised = future.exception()
        if isinstance(raised, EngineLostError):
            return  # EngineLost fails all turns of the engine at once
        if isinstance(raised, EngineError):
            turn.known = Unfinished()
            self._failed(command, str(raised))
            return
        result = future.result()
        if result.finish is Finish.TIME:
            text = f"the active time ran out in turn {turn.number}"
            turn.answer.set_exception(EpisodeStopError(StopReason.TIME_BUDGET, text))
            return
        flaw = _flaw(result, self.command.purpose, resumed)
        if flaw:
            if result.finish is Finish.ABORTED:
                turn.known.end(result)
            else:
                turn.known = Unfinished()
            self._failed(command, flaw)
            return
        self.spoken = (turn.tokens, result.tokens)
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
            cut=result.finish is Finish.LENGTH
            and turn.sampling.max_tokens == limit <= len(result.tokens),
        )
        self.post(self._done)
        turn.answer.set_result(Answer(result=result, engine_id=command.engine_id))
        # A trace that cannot be written is told by whoever writes next: here is nobody
        # to tell.
        with contextlib.suppress(DiskError):
            self.spans.episode_span(
                self.lane, f"turn {turn.number} {command.engine_id}", started, self.clock()
            )

    def _failed(self, command: StartTurn, error: str) -> None:
        self.post(
            TurnFailed(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                dispatch=command.dispatch,
                error=shortened(error),
            )
        )


def _was_lost(future: asyncio.Future[GenerateResult]) -> bool:
    return (
        future.done() and not future.cancelled() and isinstance(future.exception(), EngineLostError)
    )


def _flaw(result: GenerateResult, purpose: Purpose, resumed: Partial | None) -> str:
    """What is wrong with an engine's answer, or ""."""
    if result.finish is Finish.ABORTED:
        return "the engine aborted the turn"
    if result.text_only and purpose is Purpose.TRAIN:
        return (
            "the engine gives text only, without its tokens and log-probs: it serves evaluation, "
            "never training"
        )
    if not result.tokens or len(result.tokens) != len(result.logprobs):
        return (
            f"the engine answered {len(result.tokens)} tokens with {len(result.logprobs)} log-probs"
        )
    given = resumed.tokens if resumed is not None and result.resumed_tokens else ()
    if result.resumed_tokens != len(given) or result.tokens[: len(given)] != given:
        return f"the engine went on from other tokens than the {len(given)} that it was given"
    position = 0
    for span in result.versions:
        if span.start != position or span.end <= span.start or span.version < 0:
            return f"the engine's version spans are broken: {result.versions}"
        position = span.end
    if position != len(result.tokens):
        return f"the engine's version spans cover {position} of {len(result.tokens)} tokens"
    return ""
