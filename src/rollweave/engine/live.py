"""One request between `Add` and its result: what was sampled of it, and the time that
it had a slot or waited for one.

A request may resume a turn that another engine has begun: what that one sampled is then
ours, as if we had.

Two clocks: waiting is counted on the engine's, having a slot on that of its steps,
which stands still while the engine is suspended. A turn's budget is time in a slot, so
neither rank nor a change of weights ever costs a request its budget.
"""

import math

from rollweave.engine.detokenize import StopStrings
from rollweave.engine.planner.batching import Entry
from rollweave.schema.serving import (
    Finish,
    GenerateRequest,
    GenerateResult,
    TokenDelta,
    VersionSpan,
)


class Live:
    """Made when its request is added, at `now`. `enter` and `leave` follow its slot."""

    __slots__ = (
        "_generate_s",
        "_queue_s",
        "_since",
        "_slot_since",
        "deadline",
        "entry",
        "limit",
        "logprobs",
        "prompt",
        "request",
        "served",
        "spans",
        "stop_ids",
        "streams",
        "told",
        "watch",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        entry: Entry,
        limit: int,
        stop_ids: frozenset[int],
        now: float,
    ) -> None:
        self.request = request
        self.entry = entry
        self.limit = limit
        self.stop_ids = stop_ids
        self.prompt = len(request.tokens)
        self.logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """(start, version) of each run of output tokens sampled by one version."""
        self.watch: StopStrings | None = None
        self.streams = False
        self.told = 0
        """Tokens that `Progress` has told of, or that whoever asks had before."""
        self.served = False
        """It has had a slot."""
        self.deadline = math.inf
        """When, on the clock of the steps, its budget ends if it keeps the slot that it
        has.
        """
        self._queue_s = self._generate_s = 0.0
        self._since = now
        self._slot_since: float | None = None

    def resume(self) -> Finish | None:
        """Take over what the request resumes; how the turn has ended with that, if it
        has.

        Raises ValueError for what cannot be the beginning of this turn.
        """
        resumed = self.request.resumed
        if resumed is None:
            return None
        count = len(resumed.tokens)
        if count > self.limit:
            raise ValueError(
                f"resumed.tokens must not be more than the {self.limit} of the whole "
                f"turn, got {count}"
            )
        self.entry.tokens.extend(resumed.tokens)
        self.logprobs.extend(resumed.logprobs)
        self.spans.extend((span.start, span.version) for span in resumed.versions)
        self.told = count
        self._generate_s = resumed.generate_s
        for at, token in enumerate(resumed.tokens, 1):
            if self.stops(token):
                if at < count:
                    raise ValueError(
                        "resumed.tokens must end where the turn stops, at token "
                        f"{at}, got {count} tokens"
                    )
                return Finish.STOP
        return Finish.LENGTH if count == self.limit else None

    def stops(self, token: int) -> bool:
        """Whether the turn stops with `token`, the newest one; to be asked once for
        each. Decoding may raise anything.
        """
        return token in self.stop_ids or (self.watch is not None and self.watch.feed(token))

    def enter(self, now: float, step_clock: float) -> None:
        """It takes a slot."""
        self.served = True
        self._queue_s += now - self._since
        self._slot_since = step_clock
        if self.request.budget_s:
            self.deadline = step_clock + self.request.budget_s - self._generate_s

    def leave(self, now: float, step_clock: float) -> None:
        """It gave its slot up, and waits again."""
        self._generate_s = self.generate_s(step_clock)
        self._since, self._slot_since, self.deadline = now, None, math.inf

    def queue_s(self, now: float) -> float:
        """Seconds without a slot so far."""
        return self._queue_s + (now - self._since if self._slot_since is None else 0.0)

    def generate_s(self, step_clock: float) -> float:
        """Seconds in a slot so far, without those in which the engine was suspended."""
        return self._generate_s + (
            step_clock - self._slot_since if self._slot_since is not None else 0.0
        )

    def versions(self, since: int = 0) -> tuple[VersionSpan, ...]:
        """Which version sampled what, of the tokens from place `since` on."""
        starts = [start for start, _ in self.spans]
        ends = [*starts[1:], len(self.logprobs)]
        return tuple(
            VersionSpan(start=max(start, since), end=end, version=version)
            for (start, version), end in zip(self.spans, ends[: len(starts)], strict=True)
            if end > since
        )

    def news(self, step_clock: float) -> TokenDelta | None:
        """What was sampled since the last piece, if anything."""
        start, self.told = self.told, len(self.logprobs)
        if start == self.told:
            return None
        return TokenDelta(
            id=self.request.id,
            start=start,
            tokens=tuple(self.entry.tokens[self.prompt + start :]),
            logprobs=tuple(self.logprobs[start:]),
            versions=self.versions(start),
            generate_s=self.generate_s(step_clock),
        )

    def result(
        self, finish: Finish, *, now: float, step_clock: float, error: str = ""
    ) -> GenerateResult:
        """The whole turn, as of `now`."""
        return GenerateResult(
            id=self.request.id,
            tokens=tuple(self.entry.tokens[self.prompt :]),
            logprobs=tuple(self.logprobs),
            versions=self.versions(),
            finish=finish,
            cached_tokens=min(self.entry.cached or 0, self.prompt),
            queue_s=self.queue_s(now),
            generate_s=self.generate_s(step_clock),
            preemptions=self.entry.preemptions,
            resumed_tokens=len(self.request.resumed.tokens)
            if self.request.resumed is not None
            else 0,
            error=error,
        )
