"""The text of a turn, delta by delta, while it is sampled. Pure.

Invariants: the deltas add up to the text of the complete turn; a delta consists of
whole tokens and whole characters. A text that may still change is held back: part of a
character, a possible beginning of a stop text or of a tool call, and a token that may
end the turn.

A turn may begin again after its engine failed. The stream continues if the new tokens
begin with the tokens whose text has been released; else `ContradictionError` ends it,
since nothing released can be taken back.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rollweave.rollout.chat.replies import Division, Thinking, before
from rollweave.rollout.chat.text import TextCodec, TokenTexts
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import GenerateResult, TokenChances

SAME_LOGPROB = 1e-4
"""Maximum difference of a token's log-probs that engines with equal weights compute."""


class ContradictionError(RollweaveError):
    """The turn no longer begins with the text that was released."""


class TokenEntry(NamedTuple):
    """A sampled token with its log-prob, and the alternatives that were reported with
    it.
    """

    token: int
    logprob: float
    top: TokenChances = ()


class TextDelta(Struct, frozen=True, kw_only=True):
    """The text of one or several tokens: the smallest run of complete characters.
    `thoughts` is the part of the text that precedes the answer.
    """

    text: str
    entries: tuple[TokenEntry, ...]
    thoughts: str = ""


class _Piece(Struct, frozen=True, kw_only=True):
    """A delta, and where its tokens and its text end in the turn."""

    delta: TextDelta
    tokens_end: int
    text_end: int


