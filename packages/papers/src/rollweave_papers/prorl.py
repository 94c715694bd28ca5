"""ProRL Agent's evaluation as far as the simulator covers it: nodes (Fig. 5) and the
speed of the shell (Table 3).

Our copy is a digest. An instance is taken to be a task with its eight rollouts
("rollouts per instance: 8").
"""

from rollweave_papers.cluster import Pace, ScaledSteps, Setup, mean_of, pace
from rollweave_papers.results import Experiment, Row
from rollweave_sim.families import SHELL_ACTION_S
from rollweave_sim.workload import Workload

INSTANCES, ROLLOUTS, NODE_GPUS = 32, 8, 8
"""Batch, rollouts of an instance, and the H100 of a node (Hyperparameters; Table 3)."""

SLOW_ACTION_S = 0.78
"""Mean seconds of an action without the efficient bash (Table 3). The family's own mean
is the full system's.
"""

NODE = Setup(
    model="qwen3-14b",
    tasks=("swe",),
    context=32_768,
    gpu="h100",
    tp=2,
    rollout_gpus=NODE_GPUS,
    trainer_gpus=32,
    batch=INSTANCES * ROLLOUTS,
    group_size=ROLLOUTS,
    mode="bounded",
    rollout={"dynamic_sampling": True},
)
"""DAPO with Qwen3-14B on SWE (Table 3). Assumptions: the trainer has its own GPUs, so
that rollouts alone set the pace; 32K tokens of context; engines on two GPUs, as
RollArt's for 14B (§7.1); rollouts continue while a step trains (§3.4).
"""


def rate(measured: Pace) -> float:
    """Return the trained instances per second."""
    return INSTANCES / measured.step_s


def busy_of(measured: Pace) -> float:
    """Return the share of the time in which engines compute."""
    return float(measured.outcome.idle("engines")["busy"])


def table3(quick: bool) -> list[Row]:
    """Reproduce action time, GPU utilization and instances per second."""
    shrink, steps = (4, 1) if quick else (1, 6)
    node = NODE.but(
        rollout_gpus=NODE_GPUS // shrink, trainer_gpus=32 // shrink, batch=NODE.batch // shrink
    )
    full, slow = pace(node, steps=steps), pace(node, steps=steps, vary=_slow_bash)
    smaller = (
        f"GPUs and batch divided by {shrink}, instances scaled up again; " if shrink > 1 else ""
    )
    note = (
        f"{smaller}{mean_of(steps, 'step')}; GPU: share of the time in which engines compute; "
        "tokens of a turn are assumptions; an instance is a task with its eight rollouts here"
    )
    rows = []
    for name, measured in (("full", full), ("no efficient bash", slow)):
        rows += [
            Row(row=f"{name}, throughput", ours=rate(measured), unit="instances/s", note=note),
            Row(row=f"{name}, GPU utilization", ours=100 * busy_of(measured), unit="%", note=note),
        ]
    rows.append(
        Row(
            row="throughput, full over no efficient bash",
            ours=rate(full) / rate(slow),
            note=f"published: ratio of the two rates; engines work {busy_of(full):.0%} and "
            f"{busy_of(slow):.0%} of the time",
        )
    )
    for name, missing in (
        ("no balancing", "routing that ignores load"),
        ("no clean-up", "obsolete jobs that continue"),
    ):
        note = f"to be built in the simulator: {missing}; live, `rollweave bench service` has it"
        rows += [
            Row(row=f"{name}, {what}", ours=None, unit=unit, note=note)
            for what, unit in (("throughput", "instances/s"), ("GPU utilization", "%"))
        ]
    return rows


def fig5(quick: bool) -> list[Row]:
    """Reproduce rollout throughput of SWE by nodes, where the batch grows with them.
    The text has "nearly linearly", without numbers.
    """
    shrink, steps, nodes = (4, 1, (1, 2)) if quick else (2, 2, (1, 2, 4))
    paces = {
        count: pace(
            NODE.but(
                rollout_gpus=count * NODE_GPUS // shrink,
                trainer_gpus=count * 32 // shrink,
                batch=count * NODE.batch // shrink,
            ),
            steps=steps,
        )
        for count in nodes
    }
    one = paces[1]
    return [
        Row(
            row=f"throughput of {count} nodes, over {count} times that of one",
            ours=one.step_s / pace_.step_s,
            note=f"a node: {NODE_GPUS // shrink} H100, {INSTANCES // shrink} instances; "
            f"{mean_of(steps, 'step')}; "
            'published: "nearly linearly"',
        )
        for count, pace_ in paces.items()
        if count > 1
    ]


def _slow_bash(work: Workload) -> Workload:
    return ScaledSteps(work, factor=SLOW_ACTION_S / SHELL_ACTION_S)


EXPERIMENTS = (
    Experiment("prorl-fig5", "Nodes", "ProRL Fig. 5", fig5),
    Experiment("prorl-table3", "Ablations", "ProRL Table 3", table3),
)
