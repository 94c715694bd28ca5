"""The parts of turns: what is known of an unfinished turn, the recorded turns of an
attempt that was lost with its worker or its controller, and aspects, which only some
turns have beside the kernel of all turns (`rollout/turns`).

Invariants: the known part of a turn is a prefix of the turn, or empty. A delta that
does not continue the known part exactly, or that is inconsistent, makes the turn
unresumable for good: the turn is restarted rather than continued from wrong tokens
(Laminar §3.2, partial response pool). A recorded turn is used only for the context for
which it was sampled, and only with its first tokens up to the newest version that is
not lost; after a turn with another context, or a turn that is cut there, no later turn
is used. Whether an environment repeats itself thus decides how much is used, never what
is trained on.

The pool lives in the controller's memory. What a resumed run may use of it is also on
disk (`record/turn_log.py`).
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from rollweave.record.turn_log import TurnAnswer, TurnLog, TurnRecord, TurnTokens, context_digest
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import StartTurn
from rollweave.schema.errors import EngineLostError
from rollweave.schema.events import TURN_REPORT_INTERVAL_S, Event, TurnProgress, TurnsProgressed
from rollweave.schema.rollouts import StreamTurn
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PartialOutput,
    Sampling,
    TokenDelta,
    VersionSpan,
    spans_cover,
)

ABORT_S: Final = 2.0
"""Seconds that an engine has to answer an aborted turn with its partial output, which
it does between two steps. After that, the tokens that it has streamed are used.
"""


class PartialTurn:
    """One dispatch of a turn, which continues from `resumed`."""

    def __init__(self, resumed: PartialOutput | None = None) -> None:
        self._resumed = resumed.tokens if resumed is not None else ()
        self._tokens: list[int] = list(resumed.tokens) if resumed is not None else []
        self._logprobs: list[float] = list(resumed.logprobs) if resumed is not None else []
        self._versions: list[VersionSpan] = list(resumed.versions) if resumed is not None else []
        self._generate_s = resumed.generate_s if resumed is not None else 0.0
        self._broken = False

    def __len__(self) -> int:
        """Return the number of tokens from which the turn can be continued."""
        return 0 if self._broken else len(self._tokens)

    @property
    def partial(self) -> PartialOutput | None:
        """Return the output that another engine can continue, None if there is none."""
        if not len(self):
            return None
        return PartialOutput(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            generate_s=self._generate_s,
        )

    def since(self, start: int) -> TokenDelta | None:
        """Return the known tokens from position `start` on, None if there are none.
        Nothing but tokens and log-probs is in the delta.
        """
        if start >= len(self):
            return None
        return TokenDelta(
            id="",
            start=start,
            tokens=tuple(self._tokens[start:]),
            logprobs=tuple(self._logprobs[start:]),
            versions=(),
        )

    def append(self, delta: TokenDelta) -> None:
        """Append the tokens that the engine has reported."""
        end = delta.start + len(delta.tokens)
        fits = delta.start == len(self._tokens) and len(delta.tokens) == len(delta.logprobs)
        if (
            not fits
            or not spans_cover(delta.versions, end, start=delta.start)
            or not delta.generate_s >= self._generate_s
        ):
            self._broken = True
            return
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs
        for span in delta.versions:
            if self._versions and self._versions[-1].version == span.version:
                span = VersionSpan(
                    start=self._versions.pop().start, end=span.end, version=span.version
                )
            self._versions.append(span)
        self._generate_s = delta.generate_s

    def discard(self) -> None:
        """Make the turn unresumable."""
        self._broken = True

    def finish(self, result: GenerateResult) -> None:
        """Accept the answer of an engine that was requested to stop: all that it has
        sampled.

        It must extend the tokens that the engine has reported.
        """
        known = len(self._tokens)
        if (
            result.finish is FinishReason.ERROR
            or len(result.tokens) != len(result.logprobs)
            or result.tokens[:known] != tuple(self._tokens)
            or result.logprobs[:known] != tuple(self._logprobs)
            or not spans_cover(result.versions, len(result.tokens))
            or not result.generate_s >= 0
        ):
            self._broken = True
            return
        self._tokens, self._logprobs = list(result.tokens), list(result.logprobs)
        self._versions, self._generate_s = list(result.versions), result.generate_s

    def flaw_of(self, result: GenerateResult) -> str:
        """Return what is wrong with the engine's answer, "" if nothing is."""
        if result.finish is FinishReason.ABORTED:
            return "the engine aborted the turn"
        if not result.tokens or len(result.tokens) != len(result.logprobs):
            counts = f"{len(result.tokens)} tokens with {len(result.logprobs)} log-probs"
            return f"the engine returned {counts}"
        prefix = self._resumed if result.resumed_tokens else ()
        if result.resumed_tokens != len(prefix) or result.tokens[: len(prefix)] != prefix:
            return f"the engine continued other tokens than the {len(prefix)} that it was given"
        count = len(result.tokens)
        if not spans_cover(result.versions, count):
            return f"version spans must cover the engine's {count} tokens, got {result.versions}"
        if any(span.version < 0 for span in result.versions):
            return f"versions must be 0 or more in the engine's spans, got {result.versions}"
        return ""


