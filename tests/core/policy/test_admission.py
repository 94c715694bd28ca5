"""Admission of rollout steps beside serving, against the equations written out."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollweave.core.policy.admission import (
    CHUNK_TOKENS,
    FIRST_MARGIN,
    PROVEN,
    SATURATED,
    STALL_S,
    WINDOW,
    Admission,
    Corrections,
    Curve,
    Decoding,
    Latest,
    PrefillMode,
    Profile,
    Progress,
    QueuedPrefill,
    Slo,
    StepKind,
    fewest_slots,
    stalled,
)

POINTS = st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 2)), min_size=1, max_size=8).map(
    lambda points: tuple(sorted(dict(points).items()))
)
CURVES = st.builds(Curve, POINTS)
PROFILES = st.builds(Profile, mono=CURVES, chunked=CURVES, decode=CURVES)
TIMES = st.floats(0, 100)
PREFILLS = st.lists(
    st.builds(
        QueuedPrefill, arrived=TIMES, tokens=st.integers(1, 8192), ahead=st.integers(0, 8192)
    ),
    max_size=5,
)


DECODES = st.lists(
    st.builds(
        lambda first, later, tokens: Decoding(first=first, newest=first + later, tokens=tokens),
        TIMES,
        st.floats(0, 5),
        st.integers(1, 100),
    ),
    max_size=5,
)


def growing(points: tuple[tuple[int, float], ...]) -> Curve:
    """Return a curve on which no larger size is faster."""
    sizes, seconds = zip(*points, strict=True)
    return Curve(tuple(zip(sizes, sorted(seconds), strict=True)))


def slow_seconds(points: tuple[tuple[int, float], ...], size: int) -> float:
    """Walk over all pairs of neighbors."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(points):
        if low <= size <= high:
            return low_s + (high_s - low_s) / (high - low) * (size - low)
    slopes = [points[-1][1] / points[-1][0]]
    if len(points) > 1:
        (low, low_s), (high, high_s) = points[-2:]
        slopes.append((high_s - low_s) / (high - low))
    return points[-1][1] + max(slopes) * (size - points[-1][0])


@given(POINTS, st.integers(1, 20_000))
def test_a_curve_is_linear_between_its_points(
    points: tuple[tuple[int, float], ...], size: int
) -> None:
    assert Curve(points).seconds(size) == pytest.approx(slow_seconds(points, size))
    assert Curve(points).seconds(0) == 0


@given(
    PROFILES,
    PREFILLS,
    DECODES,
    TIMES,
    st.integers(0, 512),
    st.one_of(st.just(0.0), st.floats(0.001, 1)),
    st.floats(0, 1),
)
def test_the_slack_is_the_smallest_of_both_equations(
    profile: Profile,
    prefills: list[QueuedPrefill],
    decodes: list[Decoding],
    now: float,
    pending: int,
    longest_s: float,
    mean_s: float,
) -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.15)
    admission = Admission(slo=slo, profile=profile, rollout=profile, mode=PrefillMode.MONOLITHIC)
    expected = math.inf
    step_s = slow_seconds(profile.decode.points, len(decodes)) if decodes else 0.0
    for request in prefills:
        cost = slow_seconds(profile.mono.points, request.ahead + request.tokens) + step_s
        expected = min(expected, request.arrived + 0.5 - now - FIRST_MARGIN * cost)
    if longest_s:  # a request that arrives now waits for the prompts before it
        ahead = max((one.ahead + one.tokens for one in prefills), default=0)
        cost = step_s + (slow_seconds(profile.mono.points, ahead) if ahead else 0.0)
        expected = min(expected, 0.5 - FIRST_MARGIN * cost - longest_s)
    cost = step_s + (slow_seconds(profile.mono.points, pending) if pending else 0.0)
    for one in decodes:
        # of its next token, and of the mean since the first one
        for due in (one.newest + 0.15, one.first + one.tokens * 0.15):
            expected = min(expected, due - now - FIRST_MARGIN * cost - mean_s)
    slack = admission.slack(
        now, prefills, decodes, pending=pending, longest_s=longest_s, mean_s=mean_s
    )
    assert slack == pytest.approx(expected)


def test_a_request_that_prompts_have_delayed_catches_up() -> None:
    late = Decoding(first=1.0, newest=1.5, tokens=4)
    assert late.due(0.1) == pytest.approx(1.4)  # its mean is at the limit by then
    early = Decoding(first=1.0, newest=1.2, tokens=4)
    assert early.due(0.1) == pytest.approx(1.3)  # no more than a token's time


