"""Heddle's experiments: rollout throughput and time by when, where and on how many GPUs a trajectory runs.

How well lengths are predicted is in `heddle_prediction.py`. Heddle's priorities, placements, migration and allocation do not
exist here yet, nor do the schedulers that it is compared with: those rows are missing and name what has to be built. What
exists is first come first served by trajectory, with affinity to the engine of the last turn and the least loaded engine for
the first one, on engines of one size.
"""

import functools

from rollweave.reproduce import heddle_prediction
from rollweave.reproduce.cluster import Setup, SlowStarts, rollouts
from rollweave.reproduce.rows import Experiment, Row
from rollweave.schema.base import Noun
from rollweave.sim.families import FAMILIES
from rollweave.sim.workload import workload

GPUS = 64
"""Eight machines of eight Hopper GPUs with NVLink of 900 GB/s (Heddle §7): h100."""

MEMBERS = 16
"""Samples of a prompt (Heddle §7)."""

WORKER_BATCH = 100
"""Trajectories on a worker of the baselines at once (Heddle §7.1); the global batch is that of all workers."""

MODELS = {"qwen3-8b": 1, "qwen3-14b": 1, "qwen3-32b": 2}
"""GPUs of a baseline's worker (Heddle §7.1)."""

STUDIED = "qwen3-14b"
"""The model of the ablations (Heddle §7.2 to 7.4)."""

TASKS = ("coding", "search", "math")

WIDE = 8
"""GPUs of a worker in Fix-8 (Heddle §7.4)."""

QUICK_PARTS = 32
"""Of a cluster and its batch, of which quick forms simulate one."""

POLICY = "first come first served, affinity, least load for the first turn; a slot for each, so that it pins as Verl does"


READY_S = 60.0
"""No environment is ready before it: engines take their first weights one after the other, and whichever had them first would
get whole groups, hard ones among them. Taken off again."""


class Rollout(Noun, frozen=True, kw_only=True):
    """One batch from an empty cluster to its last reward: seconds, and sampled tokens a second of the whole cluster."""

    seconds: float
    tokens_per_s: float


