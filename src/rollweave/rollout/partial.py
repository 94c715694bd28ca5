"""What is known of a turn that an engine is sampling: enough to go on with it elsewhere
(Laminar §3.2, partial response pool).

Invariant: it is a beginning of the turn, or nothing. Whatever does not fit exactly
where the last piece ended, or is not whole in itself, leaves nothing to go on from, for
good: the turn is begun again rather than continued from wrong tokens.

This is memory of the controller, and ends with it: after a crash attempts begin again
(docs/decisions/0007).
"""

from rollweave.schema.serving import Finish, GenerateResult, Partial, Piece, VersionSpan, covers


class Unfinished:
    """One try of a turn, that goes on from `resumed`."""

    def __init__(self, resumed: Partial | None = None) -> None:
        self._tokens: list[int] = list(resumed.tokens) if resumed is not None else []
        self._logprobs: list[float] = list(resumed.logprobs) if resumed is not None else []
        self._versions: list[VersionSpan] = list(resumed.versions) if resumed is not None else []
        self._generate_s = resumed.generate_s if resumed is not None else 0.0
        self._broken = False

    def __len__(self) -> int:
        """Tokens to go on from."""
        return 0 if self._broken else len(self._tokens)

    @property
    def partial(self) -> Partial | None:
        """What another engine can go on from."""
        if not len(self):
            return None
        return Partial(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._versions),
            generate_s=self._generate_s,
        )

    def hear(self, piece: Piece) -> None:
        """Take what the engine has told."""
        end = piece.start + len(piece.tokens)
        fits = piece.start == len(self._tokens) and len(piece.tokens) == len(piece.logprobs)
        if (
            not fits
            or not covers(piece.versions, piece.start, end)
            or not piece.generate_s >= self._generate_s
        ):
            self._broken = True
            return
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        for span in piece.versions:
            if self._versions and self._versions[-1].version == span.version:
                span = VersionSpan(
                    start=self._versions.pop().start, end=span.end, version=span.version
                )
            self._versions.append(span)
        self._generate_s = piece.generate_s

    def end(self, result: GenerateResult) -> None:
        """The engine was to stop, and has answered with all that it has: at least what
        it has told.
        """
        told = len(self._tokens)
        whole = (
            result.finish is not Finish.ERROR
            and len(result.tokens) == len(result.logprobs)
            and not result.text_only
        )
        same = result.tokens[:told] == tuple(self._tokens) and result.logprobs[:told] == tuple(
            self._logprobs
        )
        if (
            not whole
            or not same
            or not covers(result.versions, 0, len(result.tokens))
            or not result.generate_s >= 0
        ):
            self._broken = True
            return
        self._tokens, self._logprobs = list(result.tokens), list(result.logprobs)
        self._versions, self._generate_s = list(result.versions), result.generate_s
