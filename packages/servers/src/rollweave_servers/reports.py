"""The reports of an engine with a server: the tokens of streamed turns, in messages at
intervals, and the seconds of each phase of a weight update, in its log. Invariant: no
delta of a request follows its result.

The server generates during the first phase of an update, and stops for the others:

| phase | what happens |
|---|---|
| `bring` | the engine maps or copies the version, and verifies its digest |
| `pause` | the server ends its current step and stops |
| `verify` | all ranks check the layout of the version |
| `swap` | each rank loads its slices; the weights get their label |
| `resume` | the server continues, without the recomputation of KV that follows |
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


PHASES = ("bring", "pause", "verify", "swap", "resume")


class UpdateTimes:
    """The seconds of each phase of one update."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time in the context to `phase`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - started

    def report(self, version: int) -> None:
        """Write a line to the log of this process."""
        parts = ", ".join(f"{phase} {seconds:.4f} s" for phase, seconds in self.seconds.items())
        sys.stderr.write(f"weights v{version} updated: {parts}\n")
