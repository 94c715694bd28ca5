"""How many rollout workers there should be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.cluster.worker_count import Peak, needed, observe
from tests.support.properties import examples

NEEDS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=40
)  # (seconds since the one before, workers needed)


def greatest(history: list[tuple[float, int]], *, now: float, window_s: float) -> int:
    """Return the greatest need within the window, by a walk over the whole history."""
    ends = [at for at, _ in history[1:]] + [now]
    return max(need for (_, need), end in zip(history, ends, strict=True) if end >= now - window_s)


@given(steps=NEEDS, window_s=st.integers(0, 60))
def test_the_first_peak_is_the_greatest_need_of_the_window(
    steps: list[tuple[int, int]], window_s: int
) -> None:
    peaks: list[Peak] = []
    history: list[tuple[float, int]] = []
    now = 0.0
    for wait, need in steps:
        now += wait
        history.append((now, need))
        peaks = observe(peaks, need, now=now, window_s=window_s)
        assert peaks[0].workers == greatest(history, now=now, window_s=window_s)
        assert peaks[-1] == Peak(workers=need, until=now)
        counts = [peak.workers for peak in peaks]
        assert counts == sorted(set(counts), reverse=True), "as many as there are counts"


@settings(max_examples=examples(200))
@given(steps=NEEDS, window_s=st.integers(1, 60))
def test_the_number_never_flaps(steps: list[tuple[int, int]], window_s: int) -> None:
    """It is never below the need, and after it has grown it does not shrink for a whole
    window.
    """
    peaks: list[Peak] = []
    now, before, grown_at = 0.0, 0, -1e9
    for wait, need in steps:
        now += wait
        peaks = observe(peaks, need, now=now, window_s=window_s)
        number = peaks[0].workers
        assert number >= need
        if number > before:
            grown_at = now
        elif number < before:
            assert now - grown_at >= window_s
        before = number


@given(
    attempts=st.integers(0, 100),
    workers=st.integers(1, 12),
    at_once=st.integers(1, 60),
)
def test_as_few_workers_as_have_places_for_all_attempts(
    attempts: int, workers: int, at_once: int
) -> None:
    number = needed(attempts, workers=workers, at_once=at_once)
    share = next(share for share in range(1, 61) if share * workers >= at_once)
    fits = [one for one in range(workers + 1) if one * share >= attempts]
    assert number == min(fits, default=workers)


def test_a_gap_between_two_bursts_ends_no_worker() -> None:
    peaks: list[Peak] = []
    numbers = []
    for now, need in [(0.0, 4), (10.0, 0), (39.0, 0), (39.5, 3), (45.0, 0), (69.4, 0), (75.1, 0)]:
        peaks = observe(peaks, need, now=now, window_s=30.0)
        numbers.append(peaks[0].workers)
    assert numbers == [4, 4, 4, 4, 3, 3, 0]
