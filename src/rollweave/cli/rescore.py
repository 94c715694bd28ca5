"""`rollweave rescore`: asks again for the rewards that failed for good in a run, and
writes the obtained rewards to the run's records.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, err, out
from rollweave.cli.runs import find_run
from rollweave.envs.roles import OUTSIDE
from rollweave.envs.threads import EnvThreads
from rollweave.record.rundir import RunDir, run_id
from rollweave.record.store import (
    Scored,
    StoredAttempt,
    TrajectoryReader,
    TrajectoryStore,
    unscored_attempts,
)
from rollweave.rollout.driver import EpisodeStopError
from rollweave.rollout.reward_sources import finished_attempt
from rollweave.rollout.rewards import Rewards, rescored
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Purpose, StopReason, Trajectory


def rescore(name: str) -> None:
    """Ask again for the missing rewards of run `name`, and write the obtained rewards.

    Raises ConfigError, also if a reward calls a role, and typer.Exit if a reward failed
    again.
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
    if calling := [error for error in errors if OUTSIDE in error]:
        rule = f"{run.config} must have rewards that call no role, since rescore starts no roles"
        raise ConfigError(f"{rule}, got {calling[0]}")
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
    slots = asyncio.Semaphore(config.rollout.places.eval)
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
