"""The values that our families and users have for quantities that papers state.

Lengths are those of trajectories drawn from the family, as simulated runs draw them;
caps and rates are read from it. Users are simulated alone, on serving engines that lend
nothing.
"""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave_papers.cluster import Setup
from rollweave_papers.constraints import ONE, QUANTITIES, USERS, Constraint, Form
from rollweave_sim.clock import Clock
from rollweave_sim.families import FAMILIES, REWARD_IO_S, Family
from rollweave_sim.serving import ServingCluster
from rollweave_sim.workload import Drawn, Plan

SAMPLE, GROUP = 8192, 16
"""Trajectories that are drawn, and members of a group."""

MINUTE_S = 60.0

RATE, SERVED_S = 2.0, 300.0
"""Requests of users per second (assumed in `rose.SERVING`), and simulated seconds: the
window of traffic with the highest burst, 4.22 times the mean.
"""

RATES = tuple(1.1**power for power in range(49))
"""Rates that are tried, up to 97 a second."""

SERVERS = {
    "users-7b": {"engines": 16, "prefill": 4, "gpus": 1, "ttft_s": 0.5, "tpot_s": 0.15},
    "users-32b": {"engines": 16, "prefill": 4, "gpus": 4, "ttft_s": 1.0, "tpot_s": 0.45},
    "users-8b": {"engines": 8, "prefill": 0, "gpus": 1, "ttft_s": 0.5, "tpot_s": 0.15},
}
"""Serving engines, those that compute prompts, and GPUs of an engine: ROSE §6, 16 and
64 GPUs with one part of four for prompts; and eight GPUs without that division (§3.2).
"""


def value(family: str, constraint: Constraint) -> float | None:
    """Return our value of what a constraint bounds; None if the family has nothing of
    the kind.
    """
    return quotient(family, constraint.above, constraint.per)


def value_of(family: str, quantity: str) -> float | None:
    """Return our value of a quantity without a batch or a speed."""
    one = QUANTITIES[quantity]
    return quotient(family, one.above, one.per)


def quotient(family: str, above: Form, per: Form = ONE) -> float | None:
    """Return our value of one linear form over another."""
    ends = []
    for form in (above, per):
        values = {name: 1.0 if name == "1" else statistic(family, name) for name in form}
        if None in values.values():
            return None
        ends.append(sum(one * (values[name] or 0.0) for name, one in form.items()))
    return ends[0] / ends[1] if ends[1] else None


@functools.cache
def statistic(family: str, name: str) -> float | None:
    """Return our value of a statistic; None if the family has none."""
    if family in USERS:
        return users(family, RATE)[name]
    one = FAMILIES[family]
    if name in _CAPS:
        return _CAPS[name](one)
    seen = _seen(family)
    plain, at, of = name.partition("@")
    kind, _, which = plain.partition(".")
    if kind == "judge_s":
        # RollArt's model judges mathematical answers alone (§7.1)
        return float(seen["reward_s"].mean()) - REWARD_IO_S if family == "gem-math" else None
    values = seen[kind]
    if at:
        starts = range(0, max(1, len(values) - int(of) + 1), int(of))
        return statistics.fmean(values[start : start + int(of)].max() for start in starts)
    if not len(values):
        return None
    if which == "mean":
        return float(values.mean())
    if which == "varied":
        groups = values.reshape(-1, GROUP)
        return float((groups.min(axis=1) < groups.max(axis=1)).mean())
    return float(np.percentile(values, float(which[1:])))