@given(PROFILES, PREFILLS, DECODES, TIMES)
def test_a_phase_without_a_limit_never_delays_a_rollout(
    profile: Profile, prefills: list[QueuedPrefill], decodes: list[Decoding], now: float
) -> None:
    def slack(slo: Slo, prompts: list[QueuedPrefill]) -> float:
        return Admission(slo=slo, profile=profile, rollout=profile).slack(now, prompts, decodes)

    assert slack(Slo(ttft_s=math.inf, tpot_s=math.inf), prefills) == math.inf
    tokens_only = Slo(ttft_s=math.inf, tpot_s=0.15)
    assert slack(tokens_only, prefills) == slack(Slo(ttft_s=0.5, tpot_s=0.15), [])


@given(st.lists(st.floats(0.01, 50), max_size=2 * WINDOW))
def test_the_factor_is_the_99th_percentile_of_the_window(ratios: list[float]) -> None:
    corrections = Corrections()
    for ratio in ratios:
        corrections.measured(StepKind.ROLLOUT_DECODE, profiled_s=2.0, seconds=2.0 * ratio)
    unproven = [FIRST_MARGIN] if len(ratios) < PROVEN else []
    window = sorted([*unproven, *ratios[-WINDOW:]])
    below = [value for value in window if sum(one <= value for one in window) / len(window) >= 0.99]
    assert corrections.factor(StepKind.ROLLOUT_DECODE) == pytest.approx(min(below))
    assert corrections.factor(StepKind.SERVING_DECODE) == FIRST_MARGIN


def test_a_profile_that_is_far_too_low_stops_rollouts_at_once() -> None:
    fast = Curve(((1, 0.001),))
    profile = Profile(mono=fast, chunked=fast, decode=fast)
    admission = Admission(slo=Slo(ttft_s=0.5, tpot_s=0.1), profile=profile, rollout=profile)
    assert admission.decoding(0.05, most=8) == 8
    admission.corrections.measured(StepKind.ROLLOUT_DECODE, profiled_s=0.008, seconds=0.08)
    assert admission.decoding(0.05, most=8) == 4
    for _ in range(WINDOW):
        admission.corrections.measured(StepKind.ROLLOUT_DECODE, profiled_s=0.008, seconds=0.008)
    assert admission.decoding(0.05, most=8) == 8, "the error is forgotten"


@given(PROFILES, st.floats(-1, 2), st.integers(0, 64))
def test_a_chunk_is_the_largest_that_fits(profile: Profile, slack: float, decode: int) -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.1)
    admission = Admission(slo=slo, profile=profile, rollout=profile)
    chunk = admission.chunk(slack, decode=decode)
    sizes = [1 << power for power in range(CHUNK_TOKENS.bit_length())]
    fitting = [size for size in sizes if admission.step_s(prompt=size, decode=decode) <= slack]
    assert chunk == max(fitting, default=0)


@given(PROFILES, st.floats(-1, 2), st.integers(1, 64))
def test_as_many_sequences_decode_as_fit_by_halves(
    profile: Profile, slack: float, most: int
) -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.1)
    admission = Admission(slo=slo, profile=profile, rollout=profile)
    sizes = [most >> halvings for halvings in range(most.bit_length())]
    fitting = [size for size in sizes if admission.step_s(prompt=0, decode=size) <= slack]
    assert admission.decoding(slack, most=most) == max(fitting, default=0)


