"""The requests of a serving engine, as admission of rollouts sees them: when each
arrived, when its newest token was sampled, and what prompts are to be expected.
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
"""Seconds after which a request that was posted is live, or over: it waits for a step
at most.
"""

FORGOTTEN = 64
"""Number of requests that are over, and may still be known."""

FIRST_PROMPT = 64
"""Tokens of the prompt that is expected before there was any."""


class ServingLoad:
    """The requests of the serving model. All but `arrive` belongs to the thread that
    computes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[str, float] = {}
        self._decoding: dict[str, Decoding] = {}
        """The requests that have tokens, and some that had."""
        self._prompts_s: deque[float] = deque(maxlen=WINDOW)
        """Seconds of the latest prompts."""

    def arrive(self, id: str, now: float) -> None:
        """Record, on any thread, that a request has arrived."""
        with self._lock:
            self._arrived[id] = now

    def longest_s(self, admission: Admission) -> float:
        """Return the seconds that the prompt of the next request takes at most: the
        99th percentile of the latest ones.
        """
        if not self._prompts_s:
            return FIRST_MARGIN * admission.profile.prefill_s(FIRST_PROMPT, admission.mode)
        return percentile(self._prompts_s)

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
        """Return the slack of all requests, and of one that arrives now."""
        planner, prefills, decodes, ahead = loop.planner, [], [], 0
        for entry in [*planner.running, *planner.waiting]:
            decoding = self._decoding.get(entry.id)
            if decoding is not None:
                decodes.append(decoding)
                continue
            missing = len(entry.tokens) - entry.computed
            prefills.append(
                QueuedPrefill(
                    arrived=self._arrived.get(entry.id, now),
                    tokens=missing,
                    ahead=ahead,
                )
            )
            ahead += missing
        return admission.slack(
            now,
            prefills,
            decodes,
            pending=min(ahead, planner.chunk_tokens),
            longest_s=self.longest_s(admission),
            mean_s=sum(self._prompts_s) / len(self._prompts_s) if self._prompts_s else 0.0,
        )

    def measured(self, admission: Admission, work: StepWork, seconds: float) -> None:
        """Correct the estimates by a step of the serving model."""
        profile = admission.profile
        kind = StepKind.SERVING_PREFILL if work.prefill_tokens else StepKind.SERVING_DECODE
        profiled = profile.chunked.seconds(work.prefill_tokens) + profile.decode.seconds(
            work.decode
        )
        if work.longest_prompt and profiled > 0:
            # The step may compute a few last tokens of a long prompt: the profile knows
            # what the rest takes, and the step by how much the profile is wrong.
            whole = profile.chunked.seconds(work.longest_prompt)
            self._prompts_s.append(seconds / profiled * whole)
        admission.corrections.measured(kind, profiled_s=profiled, seconds=seconds)
