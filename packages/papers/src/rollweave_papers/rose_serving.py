"""ROSE's co-serving executor beside its baselines: what rollouts gain, and how long
users wait (§6.1, §6.2, App. C and D).

Each row is a run with users beside it: rollouts have the run's own GPUs and all that
serve, and begin with an empty cluster in each step. No paper gives the rate of the
requests: that of `SERVING` is our assumption.
"""

import functools
from collections.abc import Mapping
from typing import Any

from rollweave.schema.base import Struct
from rollweave_papers.cluster import Setup, mean_of, steps_of
from rollweave_papers.results import Experiment, Row
from rollweave_papers.rose import ALFWORLD, FROZENLAKE, SERVING, rollout_times

SIZES: Mapping[str, Setup] = {
    "8B": FROZENLAKE.but(policies=("affinity",), serving=SERVING, borrowed=16),
    "32B": ALFWORLD.but(
        policies=("affinity",),
        serving={**SERVING, "model": "qwen2.5-32b", "ttft_s": 1.0, "tpot_s": 0.45},
        borrowed=64,
    ),
}
"""Up to 16 and 64 borrowed GPUs, users of a model of similar size, and their limits."""


class Seen(Struct, frozen=True, kw_only=True):
    """Mean seconds of a rollout, and the 95th and 99th percentiles of the users'
    latencies in milliseconds, over a whole run.
    """

    rollout_s: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    late: float  # share of requests beyond a limit


@functools.cache
def seen(
    size: str,
    *,
    sharing: str = "cooperative",
    steps: int,
    lease_s: float = 10.0,
    density: float = 1.0,
    borrows: bool = True,
) -> Seen:
    """Simulate a run of so many steps beside users. Raises ExperimentError."""
    setup = SIZES[size]
    serving: dict[str, Any] = {**setup.serving, "lease_s": lease_s}
    serving["rate"] *= density
    setup = setup.but(serving=serving, sharing=sharing, borrowed=setup.borrowed if borrows else 0)
    outcome = steps_of(setup, steps=steps)
    users = outcome.serving
    assert users is not None, "the set-up has serving engines"
    times = rollout_times(outcome)
    return Seen(
        rollout_s=sum(times) / len(times),
        ttft_ms=(1e3 * users.ttft_s[1], 1e3 * users.ttft_s[2]),
        tpot_ms=(1e3 * users.tpot_s[1], 1e3 * users.tpot_s[2]),
        late=max(users.late_first, users.late_tokens),
    )


def _steps(size: str, quick: bool) -> int:
    """Return the steps of a run: fewer where a step is large."""
    return 1 if quick else {"8B": 5, "32B": 2}[size]


def _sizes(quick: bool) -> tuple[str, ...]:
    return ("8B",) if quick else tuple(SIZES)


def _note(size: str, steps: int) -> str:
    text = f"{mean_of(steps, 'rollout')} of a run, and all requests meanwhile"
    return text if size == "8B" else f"{text}; turns and lengths of ALFWorld are assumptions"


IN_TIME = "two models take turns on a GPU, step by step, where the paper shares it in space"

BUSY = 20.0
"""Factor of our rate of requests at which the users are alone, too."""


