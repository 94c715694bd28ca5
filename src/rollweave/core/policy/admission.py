"""Decide whether a rollout step may run now on the engine of a serving model (ROSE
§4.1), and how many turns an engine should run at the same time (ROSE §4.3, App. A).

One model computes at a time, and serving comes first. A rollout step runs between two
serving steps if the slack of every serving request, the time for which it can wait,
covers the step:

    prefill   S_r = arrival + TTFT - now - T_prf(tokens)        (eq. 1)
    decode    S_r = newest token + TPOT - now - T_dec(batch)    (eq. 2)

TTFT is the limit on the time to the first token, TPOT the limit on the time per further
token; T_prf and T_dec are the profiled seconds of the step. The smallest slack decides.
The phase of a request determines its equation, so the first equation holds for an
engine that only computes prompts, the second for an engine that only decodes, and both
for an engine that does both.

In the paper, an engine has one phase. If one step computes both, the slack of a
decoding request also covers the prompts in that step, and the slack of a prompt covers
the decoding requests. The TPOT of a request is a mean over its tokens: a request that
other prompts have delayed has less slack than by equation 2 until it has caught up, and
a request that is early has no more slack than by equation 2.

The paper profiles T once. Here a profile is corrected online: each step gives a ratio
of measured to profiled seconds, and estimates are multiplied by the 99th percentile of
recent ratios. So if a profile is too low, rollouts stop once more than a hundredth of
the steps show it; if it is too high, slack is not wasted forever.
"""

import enum
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from rollweave.schema.base import Struct

CHUNK_TOKENS = 512
"""Maximum number of prompt tokens in a rollout step (ROSE §4.1)."""

STALL_S = 2.0
"""Seconds without progress after which a rollout turn is returned (ROSE §4.1)."""

WINDOW = 256
"""Maximum number of measured steps of a kind, the latest, that correct its estimates.
"""

FIRST_MARGIN = 1.25
"""Factor of estimates before any step was measured. It counts as one measured ratio
until `PROVEN` ratios have been measured.
"""

PROVEN = 32
"""Number of measured steps of a kind after which `FIRST_MARGIN` no longer counts."""

QUANTILE = 0.99
"""Quantile of the measured ratios by which estimates are multiplied: latency limits
hold for the 99th percentile, too.
"""


class PrefillMode(enum.StrEnum):
    """The way a prompt is computed: in one step, or in chunks between other steps."""

    MONOLITHIC = "mono"
    CHUNKED = "chunk"


class StepKind(enum.StrEnum):
    """A kind of step whose estimates are corrected on their own."""

    SERVING_PREFILL = "serving prefill"
    SERVING_DECODE = "serving decode"
    ROLLOUT_PREFILL = "rollout prefill"
    ROLLOUT_DECODE = "rollout decode"


