"""RollArt's parts by themselves (§3.2, §7.3, §7.4): environment latency, rewards,
weight transfer, redundancy, PD.
"""

import functools
import statistics
from collections.abc import Mapping

from msgspec.structs import replace

from rollweave.schema.base import Struct
from rollweave_papers.cluster import (
    GaussianSteps,
    Setup,
    SlowStarts,
    Watched,
    first_step,
    mean_of,
    pace,
    ratio_of,
    rollouts,
)
from rollweave_papers.results import Experiment, Row, span
from rollweave_sim.cost import EngineCost, TrainerCost
from rollweave_sim.families import INIT_TIMEOUT_S, SWE_INIT_HANG_RATE
from rollweave_sim.hardware import Link, gpu, link, model
from rollweave_sim.hosts import NO_POOL
from rollweave_sim.workers import KEEP_S
from rollweave_sim.workload import Workload, workload

CONTEXT, MATH_CONTEXT = 32_768, 16_384
MODELS = {"8B": ("qwen3-8b", 1), "14B": ("qwen3-14b", 2), "32B": ("qwen3-32b", 4)}

ENV_MEAN_S = 10.0
"""Mean seconds of the injected latency (§7.3, R2)."""

JUDGES = 4
"""GPUs of the local reward model (§7.3, R3)."""


