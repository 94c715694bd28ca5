"""The state of one request between `Add` and its result: its sampled tokens, the end of
its text, and the seconds that it waited and held a slot.

A request may resume a turn that another engine began; the tokens that the other engine
sampled then count as sampled here.

There are two clocks. Waiting is measured on the engine's clock; holding a slot is
measured on the step clock, which stands still while the engine is suspended. A turn's
budget is time in a slot, so neither rank nor a change of weights ever costs a request
its budget.

Stop strings are detected by decoding only the end of a growing sequence of tokens. A
token may hold part of a character, and a tokenizer may render a token differently after
another one. New text is therefore the difference of two decodings that start at the
same token, and an incomplete character (U+FFFD at the end) is held back until it is
complete.

`validate` refuses requests that the engine cannot compute or that would harm others.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from rollweave.engine.batching import Entry
from rollweave.io.tokenizer import missing_tokenizer, read_tokenizer
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    TokenChances,
    TokenDelta,
    VersionSpan,
)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the checkpoint's tokenizer.

    Raises EngineError if it has none that can be used: stop strings cannot be served
    without it.
    """
    try:
        read = read_tokenizer(directory)
    except ConfigError as error:
        raise EngineError(f"sampling.stop needs a tokenizer: {error}") from error
    if read is None:
        raise EngineError(f"sampling.stop needs a tokenizer: {missing_tokenizer(directory)}")
    return read.tokenizer