class Slo(Struct, frozen=True, kw_only=True):
    """The latency limits of each serving request: maximum seconds to the first token,
    and maximum mean seconds per further token. Infinity means that there is no limit.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


class Curve(Struct, frozen=True):
    """Measured seconds by size (tokens, or sequences), in increasing sizes.

    Between two sizes the seconds are interpolated. Beyond the last size they grow in
    proportion to the size, or with the last slope if it is steeper. Below the first
    size they are the seconds of the first size.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sizes must be positive and increasing, got {sizes}")
        for _, seconds in self.points:
            if not 0 <= seconds < math.inf:
                raise ValueError(f"seconds must be 0 or more and finite, got {seconds}")

    def seconds(self, size: int) -> float:
        """Return the seconds of this size; 0 for a size of 0."""
        if size <= 0:
            return 0.0
        at = bisect_left(self.points, size, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        low, low_s = self.points[at - 1]
        if at < len(self.points):
            high, high_s = self.points[at]
            return low_s + (high_s - low_s) * (size - low) / (high - low)
        slope = low_s / low
        if at > 1:
            former, former_s = self.points[at - 2]
            slope = max(slope, (low_s - former_s) / (low - former))
        return low_s + slope * (size - low)


class Profile(Struct, frozen=True, kw_only=True):
    """A model's profiled seconds: of a prompt by its tokens, in one step and in chunks,
    and of a decode step by its sequences.
    """

    mono: Curve
    chunked: Curve
    decode: Curve

    def prefill_s(self, tokens: int, mode: PrefillMode) -> float:
        """Return T_prf of the paper."""
        curve = self.mono if mode is PrefillMode.MONOLITHIC else self.chunked
        return curve.seconds(tokens)


class QueuedPrefill(Struct, frozen=True, kw_only=True):
    """A serving request without its first token: `tokens` of its prompt are yet to be
    computed, after `ahead` tokens of other prompts, which the paper leaves out.
    """

    arrived: float
    tokens: int
    ahead: int = 0


class Decoding(Struct, frozen=True, kw_only=True):
    """A serving request that decodes: the times of its first and newest token, and the
    number of its tokens so far, at least 1.
    """

    first: float
    newest: float
    tokens: int = 1

    def due(self, tpot_s: float) -> float:
        """Return when the next token is due: `tpot_s` after the newest token, or
        earlier if the mean time per token since the first token would exceed `tpot_s`.
        """
        return min(self.newest + tpot_s, self.first + self.tokens * tpot_s)


class Latest:
    """The latest measured values, `size` at most."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a value, in place of the oldest value if there are `size` others."""
        if len(self._values) == self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    @property
    def mean(self) -> float:
        """The mean of the values. There must be at least one value."""
        return sum(self._values) / len(self._values)

    def percentile(self, *more: float) -> float:
        """Return the 99th percentile of these values and `more`: the smallest value
        that at most a hundredth of all values exceed.
        """
        values = sorted([*self._sorted, *more]) if more else self._sorted
        return values[math.ceil(QUANTILE * len(values)) - 1]


class Corrections:
    """The factors by which estimates of each kind of step are scaled."""

    def __init__(self) -> None:
        self._ratios = {kind: Latest() for kind in StepKind}
        self._factors = dict.fromkeys(StepKind, FIRST_MARGIN)

    def measured(self, kind: StepKind, *, profiled_s: float, seconds: float) -> None:
        """Record that a step with `profiled_s` took `seconds`. A step without profiled
        seconds is ignored.
        """
        if profiled_s > 0 and seconds >= 0:
            ratios = self._ratios[kind]
            ratios.add(seconds / profiled_s)
            unproven = [FIRST_MARGIN] if len(ratios) < PROVEN else []
            self._factors[kind] = ratios.percentile(*unproven)

    def factor(self, kind: StepKind) -> float:
        """Return the factor: the 99th percentile of the ratios in the window."""
        return self._factors[kind]


def ttft_slack(
    request: QueuedPrefill,
    *,
    slo: Slo,
    profile: Profile,
    mode: PrefillMode,
    now: float,
    factor: float = 1.0,
    beside_s: float = 0.0,
) -> float:
    """Return the slack of equation 1. The steps that compute the prompt take `beside_s`
    longer because of other requests.
    """
    prefill_s = factor * profile.prefill_s(request.ahead + request.tokens, mode)
    return request.arrived + slo.ttft_s - now - prefill_s - beside_s


def tpot_slack(
    due: float,
    *,
    profile: Profile,
    batch: int,
    now: float,
    factor: float = 1.0,
    beside_s: float = 0.0,
) -> float:
    """Return the slack of equation 2 for a request whose next token is due at `due`, in
    a batch of this size. The step takes `beside_s` longer because of prompts.
    """
    return due - now - factor * profile.decode.seconds(batch) - beside_s


class Admission:
    """Decides for one serving engine. `profile` is the serving model's profile,
    `rollout` the rollout model's.
    """

    def __init__(
        self,
        *,
        slo: Slo,
        profile: Profile,
        rollout: Profile,
        mode: PrefillMode = PrefillMode.CHUNKED,
    ) -> None:
        self.slo, self.profile, self.rollout = slo, profile, rollout
        self.mode = mode
        self.corrections = Corrections()

    def slack(
        self,
        now: float,
        prefills: Sequence[QueuedPrefill],
        decodes: Sequence[Decoding],
        *,
        pending: int = 0,
        longest_s: float = 0.0,
        mean_s: float = 0.0,
    ) -> float:
        """Return the smallest slack of all serving requests; infinity if there are no
        requests.

        The next serving step computes `pending` tokens of waiting prompts. Another
        request may arrive at any time. It must meet its limit even if its prompt takes
        `longest_s`, and requests that decode keep time for a prompt that takes
        `mean_s`. Both are 0 if no request is expected.
        """
        prefill_factor = self.corrections.factor(StepKind.SERVING_PREFILL)
        # a step of both kinds is corrected as a prefill
        decode_factor = (
            prefill_factor if pending else self.corrections.factor(StepKind.SERVING_DECODE)
        )
        decode_s = decode_factor * self.profile.decode.seconds(len(decodes))
        slacks = [
            ttft_slack(
                request,
                slo=self.slo,
                profile=self.profile,
                mode=self.mode,
                now=now,
                factor=prefill_factor,
                beside_s=decode_s,
            )
            for request in prefills
        ]
        if longest_s:
            ahead = max((request.ahead + request.tokens for request in prefills), default=0)
            ahead_s = prefill_factor * self.profile.prefill_s(ahead, self.mode)
            slacks.append(self.slo.ttft_s - ahead_s - decode_s - longest_s)
        if decodes:
            slacks.append(
                tpot_slack(
                    min(request.due(self.slo.tpot_s) for request in decodes),
                    profile=self.profile,
                    batch=len(decodes),
                    now=now,
                    factor=decode_factor,
                    beside_s=prefill_factor * self.profile.prefill_s(pending, self.mode) + mean_s,
                )
            )
        return min(slacks, default=math.inf)

    def profiled_s(self, *, prompt: int, decode: int) -> float:
        """Return the profiled seconds of a rollout step, uncorrected."""
        return self.rollout.chunked.seconds(prompt) + self.rollout.decode.seconds(decode)

    def step_s(self, *, prompt: int, decode: int) -> float:
        """Return the expected seconds of a rollout step that computes `prompt` tokens
        of prompts and decodes `decode` sequences.
        """
        factors = self.corrections
        return factors.factor(StepKind.ROLLOUT_PREFILL) * self.rollout.chunked.seconds(
            prompt
        ) + factors.factor(StepKind.ROLLOUT_DECODE) * self.rollout.decode.seconds(decode)

    def admits(self, slack: float) -> bool:
        """Return whether the smallest rollout step fits in the slack: a step that
        decodes one sequence, or computes one token of a prompt. Larger steps are
        assumed not to be faster.
        """
        return slack >= min(self.step_s(prompt=0, decode=1), self.step_s(prompt=1, decode=0))

    def decoding(self, slack: float, *, most: int) -> int:
        """Return how many of `most` sequences a rollout step may decode: `most`, halved
        until the step fits in the slack; 0 if not even one sequence fits.
        """
        return _halved(most, lambda decode: self.step_s(prompt=0, decode=decode) <= slack)

    def slots(self, *, longest_s: float, most: int) -> int:
        """Return how many rollouts may hold a slot in addition to serving requests, at
        least 1. It is the number that a step can decode both in the slack of a request
        that has just arrived and whose prompt takes `longest_s`, and in the slack of a
        request that has just sampled a token.
        """
        decode_s = self.corrections.factor(StepKind.SERVING_DECODE) * self.profile.decode.seconds(1)
        room = min(self.slo.ttft_s - longest_s, self.slo.tpot_s - decode_s)
        return max(1, self.decoding(room, most=most))

    def chunk(self, slack: float, *, decode: int) -> int:
        """Return how many prompt tokens a rollout step with `decode` sequences may
        have: the largest power of two up to `CHUNK_TOKENS` whose step fits in the
        slack, or 0 if no step fits.
        """
        return _halved(
            CHUNK_TOKENS, lambda prompt: self.step_s(prompt=prompt, decode=decode) <= slack
        )


def _halved(most: int, fits: Callable[[int], bool]) -> int:
    """Return `most`, halved until it fits; 0 if not even 1 does."""
    while most and not fits(most):
        most //= 2
    return most


def stalled(progressed: float, now: float) -> bool:
    """Return whether `STALL_S` have passed since the last progress. A rollout turn is
    then returned, and a step of a profile is left out.
    """
    return now - progressed >= STALL_S


class Progress:
    """The latest progress of the rollouts on a lent engine. A turn that holds a slot
    may be left out of steps in which other turns fit.
    """

    def __init__(self) -> None:
        self._stepped = 0.0
        self._computed: dict[str, tuple[int, float]] = {}
        """The number of computed tokens of each turn in a slot, and when it last
        changed.
        """

    def restart(self, now: float) -> None:
        """Note that no turn waited for a step until now."""
        self._stepped = now
        self._computed.clear()

    def stepped(self, computed: Mapping[str, int], now: float) -> None:
        """Note that a step of rollouts ended now. `computed` has the computed tokens of
        each turn in a slot.
        """
        before, self._stepped = self._computed, now
        self._computed = {
            id: before[id] if id in before and before[id][0] == tokens else (tokens, now)
            for id, tokens in computed.items()
        }

    def stalled(self, live: Collection[str], now: float) -> list[str]:
        """Return the turns to give back: all `live` turns if there was no step for too
        long, otherwise the turns in a slot that made no progress for too long.
        """
        if stalled(self._stepped, now):
            return list(live)
        turns = self._computed.items()
        return [id for id, (_, since) in turns if stalled(since, now) and id in live]


SATURATED = 0.95
"""Share of the highest throughput that counts as the highest throughput."""


def fewest_slots(step_s: Callable[[int], float], *, most: int) -> int:
    """Return the fewest sequences, up to `most`, whose throughput is at least
    `SATURATED` times the highest throughput. `step_s(sequences)` is the seconds of a
    step that decodes this number of sequences. Raises ValueError if `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    rates = [count / step_s(count) for count in range(1, most + 1)]
    enough = SATURATED * max(rates)
    return next(count for count, rate in enumerate(rates, 1) if rate >= enough)
