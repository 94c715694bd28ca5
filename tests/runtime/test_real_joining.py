"""An engine joins a real run, and is there again after the controller was killed, with
real engines and the real trainer.
"""

from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.core.state import EngineStatus
from rollweave.record.journal import Replay
from rollweave.schema.base import EngineId
from rollweave.schema.commands import LoadWeights, StartTurn
from tests.support.commands import invoke
from tests.support.real_runs import Lineage, at_gate, check_totals, hazardous, living, run_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

E1 = EngineId("e1")


def joined(core: Core) -> bool:
    engine = core.state.engines.get(E1)
    return engine is not None and engine.status is EngineStatus.SERVING


@pytest.mark.parametrize("mode", ["bounded", "decoupled"])
def test_an_engine_joins_and_outlives_the_controller(tmp_path: Path, mode: str) -> None:
    gate, lineage = tmp_path / "gate", Lineage()
    rollout = {"mode": mode}
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "at": 20},
        run={"steps": 6},
        rollout=rollout,
        engines={"count": 1, "max_slots": 4},
    )
    with living(config) as life:
        at_gate(life, gate)
        code, text, _ = invoke("engines", str(run_dir(config)), "--add", "1")
        assert (code, text.splitlines()[0]) == (0, "e1: starting")
        life.until(joined, "the engine that joins")
        life.kill()
    lineage.take(config)
    with living(config, resume=True) as life:
        life.until(joined, "the engine that joined, in the next life")
        gate.touch()
        summary = life.finish()
    lineage.take(config)
    lineage.check(config.run.steps)
    check_totals(config, summary)
    assert summary["engines"] == {"joined": 1, "left": 0}
    assert summary["watchdog"].get("engine_restarted", 0) == 0
    commands = [
        command for _, _, out in Replay(run_dir(config) / "journal.bin", config) for command in out
    ]
    assert any(isinstance(command, LoadWeights) and command.engine_id == E1 for command in commands)
    turns = [command.engine_id for command in commands if isinstance(command, StartTurn)]
    assert turns.count(E1) > 0, "it serves turns"
