"""ROSE's evaluation as far as it is built: more GPUs for rollouts, with and without
users beside them, the gain of prefix caching, and weights between clusters (§2.2, §6.3,
App. E).
"""

import math
import statistics

import msgspec

from rollweave.core.policy.relay import CHUNK_BYTES, PROBE
from rollweave_papers.cluster import (
    ExperimentError,
    Setup,
    Watched,
    first_step,
    mean_of,
    ratio_of,
    rollouts,
    steps_of,
)
from rollweave_papers.results import Experiment, Row, span
from rollweave_sim.cost import ENCODERS, LINK_EFFICIENCY, EngineCost, TrainerCost
from rollweave_sim.hardware import GPUS_PER_MACHINE, ModelShape, gpu, link, model
from rollweave_sim.relays import DELTA_SHARE
from rollweave_sim.run import Outcome

CONTEXT = 32_768
"""Maximum tokens of Qwen3-8B/32k on FrozenLake (§6)."""

SERVING = {"model": "qwen2.5-7b", "engines": 16, "prefill": 4, "rate": 2.0}
"""Serving engines beside the run. The paper names the cluster's 16 GPUs and its limits,
but not the rate of requests: 2 a second are our assumption.
"""

AT_ONCE = 16
"""Concurrent trajectories of one GPU (§4.3 and App. A)."""

FROZENLAKE = Setup(
    model="qwen3-8b",
    tasks=("frozenlake",),
    context=CONTEXT,
    rollout_gpus=8,
    trainer_gpus=8,
    batch=256,
    group_size=16,
    slots=AT_ONCE,
)
"""The set-up of §6: batch 256 in groups of 16, eight GPUs for rollouts and eight for
training, all H800.
"""


ALFWORLD = FROZENLAKE.but(
    model="qwen3-32b",
    tasks=("alfworld",),
    tp=4,
    rollout_gpus=16,
    trainer_gpus=32,
    batch=1024,
    slots=64,
)
"""The set-up of 32B (§6): 16 GPUs for rollouts and 32 for training; 16 trajectories at
once for each GPU of an engine of four.
"""


def fig1c(quick: bool) -> list[Row]:
    """Reproduce ROSE §2.2: rollout time with and without prefix caching, in groups of
    8.

    The numbers of GPUs between which it falls from 607 s to 435 s are not in the text:
    from 8 to 16, the cluster's size, is our reading.
    """
    steps = 1 if quick else 4
    setup = FROZENLAKE.but(group_size=8, slots=256)
    eight, bare = (
        rollouts(setup.but(without=missing), steps=steps) for missing in ((), ("prefix_cache",))
    )
    note = f"{mean_of(steps, 'rollout')}; as many sequences at once as vLLM's default"
    gain = ratio_of(bare, eight)
    rows = [
        Row(
            row="rollout without over with prefix caching, 8 GPUs",
            ours=gain.mean,
            seeds=gain.seeds,
            note=note,
        ),
        Row(
            row="rollout on 8 GPUs",
            ours=statistics.fmean(eight),
            unit="s",
            seeds=span(eight),
            note=f"{note}; tokens of a turn are assumptions",
        ),
    ]
    if not quick:
        gain = ratio_of(eight, rollouts(setup.but(rollout_gpus=16), steps=steps))
        rows.append(
            Row(
                row="8 over 16 GPUs",
                ours=gain.mean,
                seeds=gain.seeds,
                note=f"{note}; published: ratio of the times",
            )
        )
    return rows


def fig14(quick: bool) -> list[Row]:
    """Reproduce ROSE App. E: rollout time of FrozenLake on eight dedicated GPUs and 4,
    8 or 16 borrowed ones, over the first five steps.
    """
    steps, counts = (2, (8,)) if quick else (5, (4, 8, 16))
    alone = _with_weights_s(FROZENLAKE, steps=steps)
    note = (
        f"{mean_of(steps, 'rollout')} of a run, from the end of a training step to the next; a "
        "borrowed GPU has no other clients here; weights leave over 200 Gb/s Ethernet, along a "
        "chain of relays on the machines"
    )
    rows = [
        Row(
            row=f"rollout speed-up with {count} borrowed GPUs",
            ours=alone
            / _with_weights_s(
                FROZENLAKE.but(rollout_gpus=8 + count, link="ethernet", relayed=True), steps=steps
            ),
            note=note,
        )
        for count in counts
    ]
    return [*rows, *_beside_users(quick)]