_CAPS: Mapping[str, Callable[[Family], float | None]] = {
    "turns.least": lambda one: float(one.turns[0]),
    "turns.most": lambda one: float(one.turns[1]),
    "prompt.cap": lambda one: one.prompt.high,
    "response.cap": lambda one: float(one.max_response),
    "context.cap": lambda one: float(one.max_context),
    "env_s.cap": lambda one: one.env_s.high,
    "reward_s.cap": lambda one: one.reward_s.high,
    "init_s.cap": lambda one: one.init_s.high,
    "hang_s": lambda one: one.init_timeout_s,
    "init.hangs": lambda one: one.init_hang_rate,
    "init.fails": lambda one: one.init_hang_rate + one.init_error_rate,
    # our resets that do not hang are capped at a minute, and those that hang at more
    "init.late": lambda one: one.init_hang_rate if one.init_s.high <= MINUTE_S else None,
}


@functools.cache
def _seen(family: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return what was drawn, by kind: a value of each trajectory, or, of `env_s`, of
    each call.
    """
    plans = drawn(FAMILIES[family])
    sampled = [sum(turn.output_tokens for turn in plan.turns) for plan in plans]
    observed = [sum(turn.observation_tokens for turn in plan.turns) for plan in plans]
    columns = {
        "turns": [len(plan.turns) for plan in plans],
        "prompt": [plan.prompt_tokens for plan in plans],
        "sampled": sampled,
        "observed": observed,
        "response": [one + other for one, other in zip(sampled, observed, strict=True)],
        "init_s": [plan.init_s for plan in plans],
        "reward_s": [plan.reward_s for plan in plans],
        "groups": [plan.reward for plan in plans],
        "env_s": [turn.env_s for plan in plans for turn in plan.turns if turn.env_s],
    }
    return {name: np.array(column, dtype=np.float64) for name, column in columns.items()}


def drawn(family: Family) -> list[Plan]:
    """Return trajectories of a family, in groups; those whose reset fails are left
    out.
    """
    plans = Drawn(family)
    found: list[Plan] = []
    for number in range(SAMPLE):
        index, member = divmod(number, GROUP)
        attempts = (
            plans.plan(index=index, member=member, attempt=attempt, seed=0)
            for attempt in itertools.count()
        )
        found.append(next(plan for plan in attempts if plan.fails_in != "init"))
    return found


@functools.cache
def users(family: str, rate: float) -> dict[str, float]:
    """Return the statistics of users who send `rate` requests a second, alone."""
    shape = SERVERS[family]
    clock = Clock()
    cluster = ServingCluster(
        _beside(int(shape["gpus"])),
        ServingFile.model_validate(
            {
                "model": USERS[family],
                "rate": rate,
                "engines": shape["engines"],
                "prefill": shape["prefill"],
                "ttft_s": shape["ttft_s"],
                "tpot_s": shape["tpot_s"],
            }
        ),
        clock=clock,
        post=lambda event: None,
    )
    cluster.start()
    while clock.now < SERVED_S:
        clock.step()
    seen = cluster.latencies()
    return {
        "requests.rate": rate,
        "ttft_s.p99": seen.ttft_s[2],
        "serving.share": seen.serving_share,
    }


def _beside(gpus: int) -> RunConfig:
    """Return a run beside which the users' engines stand; it does nothing."""
    return Setup(
        model="qwen3-8b" if gpus == 1 else "qwen3-32b",
        tasks=("frozenlake",),
        context=32_768,
        rollout_gpus=8,
        trainer_gpus=8,
        batch=16,
        tp=gpus,
    ).config(steps=1)


def rates(family: str, constraint: Constraint) -> tuple[float, float]:
    """Return the rates between which users meet a constraint on a quantity that rises
    with the rate: the last of `RATES` that is too low, 0 if none is, and the first that
    is too high, infinite if none is.
    """
    (name,) = constraint.above

    def first_above(limit: float) -> int:
        return bisect.bisect_left(RATES, limit, key=lambda rate: users(family, rate)[name])

    low = 0 if constraint.at_least is None else first_above(constraint.at_least)
    high = len(RATES) if constraint.at_most is None else first_above(constraint.at_most)
    return RATES[low - 1] if low else 0.0, RATES[high] if high < len(RATES) else math.inf
