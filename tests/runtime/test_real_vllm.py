"""Training with two real vLLM servers, one of which is killed and the other stopped
(`make test-vllm`).
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.vllm_server import VARIABLE
from rollweave.core.core import Core
from rollweave.core.state import EngineStatus
from tests.runtime import real
from tests.runtime.real import Life, Lineage, check_totals, lake, lines, living
from tests.support.engines import needs_vllm
from tests.support.processes import descendants

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINE = "rollweave.runtime.entrypoints.server_engine"

STEPS = 40
"""Number of steps: enough that some are left when both engines are back."""

EXACT = 1e-4
"""Maximum difference of a log-prob between the trainer and vLLM in float32."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes half a minute to start, on a busy machine several."""
    monkeypatch.setattr(real, "LIMIT_S", 500.0)


def serving(version: int) -> Any:
    """Return whether both engines serve this version or a later one."""

    def condition(core: Core) -> bool:
        engines = core.state.engines.values()
        return len(engines) == 2 and all(
            engine.status is EngineStatus.SERVING and engine.version >= version
            for engine in engines
        )

    return condition


def servers(life: Life) -> list[list[int]]:
    """Return the processes of each server that has any."""
    return [found for pid in life.children(ENGINE) if (found := descendants(pid))]


@pytest.mark.parametrize("mode", ["bounded", "partial", "decoupled"])
def test_nothing_is_lost_with_a_killed_server_and_one_that_stops_in_an_update(
    tmp_path: Path, mode: str
) -> None:
    config = lake(
        tmp_path,
        run={"steps": STEPS},
        model={"scratch": {"hidden": 64, "layers": 1}},
        rollout={"mode": mode},
        engines={"kind": "vllm", "python": os.environ[VARIABLE], "count": 2},
        watchdog={"train_s": 1200.0},
        eval={"every": 0},
    )
    with living(config) as life:
        life.until(serving(2), "two updates of both engines")
        killed, stopped = servers(life)
        os.kill(killed[0], signal.SIGKILL)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)  # its next update never ends
        result = life.finish()
    check_totals(config, result)
    lineage = Lineage()
    lineage.take(config)
    lineage.check(STEPS)
    assert result["watchdog"]["engine_restarted"] == 2
    reasons = " ".join(line["message"] for line in lines(config, "warning"))
    assert "vLLM ended: signal SIGKILL" in reasons or "broke off" in reasons
    assert "vLLM did not answer" in reasons or "vLLM: does not answer" in reasons
    gaps = [
        line["trainer"]["logprob_gap_max"]
        for line in lines(config, "step")
        if "logprob_gap_max" in line["trainer"]
    ]
    # in mode decoupled few rows have the weights that the trainer has
    assert gaps or mode == "decoupled"
    assert max(gaps, default=0.0) < EXACT
    assert not [pid for pid in (*killed, *stopped) if Path(f"/proc/{pid}").exists()]