@given(PROFILES, st.floats(0, 1), st.integers(1, 64))
def test_there_are_as_many_slots_as_decode_beside_a_request_alone(
    profile: Profile, longest_s: float, most: int
) -> None:
    """One that has just arrived, or has just had a token."""
    slo = Slo(ttft_s=0.5, tpot_s=0.15)
    admission = Admission(slo=slo, profile=profile, rollout=profile)
    arrived = admission.slack(0.0, (), (), longest_s=longest_s) if longest_s else 0.5
    decodes = admission.slack(0.0, (), [Decoding(first=0.0, newest=0.0)])
    expected = admission.decoding(min(arrived, decodes), most=most)
    assert admission.slots(longest_s=longest_s, most=most) == max(1, expected)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_an_slo_must_be_positive(value: float) -> None:
    with pytest.raises(ValueError, match=f"ttft_s must be positive, got {value}"):
        Slo(ttft_s=value, tpot_s=1.0)


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 1.0)), ((0, 1.0),), ((1, -1.0),)])
def test_a_curve_must_be_a_measurement(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Curve(points)


def test_a_turn_is_stalled_after_two_seconds() -> None:
    assert not stalled(10.0, 10.0 + STALL_S - 0.01)
    assert stalled(10.0, 10.0 + STALL_S)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1.5),
            st.sampled_from(["step", "none", "restart"]),
            st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=12,
    )
)
@example([(1.0, "step", {"a": 1, "b": 0}, {"a", "b"})] * 4)
@example([(1.0, "step", {"a": 1}, {"a", "b"}), (1.0, "step", {"b": 1}, {"b"})] * 3)
def test_a_turn_is_given_back_after_two_seconds_without_progress(
    events: list[tuple[float, str, dict[str, int], set[str]]],
) -> None:
    """Against a search through all steps; each adds computed tokens to the turns in a
    slot. Others are live without one, or have ended.
    """
    progress, now, stepped, totals = Progress(), 0.0, 0.0, dict.fromkeys("abc", 0)
    history: list[tuple[float, dict[str, int]]] = []
    for wait_s, event, more, live in events:
        now += wait_s
        if event == "restart":
            progress.restart(now)
            stepped, history = now, []
            continue
        if event == "step":
            for name, tokens in more.items():
                totals[name] += tokens
            history.append((now, {name: totals[name] for name in more}))
            progress.stepped(history[-1][1], now)
            stepped = now
        late = []
        for name in history[-1][1] if history else ():
            for at, computed in reversed(history):
                if computed.get(name) != totals[name]:
                    break
                since = at
            late += [name] if now - since >= STALL_S and name in live else []
        expected = sorted(live) if now - stepped >= STALL_S else late
        assert progress.stalled(sorted(live), now) == expected


@given(st.lists(st.floats(0, 10), min_size=1), st.integers(1, 40), st.lists(st.floats(0, 10)))
def test_the_latest_values_are_those_of_a_sorted_window(
    values: list[float], size: int, more: list[float]
) -> None:
    latest = Latest(size)
    for value in values:
        latest.add(value)
    window = values[-size:]
    assert len(latest) == len(window)
    assert latest.mean == pytest.approx(sum(window) / len(window))
    for added in ([], more):
        all_of_them = sorted([*window, *added])
        share = sum(one <= latest.percentile(*added) for one in all_of_them) / len(all_of_them)
        assert share >= 0.99
        below = [one for one in all_of_them if one < latest.percentile(*added)]
        assert len(below) / len(all_of_them) < 0.99


@given(POINTS, POINTS, st.floats(-1, 2))
def test_a_step_is_admitted_if_any_is(
    prompts: tuple[tuple[int, float], ...], tokens: tuple[tuple[int, float], ...], slack: float
) -> None:
    curves = [growing(prompts), growing(tokens)]
    profile = Profile(mono=curves[0], chunked=curves[0], decode=curves[1])
    admission = Admission(slo=Slo(ttft_s=1, tpot_s=1), profile=profile, rollout=profile)
    any_fits = admission.decoding(slack, most=1) or admission.chunk(slack, decode=0)
    assert admission.admits(slack) == bool(any_fits)


SECONDS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40)


@given(seconds=SECONDS)
def test_no_fewer_sequences_have_nearly_the_highest_throughput(seconds: list[float]) -> None:
    chosen = fewest_slots(lambda count: seconds[count - 1], most=len(seconds))
    rates = {count: count / seconds[count - 1] for count in range(1, len(seconds) + 1)}
    best = max(rates.values())
    assert rates[chosen] >= SATURATED * best
    assert all(rates[count] < SATURATED * best for count in range(1, chosen))


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [
        (19.0, 1.0, 160),  # 19/20 of the throughput of 400 sequences, 400 / 419
        (0.0, 1.0, 1),  # a step of compute alone gains nothing
        (1.0, 0.0, 380),  # one that only reads weights gains with each
    ],
)
def test_of_a_constant_and_a_price_for_each_sequence(
    fixed: float, each: float, expected: int
) -> None:
    assert fewest_slots(lambda count: fixed + each * count, most=400) == pytest.approx(
        expected, abs=40
    )
    if not each or not fixed:
        assert fewest_slots(lambda count: fixed + each * count, most=400) == expected


def test_there_is_one_turn_at_least() -> None:
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        fewest_slots(lambda count: 1.0, most=0)
