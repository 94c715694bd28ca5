"""The requests of a serving engine, as the admission of rollouts sees them: when each
arrived, when its newest token was sampled, and how long the next prompt may take.
"""

import threading
from collections import deque

from rollweave.core.policy.admission import (
    FIRST_MARGIN,
    WINDOW,
    Admission,
    Decoding,
    QueuedPrefill,
    StepKind,
    percentile,
)
from rollweave.engine.loop import EngineLoop
from rollweave.engine.planner.batching import StepWork

ARRIVAL_S = 60.0
"""Seconds after which a posted request is live or has ended, since it waits for one
step at most.
"""

FORGOTTEN = 64
"""Requests that have ended are forgotten once there are this many more requests than
twice the live ones.
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
        self._prompts_s: deque[float] = deque(maxlen=WINDOW)
        """Estimated seconds of each of the latest prompts."""
        self._longest_s = self._mean_s = 0.0
        """Their 99th percentile, and their mean: 0 before the first one."""

    def arrive(self, id: str, now: float) -> None:
        """Record, on any thread, that a request has arrived."""
        with self._lock:
            self._arrived[id] = now

    def longest_s(self, admission: Admission) -> float:
        """Return the seconds that the prompt of the next request may take: the 99th
        percentile of the latest ones.
        """
        if not self._prompts_s:
            return FIRST_MARGIN * admission.profile.prefill_s(FIRST_PROMPT, admission.mode)
        return self._longest_s

    def stepped(self, loop: EngineLoop, now: float) -> None:
        """Note the tokens of a step that ended now."""
        live, known = loop.live, self._decoding
        for id, state in live.items():
            count, before = len(state.logprobs), known.get(id)
            if count and (before is None or before.tokens > count):
                known[id] = Decoding(first=now, newest=now, tokens=count)
            elif before is not None and before.tokens < count:
                known[id] = Decoding(first=before.first, newest=now, tokens=count)
        if len(known) > 2 * len(live) + FORGOTTEN:
            self._decoding = {id: one for id, one in known.items() if id in live}
        if len(self._arrived) > 2 * len(live) + FORGOTTEN:
            with self._lock:
                self._arrived = {
                    id: at for id, at in self._arrived.items() if id in live or now - at < ARRIVAL_S
                }

    def slack(self, loop: EngineLoop, admission: Admission, now: float) -> float:
        """Return the smallest slack of all requests and of one that arrives now."""
        planner, prefills, decodes, ahead = loop.planner, [], [], 0
        for entry in [*planner.running, *planner.waiting]:
            decoding = self._decoding.get(entry.id)
            if decoding is not None:
                decodes.append(decoding)
                ahead += entry.missing - 1  # one that lost its KV computes its tokens again
                continue
            prefills.append(
                QueuedPrefill(
                    arrived=self._arrived.get(entry.id, now),
                    tokens=entry.missing,
                    ahead=ahead,
                )
            )
            ahead += entry.missing
        return admission.slack(
            now,
            prefills,
            decodes,
            pending=min(ahead, planner.chunk_tokens),
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
            self._prompts_s.append(seconds / profiled * whole)
            self._longest_s = percentile(self._prompts_s)
            self._mean_s = sum(self._prompts_s) / len(self._prompts_s)
        admission.corrections.measured(kind, profiled_s=profiled, seconds=seconds)