def fig11b(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.3, R2: step times of Qwen3-8B/32K with trajectory- and
    batch-level stepping, where the latency of a call is normal around 10 s.

    Our reading: batches of 512 from all tasks but SWE on 128 GPUs, synchronous, so that
    only stepping differs.
    """
    shrink, steps = (8, 1) if quick else (2, 2)
    setup = Setup(
        model="qwen3-8b",
        tasks=("webshop", "frozenlake", "gem-math", "gem-game"),
        context=CONTEXT,
        rollout_gpus=96 // shrink,
        trainer_gpus=32 // shrink,
        batch=512 // shrink,
    )
    batched = setup.but(without=("free_stepping",))
    rows = []
    for sigma in (1.0, 10.0) if quick else (1.0, 4.0, 7.0, 10.0):

        def vary(work: Workload, sigma: float = sigma) -> Workload:
            return GaussianSteps(work, mean_s=ENV_MEAN_S, sigma_s=sigma)

        rows.append(
            Row(
                row=f"batch- over trajectory-level step time, σ = {sigma:g} s",
                ours=pace(batched, steps=steps, vary=vary).step_s
                / pace(setup, steps=steps, vary=vary).step_s,
                note=f"GPUs and batch divided by {shrink}, {mean_of(steps, 'step')}; latencies "
                "below 0 s are 0",
            )
        )
    return rows


def _judging_s(seed: int, *, groups: int, members: int) -> float:
    """Return the seconds that one judging GPU needs for all verdicts of a batch."""
    plans = workload("gem-math")
    return sum(
        plans.plan(index=index, member=member, attempt=0, seed=seed).reward_s
        for index in range(groups)
        for member in range(members)
    )


def fig12(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.3, R3: mathematical tasks with Qwen3-8B/16K on 16 H800,
    eight of them for training, with batch 84.

    Our reading: 84 is the sum of the three jobs' batches, in groups of 4. If rewards
    are local, four GPUs roll out and four judge; if they are serverless, all eight roll
    out.
    """
    steps, groups, members = (3 if quick else 10), 21, 4
    local = Setup(
        model="qwen3-8b",
        tasks=("gem-math",),
        context=MATH_CONTEXT,
        rollout_gpus=4,
        trainer_gpus=8,
        batch=groups * members,
        group_size=members,
        judges=JUDGES,
    )
    runs = {
        "local": local,
        "serverless": local.but(rollout_gpus=8, serverless=True),
        "local, each": local.but(batch=3 * local.batch),
        "serverless, each": local.but(rollout_gpus=8, serverless=True, batch=3 * local.batch),
    }
    outcomes = {
        name: [first_step(setup, seed=seed) for seed in range(steps)]
        for name, setup in runs.items()
    }
    firsts = {name: [run.steps[0] for run in same] for name, same in outcomes.items()}
    times = {name: [float(step["at"]) for step in same] for name, same in firsts.items()}
    judging = [_judging_s(seed, groups=groups, members=members) for seed in range(steps)]
    used = statistics.fmean(
        judging_s / (JUDGES * call_s)
        for judging_s, call_s in zip(judging, times["local"], strict=True)
    )
    serverless = statistics.fmean(run.rewards_used or 0.0 for run in outcomes["serverless"])
    return _judged(times, local=used, serverless=serverless)


def _judged(times: Mapping[str, list[float]], *, local: float, serverless: float) -> list[Row]:
    """Return the rows of Fig. 12 from the seconds of rollouts by seed, and from the
    shares of the time in which local and serverless instances work.
    """
    row = functools.partial(Row, note=mean_of(len(times["local"]), "rollout"))
    one_by_one = (
        "assumption: each judging GPU gives one verdict at a time, which takes the family's seconds"
    )
    gain, other = (
        ratio_of(times[f"local{each}"], times[f"serverless{each}"]) for each in ("", ", each")
    )
    return [
        row(
            row="rollout, local judges",
            ours=statistics.fmean(times["local"]),
            unit="s",
            seeds=span(times["local"]),
            note=one_by_one,
        ),
        row(
            row="rollout, serverless judges",
            ours=statistics.fmean(times["serverless"]),
            unit="s",
            seeds=span(times["serverless"]),
        ),
        row(
            row="local over serverless",
            ours=gain.mean,
            seeds=gain.seeds,
            note="published: ratio of the two times",
        ),
        row(
            row="local over serverless, if 84 is each job's batch",
            ours=other.mean,
            seeds=other.seeds,
            note="the other reading of the text",
        ),
        row(row="utilization of judging GPUs, local", ours=100 * local, unit="%", note=one_by_one),
        row(
            row="utilization of judging GPUs, serverless",
            ours=100 * serverless,
            unit="%",
            note=f"an idle instance is kept for {KEEP_S:.0f} s (assumption), and has no other "
            "caller",
        ),
        row(
            row="utilization of judging GPUs, serverless over local",
            ours=serverless / local,
            note="published: ratio of the two shares",
        ),
    ]


# Weights from cluster to cluster.


def trainer(size: str, *, over: str) -> TrainerCost:
    """Return a trainer of 32 H800 (§7.1)."""
    return TrainerCost(gpu=gpu("h800"), model=model(MODELS[size][0]), gpus=32, link=link(over))


def table3(quick: bool) -> list[Row]:
    """Reproduce RollArt §3.2: one copy of the weights from the training to the
    inference cluster, over 200 Gb/s Ethernet and 400 Gb/s InfiniBand.
    """
    infiniband = replace(link("rdma"), per_gpu=False)
    return [
        Row(
            row=f"{size} over {name}",
            ours=trainer(size, over="rdma").publish_s(over=way),
            unit="s",
            note="closed form: one copy at 80 % of the link",
        )
        for size in MODELS
        for name, way in (("TCP", link("ethernet")), ("RDMA", infiniband))
    ]


def transfer(size: str) -> tuple[float, float]:
    """Return the seconds of the push into the store over Ethernet, and until all 96
    GPUs' engines have pulled from it over InfiniBand.
    """
    tp = MODELS[size][1]
    return trainer(size, over="ethernet").publish_s(), trainer(size, over="rdma").load_s(
        engines=96 // tp, tp=tp
    )


class Stored(TrainerCost):
    """A trainer of 32 H800 that pushes weights over Ethernet into a store, from which
    engines pull them over InfiniBand (§6.3).
    """

    def __init__(self, size: str) -> None:
        super().__init__(gpu=gpu("h800"), model=model(MODELS[size][0]), gpus=32, link=link("rdma"))

    def publish_s(self, *, over: Link | None = None) -> float:
        return super().publish_s(over=over or link("ethernet"))


class Updates(Struct, frozen=True, kw_only=True):
    """Seconds of one version, as means: the push, the pull until the last engine has
    it, and for how long an engine stopped.
    """

    push_s: float
    pull_s: float
    stopped_s: float


def updates(size: str, *, steps: int) -> Updates:
    """Simulate a run whose engines on 96 GPUs pull each version while they generate.

    Left out are the first one and the last one, for which no engine has work. Raises
    ExperimentError.
    """
    shape, tp = MODELS[size]
    setup = Setup(
        model=shape,
        tasks=("webshop", "frozenlake", "gem-math", "gem-game"),
        context=CONTEXT,
        rollout_gpus=96,
        trainer_gpus=32,
        batch=96,
        tp=tp,
    ).in_rollarts_order()
    engine = EngineCost(gpu=gpu("h800"), model=model(shape), tp=tp)
    run = Watched(setup.config(steps=steps), costs=({(NO_POOL, tp): engine}, Stored(size)))
    run.finish()
    versions = [run.transfers[version] for version in range(1, steps)]
    return Updates(
        push_s=statistics.fmean(run.stall_s),
        pull_s=statistics.fmean(max(one.pulls_s) for one in versions),
        stopped_s=statistics.fmean(wait for one in versions for wait in one.waits_s),
    )


def table4(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.4 in simulated runs: the store is one machine beside the
    inference cluster, and 96 GPUs roll out, in batches of 96 (ours).
    """
    rows = []
    for size in ("8B",) if quick else MODELS:
        measured = updates(size, steps=3 if quick else 5)
        push, pull, stopped = measured.push_s, measured.pull_s, measured.stopped_s
        row = functools.partial(Row, unit="s")
        rows += [
            row(
                row=f"{size} push",
                ours=push,
                note="200 Gb/s at 80 %; theirs reaches 2 %",
            ),
            row(
                row=f"{size} accumulated pull",
                ours=pull,
                note="simulated run: until the last engine has it; all pull at once from one "
                "machine with eight adapters of 400 Gb/s, while they generate, without relays",
            ),
            row(row=f"{size} naive (push + pull)", ours=push + pull),
            row(
                row=f"{size} exposed pull",
                ours=stopped,
                note="mean of the engines, each of which stops for its swap alone: from the memory "
                "of its machine over PCIe, at once with the others there; theirs is also the wait "
                "for buckets that have not arrived",
            ),
        ]
    return rows


def fig14a(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.4: step time if rollouts wait for push and pull, over that
    in RollArt's order, where push and pull are hidden. SWE is left out.
    """
    shrink, steps = (4, 1) if quick else (2, 3)
    rows = []
    for size, (shape, tp) in MODELS.items():
        setup = Setup(
            model=shape,
            tasks=("webshop", "frozenlake", "gem-math", "gem-game"),
            context=CONTEXT,
            rollout_gpus=96 // shrink,
            trainer_gpus=32 // shrink,
            batch=512 // shrink,
            tp=tp,
        ).in_rollarts_order()
        step_s = pace(setup, steps=steps).step_s
        push, pull = transfer(size)
        rows.append(
            Row(
                row=f"{size} step time, synchronous over asynchronous transfer",
                ours=(step_s + push + pull) / step_s,
                note=f"GPUs and batch divided by {shrink}, {mean_of(steps, 'step')}; a closed form "
                "over a simulated step that hides both: push and pull added to it, over the step; "
                f"push {push:.2f} s, pull {pull:.2f} s",
            )
        )
    return rows


# Redundancy.


def fig14b(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.4: rollout time of Qwen3-8B/32K on 32 H800 with GEM-math, by
    groups and members launched beyond those needed.

    The number needed is not in the text: 32 groups of 8 (assumption). All launched ones
    are alive at once. Published is a ratio of rollouts in RollArt's order, in which
    trajectories in flight continue in the next step; rollouts that begin with an empty
    cluster, and end everything, are the other reading.
    """
    steps, groups, members = (2 if quick else 6), 32, 8
    setup = Setup(
        model="qwen3-8b",
        tasks=("gem-math",),
        context=CONTEXT,
        rollout_gpus=32,
        trainer_gpus=8,
        batch=groups * members,
    )

    def launched(more_groups: int, more_members: int) -> Setup:
        return setup.but(
            environments=(groups + more_groups) * (members + more_members),
            rollout={"spare_groups": more_groups, "spare_members": more_members},
        )

    def step_s(more: tuple[int, int]) -> float:
        return pace(launched(*more).in_rollarts_order(), steps=steps).step_s

    def empty(more: tuple[int, int], *, failing: bool = False) -> list[float]:
        vary = _failing if failing else None
        return rollouts(launched(*more), steps=steps, vary=vary)

    choices = (
        ((8, 0), (0, 4), (32, 8))
        if quick
        else ((8, 0), (16, 0), (32, 0), (0, 2), (0, 4), (0, 8), (8, 2), (16, 4), (32, 8))
    )
    plain_s, plain_empty = step_s((0, 0)), empty((0, 0))
    gains = {choice: plain_s / step_s(choice) for choice in choices}
    note = mean_of(steps, "step")
    from_empty = f"{mean_of(steps, 'rollout')}; the other reading"
    ended = {more: ratio_of(plain_empty, empty(more)) for more in ((8, 0), (32, 8))}
    late = ratio_of(empty((0, 0), failing=True), empty((8, 0), failing=True))
    return [
        Row(
            row="maximum speed-up of rollouts",
            ours=max(gains.values()),
            note=f"{note}; up to twice the groups and members are launched; trajectories in flight "
            "continue, where §6.3 lets a system end them (rows from an empty cluster)",
        ),
        *(
            Row(row=f"{more} more groups, {extra} more members", ours=gain, note=note)
            for (more, extra), gain in gains.items()
        ),
        *(
            Row(
                row=f"{more} more groups, {extra} more members, from an empty cluster",
                ours=gain.mean,
                seeds=gain.seeds,
                note=from_empty,
            )
            for (more, extra), gain in ended.items()
        ),
        Row(
            row="8 more groups, from an empty cluster, with slow starts",
            ours=late.mean,
            seeds=late.seeds,
            note=f"{from_empty}; the share of environments that RollArt §8 counts in production "
            f"starts {INIT_TIMEOUT_S:g} s late",
            own=True,
        ),
    ]


def _failing(work: Workload) -> Workload:
    return SlowStarts(work, rate=SWE_INIT_HANG_RATE, seconds=INIT_TIMEOUT_S)


# Prefill and decoding apart.

SIZES = {"32B": ("qwen3-32b", 4), "30B-A3B": ("qwen3-30b-a3b", 4)}
"""Models of Table 5, and the GPUs of an engine (assumption: as for the dense one)."""

NODES = {"1P3D": (1, 3), "2P2D": (2, 2), "3P1D": (3, 1)}
"""Nodes of eight H800 for prompts, and nodes of eight H20 that sample."""


class PhasesSeconds(Struct, frozen=True, kw_only=True):
    """Seconds of each rollout with both variants."""

    split: list[float]
    collocated: list[float]


def phases_s(size: str, nodes: str, *, steps: int) -> PhasesSeconds:
    """Simulate rollouts of SWE with prompts on the H800 alone, and with both parts of
    turns on all GPUs. Raises ExperimentError.
    """
    (shape, tp), (prefill, decode) = SIZES[size], NODES[nodes]
    setup = Setup(
        model=shape,
        tasks=("swe",),
        context=CONTEXT,
        rollout_gpus=8 * (prefill + decode),
        trainer_gpus=32,
        batch=128,
        kinds={"h800": 8 * prefill, "h20": 8 * decode},
        tp=tp,
    )
    split = setup.but(phases={"h800": "prefill", "h20": "decode"})
    return PhasesSeconds(
        split=rollouts(split, steps=steps), collocated=rollouts(setup, steps=steps)
    )


def table5(quick: bool) -> list[Row]:
    """Reproduce RollArt §7.4: SWE with batch 128, where each prefill node has eight
    H800 and each decoding node eight H20.
    """
    steps = 1 if quick else 3
    note = f"{mean_of(steps, 'rollout')}, on engines of {SIZES['32B'][1]} GPUs (assumption)"
    rows = []
    for size in SIZES:
        for nodes in ("2P2D",) if quick else NODES:
            ours = phases_s(size, nodes, steps=steps)
            gain = ratio_of(ours.collocated, ours.split)
            rows += [
                *(
                    Row(
                        row=f"{size} {nodes}, {name}",
                        ours=statistics.fmean(seconds),
                        unit="s",
                        seeds=span(seconds),
                        note=note,
                    )
                    for name, seconds in (
                        ("disaggregated", ours.split),
                        ("collocated", ours.collocated),
                    )
                ),
                Row(
                    row=f"{size} {nodes}, collocated over disaggregated",
                    ours=gain.mean,
                    seeds=gain.seeds,
                    note=note,
                ),
            ]
    return rows


EXPERIMENTS = (
    Experiment(
        "rollart-fig11b",
        "Trajectory- against batch-level stepping",
        "RollArt Fig. 11b, §7.3",
        fig11b,
    ),
    Experiment("rollart-fig12", "Serverless rewards", "RollArt Fig. 12, §7.3", fig12),
    Experiment("rollart-table3", "Weight transfer by link", "RollArt Table 3, §3.2", table3),
    Experiment(
        "rollart-table4", "Weight transfer between clusters", "RollArt Table 4, §7.4", table4
    ),
    Experiment("rollart-fig14a", "Asynchronous weight transfer", "RollArt Fig. 14a, §7.4", fig14a),
    Experiment("rollart-fig14b", "Redundant environments", "RollArt Fig. 14b, §7.4", fig14b),
    Experiment(
        "rollart-table5", "Disaggregated prefill and decoding", "RollArt Table 5, §7.4", table5
    ),
)
