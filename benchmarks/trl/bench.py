"""Bench `trl`: the fixed lake, learned by our runs in each mode and by TRL's
GRPOTrainer from the same warmed-up checkpoint, with the same tasks, groups, loss and
learning rate.

TRL plays the same multi-turn episodes through its `rollout_func`, and samples with its
own generation by transformers. Runs are interleaved: every variant once, then every
variant again with the next seed. The bench evaluates TRL's checkpoints with our own
evaluation, while TRL waits and its clock is stopped; a run of ours evaluates itself
while it trains, at the expense of its own time.
"""

import contextlib
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import MODE_SETTINGS, Progress, add_ratio, scratch_folder
from benchmarks.runs import MeasuredRun, conditions_of, example, measure, missed, trained
from benchmarks.trl.process import MISSING, checkpoints, interpreter, trl_version
from benchmarks.trl.protocol import TrlSpec
from rollweave.cli.evaluate import evaluation_config, step_of_run
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import TRAINER_THREADS
from rollweave.schema.errors import RollweaveError
from rollweave.schema.training import Save, Saved
from rollweave.schema.work import Purpose
from rollweave.train.checkpoint import EXPORT
from rollweave.train.scratch import build_checkpoint
from rollweave.train.state import BETAS
from rollweave.train.trainer import Trainer

CONFIG = "frozenlake_fixed.toml"
TARGET = 0.8
"""Success at the sampling temperature."""

SEEDS = 1
COMPARED: Mapping[str, str] = {"": "bounded", "_sync": "sync"}
"""Suffix of a ratio → the variant of ours that TRL is compared with."""

TRL = "trl"
COMMON = (
    'algorithm={advantage="grpo"}',
    "trainer.lr.final=1.0",
    "trainer.lr.warmup=0",
    "eval.every=4",
    "eval.episodes=48",
    "eval.temperature=1.0",
    "eval.final_episodes=0",
    f"eval.stop_at={TARGET}",
    "run.steps=100",
    "run.checkpoint_every=0",
    "run.name=trl",
)
"""Settings that TRL has, too: GRPO with one advantage for each trajectory, no KL, and a
constant learning rate.
"""

QUICK = ("run.steps=4", "eval.episodes=8")
QUICK_WARMUP = ("warmup.steps=5",)
FIGURES = tuple(
    f"{what}_{side}" for what in ("step_s", "wall_s", "steps") for side in (*MODE_SETTINGS, TRL)
) + tuple(f"{what}_ratio{suffix}" for suffix in COMPARED for what in ("step", "wall", "steps"))

DIFFERENCES = (
    "TRL generates, then trains, in one process; ours has a trainer, an engine and a controller, "
    "and in every mode but sync engine and trainer work at the same time",
    "TRL and mode sync are on policy; in the other modes a batch may be older than the weights, "
    "and the ratio is that to the engine's log-probs",
    "TRL generates a turn of all running episodes at once by transformers, which computes their "
    "contexts anew in every turn; our engine batches continuously and keeps their KV",
    "a group's standard deviation is that of a sample in TRL, and that of the population in ours",
    "TRL pads sequences to the longest one; our trainer packs them",
    "our seconds include the evaluations of the run, weights and records on disk; TRL's include no "
    "evaluation and no checkpoint",
    "random numbers",
)


class Learned(Struct, frozen=True, kw_only=True):
    """One training: the seconds of its steps without the first, and the steps and the
    seconds to the target, None if it was not reached.
    """

    step_s: list[float]
    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, run: MeasuredRun) -> "Learned":
        """Return what a run of ours has learned."""
        return cls(
            step_s=[float(line["wall_s"]) for line in run.data.steps[1:]],
            steps=run.reached_step(TARGET),
            seconds=run.reached_s(TARGET),
        )


def bench_trl(*, seeds: int | None, quick: bool, progress: Progress) -> Result:
    """Return figures by variant (`step_s_…`, `steps_…` and `wall_s_…` to the target),
    and the ratios of TRL to ours: to mode bounded, and with `_sync` to mode sync.
    """
    if (python := interpreter()) is None:
        return Result.not_measured("trl", FIGURES, MISSING)
    version = trl_version(python)
    path = example(CONFIG)
    overrides = (*COMMON, *QUICK) if quick else COMMON
    count = seeds if seeds is not None else SEEDS
    learned: dict[str, list[Learned]] = {name: [] for name in (*MODE_SETTINGS, TRL)}
    with scratch_folder() as scratch:
        for seed in range(count):
            first = build_initial(
                load(path, [*(QUICK_WARMUP if quick else ()), f"run.seed={seed}"]),
                scratch / f"seed-{seed}",
            )
            common = [*overrides, f'model={{path="{first}"}}', "warmup={}", f"run.seed={seed}"]
            for name, settings in MODE_SETTINGS.items():
                run = measure(path, [*common, *settings]).with_engines_ready(1)
                learned[name].append(Learned.of(run))
                progress(f"seed {seed}, {name}: {described(learned[name][-1])}")
            learned[TRL].append(train_trl(python, load(path, common), scratch / f"trl-{seed}"))
            progress(f"seed {seed}, {TRL}: {described(learned[TRL][-1])}")
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "trl": version,
        "seeds": list(range(count)),
        "variants": {name: list(settings) for name, settings in MODE_SETTINGS.items()},
        "target_success": TARGET,
        "same": "initial weights after the warm-up, tasks in order, tokens and limits of an "
        "episode, trajectories and groups in a step, temperature, AdamW and its learning rate, "
        "clipping, advantages, average over tokens; one thread for each process; evaluation",
        "step_s": "median without the first step",
        "wall_s": "from a loaded model, ours in trainer and engine, to the first evaluation at the "
        "target, at the sampling temperature; every fourth step is evaluated",
        "differences": list(DIFFERENCES),
    }
    figures = figures_of(learned, conditions, quick=quick)
    return Result(bench="trl", figures=figures, conditions=conditions)


