"""Bench `trl`: the fixed lake, learned by our runs in each mode and by TRL's
GRPOTrainer from the same warmed-up checkpoint, with the same tasks, groups, loss and
learning rate; or the sums, learned by a pretrained chat model.

TRL plays the same multi-turn episodes through its `rollout_func`, and samples with its
own generation by transformers. Runs are interleaved: every variant once, then every
variant again with the next seed. The bench evaluates TRL's checkpoints with our own
evaluation, while TRL waits and its clock is stopped; a run of ours evaluates itself
while it trains, at the expense of its own time.
"""

import contextlib
import itertools
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import MODE_SETTINGS, Progress, add_ratio, scratch_folder
from benchmarks.runs import conditions_of, missed, subject, trained
from benchmarks.trl.process import MISSING, checkpoints, interpreter, spec_of, trl_version
from benchmarks.usage import SAMPLE_S, Usage, used
from rollweave.cli.evaluate import evaluation_config, step_of_run
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.conversation import tokenize_transcript
from rollweave.runtime.metrics import Silent
from rollweave.schema.base import Struct
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave.schema.training import Save, Saved
from rollweave.train.checkpoint import EXPORT
from rollweave.train.scratch import build_checkpoint
from rollweave.train.trainer import Trainer

TARGET = 0.8
"""Success at the sampling temperature."""

SEEDS = 1
COMPARED: Mapping[str, str] = {"": "bounded", "_sync": "sync"}
"""Suffix of a ratio → the variant of ours that TRL is compared with."""

TRL = "trl"
GIB = 1 << 30
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
MEASURES = {
    "step": "step_s",
    "wall": "wall_s",
    "steps": "steps",
    "cpu": "cpu_s",
    "memory": "memory_gib",
}
"""Prefix of a ratio → the figure of each variant that it compares."""

FIGURES = tuple(
    f"{what}_{side}" for what in MEASURES.values() for side in (*MODE_SETTINGS, TRL)
) + tuple(f"{what}_ratio{suffix}" for suffix in COMPARED for what in MEASURES)

DIFFERENCES = (
    "TRL generates, then trains, in one process; ours has a trainer, an engine and a controller, "
    "and in every mode but sync engine and trainer work at the same time",
    "TRL and mode sync are on policy; in the other modes a batch may be older than the weights, "
    "and the ratio is that to the engine's log-probs",
    "TRL generates a turn of all running episodes at once by transformers, which computes their "
    "contexts anew in every turn; our engine batches continuously and keeps their KV",
    "a group's standard deviation is that of a sample in TRL, and that of the population in ours",
    "TRL pads sequences to the longest one; our trainer packs them",
    "our seconds and processor time include the evaluations of the run, weights and records on "
    "disk; TRL's include no evaluation and no checkpoint",
    "random numbers",
)


class Learned(Struct, frozen=True, kw_only=True):
    """One training: the seconds and the processor seconds of its steps without the
    first, the peak of its memory in bytes, and the steps and the seconds to the target,
    None if it was not reached.
    """

    step_s: list[float]
    cpu_s: list[float]
    peak: int
    steps: int | None
    seconds: float | None


class Clock(Silent):
    """Has the processor time at the end of each training step."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self.cpu_s: list[float] = []

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "step":
            self.cpu_s.append(self._usage.cpu_s())


def bench_trl(*, seeds: int | None, quick: bool, model: Path | None, progress: Progress) -> Result:
    """Return figures by variant: the medians of `step_s_…` and `cpu_s_…`,
    `memory_gib_…`, `steps_…` and `wall_s_…` to the target; and the ratios of TRL to
    ours: to mode bounded, and with `_sync` to mode sync. With a pretrained `model` they
    have these two modes only.
    """
    if (python := interpreter()) is None:
        return Result.not_measured("trl", FIGURES, MISSING)
    version = trl_version(python)
    modes = {
        mode: settings
        for mode, settings in MODE_SETTINGS.items()
        if model is None or mode in COMPARED.values()
    }
    count = seeds if seeds is not None else SEEDS
    learned: dict[str, list[Learned]] = {name: [] for name in (*modes, TRL)}
    with scratch_folder() as scratch, subject(model) as (path, settings):
        overrides = [*settings, *COMMON, *(QUICK if quick else ())]
        for seed in range(count):
            common = [*overrides, f"run.seed={seed}", f"run.dir={json.dumps(str(scratch))}"]
            if model is None:
                warm = load(path, [*(QUICK_WARMUP if quick else ()), f"run.seed={seed}"])
                first = build_initial(warm, scratch / f"seed-{seed}")
                common += [f'model={{path="{first}"}}', "warmup={}"]
            for name, mode in modes.items():
                config = load(path, [*common, *mode, f"run.name={name}-{seed}"])
                learned[name].append(train_ours(config))
                progress(f"seed {seed}, {name}: {described(learned[name][-1])}")
            learned[TRL].append(train_trl(python, load(path, common), scratch / f"trl-{seed}"))
            progress(f"seed {seed}, {TRL}: {described(learned[TRL][-1])}")
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "trl": version,
        "seeds": list(range(count)),
        "variants": {name: list(mode) for name, mode in modes.items()},
        "target_success": TARGET,
        "same": "initial weights, tasks in order, tokens and limits of an "
        "episode, trajectories and groups in a step, temperature, AdamW and its learning rate, "
        "clipping, advantages, average over tokens; one thread for each process; evaluation",
        "step_s": "median without the first step; cpu_s is the processor time of all processes",
        "memory_gib": f"peak of all processes, sampled every {SAMPLE_S} s, pages that they share "
        "counted once; ours include the bench itself, which is the controller of the run",
        "wall_s": "from a loaded model, ours in trainer and engine, to the first evaluation at the "
        "target, at the sampling temperature; every fourth step is evaluated",
        "differences": list(DIFFERENCES),
    }
    figures = figures_of(learned, conditions, quick=quick)
    return Result(bench="trl", figures=figures, conditions=conditions)


def train_ours(config: RunConfig) -> Learned:
    """Train in a run, and delete its directory."""
    with used() as usage:
        clock = Clock(usage)
        run, measured = trained(config, progress=clock)
    shutil.rmtree(run.path)
    measured = measured.with_engines_ready(1)
    return Learned(
        step_s=[float(line["wall_s"]) for line in measured.data.steps[1:]],
        cpu_s=[after - before for before, after in itertools.pairwise(clock.cpu_s)],
        peak=usage.peak,
        steps=measured.reached_step(TARGET),
        seconds=measured.reached_s(TARGET),
    )


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
    step_s, cpu_s, peak = list[float](), list[float](), 0
    steps = seconds = None
    with contextlib.closing(checkpoints(python, spec_of(config, directory))) as saved:
        for one, until_now in saved:
            peak = until_now
            step_s += one.step_s
            cpu_s += one.cpu_s
            success = evaluated(config, directory, one.step, Path(one.path))
            shutil.rmtree(one.path)
            if success >= TARGET:
                steps, seconds = one.step, one.seconds
                break
    return Learned(step_s=step_s[1:], cpu_s=cpu_s[1:], peak=peak, steps=steps, seconds=seconds)


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
        for what in ("step_s", "cpu_s"):
            each = [seconds for one in runs for seconds in getattr(one, what)]
            figures[f"{what}_{name}"] = round(statistics.median(each), 3)
        figures[f"memory_gib_{name}"] = round(max(one.peak for one in runs) / GIB, 2)
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
        for what, of in MEASURES.items():
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
