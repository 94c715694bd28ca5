"""Aspects are what only some turns have beside the kernel of all turns
(`rollout/turns`). An aspect belongs to one turn.
"""

import asyncio
from collections.abc import Callable

from rollweave.record.turn_log import TurnAnswer, TurnLog, TurnTokens
from rollweave.rollout.turns.recorded import as_delta
from rollweave.rollout.turns.resuming import PartialTurn
from rollweave.schema.commands import StartTurn
from rollweave.schema.events import TURN_REPORT_INTERVAL_S, Event, TurnProgress, TurnsProgressed
from rollweave.schema.rollouts import StreamTurn
from rollweave.schema.serving import GenerateRequest, GenerateResult, TokenDelta


class Aspect:
    """The hooks of an aspect, which do nothing by default. `command` is the one that
    gave the turn to its engine. No hook is called for a dispatch that only computes the
    turn's prompt, except `on_stop`.
    """

    def before_dispatch(self, command: StartTurn, request: GenerateRequest) -> None:
        """Called before the request is sent to the engine."""

    def on_tokens(self, command: StartTurn, delta: TokenDelta, known: PartialTurn) -> None:
        """Called when the engine has reported tokens, which `known` has already."""

    def on_result(self, command: StartTurn, result: GenerateResult) -> None:
        """Called with a valid answer, before the turn is answered."""

    def on_stop(self) -> None:
        """Called when no engine computes the turn any longer."""


class Streaming(Aspect):
    """Sends the tokens to the attempt's worker: an agent program reads them while they
    are sampled.
    """

    def __init__(self, answer: Callable[[StreamTurn], None]) -> None:
        self._answer = answer
        self._sent = 0
        """Number of tokens of the turn that the worker has."""

    def before_dispatch(self, command: StartTurn, request: GenerateRequest) -> None:
        kept = len(request.resumed.tokens) if request.resumed is not None else 0
        self._sent = min(self._sent, kept)

    def on_tokens(self, command: StartTurn, delta: TokenDelta, known: PartialTurn) -> None:
        lacking = known.since(self._sent)
        if lacking is None:
            return
        self._sent = len(known)
        self._answer(
            StreamTurn(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                delta=lacking,
            )
        )


class Recording(Aspect):
    """Records the turn in the log, under the digest of its context, for an attempt that
    continues this one if its worker or the controller is lost.
    """

    def __init__(self, log: TurnLog, context: bytes) -> None:
        self._log, self._context = log, context

    def before_dispatch(self, command: StartTurn, request: GenerateRequest) -> None:
        if request.resumed is not None:
            self._append(command, as_delta(request.resumed, request.id))

    def on_tokens(self, command: StartTurn, delta: TokenDelta, known: PartialTurn) -> None:
        self._append(command, delta)

    def _append(self, command: StartTurn, delta: TokenDelta) -> None:
        self._log.append(
            TurnTokens(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                context=self._context,
                delta=delta,
            )
        )

    def on_result(self, command: StartTurn, result: GenerateResult) -> None:
        self._log.append(
            TurnAnswer(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                context=self._context,
                result=result,
            )
        )


class Reporting(Aspect):
    """Counts the tokens of the turn for the reporter."""

    def __init__(self, reporter: "ProgressReporter") -> None:
        self._reporter = reporter

    def before_dispatch(self, command: StartTurn, request: GenerateRequest) -> None:
        self._command, self._tokens, self._reported, self._is_long = command, 0, 0, False

    def on_tokens(self, command: StartTurn, delta: TokenDelta, known: PartialTurn) -> None:
        self._tokens = len(known)
        self._reporter.add(self)

    def on_stop(self) -> None:
        self._reporter.remove(self)

    def progress(self) -> TurnProgress | None:
        """Return the progress of a long turn since the last call, None if none."""
        is_long, self._is_long = self._is_long, True
        if not is_long or self._tokens <= self._reported:
            return None
        self._reported = self._tokens
        return TurnProgress(
            trajectory_id=self._command.trajectory_id,
            attempt=self._command.attempt,
            turn=self._command.turn,
            dispatch=self._command.dispatch,
            output_tokens=self._tokens,
        )


class ProgressReporter:
    """Tracks the turns that engines are sampling, and posts one event per interval if
    any of them has progressed.

    The core needs the numbers only to know which trajectory holds how much KV, and the
    journal stores every report. So a turn is reported from the second interval on, at
    most once per interval, and only if it has progressed.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._turns: dict[Reporting, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, turn: Reporting) -> None:
        """Track a turn of which an engine has sampled tokens."""
        self._turns[turn] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_REPORT_INTERVAL_S, self.report)

    def remove(self, turn: Reporting) -> None:
        """Stop tracking a turn: no engine is sampling it."""
        self._turns.pop(turn, None)

    def report(self) -> None:
        """Post the progress since the last report; called every
        `TURN_REPORT_INTERVAL_S` while there are turns.
        """
        self._timer = (
            asyncio.get_running_loop().call_later(TURN_REPORT_INTERVAL_S, self.report)
            if self._turns
            else None
        )
        turns = [progress for turn in self._turns if (progress := turn.progress()) is not None]
        if turns:
            self._post(TurnsProgressed(turns=tuple(turns)))
