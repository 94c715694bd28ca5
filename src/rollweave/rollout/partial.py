"""The known part of a turn that an engine is sampling: enough to continue it on another
engine (Laminar §3.2, partial response pool).

Invariant: the known part is a prefix of the turn, or empty. A delta that does not
continue the known part exactly, or that is inconsistent, makes the turn unresumable for
good: the turn is restarted rather than continued from wrong tokens.

The pool lives in the controller's memory. What a resumed run may use of it is also on
disk (`record/turn_log.py`).
"""

from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    PartialOutput,
    TokenDelta,
    VersionSpan,
    spans_cover,
)


class PartialTurn:
    """One dispatch of a turn, which continues from `resumed`."""

    def __init__(self, resumed: PartialOutput | None = None) -> None:
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

    def finish(self, result: GenerateResult) -> None:
        """Accept the answer of an engine that was requested to stop: all that it has
        sampled.

        It must extend the tokens that the engine has reported.
        """
        known = len(self._tokens)
        complete = result.finish is not FinishReason.ERROR and len(result.tokens) == len(
            result.logprobs
        )
        same = result.tokens[:known] == tuple(self._tokens) and result.logprobs[:known] == tuple(
            self._logprobs
        )
        if (
            not complete
            or not same
            or not spans_cover(result.versions, len(result.tokens))
            or not result.generate_s >= 0
        ):
            self._broken = True
            return
        self._tokens, self._logprobs = list(result.tokens), list(result.logprobs)
        self._versions, self._generate_s = list(result.versions), result.generate_s