def _beside_users(quick: bool) -> list[Row]:
    """Compare rollouts on eight dedicated GPUs with those that also borrow 16 from
    serving engines with users, and show what these users saw.
    """
    steps = 1 if quick else 5
    alone = FROZENLAKE.but(policies=("affinity",))
    sharing = [
        first_step(alone.but(serving=SERVING, borrowed=16), seed=seed) for seed in range(steps)
    ]
    gain = ratio_of(rollouts(alone, steps=steps), [float(one.steps[0]["at"]) for one in sharing])
    users = [one.serving for one in sharing if one.serving is not None]
    late = max(max(one.late_first, one.late_tokens) for one in users)
    note = (
        f"{mean_of(steps, 'rollout')}; users send {SERVING['rate']:g} requests/s of a 7B model to "
        f"{SERVING['engines']} engines, {SERVING['prefill']} of which compute prompts; weights are "
        "in place"
    )
    return [
        Row(
            row="rollout speed-up with 16 GPUs that serve as well",
            ours=gain.mean,
            seeds=gain.seeds,
            note=note,
        ),
        Row(
            row="their users' time to the first token, P99 (limit 0.5 s)",
            ours=max(one.ttft_s[-1] for one in users),
            unit="s",
            note="the longest of these rollouts",
        ),
        Row(
            row="their users' time per token, P99 (limit 0.15 s)",
            ours=max(one.tpot_s[-1] for one in users),
            unit="s",
            note="the longest of these rollouts",
        ),
        Row(
            row="their users' requests beyond a limit",
            ours=100 * late,
            unit="%",
            note="the most of these rollouts",
        ),
    ]


def _with_weights_s(setup: Setup, *, steps: int) -> float:
    """Return the mean seconds of the first `steps` rollouts of a run, with the wait for
    new weights.
    """
    return statistics.fmean(rollout_times(steps_of(setup, steps=steps)))


def rollout_times(outcome: Outcome) -> list[float]:
    """Return the seconds of each rollout of a synchronous run, from the end of the
    training step before it.
    """
    lines = outcome.steps
    ends = [0.0, *(float(line["at"]) + line["trainer"]["train_s"] for line in lines[:-1])]
    return [float(line["at"]) - end for line, end in zip(lines, ends, strict=True)]


# Weights from cluster to cluster.

SIZES = {"8B": ("qwen3-8b", 1), "32B": ("qwen3-32b", 4)}
"""Shape and GPUs of an engine (§6)."""

SENDER_GPUS = RECEIVER_GPUS = 16
"""GPUs for training, and for serving in another cluster (§6.3)."""


BUCKET_BYTES, BUCKET_S = 64e6, 0.3
"""Bytes of a bucket in which a training worker pushes whole weights, and the minimum
seconds of each: 0.2 to 0.4 s, where the link alone would take 3 ms (ROSE App. F, for
32B). Buckets of changes take "a few milliseconds".
"""


class TwoClusters(TrainerCost):
    """A trainer whose weights are copied into the memory of its machine, and from there
    cross the link of so many bits per second to the relays of another cluster: whole
    weights in buckets, which each GPU pushes one after the other.

    The chain has that link once; all its other parts are faster and follow.
    """

    def __init__(self, *, shape: ModelShape, bits_per_s: float) -> None:
        super().__init__(gpu=gpu("h800"), model=shape, gpus=SENDER_GPUS, link=link("pcie"))
        self._between = msgspec.structs.replace(link("ethernet"), bytes_per_s=bits_per_s / 8)

    def hop_s(self, *, share: float) -> float:
        """Use the link between the clusters."""
        crossing_s = share * super().publish_s(over=self._between)
        if share < 1:
            return crossing_s
        shard = self._model.weight_bytes / self._gpus
        return max(crossing_s, math.ceil(shard / BUCKET_BYTES) * BUCKET_S)

    def lag_s(self) -> float:
        """Use a chunk on that link."""
        return self._between.latency_s + CHUNK_BYTES / (self._between.bytes_per_s * LINK_EFFICIENCY)


def transfer_s(size: str, *, bits_per_s: float, sparse: bool) -> float:
    """Return the seconds from the beginning of a publication until all engines of the
    other cluster have it: whole, or only what has changed. Where the other form was
    faster before, a run sends this one only as a probe. Raises ExperimentError.
    """
    name, tp = SIZES[size]
    setup = FROZENLAKE.but(
        model=name,
        tp=tp,
        rollout_gpus=RECEIVER_GPUS + GPUS_PER_MACHINE,  # with the machine beside the trainer
        trainer_gpus=SENDER_GPUS,
        batch=16,
        relayed=True,
        without=() if sparse else ("deltas",),
    )
    shape = model(name)
    engine = EngineCost(gpu=gpu("h800"), model=shape, tp=tp)
    run = Watched(
        setup.config(steps=8 if not sparse else PROBE + 2),
        costs=({("h800", tp): engine}, TwoClusters(shape=shape, bits_per_s=bits_per_s)),
    )
    run.finish()
    last = run.world.core.state.publication.version
    seconds = [
        one.seconds
        for version, one in run.transfers.items()
        # the first ones overlap with the weights of the beginning
        if last // 2 < version < last and one.changes == sparse
    ]
    if not seconds:
        raise ExperimentError("no version was sent in this form")
    return statistics.fmean(seconds)


