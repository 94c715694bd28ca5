"""Third-party agent programs in sandboxes without a network, behind the service and in
training.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from packages.service.tests.api import get, submit
from packages.service.tests.rollout_service import service_config, serving
from packages.service.tests.services import ZYGOTE, nothing_left
from tests.support.fake_runs import make_config, run
from tests.support.programs import CLIENT, agent_program

TASK = {"env": "program", "time_s": 60.0, "step_s": 30.0}

TALKS = agent_program("""
words = [say("go"), say("on")]
open("said.txt", "w").write(" ".join(words))
""")

COUNTS = ["sh", "-c", "wc -w < $SUBMISSION/said.txt"]


async def rollout(tmp_path: Path, **options: Any) -> dict[str, Any]:
    config = service_config(
        tmp_path, task=TASK, options=options, sandbox=ZYGOTE, rollout={"retries": 0}
    )
    with nothing_left(), serving(config) as service:
        await submit(service, id="x")
        answer = await get(service, "/v1/rollouts/x?wait=60")
        (member,) = answer["members"]
        return member  # type: ignore[no-any-return]


async def test_a_program_runs_a_rollout(tmp_path: Path) -> None:
    member = await rollout(tmp_path, packages=CLIENT, command=TALKS, score=COUNTS)
    result = member["result"]
    assert (member["stop_reason"], result["error"]) == ("finished", "")
    outcome = json.loads(result["result"])
    assert (outcome["rc"], float(outcome["score"])) == (0, result["reward"])
    assert [
        [segment["kind"] for segment in sequence["segments"]] for sequence in result["sequences"]
    ] == [["prompt", "output"]] * 2


@pytest.mark.extended
async def test_a_program_that_hangs_gets_no_reward_and_leaves_nothing(tmp_path: Path) -> None:
    member = await rollout(
        tmp_path,
        packages=CLIENT,
        command=agent_program("say('go')\nwhile True: pass"),
        score=COUNTS,
        timeout_s=5.0,
    )
    assert (member["stop_reason"], member["result"]["reward"]) == ("env_error", None)
    assert "did not end within timeout_s" in member["result"]["error"]


@pytest.mark.extended
def test_a_run_trains_on_the_output_of_a_program(tmp_path: Path) -> None:
    with nothing_left():
        options = {"packages": CLIENT, "command": TALKS, "score": COUNTS}
        summary = run(
            make_config(
                tmp_path, task=TASK, options=options, sandbox={**ZYGOTE, "warm": 1}, steps=2
            )
        )
    assert summary.error == ""
    assert summary.account.trained == 2 * 2 * 2
