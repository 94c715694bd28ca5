"""The commands about a run that is over or goes on by itself: `rollweave report` writes
its report as one HTML file, `rollweave export` its trajectories for other programs,
`rollweave rescore` asks again for the rewards that failed for good and writes the
obtained rewards to its records, and `rollweave ui` serves a live page over a directory
of runs.

"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, err, out
from rollweave.cli.runs import RUNS, find_run
from rollweave.envs.threads import EnvThreads
from rollweave.io.http.guard import TOKEN_BYTES, given_token
from rollweave.record.export import SUFFIXES, Export
from rollweave.record.report.page import write_report
from rollweave.record.rundir import RunDir, run_id
from rollweave.record.store import (
    Scored,
    StoredAttempt,
    TrajectoryReader,
    TrajectoryStore,
    unscored_attempts,
)
from rollweave.record.ui.runs import Runs
from rollweave.record.ui.server import HOST, serving
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import finished_attempt
from rollweave.rollout.rewards import Rewards, rescored
from rollweave.runtime.signals import on_ending_signals, run_to_the_end
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_bytes
from rollweave.schema.work import Purpose, StopReason, Trajectory


def report(name: str) -> None:
    """Write `report.html` and print its path."""
    run = find_run(name)
    run.must_be_writable()
    path = write_report(
        run, lambda line: err.print(f"[yellow]warning:[/] {escape(line)}", soft_wrap=True)
    )
    out.print(f"{escape(str(path))} ({human_bytes(path.stat().st_size)})", soft_wrap=True)


def export(name: str, *, format_: str, output: Path | None) -> None:
    """Write all attempts of the run to one file, and print its path."""
    if format_ not in SUFFIXES:
        raise ConfigError(f"--format must be one of {', '.join(SUFFIXES)}, got {format_!r}")
    run = find_run(name)
    if not run.trajectories.is_dir():
        raise ConfigError(f"{run.path} must hold trajectories, got none yet")
    path = output or Path(run.path.resolve().name + SUFFIXES[format_])
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--output must be a file in a directory that exists, got {str(path)!r}")
    target = path.resolve()
    if target.is_relative_to(run.path.resolve()):
        raise ConfigError(f"--output must not be among the files of the run, got {str(path)!r}")
    if target.exists() and not target.is_file():
        raise ConfigError(f"--output must be a regular file, got {str(path)!r}")
    exported = Export(run)
    for line in exported.damaged:
        text = f"[yellow]warning:[/] {escape(line)}; it and the rest of this file are left out"
        err.print(text, soft_wrap=True)
    exported.write(target, format_)
    size = human_bytes(path.stat().st_size)
    out.print(f"{escape(str(path))} ({exported.attempts:,} attempts, {size})", soft_wrap=True)


def rescore(name: str) -> None:
    """Ask again for the missing rewards of run `name`, and write the obtained rewards.

    Raises ConfigError, and typer.Exit if a reward failed again.
    """
    run = find_run(name)
    if missing := [path for path in (run.config, run.trajectories) if not path.exists()]:
        raise ConfigError(f"{run.path} must hold {missing[0].name}, got a directory without it")
    config = run.configuration()
    if not config.rewards:
        raise ConfigError(f"{run.config} must have [[rewards]] to rescore, got none")
    path = run.path.resolve()
    section = config.run.model_copy(update={"dir": str(path.parent), "name": path.name})
    with RunDir.claim(config.model_copy(update={"run": section}), resume=True) as claimed:
        reader = TrajectoryReader(claimed.trajectories)
        unscored = unscored_attempts(reader.entries)
        loaded = [(entry, reader.load(entry)) for entry in unscored]
        rewards = Rewards(
            config, run_id(claimed.identity), threads=EnvThreads(), clock=time.monotonic
        )
        errors = asyncio.run(_rescore_all(config, claimed.trajectories, rewards, loaded))
    scored = len(unscored) - errors.total()
    out.print(f"{scored} of {len(unscored)} missing rewards were computed and written")
    for error, count in errors.most_common():
        times = f" ({count} times)" if count > 1 else ""
        err.print(f"[red]{escape(error)}[/]{times}", soft_wrap=True)
    if errors:
        raise typer.Exit(FAILED)


async def _rescore_all(
    config: RunConfig,
    directory: Path,
    rewards: Rewards,
    attempts: Iterable[tuple[StoredAttempt, Trajectory]],
) -> Counter[str]:
    """Write scores as they are obtained; return the errors of all others."""
    errors: Counter[str] = Counter()
    slots = asyncio.Semaphore(config.rollout.max_running)
    with TrajectoryStore(directory) as store:

        async def one(entry: StoredAttempt, trajectory: Trajectory) -> None:
            async with slots:
                try:
                    store.rescore([await _rescored(rewards, entry, trajectory)])
                except EpisodeStopError as error:
                    errors[str(error)] += 1

        try:
            async with asyncio.TaskGroup() as tasks:
                for entry, trajectory in attempts:
                    tasks.create_task(one(entry, trajectory), name=f"rescore {trajectory.id}")
        finally:
            await rewards.close()
            store.sync()
    return errors


async def _rescored(rewards: Rewards, entry: StoredAttempt, trajectory: Trajectory) -> Scored:
    """Return the new score of an attempt. Raises EpisodeStopError."""
    score = entry.score
    assert score is not None, "only attempts that were evaluated lack rewards"
    unscored = score.unscored
    assert unscored is not None, "it says what the rewards are computed from"
    domain = rewards.of(trajectory.task.tag)
    if domain is None:
        raise EpisodeStopError(
            StopReason.REWARD_ERROR,
            f"task domain {trajectory.task.tag!r} has no [[rewards]] any longer",
        )
    began = time.monotonic()
    outcome = await domain.compute(
        finished_attempt(trajectory.id, trajectory.attempt, trajectory.task, unscored),
        known=score.rewards,
        comparisons=unscored.comparisons,
        compared=entry.purpose is Purpose.TRAIN,
    )
    if outcome.reward is None:
        raise EpisodeStopError(outcome.reason, outcome.error)
    return rescored(score, outcome, seconds=time.monotonic() - began)


def ui(directory: Path | None, *, port: int, token_env: str | None) -> None:
    """Serve the page until a signal ends it."""
    path = directory if directory is not None else RUNS if RUNS.is_dir() else Path()
    if not path.is_dir():
        raise ConfigError(f"DIR must be a directory of runs or one run, got {str(path)!r}")
    given = given_token(token_env, no_token=False, host=HOST, named="--token-env")
    token = given or secrets.token_urlsafe(TOKEN_BYTES)
    # only signals end the page, so several signals also end it in order
    with contextlib.suppress(KeyboardInterrupt):
        run_to_the_end(_serve(Runs(path.absolute()), token, port=port, shown=given is None))


async def _serve(runs: Runs, token: str, *, port: int, shown: bool) -> None:
    ended = asyncio.Event()
    with on_ending_signals(ended.set):
        async with serving(runs, token=token, port=port) as address:
            query = token if shown else "TOKEN"
            out.print(f"{address}/?token={escape(query)}", soft_wrap=True)
            out.print("[dim]press Ctrl-C to stop[/]")
            await ended.wait()