def fig10(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.3: the seconds of a transfer between clusters, whole and
    sparse, over 200 Gb/s and over 1 Gb/s Ethernet.
    """
    machines = RECEIVER_GPUS // GPUS_PER_MACHINE
    note = (
        f"simulated run: {SENDER_GPUS} GPUs train, and relays on {machines} machines receive one "
        "copy at 80 % of one link"
    )
    theirs = "theirs has a link for each machine"
    changed = f"{DELTA_SHARE:.2%} of the bytes, as measured with a model of 135M"
    codec = (
        f"changes are found by {ENCODERS} threads and applied by one on each machine, at the "
        "measured speeds of our codec; ROSE's are found and added on the GPUs"
    )
    rows = []
    for size in ("8B",) if quick else tuple(SIZES):
        for place, (speed, bits) in enumerate((("200 Gb/s", 200e9), ("1 Gb/s", 1e9))):
            whole = transfer_s(size, bits_per_s=bits, sparse=False)
            sparse = transfer_s(size, bits_per_s=bits, sparse=True)
            rows += [
                Row(
                    row=f"{size} shard-aware, {speed}",
                    ours=whole,
                    unit="s",
                    note=f"{note}, in buckets of 64 MB, each at least {BUCKET_S:g} s (App. F); "
                    f"{theirs}",
                ),
                Row(
                    row=f"{size} sparsity-aware, {speed}",
                    ours=sparse,
                    unit="s",
                    note=f"{note}, of {changed}; {codec}",
                ),
            ]
            if not place:
                rows.append(
                    Row(
                        row=f"{size} shard-aware over sparsity-aware, {speed}",
                        ours=whole / sparse,
                        note=f"{note}; {changed}",
                    )
                )
    return rows


TURN_WISE = {"turn-wise": "least_load", "turn-wise with affinity": "affinity"}
"""Our placements that correspond to the rows of Table 3."""

ROUTED = {"8B": FROZENLAKE, "32B": ALFWORLD}

PLACES = {
    "8B": {"8 GPUs for rollouts, 128 slots for 256 trajectories": 8, "24 GPUs": 24},
    "32B": {"80 GPUs": 80},
}
"""GPUs for rollouts: all of the end-to-end set-up, with a slot for every trajectory,
and with 8B also the run's own, with a slot for half of them.
"""


def table3(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.4: routing of each turn against pinning a trajectory to a
    worker, over the first five steps (with 32B two).

    The paper's speed-up is that of its end-to-end set-up, with up to 16 borrowed GPUs
    beside eight dedicated ones (32B: 64 beside 16), and so with a slot for every
    trajectory. With the dedicated ones alone the order is reversed: the first slot that
    becomes free is rarely on the engine that has the turn's prefix.
    """
    rows = []
    for size in ("8B",) if quick else tuple(ROUTED):
        steps = 1 if quick else {"8B": 5, "32B": 2}[size]
        note = f"{mean_of(steps, 'rollout')}; GPUs without serving load, {AT_ONCE} slots each"
        if size == "32B":
            note += "; turns and lengths of ALFWorld are assumptions"
        for where, gpus in PLACES[size].items():
            setup = ROUTED[size].but(rollout_gpus=gpus)
            pinned, *others = (
                rollouts(setup.but(policies=(name,)), steps=steps)
                for name in ("pinned", *TURN_WISE.values(), "earliest")
            )
            *gains, earliest = (ratio_of(pinned, other) for other in others)
            rows += [
                Row(
                    row=f"{size} {way} over pinned, {where}",
                    ours=gain.mean,
                    seeds=gain.seeds,
                    note=note,
                )
                for way, gain in zip(TURN_WISE, gains, strict=True)
            ]
            rows.append(
                Row(
                    row=f"{size} earliest finish over pinned, {where}",
                    ours=earliest.mean,
                    seeds=earliest.seeds,
                    note=f"{note}; our rule (core/mechanisms/placement/elastic)",
                    own=True,
                )
            )
    return rows


EXPERIMENTS = (
    Experiment("rose-fig1c", "Prefix caching", "ROSE Fig. 1c, §2.2", fig1c),
    Experiment("rose-table3", "Elastic routing", "ROSE Table 3, §6.4", table3),
    Experiment("rose-fig10", "Weights between clusters", "ROSE Fig. 10, §6.3", fig10),
    Experiment("rose-fig14", "Borrowed GPUs", "ROSE Fig. 14, App. E", fig14),
)
