"""Training with two inference servers, one of which is killed and the other stopped."""

import os
import signal
from pathlib import Path
from typing import Any

from rollweave.core.core import Core
from rollweave.core.state import EngineStatus
from tests.support.processes import descendants
from tests.support.real_runs import Life, Lineage, check_totals, hazardous, lines, living

ENGINE = "rollweave.runtime.entrypoints.server_engine"

STEPS = 40

GATE_AT = 800
"""Number of the environments' steps after which the run waits until both servers are
lost: about 25 steps of training.
"""

EXACT = 1e-4
"""Maximum difference of a log-prob between the trainer and a server in float32."""


def serving(version: int, engines: int = 2) -> Any:
    """Return whether so many engines serve this version or a later one."""

    def condition(core: Core) -> bool:
        fleet = core.state.engines.values()
        return len(fleet) == engines and all(
            engine.status is EngineStatus.SERVING and engine.version >= version for engine in fleet
        )

    return condition


def servers(life: Life) -> list[list[int]]:
    """Return the processes of each server that has any."""
    return [server for pid in life.children(ENGINE) if (server := descendants(pid))]


def lose_nothing_with_lost_servers(
    directory: Path, *, mode: str, kind: str, name: str, python: str
) -> None:
    """Train with two servers of a kind, called `name` in errors, of which one is killed
    and the other stops in an update: nothing is lost, and all log-probs are exact.
    """
    gate = directory / "gate"
    config = hazardous(
        directory,
        {"gate": str(gate), "at": GATE_AT},
        run={"steps": STEPS},
        model={"scratch": {"hidden": 64, "layers": 1}},
        rollout={"mode": mode},
        engines={"kind": kind, "python": python, "count": 2},
        watchdog={"train_s": 1200.0},
        eval={"every": 0},
    )
    with living(config) as life:
        core = life.until(serving(2), "two updates of both engines")
        # on a busy machine a server may have needed two starts
        restarted = core.state.counters.watchdog.get("engine_restarted", 0) + 2
        killed, stopped = servers(life)
        os.kill(killed[0], signal.SIGKILL)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)  # its next update never ends
        life.until(
            lambda core: core.state.counters.watchdog.get("engine_restarted") == restarted,
            "the loss of both servers",
        )
        gate.touch()
        result = life.finish()
    # a trajectory that lost its engine may end after the others' weights are too new
    check_totals(config, result)
    lineage = Lineage()
    lineage.take(config)
    lineage.check(STEPS)
    assert result["watchdog"]["engine_restarted"] == restarted
    reasons = " ".join(line["message"] for line in lines(config, "warning"))
    assert f"{name} ended: signal SIGKILL" in reasons or "broke off" in reasons
    assert f"{name} did not answer" in reasons or f"{name}: does not answer" in reasons
    gaps = [
        line["trainer"]["logprob_gap_max"]
        for line in lines(config, "step")
        if "logprob_gap_max" in line["trainer"]
    ]
    # in mode decoupled few rows have the weights that the trainer has
    assert gaps or mode == "decoupled"
    assert max(gaps, default=0.0) < EXACT
    assert not [pid for pid in (*killed, *stopped) if Path(f"/proc/{pid}").exists()]