def setup_of(task: str, model: str, *, tp: int, parts: int) -> Setup:
    """One of `parts` parts of the cluster, with its part of the batch. The batch is the same for every `tp` (Heddle §7)."""
    gpus = max(GPUS // parts, tp)
    workers, usual = gpus // tp, MODELS[model]
    batch = WORKER_BATCH * (gpus // usual) // MEMBERS * MEMBERS
    return Setup(
        model=model,
        tasks=(task,),
        context=FAMILIES[task].max_context,
        rollout_gpus=gpus,
        trainer_gpus=GPUS,
        batch=batch,
        group_size=MEMBERS,
        gpu="h100",
        tp=tp,
        slots=max(WORKER_BATCH, -(-batch // workers)),
    )


@functools.cache
def rollout(task: str, model: str, *, tp: int, quick: bool) -> Rollout:
    """Raises ExperimentError."""
    setup = setup_of(task, model, tp=tp, parts=QUICK_PARTS if quick else 1)
    (late,) = rollouts(setup, steps=1, vary=lambda work: SlowStarts(work, rate=1.0, seconds=READY_S))
    seconds, plans = late - READY_S, workload(task)
    tokens = sum(
        turn.output_tokens
        for index in range(setup.batch // MEMBERS)
        for member in range(MEMBERS)
        for turn in plans.plan(index=index, member=member, attempt=0, seed=0).turns
    )
    return Rollout(seconds=seconds, tokens_per_s=tokens / seconds * GPUS / setup.rollout_gpus)


def _part(*, quick: bool, tp: int = 1) -> str:
    if not quick:
        return f"{GPUS} GPUs"
    return f"quick: {max(GPUS // QUICK_PARTS, tp)} of {GPUS} GPUs with their part of the batch"


def _missing(experiment: str, row: str, needs: str, *, unit: str = "×") -> Row:
    return Row(experiment=experiment, row=row, published=None, ours=None, unit=unit, note=f"missing: {needs}")


def fig12(quick: bool) -> list[Row]:
    """Rollout throughput over tasks and models."""
    name = "heddle-fig12"
    cases = [("math", STUDIED)] if quick else [(task, model) for task in TASKS for model in MODELS]
    rows = [
        Row(
            experiment=name,
            row="Heddle over the best baseline, greatest",
            published=2.5,
            ours=None,
            note="missing: progressive priority, presorted placement, migration and allocation in the core",
        )
    ]
    for task, model in cases:
        ours = rollout(task, model, tp=MODELS[model], quick=quick)
        rows.append(
            Row(
                experiment=name,
                row=f"{task}, {model}",
                published=None,
                ours=ours.tokens_per_s,
                unit="tokens/s",
                note=f"{POLICY}; {_part(quick=quick, tp=MODELS[model])}; figure not in text",
                own=True,
            )
        )
    return [
        *rows,
        _missing(name, "Heddle over Verl", "Heddle's policies in the core, and Verl's round-robin"),
        _missing(
            name, "Heddle over Verl*", "the same, and routing that goes to the least loaded engine beyond a load ratio of 32"
        ),
        _missing(name, "Heddle over Slime", "the same, and routing that ignores the engine of the last turn"),
    ]


def fig14(quick: bool) -> list[Row]:
    """Rollout time by scheduler."""
    name = "heddle-fig14"
    rows = []
    for task in ("search",) if quick else TASKS:
        ours = rollout(task, STUDIED, tp=1, quick=quick)
        rows.append(
            Row(
                experiment=name,
                row=f"FCFS, {task}",
                published=None,
                ours=ours.seconds,
                unit="s",
                note=f"{STUDIED}, {_part(quick=quick)}; a slot for each, so that only KV is short; figure not in text",
            )
        )
    return [
        *rows,
        _missing(name, "progressive priority", "the policy in the core, fed by the predictor", unit="s"),
        _missing(name, "round-robin", "a rank that falls with every turn", unit="s"),
        _missing(name, "shortest first (Autellix)", "a rank by the tokens served so far", unit="s"),
    ]


def fig15(quick: bool) -> list[Row]:
    """Rollout throughput by placement."""
    name = "heddle-fig15"
    rows = []
    for task in ("coding",) if quick else TASKS:
        ours = rollout(task, STUDIED, tp=1, quick=quick)
        rows.append(
            Row(
                experiment=name,
                row=f"cache-aware, {task}",
                published=None,
                ours=ours.tokens_per_s,
                unit="tokens/s",
                note=f"{POLICY}; {STUDIED}, {_part(quick=quick)}; figure not in text",
            )
        )
    return [
        *rows,
        _missing(name, "Heddle's placement over cache-aware", "presorted placement and migration in the core"),
        _missing(
            name, "Heddle's placement over least load", "presorted placement and migration in the core; routing by a load ratio"
        ),
    ]


def fig16(quick: bool) -> list[Row]:
    """Rollout throughput by GPUs of a worker."""
    name = "heddle-fig16"
    rows = []
    for task in ("math",) if quick else TASKS:
        narrow, wide = (rollout(task, STUDIED, tp=tp, quick=quick) for tp in (1, WIDE))
        part = f"{STUDIED}, {_part(quick=quick)}" + (f", and Fix-8 on {WIDE} GPUs" if quick else "")
        rows.append(
            Row(
                experiment=name,
                row=f"Fix-8 over Fix-1, {task}",
                published=None,
                ours=wide.tokens_per_s / narrow.tokens_per_s,
                note=f"{part}; Fix-1 {narrow.tokens_per_s:,.0f}, Fix-8 {wide.tokens_per_s:,.0f} tokens/s; figure not in text",
            )
        )
    return [*rows, _missing(name, "adaptive over the best fixed", "allocation (§6) and engines of different sizes in one run")]


EXPERIMENTS = [
    Experiment(name="heddle-fig12", title="rollout throughput", source="Heddle Fig. 12, §7.1", run=fig12),
    heddle_prediction.EXPERIMENT,
    Experiment(name="heddle-fig14", title="schedulers", source="Heddle Fig. 14, §7.2", run=fig14),
    Experiment(name="heddle-fig15", title="placements", source="Heddle Fig. 15, §7.3", run=fig15),
    Experiment(name="heddle-fig16", title="GPUs of a worker", source="Heddle Fig. 16, §7.4", run=fig16),
]