class StopStrings:
    """Scans the output of one request for stop strings. `feed` takes its tokens one by
    one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._longest = max((len(text) for text in self._stop), default=0)
        self._tokens: list[int] = []
        self._from = 0
        self._read = 0
        self._tail = ""

    def feed(self, token: int) -> bool:
        """Return whether `token` completes a stop string in the text."""
        self._tokens.append(token)
        before = self._tokenizer.decode(
            self._tokens[self._from : self._read], skip_special_tokens=False
        )
        after = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=False)
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return False
        text = self._tail + after[len(before) :]
        self._from, self._read = self._read, len(self._tokens)
        self._tail = text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else ""
        return any(stop in text for stop in self._stop)


MOST_STOPS: Final = 64
"""Maximum number of stop strings of a request, each of which is sought after every
token.
"""

MOST_STOP_CHARS: Final = 4096
"""Maximum characters of a stop string."""

MOST_STOP_IDS: Final = 4096
"""Maximum number of stop tokens, and of banned words, of a request."""


class RequestState:
    """One request, added at `now` to an engine whose model ends a text with `eos_ids`.
    `take_slot` and `release_slot` record its changes of slot.
    """

    __slots__ = (
        "_arrived",
        "_generate_s",
        "_queue_s",
        "_slot_since",
        "_waiting_since",
        "deadline",
        "entry",
        "first_token_s",
        "forbidden",
        "limit",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "prompt_tokens",
        "prompt_top_logprobs",
        "report_s",
        "reported",
        "request",
        "served",
        "stop_ids",
        "stop_strings",
        "text_id",
        "top_logprobs",
        "version_starts",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        entry: Entry,
        limit: int,
        eos_ids: Sequence[int],
        now: float,
    ) -> None:
        self.request = request
        self.entry = entry
        self.limit = limit
        self.prompt_tokens = len(request.tokens)
        adjustments = request.sampling.adjustments
        self.min_tokens = 0 if adjustments is None else adjustments.min_tokens
        ends = () if adjustments is not None and adjustments.ignores_eos else eos_ids
        self.stop_ids = frozenset((*ends, *request.sampling.stop_token_ids))
        self.logprobs: list[float] = []
        self.top_logprobs: list[TokenChances] = []
        """The tokens reported beside each sampled one, if they are wanted."""
        self.prompt_logprobs: list[float] = []
        """The log-probs of the prompt's tokens from the second on, if they are
        wanted.
        """
        self.prompt_top_logprobs: list[TokenChances] = []
        self.version_starts: list[tuple[int, int]] = []
        """The (start, version) of each run of output tokens sampled by one version."""
        self.stop_strings: StopStrings | None = None
        self.text_id = ""
        """Id of its text, if that is constrained (`engine/matchers`)."""
        self.forbidden: npt.NDArray[np.bool_] | None = None
        """The tokens [vocab] that must not follow, if its text is constrained."""
        self.reported = 0
        """Number of output tokens that were reported by `Progress` or resumed."""
        self.report_s = math.inf
        """Maximum seconds until its newest tokens are reported."""
        self.served = False
        """True if it has ever had a slot."""
        self.deadline = math.inf
        """The time on the step clock at which its budget ends, if it keeps its slot."""
        self._arrived = now
        self.first_token_s = 0.0
        """Seconds from its arrival to the first token sampled here."""
        self._queue_s = self._generate_s = 0.0
        self._waiting_since = now
        self._slot_since: float | None = None

    def resume(self) -> FinishReason | None:
        """Take over the tokens that the request resumes; return the finish reason if
        they already end the turn.

        Raises ValueError if they cannot be the beginning of this turn.
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
        if self.request.top_logprobs or self.request.logprob_ids:
            self.top_logprobs.extend(() for _ in resumed.tokens)
        self.version_starts.extend((span.start, span.version) for span in resumed.versions)
        self.reported = count
        self._generate_s = resumed.generate_s
        for at, token in enumerate(resumed.tokens, 1):
            if self.ends_with(token):
                if at < count:
                    raise ValueError(
                        "resumed.tokens must end where the turn stops, at token "
                        f"{at}, got {count} tokens"
                    )
                return FinishReason.STOP
        return FinishReason.LENGTH if count == self.limit else None

    def ends_with(self, token: int) -> bool:
        """Return whether the turn ends with `token`, its newest one. Call it once per
        token.

        Decoding may raise anything.
        """
        if token in self.stop_ids:
            return True
        stopped = self.stop_strings is not None and self.stop_strings.feed(token)
        return stopped and len(self.logprobs) >= self.min_tokens

    def first_token(self, now: float) -> None:
        """Record that the first token is sampled."""
        self.first_token_s = now - self._arrived

    def add_scores(
        self, start: int, logprobs: list[float], tops: Sequence[TokenChances] = ()
    ) -> None:
        """Record the log-probs of the prompt's tokens from position `start` on, which
        replace those of an earlier computation.
        """
        del self.prompt_logprobs[start - 1 :]
        self.prompt_logprobs.extend(logprobs)
        del self.prompt_top_logprobs[start - 1 :]
        self.prompt_top_logprobs.extend(tops)

    def take_slot(self, now: float, step_clock: float) -> None:
        """Record that the request takes a slot."""
        self.served = True
        self._queue_s += now - self._waiting_since
        self._slot_since = step_clock
        if self.request.budget_s:
            self.deadline = step_clock + self.request.budget_s - self._generate_s

    def release_slot(self, now: float, step_clock: float) -> None:
        """Record that the request gave up its slot and waits again."""
        self._generate_s = self.generate_s(step_clock)
        self._waiting_since, self._slot_since, self.deadline = now, None, math.inf

    def queue_s(self, now: float) -> float:
        """Return the seconds without a slot so far."""
        return self._queue_s + (now - self._waiting_since if self._slot_since is None else 0.0)

    def generate_s(self, step_clock: float) -> float:
        """Return the seconds in a slot so far, excluding those in which the engine was
        suspended.
        """
        return self._generate_s + (
            step_clock - self._slot_since if self._slot_since is not None else 0.0
        )

    def versions(self, since: int = 0) -> tuple[VersionSpan, ...]:
        """Return which version sampled each of the output tokens from position `since`
        on.
        """
        starts = [start for start, _ in self.version_starts]
        ends = [*starts[1:], len(self.logprobs)]
        return tuple(
            VersionSpan(start=max(start, since), end=end, version=version)
            for (start, version), end in zip(self.version_starts, ends[: len(starts)], strict=True)
            if end > since
        )

    def take_delta(self, step_clock: float) -> TokenDelta | None:
        """Return the tokens sampled since the last delta; None if there are none."""
        start, self.reported = self.reported, len(self.logprobs)
        if start == self.reported:
            return None
        return TokenDelta(
            id=self.request.id,
            start=start,
            tokens=tuple(self.entry.tokens[self.prompt_tokens + start :]),
            logprobs=tuple(self.logprobs[start:]),
            versions=self.versions(start),
            generate_s=self.generate_s(step_clock),
            top_logprobs=tuple(self.top_logprobs[start:]),
        )

    def result(
        self, finish: FinishReason, *, now: float, step_clock: float, error: str = ""
    ) -> GenerateResult:
        """Return the result of the whole turn, as of `now`."""
        return GenerateResult(
            id=self.request.id,
            tokens=tuple(self.entry.tokens[self.prompt_tokens :]),
            logprobs=tuple(self.logprobs),
            versions=self.versions(),
            finish=finish,
            cached_tokens=min(self.entry.cached or 0, self.prompt_tokens),
            queue_s=self.queue_s(now),
            generate_s=self.generate_s(step_clock),
            first_token_s=self.first_token_s,
            preemptions=self.entry.preemptions,
            resumed_tokens=len(self.request.resumed.tokens)
            if self.request.resumed is not None
            else 0,
            prompt_logprobs=tuple(self.prompt_logprobs),
            top_logprobs=tuple(self.top_logprobs),
            prompt_top_logprobs=tuple(self.prompt_top_logprobs),
            error=error,
        )


