"""The agent's turns of one attempt: asked for, given to an engine when the core says so, answered once.

Invariants: one turn is open at a time, and each that was asked for ends in `TurnDone`, in `TurnWithdrawn`, or with its
attempt; a command that means another turn or try changes nothing; a turn that nobody waits for generates nothing.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Protocol

from rollweave.backends.base import EngineBackend
from rollweave.rollout.budget import EpisodeStopError
from rollweave.rollout.driver import Answer
from rollweave.schema.base import EngineId
from rollweave.schema.commands import AbortTurn, RerankTurn, StartInit, StartTurn
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.events import Event, TurnDone, TurnFailed, TurnRequested, TurnWithdrawn
from rollweave.schema.serving import Finish, GenerateRequest, GenerateResult, Sampling
from rollweave.schema.work import Purpose, StopReason

LEAST_BUDGET_S = 1e-3
"""Seconds that a turn may be generated whose attempt has none left: the engine takes 0 for no bound."""


class Spans(Protocol):
    """Where the pipeline says how long things took; `record/trace.py` draws it."""

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        """One phase of the attempt `lane`."""

    def episode_over(self, lane: str) -> None:
        """The attempt is over."""


@dataclasses.dataclass(slots=True)
class _Open:
    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    answer: asyncio.Future[Answer]
    try_number: int = -1
    generating: asyncio.Future[GenerateResult] | None = None

    def forget(self) -> None:
        """Stop the generation, if any; its answer is not wanted."""
        generating, self.generating = self.generating, None
        if generating is not None:
            generating.cancel()


@dataclasses.dataclass(slots=True, kw_only=True)
class Turns:
    """`TurnPort` of the attempt `command`. `engine` finds an engine's living process; `budget_s` says what is left."""

    command: StartInit
    engine: Callable[[EngineId], EngineBackend | None]
    post: Callable[[Event], None]
    clock: Callable[[], float]
    spans: Spans
    budget_s: Callable[[], float]
    spoken: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The context of the last turn, and what was sampled in it."""
    ending: bool = False
    """The attempt is being cancelled: nobody has to hear of its open turn."""
    _open: _Open | None = None

    @property
    def lane(self) -> str:
        """The attempt's name in the trace."""
        return f"{self.command.trajectory_id}/{self.command.attempt}"

    # The attempt's side.

    async def turn(self, number: int, tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        turn = self._open = _Open(number=number, tokens=tokens, sampling=sampling, answer=answer)
        name, attempt = self.command.trajectory_id, self.command.attempt
        self.post(TurnRequested(trajectory_id=name, attempt=attempt, turn=number, context_tokens=len(tokens)))
        try:
            return await answer
        except asyncio.CancelledError:
            if not self.ending and answer.cancelled():  # an agent program has given up this call, and goes on
                self.post(TurnWithdrawn(trajectory_id=name, attempt=attempt, turn=number))
            raise
        finally:
            self._open = None
            turn.forget()

    def stepped(self, name: str, start: float, end: float) -> None:
        self.spans.episode_span(self.lane, name, start, end)

    # The core's side.

    def start(self, command: StartTurn) -> None:
        """Give the open turn to an engine."""
        turn = self._open
        if turn is None or turn.number != command.turn or turn.generating is not None:
            return  # the attempt has ended meanwhile, and has said so
        turn.try_number = command.try_number
        backend = self.engine(command.engine_id)
        if backend is None:
            self._failed(command, "the engine is gone")
            return
        request = GenerateRequest(
            id=_request_id(command),
            tokens=turn.tokens,
            sampling=turn.sampling,
            rank=command.rank,
            budget_s=max(LEAST_BUDGET_S, self.budget_s()),
        )
        generating = turn.generating = backend.generate(request)
        started = self.clock()

        def done(future: asyncio.Future[GenerateResult]) -> None:
            if turn.generating is future:  # else aborted, and forgotten
                turn.generating = None
                self._generated(turn, command, started, future)

        generating.add_done_callback(done)

    def abort(self, command: AbortTurn) -> None:
        """Its answer is not wanted any more; the turn stays open."""
        turn = self._meant(command)
        if turn is not None:
            turn.forget()

    def rerank(self, command: RerankTurn) -> None:
        """Tell the engine."""
        turn, backend = self._meant(command), self.engine(command.engine_id)
        if turn is not None and turn.generating is not None and backend is not None:
            backend.rerank(_request_id(command), command.rank)

    def _meant(self, command: AbortTurn | RerankTurn) -> _Open | None:
        """The open turn, if the command means it and its latest try."""
        turn = self._open
        named = turn is not None and (turn.number, turn.try_number) == (command.turn, command.try_number)
        return turn if named else None

    def _generated(self, turn: _Open, command: StartTurn, started: float, future: asyncio.Future[GenerateResult]) -> None:
        """The engine answered, refused, or is lost."""
        if future.cancelled() or turn.answer.done():
            return
        raised = future.exception()
        if isinstance(raised, EngineLostError):
            return  # EngineLost fails all turns of the engine at once
        if isinstance(raised, EngineError):
            self._failed(command, str(raised))
            return
        result = future.result()
        if result.finish is Finish.TIME:
            text = f"the active time ran out in turn {turn.number}"
            turn.answer.set_exception(EpisodeStopError(StopReason.TIME_BUDGET, text))
            return
        flaw = _flaw(result, self.command.purpose)
        if flaw:
            self._failed(command, flaw)
            return
        self.spoken = (turn.tokens, result.tokens)
        self.post(
            TurnDone(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                try_number=command.try_number,
                output_tokens=len(result.tokens),
                cached_tokens=result.cached_tokens,
                version=result.versions[-1].version,
                queue_s=result.queue_s,
            )
        )
        turn.answer.set_result(Answer(result=result, engine_id=command.engine_id))
        # Last: where the trace cannot be written the turn is answered all the same.
        self.spans.episode_span(self.lane, f"turn {turn.number} {command.engine_id}", started, self.clock())

    def _failed(self, command: StartTurn, error: str) -> None:
        self.post(
            TurnFailed(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                try_number=command.try_number,
                error=error,
            )
        )


def _request_id(command: StartTurn | RerankTurn) -> str:
    return f"{command.trajectory_id}/{command.attempt}/{command.turn}/{command.try_number}"


def _flaw(result: GenerateResult, purpose: Purpose) -> str:
    """What is wrong with an engine's answer, or ""."""
    if result.finish is Finish.ABORTED:
        return "the engine aborted the turn"
    if result.text_only and purpose is Purpose.TRAIN:
        return "the engine gives text only, without its tokens and log-probs: it serves evaluation, never training"
    if not result.tokens or len(result.tokens) != len(result.logprobs):
        return f"the engine answered {len(result.tokens)} tokens with {len(result.logprobs)} log-probs"
    position = 0
    for span in result.versions:
        if span.start != position or span.end <= span.start or span.version < 0:
            return f"the engine's version spans are broken: {result.versions}"
        position = span.end
    if position != len(result.tokens):
        return f"the engine's version spans cover {position} of {len(result.tokens)} tokens"
    return ""
