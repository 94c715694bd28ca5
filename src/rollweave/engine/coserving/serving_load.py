"""The requests of a serving engine, as admission of rollouts sees them: when each
arrived, when its newest token was sampled, and what prompts are to be expected.
"""

import threading
from collections import deque

from rollweave.core.policy.admission import Admission, QueuedPrefill, StepKind
from rollweave.engine.loop import EngineLoop
from rollweave.engine.planner.batching import StepWork

ARRIVAL_S = 60.0
"""Seconds after which a request that was posted is live, or over: it waits for a step
at most.
"""

RECENT_PROMPTS = 64
"""Number of serving prompts whose longest is expected next."""

FIRST_PROMPT = 64
"""Tokens of the prompt that is expected before there was any."""


class ServingLoad:
    """The requests of the serving model. All but `arrive` belongs to the thread that
    computes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[str, float] = {}
        self._newest: dict[str, tuple[int, float]] = {}
        """Number of sampled tokens of each request, and when it changed."""
        self._prompts: deque[int] = deque([FIRST_PROMPT], maxlen=RECENT_PROMPTS)

    def arrive(self, id: str, now: float) -> None:
        """Record, on any thread, that a request has arrived."""
        with self._lock:
            self._arrived[id] = now

    def stepped(self, loop: EngineLoop, now: float) -> None:
        """Note the tokens of a step that ended now."""
        live = loop.live
        for id, state in live.items():
            count = len(state.logprobs)
            if self._newest.get(id, (0, 0.0))[0] != count:
                self._newest[id] = (count, now)
        if len(self._newest) > 2 * len(live) + RECENT_PROMPTS:
            self._newest = {id: at for id, at in self._newest.items() if id in live}
        if len(self._arrived) > 2 * len(live) + RECENT_PROMPTS:
            with self._lock:
                self._arrived = {
                    id: at for id, at in self._arrived.items() if id in live or now - at < ARRIVAL_S
                }

    def slack(self, loop: EngineLoop, admission: Admission, now: float) -> float:
        """Return the slack of all requests, and of one that arrives now."""
        planner, prefills, newest, ahead = loop.planner, [], [], 0
        for entry in [*planner.running, *planner.waiting]:
            count, token_at = self._newest.get(entry.id, (0, now))
            if count:
                newest.append(token_at)
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
        prefills.append(QueuedPrefill(arrived=now, tokens=max(self._prompts), ahead=ahead))
        return admission.slack(now, prefills, newest)

    def measured(self, admission: Admission, work: StepWork, seconds: float) -> None:
        """Correct the estimates by a step of the serving model."""
        if work.prefill_tokens:
            self._prompts.append(work.prefill_tokens)
        profile = admission.profile
        kind = StepKind.SERVING_PREFILL if work.prefill_tokens else StepKind.SERVING_DECODE
        profiled = profile.chunked.seconds(work.prefill_tokens) + profile.decode.seconds(
            work.decode
        )
        admission.corrections.measured(kind, profiled_s=profiled, seconds=seconds)
