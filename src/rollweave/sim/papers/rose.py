"""ROSE's evaluation as far as it is built: more GPUs for rollouts, and the gain of
prefix caching (§2.2, App. E).

ROSE's use of GPUs that serve at the same time (§4) is not built: a borrowed GPU is
simulated as one of our own.
"""

import functools

from rollweave.sim.papers.cluster import Setup, mean_of, rollout_s
from rollweave.sim.papers.rows import Experiment, Row

CONTEXT = 32_768
"""Maximum tokens of Qwen3-8B/32k on FrozenLake (§6)."""

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


def fig1c(quick: bool) -> list[Row]:
    """Reproduce ROSE §2.2: rollout time with and without prefix caching, in groups of
    8.

    The numbers of GPUs between which it falls from 607 s to 435 s are not in the text:
    from 8 to 16, the cluster's size, is our reading.
    """
    steps = 1 if quick else 4
    setup = FROZENLAKE.but(group_size=8, slots=256)
    eight, bare = (
        rollout_s(setup.but(without=missing), steps=steps) for missing in ((), ("prefix_cache",))
    )
    row = functools.partial(Row, experiment="rose-fig1c")
    note = f"{mean_of(steps, 'rollout')}; as many sequences at once as vLLM's default"
    rows = [
        row(
            row="rollout without over with prefix caching, 8 GPUs",
            published=3.4,
            ours=bare / eight,
            note=note,
        ),
        row(
            row="rollout on 8 GPUs",
            published=607.0,
            ours=eight,
            unit="s",
            note=f"{note}; tokens of a turn are assumptions",
        ),
    ]
    if not quick:
        sixteen = rollout_s(setup.but(rollout_gpus=16), steps=steps)
        rows.append(
            row(
                row="8 over 16 GPUs",
                published=607.0 / 435.0,
                ours=eight / sixteen,
                note=f"{note}; published: ratio of the times",
            )
        )
    return rows


def fig14(quick: bool) -> list[Row]:
    """Reproduce ROSE App. E: rollout time of FrozenLake on eight dedicated GPUs and 4,
    8 or 16 borrowed ones, over the first five steps.
    """
    published = {4: 1.26, 8: 1.45, 16: 1.69}
    steps, counts = (1, (8,)) if quick else (5, (4, 8, 16))
    alone = rollout_s(FROZENLAKE, steps=steps)
    note = (
        f"{mean_of(steps, 'rollout')}; a borrowed GPU has no other clients here, and its "
        "weights arrive in time"
    )
    rows = [
        Row(
            experiment="rose-fig14",
            row=f"rollout speed-up with {count} borrowed GPUs",
            published=published[count],
            ours=alone / rollout_s(FROZENLAKE.but(rollout_gpus=8 + count), steps=steps),
            note=note,
        )
        for count in counts
    ]
    missing = (
        "to be built: serving load on borrowed GPUs, and admission of rollouts by its slack and "
        "KV headroom"
    )
    rows.append(
        Row(
            experiment="rose-fig14",
            row="the same beside serving, P99 in bounds",
            published=None,
            ours=None,
            note=missing,
        )
    )
    return rows


TURN_WISE = {"turn-wise": (1.11, "least_load"), "turn-wise with affinity": (1.16, "affinity")}
"""Published speed-up over pinned (Table 3, 8B), and our placement that corresponds to
it.
"""


def table3(quick: bool) -> list[Row]:
    """Reproduce ROSE §6.4: routing of each turn against pinning a trajectory to a
    worker, over the first five steps.
    """
    steps = 1 if quick else 5
    seconds = {
        name: rollout_s(FROZENLAKE.but(policies=(name,)), steps=steps)
        for name in ("pinned", *(placement for _, placement in TURN_WISE.values()))
    }
    note = (
        f"{mean_of(steps, 'rollout')}; eight dedicated GPUs without borrowed ones, {AT_ONCE} slots "
        "each; pinned finds every prefix in its cache, while a turn-wise trajectory whose engine "
        "is full moves to an engine without its prefix"
    )
    missing = "to be built: an ALFWorld family (turns and lengths are in none of our papers)"
    row = functools.partial(Row, experiment="rose-table3")
    return [
        *(
            row(
                row=f"8B {way} over pinned",
                published=gain,
                ours=seconds["pinned"] / seconds[name],
                note=note,
            )
            for way, (gain, name) in TURN_WISE.items()
        ),
        *(
            row(row=f"32B {way} over pinned", published=gain, ours=None, note=missing)
            for way, gain in zip(TURN_WISE, (1.08, 1.48), strict=True)
        ),
    ]


EXPERIMENTS = (
    Experiment(name="rose-fig1c", title="Prefix caching", source="ROSE Fig. 1c, §2.2", run=fig1c),
    Experiment(
        name="rose-table3", title="Elastic routing", source="ROSE Table 3, §6.4", run=table3
    ),
    Experiment(name="rose-fig14", title="Borrowed GPUs", source="ROSE Fig. 14, App. E", run=fig14),
)
