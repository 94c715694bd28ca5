"""The requests of a serving engine, as the admission of rollouts sees them: when each
arrived, when its newest token was sampled, and how long the next prompt may take.
"""

import math
import threading
from collections.abc import Iterable

from rollweave.core.policy.admission import (
    FIRST_MARGIN,
    Admission,
    Decoding,
    Latest,
    QueuedPrefill,
    StepKind,
)
from rollweave.engine.batching import StepWork
from rollweave.engine.core import EngineCore

ARRIVAL_S = 60.0
"""Seconds after which a posted request is live or has ended, since it waits for one
step at most.
"""

FORGOTTEN = 64
"""Requests that have ended are forgotten once all that are known, live or ended, are
this many more than twice those that were kept the last time.
"""

FIRST_PROMPT = 64
"""Number of tokens in the expected prompt before the first one was computed."""


class ServingLoad:
    """The requests of the serving model. Only the thread that computes may call its
    methods, except `arrive`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[str, float] = {}
        self._decoding: dict[str, Decoding] = {}
        """The requests that have sampled a token, with some that have ended."""
        self._most_arrived = self._most_decoding = FORGOTTEN
        self._prompts_s = Latest()
        """Estimated seconds of each of the latest prompts."""
        self._longest_s = self._mean_s = 0.0
        """Their 99th percentile, and their mean: 0 before the first one."""
        self._first_arrival = math.inf

    def arrive(self, id: str, now: float) -> None:
        """Record, on any thread, that a request has arrived."""
        with self._lock:
            self._arrived[id] = now
            self._first_arrival = min(self._first_arrival, now)

    def await_arrival(self) -> None:
        """Begin to wait for the next request."""
        with self._lock:
            self._first_arrival = math.inf

    @property
    def first_arrival(self) -> float:
        """Time at which the first request since `await_arrival` arrived; infinity if
        none has.
        """
        return self._first_arrival

    def longest_s(self, admission: Admission) -> float:
        """Return the seconds that the prompt of the next request may take: the 99th
        percentile of the latest ones.
        """
        if not len(self._prompts_s):
            return FIRST_MARGIN * admission.profile.prefill_s(FIRST_PROMPT, admission.mode)
        return self._longest_s

    def stepped(self, core: EngineCore, now: float) -> None:
        """Note the tokens of a step that ended now."""
        live, known = core.live, self._decoding
        for id, state in live.items():
            count, before = len(state.logprobs), self._decoding_of(id)
            if count and before is None:
                known[id] = Decoding(first=now, newest=now, tokens=count)
            elif before is not None and before.tokens < count:
                known[id] = Decoding(first=before.first, newest=now, tokens=count)
        if len(known) > self._most_decoding:
            self._decoding = {id: one for id, one in known.items() if id in live}
            self._most_decoding = 2 * len(self._decoding) + FORGOTTEN
        if len(self._arrived) > self._most_arrived:
            with self._lock:
                self._arrived = {
                    id: at for id, at in self._arrived.items() if id in live or now - at < ARRIVAL_S
                }
                self._most_arrived = 2 * len(self._arrived) + FORGOTTEN

    def _decoding_of(self, id: str) -> Decoding | None:
        """Return a request that decodes; None before its first token, also if a former
        request had the same id.
        """
        known = self._decoding.get(id)
        return known if known is not None and known.first >= self._arrived.get(id, 0.0) else None

    def slack(self, core: EngineCore, admission: Admission, now: float) -> float:
        """Return the smallest slack of all requests and of one that arrives now."""
        planner = core.planner
        requests = (
            (self._arrived.get(entry.id, now), entry.missing, self._decoding_of(entry.id))
            for entry in [*planner.running, *planner.waiting]
        )
        return self.slack_of(requests, admission, now, chunk_tokens=planner.chunk_tokens)

    def slack_of(
        self,
        requests: Iterable[tuple[float, int, Decoding | None]],
        admission: Admission,
        now: float,
        *,
        chunk_tokens: int,
    ) -> float:
        """Return the smallest slack of these requests (arrival, number of tokens that
        are yet to be computed, tokens so far) and of one that arrives now.
        """
        prefills, decodes, ahead = [], [], 0
        for arrived, missing, decoding in requests:
            if decoding is not None:
                decodes.append(decoding)
                ahead += missing - 1  # one that lost its KV computes its tokens again
                continue
            prefills.append(QueuedPrefill(arrived=arrived, tokens=missing, ahead=ahead))
            ahead += missing
        return admission.slack(
            now,
            prefills,
            decodes,
            pending=min(ahead, chunk_tokens),
            longest_s=self.longest_s(admission),
            mean_s=self._mean_s,
        )

    def measured(self, admission: Admission, work: StepWork, seconds: float) -> None:
        """Correct the estimates by a step of the serving model."""
        profile = admission.profile
        kind = StepKind.SERVING_PREFILL if work.prefill_tokens else StepKind.SERVING_DECODE
        profiled = profile.chunked.seconds(work.prefill_tokens) + profile.decode.seconds(
            work.decode
        )
        if work.longest_prompt and profiled > 0:
            # The step may compute only the last few tokens of a long prompt. So take
            # the profiled seconds of the whole, times the ratio of this step.
            whole = profile.chunked.seconds(work.longest_prompt)
            self._prompts_s.add(seconds / profiled * whole)
            self._longest_s, self._mean_s = self._prompts_s.percentile(), self._prompts_s.mean
        admission.corrections.measured(kind, profiled_s=profiled, seconds=seconds)