class DeltaReader:
    """Reads the deltas of one turn.

    `stop` and `stop_tokens` end the turn, and `call_start` begins a tool call: nothing
    from there on is released before the turn is complete. `call_start` is None if calls
    are not read. Without `logprobs`, log-probs may change while the tokens stay. With
    `thinking`, thoughts are divided from the answer, and their marks are not shown: the
    tokens of a mark are entries of the next delta, or of a last one without text.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        call_start: str | None = None,
        logprobs: bool = False,
        thinking: Thinking | None = None,
    ) -> None:
        self._codec, self._wants_logprobs = codec, logprobs
        self._thinking, self._divided = thinking, 0
        self._unseen: tuple[TokenEntry, ...] = ()
        """Entries of divided deltas that show nothing, because their tokens are marks.
        """
        self._stop = tuple(text for text in stop if text)
        self._stop_tokens = frozenset((*codec.stop_token_ids, *stop_tokens))
        self._call_start = call_start
        self._released = ""
        self._released_tokens = 0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._tops: Sequence[TokenChances] = ()
        self._begin()

    def read(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[TokenChances] = (),
    ) -> list[TextDelta]:
        """Return the deltas that are certain now. The turn has these tokens so far, and
        `tops` are their alternatives, if any are reported.

        Raises ContradictionError.
        """
        self._tops = tops
        self._take(tokens, logprobs)
        certain = len(self._tokens) - self._codec.end_overlap(self._tokens)
        if certain == len(self._tokens) and self._tokens and self._tokens[-1] in self._stop_tokens:
            certain -= 1
        safe, released = self._safe_length(), list[TextDelta]()
        while (
            self._pieces
            and self._pieces[0].tokens_end <= certain
            and self._pieces[0].text_end <= safe
        ):
            released.append(self._release())
        return self._divide(released, self._text)

    def finish(self, result: GenerateResult, length: int) -> list[TextDelta]:
        """Return the other deltas of the complete turn. The first `length` characters
        of its text are shown.

        Raises ContradictionError.
        """
        tokens, self._tops = result.tokens, result.top_logprobs
        self._take(tokens, result.logprobs)
        if len(tokens) < self._released_tokens or length < len(self._released):
            raise ContradictionError("the turn ended before the end of what was released")
        deltas = [piece.delta for piece in self._pieces]
        rest = self._texts.rest()
        if rest or self._entries:
            deltas.append(TextDelta(text=rest, entries=tuple(self._entries)))
        whole = self._codec.decode(tokens)
        if self._text + rest != whole:  # decoding in parts does not add up with this tokenizer
            if not whole.startswith(self._released):
                raise ContradictionError("the turn's text does not begin with what was released")
            entries = tuple(entry for delta in deltas for entry in delta.entries)
            deltas = [TextDelta(text=whole[len(self._released) :], entries=entries)]
        divided = self._divide(_cut(deltas, length - len(self._released)), whole[:length])
        if self._unseen:
            divided.append(TextDelta(text="", entries=self._unseen))
        return divided

    def _begin(self) -> None:
        """Discard all tokens."""
        self._tokens.clear()
        self._logprobs.clear()
        self._texts = TokenTexts(self._codec)
        self._text = ""
        self._pieces: list[_Piece] = []
        self._entries: list[TokenEntry] = []
        """Entries of the tokens whose characters are not complete."""

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take over the turn's tokens, which continue or replace the known tokens."""
        count = min(len(tokens), len(self._tokens))
        same = list(tokens[:count]) == self._tokens[:count]
        if not same or list(logprobs[:count]) != self._logprobs[:count]:
            self._replace(tokens, logprobs)
        for at in range(len(self._tokens), len(tokens)):
            self._append(tokens[at], logprobs[at])

    def _replace(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Forget what is not released, and check that the rest stays."""
        kept = self._released_tokens
        overlap = min(len(tokens), kept)
        if list(tokens[:overlap]) != self._tokens[:overlap]:
            raise ContradictionError(
                "the turn began anew with other tokens than those that were released"
            )
        pairs = zip(logprobs[:overlap], self._logprobs[:overlap], strict=True)
        if self._wants_logprobs and not all(
            math.isclose(new, old, rel_tol=0.0, abs_tol=SAME_LOGPROB) for new, old in pairs
        ):
            raise ContradictionError(
                "the turn began anew with other log-probs than those that were released"
            )
        former = self._tokens[:kept]
        known = [*logprobs[:overlap], *self._logprobs[overlap:kept]]
        self._begin()
        for token, logprob in zip(former, known, strict=True):
            self._append(token, logprob)
        self._pieces.clear()

    def _append(self, token: int, logprob: float) -> None:
        at = len(self._tokens)
        self._tokens.append(token)
        self._logprobs.append(logprob)
        top = self._tops[at] if at < len(self._tops) else ()
        self._entries.append(TokenEntry(token, logprob, top))
        text = self._texts.add(token)
        if text:
            self._text += text
            self._pieces.append(
                _Piece(
                    delta=TextDelta(text=text, entries=tuple(self._entries)),
                    tokens_end=len(self._tokens),
                    text_end=len(self._text),
                )
            )
            self._entries = []

    def _release(self) -> TextDelta:
        piece = self._pieces.pop(0)
        self._released += piece.delta.text
        self._released_tokens = piece.tokens_end
        return piece.delta

    def _safe_length(self) -> int:
        """Return how many characters of the text will be shown, whatever follows."""
        text, since = self._text, len(self._released)
        safe = min((before(mark, text, since=since) for mark in self._stop), default=len(text))
        answer = 0
        if self._thinking is not None:
            place = self._thinking.divide(text)
            answer, safe = place.answer, min(safe, place.certain)
        if self._call_start is not None and answer < len(text):
            # The space before a call is not part of the message.
            call = before(self._call_start, text, since=max(since, answer))
            safe = min(safe, max(answer, len(text[:call].rstrip())))
        return safe

    def _divide(self, deltas: list[TextDelta], text: str) -> list[TextDelta]:
        """Divide deltas that follow each other in `text` into thoughts and answer.
        Leave out deltas that show nothing.
        """
        if self._thinking is None:
            return deltas
        place, divided = self._thinking.divide(text), list[TextDelta]()
        for delta in deltas:
            start, entries = self._divided, self._unseen + delta.entries
            self._divided += len(delta.text)
            thoughts, answer = _parts(place, text, start, self._divided)
            if thoughts or answer:
                divided.append(TextDelta(text=answer, thoughts=thoughts, entries=entries))
                entries = ()
            self._unseen = entries
        return divided


def text_deltas(codec: TextCodec, result: GenerateResult, *, length: int) -> tuple[TextDelta, ...]:
    """Return the first `length` characters of a complete turn's text as deltas."""
    return tuple(DeltaReader(codec).finish(result, length))


def _parts(place: Division, text: str, start: int, end: int) -> tuple[str, str]:
    """Return the thoughts and the answer within `[start, end)` of a text."""
    thoughts = text[max(start, place.start) : min(end, place.end)]
    return thoughts, text[max(start, place.answer) : end]


def _cut(deltas: Sequence[TextDelta], length: int) -> list[TextDelta]:
    """Return the deltas up to `length` characters."""
    kept: list[TextDelta] = []
    for delta in deltas:
        if not length:
            break
        kept.append(TextDelta(text=delta.text[:length], entries=delta.entries))
        length -= len(kept[-1].text)
    return kept
