"""The tokens of streamed turns, which an engine reports in messages at intervals.

Invariant: no delta of a request follows its result.
"""

import asyncio
from collections.abc import Callable

import msgspec

from rollweave.engine.clients.base import OnTokens
from rollweave.schema.serving import Progress, TokenDelta, spans_between


class ProgressReports:
    """Collects the deltas of all streamed requests, and sends them at most once in the
    shortest time that one of them was to wait.
    """

    def __init__(self, send: Callable[[Progress], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, list[TokenDelta]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def of(self, request_id: str, report_s: float) -> OnTokens:
        """Return the function that takes the deltas of a request, which wait for at
        most `report_s`.
        """

        def on_tokens(delta: TokenDelta) -> None:
            self._waiting.setdefault(request_id, []).append(delta)
            at = self._loop.time() + report_s
            if self._timer is None or at < self._timer.when():
                self._stop()
                self._timer = self._loop.call_at(at, self.flush)

        return on_tokens

    def drop(self, request_id: str) -> None:
        """Forget the deltas of a request, whose result has them."""
        self._waiting.pop(request_id, None)

    def flush(self) -> None:
        """Send what waits."""
        self._stop()
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._send(Progress(pieces=tuple(map(_joined, waiting.values()))))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    """Return deltas that follow each other as one."""
    first, last = deltas[0], deltas[-1]
    spans = [span for delta in deltas for span in delta.versions]
    return msgspec.structs.replace(
        last,
        start=first.start,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        versions=spans_between(spans, first.start, last.start + len(last.tokens)),
    )
