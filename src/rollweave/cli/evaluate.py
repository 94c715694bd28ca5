"""`rollweave eval`: evaluates a checkpoint on held-out tasks, in a run without training
steps.
"""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w
from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import err, out
from rollweave.cli.progress import display
from rollweave.cli.runs import clear, exported_checkpoint, find_run
from rollweave.io.hub import PINNED, fetched, folder
from rollweave.record.summary import Summary
from rollweave.runtime import launch
from rollweave.runtime.checkpoints import with_model
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import must_pass
from rollweave.schema.config.loading import load, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import EVAL_EPISODES, EvalConfig, ModelConfig, WarmupConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.serving import COLDEST
from rollweave.schema.text import human_seconds

DIRECTORY = "evaluations"
"""Subdirectory of a run for its evaluations, which are run directories themselves."""


class Subject(NamedTuple):
    """A model to be evaluated, at `model`, on the tasks of `config`.

    The evaluation's run directory is in `directory`; its name begins with `prefix`.
    """

    title: str
    config: RunConfig
    model: Path
    directory: Path
    prefix: str


def evaluate(
    target: str,
    *,
    env: str | None,
    overrides: Sequence[str],
    episodes: int | None,
    temperature: float | None,
    checkpoint: str | None,
    inproc: bool,
) -> None:
    """Evaluate and print the success rate by task, or the mean reward if the
    environment defines no success.

    Raises ConfigError for a run or checkpoint that is missing or incomplete,
    RollweaveError if the evaluation has no result, and KeyboardInterrupt if the user
    ended the evaluation before it had a result.
    """
    subject = subject_of(target, env=env, overrides=overrides, checkpoint=checkpoint)
    config = evaluation_config(subject, episodes=episodes, temperature=temperature)
    planned = dryrun.plan(config, fresh=True, deep=False)
    must_pass(planned.checks)
    config = planned.config
    clear(config)
    with display(err, name=subject.title, steps=0) as progress:
        summary = launch.train(config, inproc=inproc, progress=progress)
    if summary.error:
        raise RollweaveError(summary.error)
    if summary.interrupted and not summary.eval_episodes:
        raise KeyboardInterrupt
    _show(summary, subject.title, Path(config.run.dir) / config.run.name)


def subject_of(
    target: str, *, env: str | None, overrides: Sequence[str], checkpoint: str | None
) -> Subject:
    """Return the subject that `target` names: a configuration file, a checkpoint if
    `env` names its environment, or else a run. Raises ConfigError.
    """
    path = Path(target)
    if env is not None:
        return _of_checkpoint(fetched(target, field="CHECKPOINT"), env, overrides)
    if os.path.isfile(target) or path.suffix == ".toml":  # Path.is_file raises for long names
        return _of_file(path, overrides)
    if os.path.isfile(path / "config.json") and not os.path.exists(path / "config.toml"):
        raise ConfigError(f"--env must name an environment for the checkpoint {path}, got none")
    run = find_run(target)
    if not run.config.exists():
        raise ConfigError(f"{run.path} must hold config.toml, got a directory without it")
    step, model = exported_checkpoint(run, checkpoint)
    return step_of_run(run.configuration(overrides), run.path, step, model)


def step_of_run(config: RunConfig, directory: Path, step: int, model: Path) -> Subject:
    """Return the subject for the export `model` of a step of the run in `directory`."""
    return Subject(
        title=f"{directory.name} at step {step}",
        config=config,
        model=model,
        directory=directory / DIRECTORY,
        prefix=f"step-{step}",
    )


def _of_checkpoint(target: str, env: str, overrides: Sequence[str]) -> Subject:
    path, named = folder(target), PINNED.fullmatch(target)
    short = f"{Path(named[1]).name}-{named[2][:7]}" if named is not None else path.resolve().name
    if not os.path.isfile(path / "config.json"):
        raise ConfigError(
            f"with --env, CHECKPOINT must be a folder with a config.json, got {str(path)!r}"
        )
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{short}-{env}").strip("-.")
    text = tomli_w.dumps(
        {"run": {"name": name}, "model": {"path": str(path)}, "tasks": [{"env": env}]}
    )
    config = loads(text, overrides, name="--env")
    return Subject(target, config, path, Path(config.run.dir), config.run.name)


def _of_file(path: Path, overrides: Sequence[str]) -> Subject:
    config = with_model(load(path, overrides))
    if config.model.path is None:
        raise ConfigError(
            f"{path}: model.path must name a checkpoint to be evaluated, got a model from scratch"
        )
    return Subject(
        title=config.model.path,
        config=config,
        model=folder(config.model.path),
        directory=Path(config.run.dir),
        prefix=f"{config.run.name}-base",
    )


def evaluation_config(
    subject: Subject, *, episodes: int | None, temperature: float | None
) -> RunConfig:
    """Return the configuration of a run that only evaluates the subject's model. Raises
    ConfigError.
    """
    trained = subject.config
    count = (
        episodes if episodes is not None else trained.eval.final_episodes or trained.eval.episodes
    )
    warmth = temperature if temperature is not None else trained.eval.temperature
    if not math.isfinite(warmth):
        raise ConfigError(f"--temperature must be a finite number, got {warmth}")
    if 0 < warmth < COLDEST:
        raise ConfigError(f"--temperature must be 0, or at least {COLDEST:g}, got {warmth}")
    if count < 1:
        raise ConfigError(
            "--episodes must be given for a run that configures no evaluation episodes, got none"
        )
    if count > EVAL_EPISODES:
        raise ConfigError(f"--episodes must be at most {EVAL_EPISODES}, got {count}")
    section = trained.run.model_copy(
        update={
            "name": f"{subject.prefix}-t{warmth:g}-n{count}",
            "dir": str(subject.directory),
            "steps": 0,
            "checkpoint_every": 0,
            "sinks": (),
        }
    )
    shape = ModelConfig(
        path=str(subject.model),
        template_arguments=trained.model.template_arguments,
        dtype=trained.model.dtype,
        device=trained.model.device,
    )
    evaluation = EvalConfig(every=0, final_episodes=count, temperature=warmth)
    updates = {"run": section, "model": shape, "eval": evaluation, "warmup": WarmupConfig()}
    # adapters are part of the exported weights
    return trained.model_copy(update={**updates, "lora": None})


def half_width(rate: float, count: int) -> float:
    """Return half the width of Wilson's 95 % interval of a success rate over `count`
    distinct tasks. Repeated tasks add no information and must not be counted.
    """
    z = 1.96
    if count < 1:
        return 0.0
    return (
        z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    )


def _show(summary: Summary, title: str, directory: Path) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("task", "success", "± 95 %", "mean reward", "episodes"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task, reward in summary.mean_reward.items():
        count, rate = summary.eval_episodes.get(task, 0), summary.success_rate.get(task)
        distinct = min(count, summary.eval_tasks.get(task, count))
        success = (
            ["-", "-"]
            if rate is None
            else [f"[bold]{rate:.3f}[/]", f"{half_width(rate, distinct):.3f}"]
        )
        table.add_row(
            task,
            *success,
            f"{reward:.3f}" if rate is not None else f"[bold]{reward:.3f}[/]",
            str(count) if distinct == count else f"{count} of {distinct} tasks",
        )
    out.print(table)
    out.print(
        f"[dim]{escape(title)}, {human_seconds(summary.wall_s)}; trajectories: "
        f"rollweave trace {directory}[/]"
    )
    if not summary.eval_episodes:
        raise RollweaveError(
            f"no episode was scored; {directory}/summary.json lists the stop reasons"
        )
