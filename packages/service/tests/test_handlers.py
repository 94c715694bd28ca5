"""Handlers with real sandboxes, behind the service and in training: they never leave a
process behind.
"""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packages.service.tests.api import call, get, submit, wait_until
from packages.service.tests.rollout_service import Program, service_config, serving
from packages.service.tests.services import ZYGOTE, nothing_left
from rollweave.cli.main import app
from rollweave.io.processes import family
from rollweave.record.store import TrajectoryReader
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import TurnWithdrawn
from rollweave_sandbox.processes import process
from tests.support.fake_runs import make_config, run, run_dir
from tests.support.journals import checked_journal
from tests.support.processes import process_state
from tests.support.sandboxes import needs
from tests.support.variants import mostly_extended

BOXED = {"env": "tests.runtime.agents:Boxed", "time_s": 60.0, "step_s": 20.0}


async def rollout(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Run a rollout of one member; return the member."""
    config = service_config(
        tmp_path, task=BOXED, options=options, sandbox=ZYGOTE, rollout={"retries": 0}
    )
    with nothing_left(), serving(config) as service:
        await submit(service, id="x")
        answer = await get(service, "/v1/rollouts/x?wait=60")
        (member,) = answer["members"]
        return member  # type: ignore[no-any-return]


async def test_a_handler_runs_a_rollout(tmp_path: Path) -> None:
    member = await rollout(tmp_path)
    assert member["stop_reason"] == "finished"
    assert member["result"]["reward"] == 1.0
    assert member["result"]["success"] is True
    assert json.loads(member["result"]["result"]) == {"git_patch": "here\nsandbox\n"}
    (sequence,) = member["result"]["sequences"]
    expected = ["prompt", "output", "observation", "output"]
    assert [segment["kind"] for segment in sequence["segments"]] == expected


@pytest.mark.parametrize("env", mostly_extended(["math_tool", "stem"], {"math_tool"}))
async def test_built_in_handlers_run(tmp_path: Path, env: str) -> None:
    task = {"env": env, "time_s": 60.0, "step_s": 20.0, "max_tokens": 3000}
    config = service_config(tmp_path, task=task, options={"calls": "text"}, sandbox=ZYGOTE)
    with nothing_left(), serving(config) as service:
        await submit(service, id="x")
        answer = await get(service, "/v1/rollouts/x?wait=60")
    (member,) = answer["members"]
    result = member["result"]
    # the echo engine solves nothing
    assert (member["stop_reason"], result["reward"], result["success"]) == ("finished", 0.0, False)
    assert json.loads(result["result"]) == {"answer": None}


@pytest.mark.variants
@pytest.mark.parametrize(
    ("fault", "reason", "text"),
    [
        ("init", "env_error", "broken on purpose"),
        ("run", "env_error", "broken on purpose"),
        ("lost", "env_error", "kill"),
        ("eval", "reward_error", "broken on purpose"),
    ],
)
async def test_a_failure_gives_no_reward(
    tmp_path: Path, fault: str, reason: str, text: str
) -> None:
    member = await rollout(tmp_path, fault=fault)
    result = member["result"]
    expected = (reason, None, "environment")
    assert (member["stop_reason"], result["reward"], result["blame"]) == expected
    assert text in result["error"]


@pytest.mark.extended
async def test_excess_output_is_truncated(tmp_path: Path) -> None:
    member = await rollout(tmp_path, fault="flood")
    assert member["stop_reason"] == "finished"
    assert json.loads(member["result"]["result"])["shown"] <= 600


@pytest.mark.extended
@pytest.mark.variants
@pytest.mark.parametrize("warm", [0, 1])
async def test_cancelling_a_tool_call_kills_its_process_tree(tmp_path: Path, warm: int) -> None:
    config = service_config(
        tmp_path, task=BOXED, options={"fault": "hang"}, sandbox={**ZYGOTE, "warm": warm}
    )
    with nothing_left(), serving(config) as service:
        await submit(service, id="x")
        await sleep_begins(os.getpid())
        await call(service, "DELETE", "/v1/rollouts/x")
        answer = await get(service, "/v1/rollouts/x?wait=60")
        assert answer["members"][0]["stop_reason"] == "cancelled"
        assert not sleeping(os.getpid())


@pytest.mark.parametrize("how", ["kill", pytest.param("terminate twice", marks=pytest.mark.slow)])
async def test_no_sandbox_outlives_the_service(tmp_path: Path, how: str) -> None:
    needs("zygote")
    config = service_config(
        tmp_path, task=BOXED, options={"fault": "hang"}, sandbox={**ZYGOTE, "warm": 2}
    )
    program = Program(config)
    try:
        await submit(program, id="x", members=3)
        await sleep_begins(program.process.pid)
        sandboxes_before = {
            pid: entry.started
            for pid in family(program.process.pid)
            if (entry := process(pid)) is not None
        }
        if how != "kill":
            program.process.terminate()
            await wait_until(program, "/health", lambda health: health["status"] == "closing")
            program.process.terminate()
            await asyncio.to_thread(program.process.wait, 60)
    finally:
        program.kill()
    async with asyncio.timeout(30):
        while any(is_there(pid, started) for pid, started in sandboxes_before.items()):  # noqa: ASYNC110 (the kernel's time)
            await asyncio.sleep(0.01)


def is_there(pid: int, started: int) -> bool:
    entry = process(pid)
    return entry is not None and entry.started == started and process_state(pid)[0] != "Z"


def sleeping(pid: int) -> list[int]:
    """Return the descendants of `pid` that run the hanging command."""
    pids = []
    for other in family(pid):
        with contextlib.suppress(OSError):
            if b"1000" in Path(f"/proc/{other}/cmdline").read_bytes().split(b"\0"):
                pids.append(other)
    return pids


async def sleep_begins(pid: int) -> None:
    async with asyncio.timeout(60):
        while not sleeping(pid):  # noqa: ASYNC110 (it begins in another process)
            await asyncio.sleep(0.01)


@pytest.mark.extended
def test_a_run_trains_on_the_rollouts_of_a_handler(tmp_path: Path) -> None:
    with nothing_left():
        summary = run(make_config(tmp_path, task=BOXED, sandbox=ZYGOTE, steps=2))
    assert summary.error == ""
    assert summary.account.trained == 2 * 2 * 2


@pytest.mark.extended
@pytest.mark.variants
@pytest.mark.parametrize("scheduling", ["turn", "trajectory"])
def test_cancelled_calls_keep_the_accounting_balanced(tmp_path: Path, scheduling: str) -> None:
    """With several sequences in a trajectory and turns withdrawn at any moment, the
    journal obeys the contract and replays.
    """
    sections: dict[str, Any] = {"rollout": {"scheduling": scheduling}, "engines": {"max_slots": 1}}
    config = make_config(
        tmp_path, task={"env": "tests.runtime.agents:Impatient"}, steps=3, **sections
    )
    summary = run(config)
    assert (summary.error, summary.account.balanced) == ("", True)
    _, events, _ = checked_journal(config)
    assert any(isinstance(event, TurnWithdrawn) for event in events)
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    assert max(len(reader.load(entry).sequences) for entry in reader.entries) >= 2
    for command in (["trace", str(run_dir(config))], ["report", str(run_dir(config))]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output


def test_refuses_process_isolation_for_a_handler(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="isolation must be inline for a handler, got process for 'game'"
    ):
        run(make_config(tmp_path, task={**BOXED, "isolation": "process"}))
