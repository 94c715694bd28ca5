"""The agent's turns of one attempt: each is requested, dispatched to an engine by the
core, and answered once.

Invariants: one turn is open at a time, and each requested turn ends in `TurnDone`, in
`TurnWithdrawn`, or with its attempt; a command for another turn or dispatch changes
nothing; an abandoned turn generates nothing.

This is the kernel of all turns. What a turn has beside it depends on the turn:
`Streaming` if an agent program reads the tokens while they are sampled, `Recording`
where turns are recorded, `Reporting` where partial turns are kept, and `Resuming` in
the first and the last case. A turn with `Resuming` that is aborted, or whose engine is
lost, continues where it stood if the core permits. A turn that an engine refuses
restarts, since the partial output may be the reason for the refusal.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

import msgspec

from rollweave.engine.clients.base import Generates, OnTokens, Reranks
from rollweave.record.turn_log import TurnLog, context_digest
from rollweave.rollout.driver import Spans
from rollweave.rollout.turn_parts import (
    Aspect,
    PartialTurn,
    ProgressReporter,
    RecordedTurn,
    RecordedTurns,
    Recording,
    Reporting,
    Resuming,
    Streaming,
    of_dispatch,
    of_turn,
    replayed,
)
from rollweave.schema.base import EngineId
from rollweave.schema.commands import AbortTurn, RerankTurn, StartInit, StartTurn
from rollweave.schema.errors import DiskError, EngineLostError
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
    Sampling,
    TokenDelta,
)
from rollweave.schema.text import shortened
from rollweave.schema.training import PROMPT_TOKENS
from rollweave.schema.work import Purpose, StopReason

PLAN_TOKENS = 64
"""Number of tokens of the first turn that represent the agent's plan."""

