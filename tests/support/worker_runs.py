"""Whole runs with worker processes, whose environments leave their process ids."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import StopReason, Trajectory
from tests.support.fake_runs import make_config, run_dir
from tests.support.processes import process_state

LIMIT_S = 60.0


def located(
    directory: Path,
    *,
    workers: int | Mapping[str, Any] = 2,
    is_open: bool = True,
    task: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunConfig:
    """Return the configuration of a run whose environments leave their process ids."""
    where = directory / "where"
    where.mkdir(parents=True)
    if is_open:
        (where / "open").touch()
    return make_config(
        directory,
        task={"env": "tests.support.game:Located", **(task or {})},
        options={"where": str(where)},
        workers={"count": workers} if isinstance(workers, int) else workers,
        **more,
    )


def places(config: RunConfig, what: str) -> set[int]:
    """Return the processes in which this code of the environment ran."""
    where = Path(config.tasks[0].options["where"])
    return {int(path.name.split("-")[1]) for path in where.glob(f"{what}-*")}


def outcomes(config: RunConfig) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Return what is stored of each attempt, except for times."""
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    attempts: list[Trajectory] = [reader.load(entry) for entry in reader.entries]
    return {
        (one.id, one.attempt): (one.sequences, one.reward, one.success, one.stop_reason)
        for one in attempts
        if one.stop_reason is not StopReason.CANCELLED
    }


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while any(process_state(pid)[0] not in ("gone", "Z") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
