"""The serving model beside a run: the requests of its users, drawn with the burstiness
of production traffic or read from a trace in the format of the public Azure traces; the
memory that it shares with a rollout model, and its profile (ROSE §4.1, §6.1).

ROSE §3.2 reports of a 24-hour trace of Microsoft: the busiest minute has 1.7 times the
mean rate of the day, and the busiest second of three windows of five minutes has 4.22,
1.58 and 1.73 times the mean of its window. Here the rate follows the day as a sine, and
each window has one burst in which it is raised by one of these factors in turn;
arrivals are Poisson at that rate, so that single seconds scatter beyond it.
"""

import csv
import datetime
import functools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollweave.core.policy.admission import Curve, Profile
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_sim.cost import EngineCosts

DAY_S = 86_400.0
DAY_PEAK = 1.7
"""Rate of the busiest minute over the mean of the day (ROSE §3.2)."""

WINDOW_S = 300.0
SECOND_PEAKS = (4.22, 1.58, 1.73)
"""Rates of the busiest seconds over the means of their windows (ROSE §3.2)."""

BURST_S = 5.0
"""Seconds of a burst. Assumption: the paper gives the height alone."""

PROMPT_MEDIAN, PROMPT_MEAN = 1020, 1155
OUTPUT_MEDIAN, OUTPUT_MEAN = 129, 211
"""Tokens of prompts and answers in the public Azure conversation trace of 2023 (the
medians are in Splitwise, section 3.1); lengths are drawn log-normally from these.
"""

MAX_TOKENS = 8192
"""Maximum tokens of a drawn prompt and of a drawn answer. Assumption."""

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of the public Azure traces."""


class Arrival(Struct, frozen=True, kw_only=True):
    """A request that arrives at `at` seconds, with so many tokens of prompt and
    answer.
    """

    at: float
    prompt_tokens: int
    output_tokens: int


def drawn(rate: float, *, seed: int) -> Iterator[Arrival]:
    """Yield endless arrivals with a mean of `rate` a second, in order.

    They are drawn by thinning: candidates at the highest rate, each kept with the
    probability of its moment.
    """
    draw = random.Random(f"serving/{seed}")
    highest, at = rate * DAY_PEAK * max(SECOND_PEAKS), 0.0
    while True:
        at += draw.expovariate(highest)
        if draw.random() * highest < rate * _level(at, seed=seed):
            yield Arrival(
                at=at,
                prompt_tokens=_tokens(draw, median=PROMPT_MEDIAN, mean=PROMPT_MEAN),
                output_tokens=_tokens(draw, median=OUTPUT_MEDIAN, mean=OUTPUT_MEAN),
            )


def _level(at: float, *, seed: int) -> float:
    """Return the rate at a moment over the mean of the day. A run begins where it
    rises through the mean.
    """
    day = 1 + (DAY_PEAK - 1) * math.sin(2 * math.pi * at / DAY_S)
    window, within = divmod(at, WINDOW_S)
    peak = SECOND_PEAKS[int(window) % len(SECOND_PEAKS)]
    begin = _burst_begin(seed, window)
    if begin <= within < begin + BURST_S:
        return day * peak
    return day * (WINDOW_S - peak * BURST_S) / (WINDOW_S - BURST_S)


@functools.cache
def _burst_begin(seed: int, window: float) -> float:
    """Return when the burst of a window begins, in seconds of the window."""
    return random.Random(f"burst/{seed}/{window}").uniform(0, WINDOW_S - BURST_S)


def _tokens(draw: random.Random, *, median: int, mean: int) -> int:
    sigma = math.sqrt(2 * math.log(mean / median))
    return max(1, min(MAX_TOKENS, round(draw.lognormvariate(math.log(median), sigma))))


def recorded(path: Path) -> list[Arrival]:
    """Return the arrivals of a CSV file with the columns `COLUMNS`, counted from the
    first. Times are dates or numbers of seconds.

    Raises ConfigError, which names the line.
    """
    rows = timed_rows(path, COLUMNS)
    first = rows[0][1]
    return [
        Arrival(
            at=at - first,
            prompt_tokens=count(where, COLUMNS[1], row[COLUMNS[1]]),
            output_tokens=count(where, COLUMNS[2], row[COLUMNS[2]]),
        )
        for where, at, row in rows
    ]


def timed_rows(path: Path, columns: Sequence[str]) -> list[tuple[str, float, dict[str, str]]]:
    """Return the rows of a CSV file with these columns, the first of which has times in
    their order: each with where it is, and its time in seconds.

    Raises ConfigError, which names the line.
    """
    found: list[tuple[str, float, dict[str, str]]] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames is None or not set(columns) <= set(rows.fieldnames):
                raise ConfigError(
                    f"{path} must have the columns {', '.join(columns)}, got "
                    f"{', '.join(rows.fieldnames or ()) or 'none'}"
                )
            for row in rows:
                where, text = f"{path}:{rows.line_num}", row[columns[0]]
                at = _seconds(where, text)
                if found and at < found[-1][1]:
                    raise ConfigError(
                        f"{where}: {columns[0]} must not be earlier than in the line before, got "
                        f"{text!r}"
                    )
                found.append((where, at, row))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} must be a readable CSV file: {error}") from error
    if not found:
        raise ConfigError(f"{path} must have at least one line below its columns, got none")
    return found


def _seconds(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except (TypeError, ValueError):
        try:
            date = datetime.datetime.fromisoformat((text or "").strip()[:26])
        except ValueError as error:
            raise ConfigError(
                f"{where}: TIMESTAMP must be a date or a number of seconds, got {text!r}"
            ) from error
        return (date.replace(tzinfo=None) - datetime.datetime(2000, 1, 1)).total_seconds()
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{where}: TIMESTAMP must be at least 0, got {text!r}")
    return seconds


def count(where: str, name: str, text: str, *, least: int = 1) -> int:
    """Return the number in this column. Raises ConfigError."""
    try:
        number = int(text)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise ConfigError(f"{where}: {name} must be a number of at least {least}, got {text!r}")
    return number


PROFILED_TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192)
PROFILED_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Prompts and batches whose steps are profiled."""

PROFILED_CONTEXT = 1200
"""Tokens of each context in the profile: about those of a request half answered."""


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes of an engine: all, those for KV beside the weights of both models, and of a
    token of each.
    """

    total: float
    kv: float
    serving_token: float
    rollout_token: float


def profiled(cost: EngineCosts) -> Profile:
    """Return what a serving model would measure of itself before it lends."""
    prompts = Curve(
        tuple(
            (
                tokens,
                cost.step_s(
                    prefill_tokens=tokens,
                    prefill_context=tokens * (tokens + 1) // 2,
                    decode=0,
                    decode_context=0,
                ),
            )
            for tokens in PROFILED_TOKENS
        )
    )
    decode = Curve(
        tuple(
            (batch, cost.decode_s(decode=batch, decode_context=batch * PROFILED_CONTEXT, steps=1))
            for batch in PROFILED_BATCHES
        )
    )
    return Profile(mono=prompts, chunked=prompts, decode=decode)
