"""The requests of a serving engine, as admission of rollouts sees them: when each
arrived, when its newest token was sampled, and what prompts are to be expected.
"""

import threading
from collections import deque

from rollweave.core.policy.admission import Admission, Decoding, QueuedPrefill, StepKind
from rollweave.engine.loop import EngineLoop
from rollweave.engine.planner.batching import StepWork

ARRIVAL_S = 60.0
"""Seconds after which a request that was posted is live, or over: it waits for a step
at most.
"""

RECENT_PROMPTS = 64
"""Number of serving prompts whose longest is expected next."""

BURST_S = 0.25
"""Seconds within which prompts count as a burst."""

BURST_PROMPTS = 2
"""Number of prompts in a burst after which admission expects another one."""

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
        self._prompts: deque[int] = deque([FIRST_PROMPT], maxlen=RECENT_PROMPTS)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=RECENT_PROMPTS)
        """Times and tokens of the latest prompts."""

    def arrive(self, id: str, now: float, *, prompt: int) -> None:
        """Record, on any thread, that a request with so many tokens has arrived."""
        with self._lock:
            self._arrived[id] = now
            self._arrivals.append((now, prompt))

    @property
    def next_prompt(self) -> int:
        """Number of tokens of the prompt that is expected next."""
        return max(self._prompts)

    def stepped(self, loop: EngineLoop, now: float) -> None:
        """Note the tokens of a step that ended now."""
        live, known = loop.live, self._decoding
        for id, state in live.items():
            count, before = len(state.logprobs), known.get(id)
            if count and (before is None or before.tokens > count):
                known[id] = Decoding(first=now, newest=now, tokens=count)
            elif before is not None and before.tokens < count:
                known[id] = Decoding(first=before.first, newest=now, tokens=count)
        if len(known) > 2 * len(live) + RECENT_PROMPTS:
            self._decoding = {id: one for id, one in known.items() if id in live}
        if len(self._arrived) > 2 * len(live) + RECENT_PROMPTS:
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
        prefills.append(QueuedPrefill(arrived=now, tokens=self.next_prompt, ahead=ahead))
        pending = min(ahead + self._expected(now), planner.chunk_tokens)
        return admission.slack(now, prefills, decodes, pending=pending)

    def _expected(self, now: float) -> int:
        """Return the tokens of the next prompt of a burst; 0 outside of one."""
        with self._lock:
            recent = [tokens for at, tokens in self._arrivals if now - at <= BURST_S]
        return sum(recent) // len(recent) if len(recent) >= BURST_PROMPTS else 0

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