class Resuming:
    """The aspect of a turn that can continue after the tokens so far: an abort waits
    for the engine's answer, which has all of them, and the next dispatch waits for the
    abort.
    """

    def __init__(self) -> None:
        self.aborting: asyncio.Future[GenerateResult] | None = None
        self.next: StartTurn | None = None
        """The command that waits for the abort."""

    def abort(
        self,
        generating: asyncio.Future[GenerateResult],
        known: PartialTurn,
        dispatch: Callable[[StartTurn], None],
    ) -> None:
        """Wait for the answer of an engine that was told to stop, then `dispatch` the
        command that waits, if any.
        """
        self.aborting = generating
        deadline = asyncio.get_running_loop().call_later(ABORT_S, generating.cancel)

        def aborted(future: asyncio.Future[GenerateResult]) -> None:
            deadline.cancel()
            if self.aborting is not future:
                return  # the turn has been reset
            self.aborting = None
            if not future.cancelled():
                raised = future.exception()
                if raised is None:
                    known.finish(future.result())
                elif not isinstance(raised, EngineLostError):
                    known.discard()
            following, self.next = self.next, None
            if following is not None:
                dispatch(following)

        generating.add_done_callback(aborted)

    def forget(self) -> None:
        """Discard the answer to an abort, and the command that waits for it."""
        aborting, self.aborting, self.next = self.aborting, None, None
        if aborting is not None:
            aborting.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as far as it is recorded: its answer, or the first tokens of it."""

    context: bytes = b""
    answer: GenerateResult | None = None
    partial: PartialOutput | None = None

    def __len__(self) -> int:
        known = self.answer or self.partial
        return len(known.tokens) if known is not None else 0


class RecordedTurns:
    """The usable turns of one attempt, by number."""

    def __init__(self, records: Iterable[TurnRecord] = (), *, version: int | None = -1) -> None:
        """`records` are in the order in which they were written; `version` is the
        newest one whose tokens may be used; None if all may.
        """
        self._turns = _assembled(records)
        for number in sorted(self._turns):
            turn = self._turns[number] = _up_to(self._turns[number], version)
            if turn.answer is None:
                self._drop(number if turn.partial is None else number + 1)
                break

    def __len__(self) -> int:
        return len(self._turns)

    def records(self, trajectory_id: TrajectoryId, attempt: int) -> Iterator[TurnRecord]:
        """Yield the turns as records of another attempt."""
        for number, turn in sorted(self._turns.items()):
            if turn.answer is not None:
                yield TurnAnswer(
                    trajectory_id=trajectory_id,
                    attempt=attempt,
                    turn=number,
                    context=turn.context,
                    result=turn.answer,
                )
            elif turn.partial is not None:
                yield TurnTokens(
                    trajectory_id=trajectory_id,
                    attempt=attempt,
                    turn=number,
                    context=turn.context,
                    delta=as_delta(turn.partial),
                )

    def take(
        self,
        number: int,
        context: tuple[int, ...],
        sampling: Sampling,
    ) -> RecordedTurn | None:
        """Return the recorded turn with this number, if it was sampled for this context
        in this way, and has at most `sampling.max_tokens` tokens.

        An answer that a lower limit cut is unfinished.
        """
        turn = self._turns.pop(number, None)
        if (
            turn is None
            or turn.context != context_digest(context, sampling)
            or len(turn) > sampling.max_tokens
        ):
            self._turns.clear()
            return None
        answer = turn.answer
        if (
            answer is not None
            and answer.finish is FinishReason.LENGTH
            and len(turn) < sampling.max_tokens
        ):
            return _first_tokens(turn.context, answer, answer.versions)
        return turn

    def _drop(self, first: int) -> None:
        self._turns = {number: turn for number, turn in self._turns.items() if number < first}


def as_delta(partial: PartialOutput, id: str = "") -> TokenDelta:
    """Return the tokens as those of the beginning of a turn."""
    return TokenDelta(
        id=id,
        start=0,
        tokens=partial.tokens,
        logprobs=partial.logprobs,
        versions=partial.versions,
        generate_s=partial.generate_s,
    )


def _assembled(records: Iterable[TurnRecord]) -> dict[int, RecordedTurn]:
    turns = dict[int, RecordedTurn]()
    unfinished = dict[int, tuple[bytes, PartialTurn]]()
    for record in records:
        number = record.turn
        if isinstance(record, TurnAnswer):
            unfinished.pop(number, None)
            turns[number] = RecordedTurn(context=record.context, answer=record.result)
            continue
        turns.pop(number, None)
        if record.delta.start == 0 or number not in unfinished:
            unfinished[number] = (record.context, PartialTurn())
        unfinished[number][1].append(record.delta)
    for number, (context, known) in unfinished.items():
        turns[number] = RecordedTurn(context=context, partial=known.partial)
    return turns


def _up_to(turn: RecordedTurn, version: int | None) -> RecordedTurn:
    """Cut the turn before its first token of a later version."""
    if version is None:
        return turn
    whole = turn.answer or turn.partial
    if whole is None or all(span.version <= version for span in whole.versions):
        return turn
    kept = list[VersionSpan]()
    for span in whole.versions:
        if span.version > version:
            break
        kept.append(span)
    if not kept:
        return RecordedTurn(context=turn.context)
    return _first_tokens(turn.context, whole, tuple(kept))


def _first_tokens(
    context: bytes, whole: GenerateResult | PartialOutput, versions: tuple[VersionSpan, ...]
) -> RecordedTurn:
    """Return the tokens that these versions sampled as an unfinished turn."""
    count = versions[-1].end
    partial = PartialOutput(
        tokens=whole.tokens[:count],
        logprobs=whole.logprobs[:count],
        versions=versions,
        generate_s=whole.generate_s * count / len(whole.tokens),
    )
    return RecordedTurn(context=context, partial=partial)


def replayed(result: GenerateResult, *, id: str, context_tokens: int) -> GenerateResult:
    """Return a recorded answer as that of the turn which repeats it."""
    return msgspec.structs.replace(
        result, id=id, cached_tokens=context_tokens, queue_s=0.0, preemptions=0, resumed_tokens=0
    )


def of_turn(command: StartTurn) -> dict[str, Any]:
    """Return the fields by which messages name the turn of a command."""
    return {
        "trajectory_id": command.trajectory_id,
        "attempt": command.attempt,
        "turn": command.turn,
    }


def of_dispatch(command: StartTurn) -> dict[str, Any]:
    """Return the fields by which events name the dispatch of a command."""
    return {**of_turn(command), "dispatch": command.dispatch}


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
        self._answer(StreamTurn(**of_turn(command), delta=lacking))


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
        self._log.append(TurnTokens(**of_turn(command), context=self._context, delta=delta))

    def on_result(self, command: StartTurn, result: GenerateResult) -> None:
        self._log.append(TurnAnswer(**of_turn(command), context=self._context, result=result))


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
        return TurnProgress(**of_dispatch(self._command), output_tokens=self._tokens)


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