def validate(request: GenerateRequest, *, vocab: int, max_context: int) -> None:
    """Raise ValueError, naming the invalid field, if the engine cannot serve
    `request`.
    """
    sampling = request.sampling
    if not request.tokens:
        raise ValueError("tokens must have at least one token, got none")
    if len(request.tokens) >= max_context:
        raise ValueError(
            f"tokens must leave room in the context of {max_context} tokens, got a prompt of "
            f"{len(request.tokens)}"
        )
    _in_vocabulary("tokens", request.tokens, vocab)
    if not math.isfinite(request.rank):
        raise ValueError(f"rank must be finite, got {request.rank}")
    if not request.budget_s >= 0:
        raise ValueError(f"budget_s must be 0 (none) or more, got {request.budget_s}")
    _check_lists(sampling, vocab)
    if any(not 0 <= token < vocab for token in request.logprob_ids):
        raise ValueError(f"logprob_ids must be in [0, {vocab}), got {request.logprob_ids}")
    _check_adjustments(sampling, vocab)
    if request.resumed is not None:
        _in_vocabulary("resumed.tokens", request.resumed.tokens, vocab)
        if not all(map(math.isfinite, request.resumed.logprobs)):
            raise ValueError("resumed.logprobs must be finite")


def _check_lists(sampling: Sampling, vocab: int) -> None:
    """Raise ValueError for lists whose length costs the engine time at each step."""
    for field, values, most in (
        ("stop", sampling.stop, MOST_STOPS),
        ("stop_token_ids", sampling.stop_token_ids, MOST_STOP_IDS),
        ("allowed", sampling.allowed, vocab),
    ):
        if len(values) > most:
            raise ValueError(f"sampling.{field} must have at most {most}, got {len(values)}")
    longest = max(map(len, sampling.stop), default=0)
    if longest > MOST_STOP_CHARS:
        raise ValueError(
            f"sampling.stop must have strings of at most {MOST_STOP_CHARS} characters, got one "
            f"of {longest}"
        )
    if sampling.allowed and not 0 <= min(sampling.allowed) <= max(sampling.allowed) < vocab:
        wrong = next(token for token in sampling.allowed if not 0 <= token < vocab)
        raise ValueError(f"sampling.allowed must be in [0, {vocab}), got {wrong}")


def _check_adjustments(sampling: Sampling, vocab: int) -> None:
    adjustments = sampling.adjustments
    if adjustments is None:
        return
    for field, count, most in (
        ("logit_bias", len(adjustments.bias), vocab),
        ("bad_words", len(adjustments.banned), MOST_STOP_IDS),
    ):
        if count > most:
            raise ValueError(f"{field} must have at most {most}, got {count}")
    if adjustments.bias:
        _in_vocabulary("logit_bias", tuple(token for token, _ in adjustments.bias), vocab)
    for word in adjustments.banned:
        _in_vocabulary("bad_words", word, vocab)


def _in_vocabulary(field: str, tokens: tuple[int, ...], vocab: int) -> None:
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        got = f"{min(tokens)} to {max(tokens)}: out of vocabulary"
        raise ValueError(f"{field} must be in [0, {vocab}), got {got}")