def build_initial(config: RunConfig, directory: Path) -> Path:
    """Write the model from scratch that `config` describes, after its warm-up, and
    return its directory.
    """
    assert config.model.scratch is not None, "the example trains a model from scratch"
    source = TaskSource(config)
    random = directory / "random"
    directory.mkdir(parents=True)
    build_checkpoint(
        random,
        scratch=config.model.scratch,
        context=config.max_tokens,
        words=source.words(),
        seed=config.run.seed,
    )
    trainer = Trainer(config, random)
    codec = ChatCodec.from_directory(random)
    trainer.warm_up(
        tokenize_transcript(codec, messages)
        for messages in source.transcripts(seed=config.run.seed)
    )
    warm = directory / "warm"
    reply = trainer.handle(Save(path=str(warm), export=True))
    if not isinstance(reply, Saved):
        raise RollweaveError(f"the model cannot be saved: {getattr(reply, 'error', reply)}")
    return warm / EXPORT


def train_trl(python: str, config: RunConfig, directory: Path) -> Learned:
    """Train with TRL as `config` would, until a checkpoint has reached the target."""
    step_s: list[float] = []
    steps = seconds = None
    with contextlib.closing(checkpoints(python, spec_of(config, directory))) as saved:
        for one in saved:
            step_s += one.step_s
            success = evaluated(config, directory, one.step, Path(one.path))
            shutil.rmtree(one.path)
            if success >= TARGET:
                steps, seconds = one.step, one.seconds
                break
    return Learned(step_s=step_s[1:], steps=steps, seconds=seconds)


def spec_of(config: RunConfig, directory: Path) -> TrlSpec:
    """Return the training of TRL that is `config`'s."""
    (task,) = config.tasks
    trainer, values = config.trainer, config.algorithm.loss_values
    source = TaskSource(config)
    assert config.model.path is not None, "both start from one checkpoint"
    return TrlSpec(
        model=config.model.path,
        directory=str(directory),
        tasks=tuple(
            source.draw(task.name, index, Purpose.TRAIN)
            for index in range(config.run.steps * config.rollout.groups_per_step)
        ),
        options=task.options,
        steps=config.run.steps,
        save_every=config.eval.every,
        groups_per_step=config.rollout.groups_per_step,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        lr=trainer.peak_lr,
        betas=BETAS,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        clip_low=values.clip_low,
        clip_high=values.clip_high,
        threads=TRAINER_THREADS,
        seed=config.run.seed,
    )


def evaluated(config: RunConfig, directory: Path, step: int, model: Path) -> float:
    """Return the success of a checkpoint by `rollweave eval`, with the episodes and the
    temperature of the run's own evaluations.
    """
    _, run = trained(
        evaluation_config(
            step_of_run(config, directory, step, model), episodes=None, temperature=None
        )
    )
    # there is none if no episode has ended before its last turn
    return min(run.summary.success_rate.values(), default=0.0)


def figures_of(
    learned: Mapping[str, Sequence[Learned]], conditions: dict[str, Any], *, quick: bool
) -> dict[str, Figure]:
    """Return the figures; `conditions` names the reason for a missing one."""
    figures: dict[str, Figure] = {}
    for name, runs in learned.items():
        reached = [one for one in runs if one.steps is not None and one.seconds is not None]
        complete = len(reached) == len(runs)
        figures[f"step_s_{name}"] = round(
            statistics.median(seconds for one in runs for seconds in one.step_s), 3
        )
        figures[f"wall_s_{name}"] = (
            round(statistics.median(one.seconds or 0.0 for one in reached), 1) if complete else None
        )
        figures[f"steps_{name}"] = (
            statistics.median(one.steps or 0 for one in reached) if complete else None
        )
        if not complete:
            why = missed(len(runs) - len(reached), len(runs), quick=quick)
            conditions |= {f"{what}_{name}": why for what in ("wall_s", "steps")}
    for suffix, ours in COMPARED.items():
        for what, of in (("step", "step_s"), ("wall", "wall_s"), ("steps", "steps")):
            name = f"{what}_ratio{suffix}"
            add_ratio(name, f"{of}_{TRL}", f"{of}_{ours}", figures, conditions)
    return figures


def described(learned: Learned) -> str:
    """Return a line about one training."""
    step_s = statistics.median(learned.step_s)
    if learned.seconds is None:
        return f"success {TARGET} not reached; {step_s:.2f} s a step"
    return (
        f"success {TARGET} after {learned.seconds:.1f} s, {learned.steps} steps of {step_s:.2f} s"
    )
