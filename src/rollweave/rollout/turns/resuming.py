"""Turns that continue on another engine (Laminar §3.2, partial response pool): the
known part of a turn, and aborts that keep it.

Invariant: the known part is a prefix of the turn, or empty. A delta that does not
continue the known part exactly, or that is inconsistent, makes the turn unresumable for
good: the turn is restarted rather than continued from wrong tokens.

The pool lives in the controller's memory. What a resumed run may use of it is also on
disk (`record/turn_log.py`).
"""

import asyncio
from collections.abc import Callable
from typing import Final

from rollweave.schema.commands import StartTurn
from rollweave.schema.errors import EngineLostError
from rollweave.schema.serving import (
    FinishReason,
    GenerateResult,
    PartialOutput,
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
