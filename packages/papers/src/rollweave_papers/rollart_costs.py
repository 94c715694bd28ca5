"""The savings and the costs of disaggregation: reserved GPUs of a judge (RollArt §3.2,
Fig. 6), and the transfers between clusters (§7.5).
"""

import functools
import statistics

from rollweave_papers.cluster import Setup, first_step, mean_of, pace
from rollweave_papers.results import Experiment, Row
from rollweave_papers.rollart_parts import JUDGES, MATH_CONTEXT, updates
from rollweave_sim.families import JUDGE_S
from rollweave_sim.hardware import link
from rollweave_sim.workers import COLD_S, WARM_S, Serverless

SWE_CONTEXT, SWE_BATCH, SWE_GPUS = 32_768, 128, 28
"""Workload of Fig. 6, and its GPUs for rollouts."""

SIZES = ("8B", "32B")
"""Models for which rollouts wait for new weights, the ends of the ranges in §7.5."""

MEGABYTE = 1e6


def fig6(quick: bool) -> list[Row]:
    """Reproduce RollArt §3.2: Qwen3-8B/32K on SWE with batch 128, on 28 H800 beside
    four for a judge. The GPUs that train are ours.
    """
    steps = 2 if quick else 5
    setup = Setup(
        model="qwen3-8b",
        tasks=("swe",),
        context=SWE_CONTEXT,
        rollout_gpus=SWE_GPUS,
        trainer_gpus=32,
        batch=SWE_BATCH,
    )
    used = SWE_BATCH * JUDGE_S / (JUDGES * pace(setup, steps=steps).step_s)
    return [
        Row(
            row="utilization of the judge's GPUs, all steps",
            ours=100 * used,
            unit="%",
            note=f"{mean_of(steps, 'step')}; assumption: a verdict takes {JUDGE_S:g} s of a GPU, "
            "as on a mathematical answer",
        )
    ]


class _Timed(Serverless):
    """A platform that notes what each call takes beyond its work."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond_s = list[float]()

    def call(self, now: float, seconds: float) -> float:
        wait = super().call(now, seconds)
        self.beyond_s.append(wait - seconds)
        return wait


class _OnPlatform(Setup, frozen=True, kw_only=True):
    """A setup whose rewards a given platform computes."""

    platform: _Timed

    def rewards(self) -> _Timed:
        return self.platform


def section75(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.5: the weights as in Table 4, and calls between clusters."""
    row = functools.partial(Row, unit="s")
    rows = []
    for size in ("8B",) if quick else SIZES:
        measured = updates(size, steps=3 if quick else 5)
        both = measured.push_s + measured.pull_s
        rows += [
            row(
                row=f"weights, {size}: exposed",
                ours=measured.stopped_s,
                note="an engine stops for its swap alone (rollart-table4)",
            ),
            row(
                row=f"weights, {size}: push and pull, without overlap",
                ours=both,
                note="200 Gb/s at 80 %; theirs reaches 2 % (rollart-table4)",
            ),
        ]
    return [*rows, *_calls(row, batches=3 if quick else 10)]


def _calls(row: functools.partial[Row], *, batches: int) -> list[Row]:
    """Return the rows of calls, of environments and of serverless rewards."""
    ethernet = link("ethernet")

    def on_the_link(megabytes: float) -> float:
        return ethernet.latency_s + megabytes * MEGABYTE / ethernet.bytes_per_s

    beyond_s = [one for seed in range(batches) for one in _reward_calls(seed)]
    return [
        row(
            row="environment, longest transfer (2.7 MB)",
            ours=on_the_link(2.7),
            note="closed form: the link's time for this volume alone",
        ),
        row(
            row="environment, mean transfer",
            ours=None,
            note="to be built: transfers of environments, whose latency is an input here",
        ),
        row(
            row="reward, largest payload (5.2 MB) on the link",
            ours=on_the_link(5.2),
            note="the part of a call that is its volume",
        ),
        row(
            row="reward, longest overhead of a call",
            ours=max(beyond_s),
            note=f"the start of an instance from zero, {COLD_S:g} s measured with Ray Serve "
            "without a model",
        ),
        row(
            row="reward, mean overhead of a call",
            ours=statistics.fmean(beyond_s),
            note=f"{mean_of(batches, 'rollout')} of 84 trajectories (Fig. 12), each from zero "
            f"instances; {WARM_S * 1000:g} ms for a warm call, and the cold calls at each "
            "batch's beginning",
        ),
    ]


def _reward_calls(seed: int) -> list[float]:
    """Return the seconds beyond their work of the reward calls of one batch."""
    setup = _OnPlatform(
        model="qwen3-8b",
        tasks=("gem-math",),
        context=MATH_CONTEXT,
        rollout_gpus=8,
        trainer_gpus=8,
        batch=84,
        group_size=4,
        platform=_Timed(),
    )
    first_step(setup, seed=seed)
    return setup.platform.beyond_s


EXPERIMENTS = (
    Experiment("rollart-fig6", "A judge with reserved GPUs", "RollArt Fig. 6, §3.2", fig6),
    Experiment("rollart-sec75", "What disaggregation costs", "RollArt §7.5", section75),
)
