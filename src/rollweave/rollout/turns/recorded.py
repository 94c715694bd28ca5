"""The recorded turns of an attempt that was lost with its worker or its controller, for
the attempt that continues it.

Invariants: a recorded turn is used only for the context for which it was sampled, and
only with its first tokens up to the newest version that is not lost; after a turn with
another context, or one that is cut there, no later turn is used. Whether an environment
repeats itself thus decides how much is used, never what is trained on.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import msgspec

from rollweave.record.turn_log import TurnAnswer, TurnRecord, TurnTokens, context_digest
from rollweave.rollout.turns.resuming import PartialTurn
from rollweave.schema.base import TrajectoryId
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    PartialOutput,
    Sampling,
    TokenDelta,
    VersionSpan,
)


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