def table1(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.1: other ways to harvest serving GPUs."""
    names = {
        "cooperative": "ROSE",
        "autoscaling": "autoscaling in both directions (ServerlessLLM)",
        "multiplexing": "multiplexing (Prism)",
    }
    rows = []
    for size in _sizes(quick):
        steps = _steps(size, quick)
        note = _note(size, steps)
        rose = seen(size, steps=steps)
        alone = seen(size, sharing="autoscaling", steps=steps, borrows=False)
        rows.append(
            Row(
                row=f"{size} users alone, first token P99",
                ours=alone.ttft_ms[1],
                unit="ms",
                note=f"{note}; published: ServerlessLLM without rollouts",
            )
        )
        for sharing, name in names.items():
            one = seen(size, sharing=sharing, steps=steps)
            how = f"{note}; {IN_TIME}" if sharing == "multiplexing" else note
            rows += [
                Row(row=f"{size} {name}, rollout", ours=one.rollout_s, unit="s", note=how),
                Row(
                    row=f"{size} {name}, first token P99", ours=one.ttft_ms[1], unit="ms", note=how
                ),
            ]
            if sharing != "cooperative":
                rows.append(
                    Row(
                        row=f"{size} rollout, {name} over ROSE",
                        ours=one.rollout_s / rose.rollout_s,
                        note=f"{note}; published: ratio of the times",
                    )
                )
    busy = seen("8B", sharing="autoscaling", steps=1, density=BUSY, borrows=False)
    busy_users = Row(
        row=f"8B users alone, {BUSY:g} times the requests, first token P99",
        ours=busy.ttft_ms[1],
        unit="ms",
        note=_note("8B", 1),
        own=True,
    )
    return [*rows, busy_users]


def table2(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.2: sharing memory, without admission."""
    names = {
        "partition": "static partition",
        "preemption": "+ memory preemption",
        "spatial": "+ prefix caching",
    }
    rows = []
    for size in _sizes(quick):
        steps = _steps(size, quick)
        note = f"{_note(size, steps)}; {IN_TIME}"
        for sharing, name in names.items():
            one = seen(size, sharing=sharing, steps=steps)
            rows += _three(f"{size} {name}", one, note)
    return rows


def table4(quick: bool) -> list[Row]:
    """Reproduce ROSE App. C: the lease of the KV of finished turns."""
    rows = []
    for lease_s in (10, 100) if quick else (10, 20, 50, 100):
        steps = _steps("8B", quick)
        one = seen("8B", steps=steps, lease_s=float(lease_s))
        rows += _three(f"lease of {lease_s} s", one, _note("8B", steps))
    return rows


def table5(quick: bool) -> list[Row]:
    """Reproduce ROSE App. D: more requests of users."""
    rows = []
    for size in _sizes(quick):
        steps = _steps(size, quick)
        for density in (1.0, 2.0) if quick else (1.0, 1.5, 2.0):
            one = seen(size, steps=steps, density=density)
            name = f"{size} {density:g} times the requests"
            rows += _three(name, one, _note(size, steps))
    return rows


def _three(name: str, one: Seen, note: str) -> list[Row]:
    return [
        Row(row=f"{name}, rollout", ours=one.rollout_s, unit="s", note=note),
        Row(row=f"{name}, first token P99", ours=one.ttft_ms[1], unit="ms", note=note),
        Row(row=f"{name}, time per token P99", ours=one.tpot_ms[1], unit="ms", note=note),
    ]


def fig9(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.2: admission by both limits against one of them."""
    steps = _steps("8B", quick)
    dual, ttft, tpot = (
        seen("8B", sharing=one, steps=steps) for one in ("cooperative", "ttft", "tpot")
    )
    note = _note("8B", steps)
    which = f"{note}; the model is not named in the text: 8B is our reading"
    lower = functools.partial(Row, unit="%", is_change=True, note=which)
    return [
        lower(
            row="time per token P99, lower with both limits than with TPOT alone",
            ours=100 * (1 - dual.tpot_ms[1] / tpot.tpot_ms[1]),
        ),
        lower(
            row="time per token P99, lower with both limits than with TTFT alone",
            ours=100 * (1 - dual.tpot_ms[1] / ttft.tpot_ms[1]),
        ),
        lower(
            row="first token P99, lower with both limits than with TPOT alone",
            ours=100 * (1 - dual.ttft_ms[1] / tpot.ttft_ms[1]),
        ),
        lower(
            row="first token P99, lower with both limits than with TTFT alone",
            ours=100 * (1 - dual.ttft_ms[1] / ttft.ttft_ms[1]),
        ),
        Row(
            row="rollout, TTFT alone over both",
            ours=ttft.rollout_s / dual.rollout_s,
            note=f"{note}; published: similar",
        ),
        Row(
            row="rollout, TPOT alone over both",
            ours=tpot.rollout_s / dual.rollout_s,
            note=f"{note}; published: similar",
        ),
    ]


EXPERIMENTS = (
    Experiment("rose-table1", "Harvesting serving GPUs", "ROSE Table 1, §6.1", table1),
    Experiment("rose-table2", "Sharing memory", "ROSE Table 2, §6.2", table2),
    Experiment("rose-table4", "Lease of cached turns", "ROSE Table 4, App. C", table4),
    Experiment("rose-table5", "Requests of users", "ROSE Table 5, App. D", table5),
    Experiment("rose-fig9", "Admission", "ROSE Fig. 9, §6.2", fig9),
)
