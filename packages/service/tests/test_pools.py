"""A service whose stages INIT, RUN and EVAL have pools of their own sizes, with rollout
workers in processes of their own.
"""

from pathlib import Path
from typing import Any

from packages.service.tests.api import get, submit, wait_until
from packages.service.tests.rollout_service import service_config, serving
from packages.service.tests.staged import at_once, processes

ROLLOUTS = 10
SIZES = {"init": 3, "run": 2, "eval": 1}
STAGES = ("queued", "init", "run_queued", "run", "eval_queued", "eval")


async def until(service: Any, folder: Path, *counts: int) -> None:
    """Wait until so many rollouts are in each of `STAGES`, and their environments know
    that they are.
    """
    expected = dict(zip(STAGES, counts, strict=True))
    inside = {name: expected[name] for name in SIZES}
    await wait_until(
        service,
        "/health",
        lambda health: (
            {name: health[name] for name in STAGES} == expected and at_once(folder)[-1] == inside
        ),
    )


async def test_each_stage_has_its_own_pool_and_its_own_queue(tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    folder.mkdir()
    config = service_config(
        tmp_path,
        task={"env": "packages.service.tests.staged:Staged"},
        options={"folder": str(folder)},
        rollout={"max_running": SIZES},
        workers={"count": 2},
    )
    with serving(config) as service:
        await submit(service, id="r", members=ROLLOUTS)
        await until(service, folder, 7, 3, 0, 0, 0, 0)
        (folder / "init").touch()
        await until(service, folder, 2, 0, 6, 2, 0, 0)
        queues = {"init_queue": 2, "run_queue": 6, "eval_queue": 0, "active_run": 2, "total": 10}
        assert (await get(service, "/status")).items() >= queues.items()
        (folder / "run").touch()
        await until(service, folder, 0, 0, 0, 0, 9, 1)
        queues = {"init_queue": 0, "run_queue": 0, "eval_queue": 9, "active_eval": 1, "total": 10}
        assert (await get(service, "/status")).items() >= queues.items()
        (folder / "eval").touch()
        answer = await get(service, "/v1/rollouts/r?wait=30")
        assert [member["result"]["reward"] for member in answer["members"]] == [1.0] * ROLLOUTS
    counts = at_once(folder)
    assert {name: max(one[name] for one in counts) for name in SIZES} == SIZES
    assert not any(counts[-1].values())
    assert len(processes(folder)) == 2
