"""`rollweave eval`: evaluates a checkpoint on held-out tasks, in a run without training
steps.
"""

import math
from pathlib import Path

from rich.table import Table

from rollweave.cli.console import err, out
from rollweave.cli.progress import display
from rollweave.cli.runs import clear, exported_checkpoint, find_run
from rollweave.record.summary import Summary
from rollweave.runtime import launch
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import human_seconds, must_pass
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import (
    EVAL_EPISODES,
    EvalConfig,
    ModelConfig,
    WarmupConfig,
)
from rollweave.schema.errors import ConfigError, RollweaveError

DIRECTORY = "evaluations"
"""Subdirectory of a run for its evaluations, each of which is a run directory."""


def evaluate(
    name: str, *, episodes: int | None, temperature: float | None, checkpoint: str, inproc: bool
) -> None:
    """Evaluate and print the success rate by task, or the mean reward if the
    environment defines no success.

    Raises ConfigError for a run or checkpoint that is missing or incomplete,
    RollweaveError if the evaluation has no result, and KeyboardInterrupt if the user
    ended it before it had one.
    """
    run = find_run(name)
    if not run.config.exists():
        raise ConfigError(f"{run.path} must hold config.toml, got a directory without it")
    step, model = exported_checkpoint(run, checkpoint)
    config = evaluation_config(
        load(run.config),
        directory=run.path,
        step=step,
        model=model,
        episodes=episodes,
        temperature=temperature,
    )
    must_pass(dryrun.examine(config, fresh=True, deep=False))
    clear(config)
    with display(err, name=f"{run.path.name} at step {step}", steps=0) as progress:
        summary = launch.train(config, inproc=inproc, progress=progress)
    if summary.error:
        raise RollweaveError(summary.error)
    if summary.interrupted and not summary.eval_episodes:
        raise KeyboardInterrupt
    _show(summary, step, Path(config.run.dir) / config.run.name)


def evaluation_config(
    trained: RunConfig,
    *,
    directory: Path,
    step: int,
    model: Path,
    episodes: int | None,
    temperature: float | None,
) -> RunConfig:
    """Return the configuration of a run that only evaluates `model`, on the tasks of
    `trained`.
    """
    count = (
        episodes if episodes is not None else trained.eval.final_episodes or trained.eval.episodes
    )
    warmth = temperature if temperature is not None else trained.eval.temperature
    if not math.isfinite(warmth):
        raise ConfigError(f"--temperature must be a finite number, got {warmth}")
    if count < 1:
        raise ConfigError(
            "--episodes must be given for a run that configures no evaluation episodes, got none"
        )
    if count > EVAL_EPISODES:
        raise ConfigError(f"--episodes must be at most {EVAL_EPISODES}, got {count}")
    section = trained.run.model_copy(
        update={
            "name": f"step-{step}-t{warmth:g}-n{count}",
            "dir": str(directory / DIRECTORY),
            "steps": 0,
            "checkpoint_every": 0,
            "sinks": (),
        }
    )
    shape = ModelConfig(path=str(model), dtype=trained.model.dtype, device=trained.model.device)
    evaluation = EvalConfig(every=0, final_episodes=count, temperature=warmth)
    updates = {"run": section, "model": shape, "eval": evaluation, "warmup": WarmupConfig()}
    # adapters are part of the exported weights
    return trained.model_copy(update={**updates, "lora": None})


def half_width(rate: float, count: int) -> float:
    """Return half the width of Wilson's 95 % interval of a success rate."""
    z = 1.96
    if count < 1:
        return 0.0
    return (
        z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    )


def _show(summary: Summary, step: int, directory: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("task", "success", "± 95 %", "mean reward", "episodes"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task, reward in summary.mean_reward.items():
        count, rate = summary.eval_episodes.get(task, 0), summary.success_rate.get(task)
        success = (
            ["-", "-"]
            if rate is None
            else [f"[bold]{rate:.3f}[/]", f"{half_width(rate, count):.3f}"]
        )
        table.add_row(
            task,
            *success,
            f"{reward:.3f}" if rate is not None else f"[bold]{reward:.3f}[/]",
            str(count),
        )
    out.print(table)
    out.print(
        f"[dim]checkpoint of step {step}, {human_seconds(summary.wall_s)}; trajectories: "
        f"rollweave trace {directory}[/]"
    )
    if not summary.eval_episodes:
        raise RollweaveError(
            f"no episode was scored; {directory}/summary.json lists the stop reasons"
        )