LEAST_BUDGET_S = 1e-3
"""Smallest generation budget in seconds, used when an attempt has no time left: an
engine takes 0 as unbounded.
"""


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenTurn:
    """The turn that has been requested and not answered. An engine computes it
    (`generating`), or none does.
    """

    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    budget_s: float
    routes_from: int
    streamed: bool
    recorded: RecordedTurn
    """The recorded part of this turn, with which the turn begins."""
    known: PartialTurn
    """The tokens that are sampled, as far as engines report them."""
    resuming: Resuming | None
    aspects: tuple[Aspect, ...]
    """The aspects of the turn, in the order in which their hooks are called."""
    dispatch: int = -1
    request_id: str = ""
    generating: asyncio.Future[GenerateResult] | None = None
    prefilling: bool = False
    """True if the engine computes only the KV of the context."""

    def stop(self) -> None:
        """Tell the aspects that no engine samples the turn any longer."""
        for aspect in self.aspects:
            aspect.on_stop()

    def forget(self) -> None:
        """Stop the generation, if any, and discard its answer."""
        generating, self.generating = self.generating, None
        if generating is not None:
            generating.cancel()
        if self.resuming is not None:
            self.resuming.forget()


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
    reward: float = 0.0
    """The reward before the last turn that was requested."""
    plan: tuple[int, ...] = ()
    """The first tokens of the first turn."""
    prompt: tuple[int, ...] = ()
    """The last tokens of the first prompt."""
    state: tuple[float, ...] = ()
    """The state of the last turn that was answered, if its engine gave one."""
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
            partial = turn.known.partial
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
        tokens = context + asked.tokens
        recorded = self.recorded.take(asked.turn, tokens, asked.sampling) or RecordedTurn()
        turn = self._open = _OpenTurn(
            number=asked.turn,
            tokens=tokens,
            sampling=asked.sampling,
            budget_s=asked.budget_s,
            # no engine has processed the last token of the former answer
            routes_from=max(0, len(context) - 1),
            streamed=asked.streamed,
            recorded=recorded,
            known=PartialTurn(recorded.partial),
            resuming=Resuming() if asked.streamed or self.progress is not None else None,
            aspects=self._aspects(asked, tokens),
        )
        self.reward, self.prompt = asked.reward, self.prompt or tokens[-PROMPT_TOKENS:]
        self._request(turn)

    def _aspects(self, asked: TurnAsked, tokens: tuple[int, ...]) -> tuple[Aspect, ...]:
        """Return the aspects that a turn needs, in the order of their hooks."""
        log, progress = self.log, self.progress
        aspects = (
            Streaming(self.answer) if asked.streamed else None,
            Recording(log, context_digest(tokens, asked.sampling)) if log is not None else None,
            Reporting(progress) if progress is not None else None,
        )
        return tuple(aspect for aspect in aspects if aspect is not None)

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
        turn.stop()

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
            turn.stop()
        turn.dispatch = command.dispatch
        if turn.recorded.answer is not None:
            result = replayed(turn.recorded.answer, id=self.lane, context_tokens=len(turn.tokens))
            self._finish(turn, command, result, replay=True)
            return
        if not command.resume:
            turn.forget()
            turn.known = PartialTurn(turn.recorded.partial)
        if turn.resuming is not None and turn.resuming.aborting is not None:
            turn.resuming.next = command
        else:
            self._dispatch(turn, command)

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
        self._requests += 1
        turn.request_id = f"{self.lane}/{turn.number}/{self._requests}"
        turn.prefilling, resumed = command.prefill, turn.known.partial
        if command.prefill:
            # An engine that computes a prompt also samples a token, which is discarded:
            # the engine that then has the turn samples all of them.
            tokens = turn.tokens + (resumed.tokens if resumed is not None else ())
            only = Sampling(max_tokens=1)
            request = GenerateRequest(
                id=turn.request_id, tokens=tokens, sampling=only, rank=command.rank
            )
            self._send(turn, command, backend, request, None)
            return
        request = GenerateRequest(
            id=turn.request_id,
            tokens=turn.tokens,
            sampling=turn.sampling,
            rank=command.rank,
            budget_s=max(LEAST_BUDGET_S, turn.budget_s),
            resumed=resumed,
            routes_from=turn.routes_from,
        )
        known = turn.known = PartialTurn(resumed)
        for aspect in turn.aspects:
            aspect.before_dispatch(command, request)

        def on_tokens(delta: TokenDelta) -> None:
            known.append(delta)
            if turn.known is known and turn.generating is not None:
                for aspect in turn.aspects:
                    aspect.on_tokens(command, delta, known)

        self._send(turn, command, backend, request, on_tokens if turn.aspects else None)

    def _send(
        self,
        turn: _OpenTurn,
        command: StartTurn,
        backend: Generates,
        request: GenerateRequest,
        on_tokens: OnTokens | None,
    ) -> None:
        """Send a request to the engine, and handle its answer, its refusal, or its
        loss.
        """
        started = self.clock()

        def done(future: asyncio.Future[GenerateResult]) -> None:
            if turn.generating is not future:
                return  # the turn was aborted or reset
            turn.generating = None
            turn.stop()
            if future.cancelled() or isinstance(future.exception(), EngineLostError):
                return  # `EngineLost` fails all turns of the engine at once
            refusal = future.exception()
            if refusal is None:
                handle = self._prefilled if command.prefill else self._sampled
                handle(turn, command, future.result(), started)
                return
            if not command.prefill:
                turn.known, turn.recorded = PartialTurn(), RecordedTurn()
            self._failed(command, str(refusal))

        report_s = STREAM_S if turn.streamed else PROGRESS_S
        try:
            turn.generating = backend.generate(request, on_tokens, report_s=report_s)
        except Exception as error:  # a request that cannot be sent fails only its turn
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
        generating, resuming = turn.generating, turn.resuming
        if resuming is not None:
            resuming.next = None
        if generating is None:
            return
        turn.stop()
        backend = self.engine(command.engine_id)
        if backend is None or turn.prefilling or resuming is None:
            turn.forget()
            return
        turn.generating = None
        backend.abort(turn.request_id)
        resuming.abort(generating, turn.known, lambda following: self._dispatch(turn, following))

    def rerank(self, command: RerankTurn) -> None:
        """Pass the new rank to the engine, if ranks can change there."""
        turn, backend = self._addressed(command), self.engine(command.engine_id)
        if turn is None or backend is None:
            return
        if turn.generating is not None:
            if isinstance(backend, Reranks):
                backend.rerank(turn.request_id, command.rank)
        elif turn.resuming is not None and turn.resuming.next is not None:
            turn.resuming.next = msgspec.structs.replace(turn.resuming.next, rank=command.rank)

    def _addressed(self, command: AbortTurn | RerankTurn) -> _OpenTurn | None:
        """Return the open turn if the command addresses it and its latest dispatch."""
        turn = self._open
        if turn is None or (turn.number, turn.dispatch) != (command.turn, command.dispatch):
            return None
        return turn

    def _prefilled(
        self, turn: _OpenTurn, command: StartTurn, result: GenerateResult, started: float
    ) -> None:
        """Handle the answer of an engine that has computed the prompt."""
        if not result.tokens:
            self._failed(command, result.error or f"the engine returned {result.finish}")
            return
        self.post(PrefillDone(**of_dispatch(command), cached_tokens=result.cached_tokens))
        self._record_span(f"prompt {turn.number} {command.engine_id}", started)

    def _sampled(
        self, turn: _OpenTurn, command: StartTurn, result: GenerateResult, started: float
    ) -> None:
        """Handle the answer of an engine that has sampled the turn, or a part of it."""
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
            turn.known.finish(result)
            self.post(
                TurnReturned(
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    turn=command.turn,
                    dispatch=command.dispatch,
                )
            )
            return
        flaw = turn.known.flaw_of(result)
        if flaw:
            if result.finish is FinishReason.ABORTED:
                turn.known.finish(result)
            else:
                turn.known, turn.recorded = PartialTurn(), RecordedTurn()
            self._failed(command, flaw)
            return
        for aspect in turn.aspects:
            aspect.on_result(command, result)
        self._finish(turn, command, result)
        self._record_span(f"turn {turn.number} {command.engine_id}", started)

    def _record_span(self, name: str, started: float) -> None:
        # No caller here can handle a trace that cannot be written: the next writer
        # reports the failure.
        with contextlib.suppress(DiskError):
            self.spans.episode_span(self.lane, name, started, self.clock())

    def _finish(
        self, turn: _OpenTurn, command: StartTurn, result: GenerateResult, *, replay: bool = False
    ) -> None:
        """Answer the turn. With `replay`, the answer is a recorded one."""
        self._leave(turn)
        self._contexts[turn.number] = turn.tokens + result.tokens
        self.plan, self.state = self.plan or result.tokens[:PLAN_TOKENS], result.state
        limit = self.command.task.limits.max_turn_tokens
        self._done = TurnDone(
            **of_dispatch(command),
            output_tokens=len(result.tokens),
            cached_tokens=result.cached_tokens,
            version=result.versions[-1].version,
            queue_s=result.queue_s,
            cut=result.finish is FinishReason.LENGTH
            and turn.sampling.max_tokens == limit <= len(result.tokens),
            replayed=replay,
        )
        self.post(self._done)
        routes = result.routes if self.command.purpose is Purpose.TRAIN else None
        self._answer(command, result=msgspec.structs.replace(result, routes=routes, state=()))

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
                **of_turn(command),
                engine_id=command.engine_id,
                result=result,
                stop=stop,
                error=error,
            )
        )

    def _failed(self, command: StartTurn, error: str) -> None:
        self.last_failure = shortened(error)
        self.post(TurnFailed(**of_dispatch(command), error=self.last_failure))


def _was_lost(future: asyncio.Future[GenerateResult]) -> bool:
    return (
        future.done() and not future.cancelled() and isinstance(future.exception(), EngineLostError)
    )
