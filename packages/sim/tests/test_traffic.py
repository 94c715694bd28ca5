"""Requests of users: their burstiness, and traces in the format of the Azure traces."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from rollweave.schema.errors import ConfigError
from rollweave_sim.traffic import DAY_PEAK, WINDOW_S, drawn, recorded

HEADER, AT = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "TIMESTAMP must"


@pytest.mark.extended
def test_bursts_are_as_high_as_published_and_the_mean_is_kept() -> None:
    rate, seconds = 100.0, 3 * WINDOW_S
    arrivals = list(itertools.takewhile(lambda one: one.at < seconds, drawn(rate, seed=3)))
    assert len(arrivals) / seconds == pytest.approx(rate * DAY_PEAK**0.05, rel=0.1)
    per_second = Counter(int(one.at) for one in arrivals)
    for window, peak in enumerate((4.22, 1.58, 1.73)):
        counts = [per_second[int(window * WINDOW_S) + second] for second in range(int(WINDOW_S))]
        mean = sum(counts) / len(counts)
        assert 0.8 * peak < max(counts) / mean < 1.35 * peak


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    first, again, other = (list(itertools.islice(drawn(5.0, seed=seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    late = next(itertools.islice(drawn(5.0, seed=1), 20_000, None))
    pinned = [(round(one.at, 4), one.prompt_tokens, one.output_tokens) for one in (first[9], late)]
    assert pinned == [(2.8858, 755, 660), (3625.7413, 585, 418)]


def test_a_trace_with_dates_begins_at_its_first_request(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        HEADER + "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.2299600,396,109\n"
    )
    first, second = recorded(trace)
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "-3,10,10\n", ":2: TIMESTAMP must be at least 0, got '-3'"),
        (HEADER + "soon,10,10\n", f":2: {AT} be a date or a number of seconds, got 'soon'"),
        (HEADER + "5,9,9\n4,9,9\n", f":3: {AT} not be earlier than in the line before, got '4'"),
        (HEADER + "5,0,10\n", ":2: ContextTokens must be a number of at least 1, got '0'"),
        (HEADER + "5,7,x\n", ":2: GeneratedTokens must be a number of at least 1, got 'x'"),
        (HEADER, " must have at least one line below its columns, got none"),
        (
            "TIMESTAMP,Tokens\n1,2\n",
            " must have the columns TIMESTAMP, ContextTokens, GeneratedTokens, got TIMESTAMP, "
            "Tokens",
        ),
    ],
)
def test_a_bad_trace_is_one_line_with_line_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ConfigError) as raised:
        recorded(trace)
    assert str(raised.value) == f"{trace}{message}"


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a readable CSV file"):
        recorded(tmp_path / "none.csv")
