"""Decide whether a rollout step may run now beside a serving model (ROSE §4.1).

One model computes at a time, and serving comes first. A rollout step runs between two
serving steps if the slack of every serving request covers it:

    prefill   S_r = arrival + TTFT - now - T_prf(tokens)        (eq. 1)
    decode    S_r = newest token + TPOT - now - T_dec(batch)    (eq. 2)

The smallest slack decides. Each request has the equation of the phase that it is in, so
a prefill deployment is held to the first one, a decode deployment to the second, and a
collocated one to both.

The paper's deployments have one phase each. If both are computed in one step, the slack
of a decoding request also covers the prompts in that step, and the slack of a prompt
covers the decoding requests. The TPOT of a request is a mean over its tokens: a request
that other prompts have delayed has less slack until it has caught up, and never more
than equation 2 gives it.

The paper profiles T once. Here a profile is corrected online: each measured step gives
the ratio to its profiled seconds, and estimates are scaled by the 99th percentile of
recent ratios. So a profile that is too low stops rollouts once a hundredth of the steps
show it, and one that is too high does not waste slack forever.
"""

import enum
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from rollweave.schema.base import Struct

CHUNK_TOKENS = 512
"""Maximum number of prompt tokens in a rollout step (ROSE §4.1)."""

STALL_S = 2.0
"""Seconds without progress after which a rollout turn is returned (ROSE §4.1)."""

WINDOW = 256
"""Number of measured steps of a kind that correct its estimates."""

FIRST_MARGIN = 1.25
"""Factor of estimates before anything was measured. It counts as one measured ratio
until `PROVEN` others were.
"""

PROVEN = 32
"""Number of measured steps of a kind from which on they alone correct its estimates."""

QUANTILE = 0.99
"""Quantile of the measured ratios by which estimates are scaled, as SLOs are of P99."""


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
    """Maximum seconds until the first token, and from each token to the next. A limit
    is infinite if nothing is promised.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


class Curve(Struct, frozen=True):
    """Measured seconds by size (tokens, or sequences), in increasing sizes.

    Between two sizes the seconds are interpolated. Beyond the last one they grow in
    proportion, or with the last slope if that is steeper; below the first one they are
    those of the first.
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
    """A serving request without its first token, of whose prompt `tokens` are missing.

    `ahead` tokens of other prompts are computed before it: the paper leaves them out.
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
        """Return when the next token is due: `tpot_s` after the newest one, or earlier
        if the mean since the first one would exceed it.
        """
        return min(self.newest + tpot_s, self.first + self.tokens * tpot_s)


def percentile(values: Collection[float]) -> float:
    """Return the 99th percentile of measured values: the smallest that at most a
    hundredth of them exceed.
    """
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1]


class Corrections:
    """The factors by which estimates of each kind of step are scaled."""

    def __init__(self, *, window: int = WINDOW, first_margin: float = FIRST_MARGIN) -> None:
        self._ratios = {kind: deque([first_margin], maxlen=window) for kind in StepKind}
        self._factors = dict.fromkeys(StepKind, first_margin)
        self._unproven = set(StepKind)

    def measured(self, kind: StepKind, *, profiled_s: float, seconds: float) -> None:
        """Learn that a step with this estimate took `seconds`. A step without an
        estimate teaches nothing.
        """
        if profiled_s > 0 and seconds >= 0:
            ratios = self._ratios[kind]
            ratios.append(seconds / profiled_s)
            if kind in self._unproven and len(ratios) > PROVEN:
                self._unproven.remove(kind)
                ratios.popleft()
            self._factors[kind] = percentile(ratios)

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
    """Return the seconds of equation 1. Steps that compute the prompt take `beside_s`
    more for other requests.
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
    """Return the seconds of equation 2 for a request whose next token is due then, in a
    batch of this size. The step takes `beside_s` more for prompts.
    """
    return due - now - factor * profile.decode.seconds(batch) - beside_s


class Admission:
    """The decisions for one serving engine.

    `profile` is that of the serving model, `rollout` that of the rollout model.
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
        prefills: Iterable[QueuedPrefill],
        decodes: Sequence[Decoding],
        *,
        pending: int = 0,
        longest_s: float = 0.0,
        mean_s: float = 0.0,
    ) -> float:
        """Return the smallest slack of all serving requests, infinity without any.

        The next serving step computes `pending` tokens of prompts that wait. Another
        prompt may arrive at any time: its request must meet its limit even if the
        prompt takes `longest_s`, and requests that decode keep time for one that takes
        `mean_s`. (0: none arrives.)
        """
        prefill_factor = self.corrections.factor(StepKind.SERVING_PREFILL)
        # a step of both kinds is corrected as a prefill
        decode_factor = (
            prefill_factor if pending else self.corrections.factor(StepKind.SERVING_DECODE)
        )
        decode_s = decode_factor * self.profile.decode.seconds(len(decodes))
        slacks, ahead = [], 0
        for request in prefills:
            slacks.append(
                ttft_slack(
                    request,
                    slo=self.slo,
                    profile=self.profile,
                    mode=self.mode,
                    now=now,
                    factor=prefill_factor,
                    beside_s=decode_s,
                )
            )
            ahead = max(ahead, request.ahead + request.tokens)
        if longest_s:
            ahead_s = prefill_factor * self.profile.prefill_s(ahead, self.mode)
            slacks.append(self.slo.ttft_s - ahead_s - decode_s - longest_s)
        if decodes:
            slacks.append(
                tpot_slack(
                    min(one.due(self.slo.tpot_s) for one in decodes),
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

    def decoding(self, slack: float, *, most: int) -> int:
        """Return how many of `most` sequences a rollout step may decode: as many as
        fit in the slack when they are halved again and again, 0 if not even one does.
        """
        decode = most
        while decode and self.step_s(prompt=0, decode=decode) > slack:
            decode //= 2
        return decode

    def slots(self, *, longest_s: float, most: int) -> int:
        """Return how many rollouts may decode at once beside serving requests, at
        least 1: as many as fit in the slack of a request that has just arrived, whose
        prompt takes `longest_s`, and of one that has just had a token.
        """
        decode_s = self.corrections.factor(StepKind.SERVING_DECODE) * self.profile.decode.seconds(1)
        room = min(self.slo.ttft_s - longest_s, self.slo.tpot_s - decode_s)
        return max(1, self.decoding(room, most=most))

    def chunk(self, slack: float, *, decode: int) -> int:
        """Return how many prompt tokens a rollout step beside `decode` sequences may
        have: the largest power of two up to `CHUNK_TOKENS` whose step fits in the
        slack, 0 if none does.
        """
        tokens = CHUNK_TOKENS
        while tokens and self.step_s(prompt=tokens, decode=decode) > slack:
            tokens //= 2
        return tokens


def stalled(progressed: float, now: float) -> bool:
    """Return whether what last progressed at `progressed` has waited too long: a
    rollout turn is returned, and a step that measures is left out.
    """
    return now - progressed >= STALL_S
