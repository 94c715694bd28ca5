"""Every fault for real: processes are killed and stopped in the middle of their work,
environments and losses fail.

Engines and trainer are real, and started by the command line. Each test waits for
reports of the run itself.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.core import Core
from rollweave.core.state import TrainerStatus
from rollweave.record.journal import Replay
from rollweave.record.store import TrajectoryReader
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import LoadWeights
from tests.support.real_runs import (
    Life,
    Lineage,
    at_gate,
    check_totals,
    hazardous,
    lake,
    lines,
    living,
    longer,
    run_dir,
    run_to_end,
    summary,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE, TRAINER = "rollweave.runtime.entrypoints.engine", "rollweave.runtime.entrypoints.trainer"
RELAY = "rollweave.runtime.entrypoints.relay"
ENVIRONMENT = "rollweave.envs.isolated"


def turn_in_flight(core: Core) -> bool:
    return any(engine.active for engine in core.state.engines.values())


def training(core: Core) -> bool:
    return core.state.trainer.status is TrainerStatus.TRAINING


# Engines.


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_is_killed_in_the_middle_of_a_turn(tmp_path: Path, count: int) -> None:
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path, {"gate": str(gate), "at": 20}, run={"steps": 4}, engines={"count": count}
    )
    with living(config) as life:
        at_gate(life, gate)
        victims = life.children(ENGINE)
        assert len(victims) == count
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        gate.touch()
        life.until(turn_in_flight, "a turn on the engine")
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        result = life.finish()
    check_totals(config, result)
    assert result["watchdog"]["engine_restarted"] == count
    assert result["watchdog"]["turn_failed"] >= 1
    warnings = [line for line in lines(config, "warning") if "restarted" in line["message"]]
    assert {line["component"] for line in warnings} == {f"e{number}" for number in range(count)}
    assert all("SIGKILL" in line["message"] for line in warnings)


def test_an_engine_that_hangs_is_named_and_replaced(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    watchdog = {"turn_s": 3.0}
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "at": 20},
        run={"steps": 4},
        engines={"count": 2},
        watchdog=watchdog,
    )
    with living(config) as life:
        at_gate(life, gate)
        os.kill(life.children(ENGINE)[0], signal.SIGSTOP)
        gate.touch()
        result = life.finish()
    check_totals(config, result)
    assert result["watchdog"]["engine_restarted"] >= 1
    warnings = [
        line["message"] for line in lines(config, "warning") if "restarted" in line["message"]
    ]
    # the last one if the engine had no turn at that moment
    reasons = ("without an answer", "stuck", "no answer to 2 heartbeats")
    assert any(reason in message for message in warnings for reason in reasons), warnings


# Relays.


@pytest.mark.parametrize("hang", [False, True], ids=["killed", "hung"])
@pytest.mark.parametrize("mode", ["bounded", "decoupled"])
def test_training_continues_without_a_relay_and_an_engine(
    tmp_path: Path, mode: str, hang: bool
) -> None:
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "at": 20},
        run={"steps": 6},
        rollout={"mode": mode},
        engines={"count": 2},
        weights={"relays": 2},
    )
    with living(config) as life:
        at_gate(life, gate)
        os.kill(life.children(RELAY)[0], signal.SIGSTOP if hang else signal.SIGKILL)
        os.kill(life.children(ENGINE)[1], signal.SIGKILL)
        life.until(
            lambda core: any(
                relay.epoch for relay in core.state.mechanisms["relays"].relays.values()
            ),
            "a relay that is replaced",
        )
        gate.touch()  # not before: the run might end before the silence is noticed
        result = life.finish()
    check_totals(config, result)
    assert result["watchdog"]["engine_restarted"] == 1
    assert result["watchdog"]["relay_restarted"] == 1
    warnings = [
        line["message"]
        for line in lines(config, "warning")
        if "restarted: lost: relay" in line["message"]
    ]
    assert ("sent nothing" if hang else "SIGKILL") in warnings[0]


# A version that exists only in a checkpoint.


def only_waiting(core: Core) -> TrajectoryId | None:
    """Return the one trajectory that is left of version 0, once its engine has no other
    one, and every other engine newer weights.
    """
    state = core.state
    left = [
        one
        for one in (*state.pools.init, *state.pools.run)
        if state.mechanisms["versions"].trajectories.get(one) == 0
    ]
    newer = [engine for engine in state.engines.values() if engine.publication_id > 0]
    candidates = (
        len(left) == 1
        and len(newer) == len(state.engines) - 1
        and state.publication.checkpointed.get(0) == 0
        and state.evaluations.current is None
    )
    return left[0] if candidates and engine_of(core, left[0]) is not None else None


def engine_of(core: Core, trajectory: TrajectoryId) -> EngineId | None:
    """Return the engine to which the trajectory is assigned."""
    work = core.state.mechanisms["lengths"].trajectories.get(trajectory)
    return work.assigned_engine if work is not None else None


def test_a_trajectory_outlives_its_engine_and_the_trainers_memory(tmp_path: Path) -> None:
    """The first episode waits at the gate until its version exists only in a
    checkpoint, which is kept as the best.
    """
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "first": True},
        run={"steps": 12, "checkpoint_every": 1},
        rollout={"mode": "decoupled"},
        engines={"count": 2},
        eval={"every": 100},
    )
    with living(config) as life:
        core = life.until(only_waiting, "one trajectory of version 0")
        waiting = only_waiting(core)
        assert waiting is not None
        engine_id = engine_of(core, waiting)
        os.kill(life.child(TRAINER), signal.SIGKILL)
        life.until(
            lambda core: core.state.trainer.epoch == 1 and 0 not in core.state.publication.retained,
            "the trainer's loss",
        )
        (victim,) = [
            pid
            for pid in life.children(ENGINE)
            if os.readlink(f"/proc/{pid}/fd/1").endswith(f"/{engine_id}.log")
        ]
        os.kill(victim, signal.SIGKILL)
        core = life.until(lambda core: again(core, waiting), "version 0 on an engine")
        gate.touch()
        result = life.finish()
    check_totals(config, result)
    replay = Replay(run_dir(config) / "journal.bin", config)
    loads = [one for _, _, out in replay for one in out if isinstance(one, LoadWeights)]
    assert [load.publication_id for load in loads if load.from_checkpoint == 0] == [0]
    assert result["watchdog"]["trainer_restarted"] == 1
    assert result["watchdog"]["engine_restarted"] == 1
    assert result["retried"] == {}, "no attempt was restarted"
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    (entry,) = [entry for entry in reader.entries if entry.trajectory_id == waiting]
    assert (entry.attempt, reader.load(entry).sequences[0].versions()) == (0, (0, 0))


def again(core: Core, waiting: TrajectoryId) -> bool:
    """Return whether it has lost its engine, and has another one with its version."""
    lost = any(engine.epoch for engine in core.state.engines.values())
    return lost and engine_of(core, waiting) is not None


# The trainer.


@pytest.mark.parametrize("hang", [False, True], ids=["killed", "hung"])
def test_a_trainer_lost_in_the_middle_of_a_step_returns_to_its_checkpoint(
    tmp_path: Path, hang: bool
) -> None:
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "at": 60},
        run={"steps": 7, "checkpoint_every": 3},
        eval={"every": 0},
        watchdog={"train_s": 60.0 if hang else 600.0},  # engines have a tenth of it to load
    )
    with living(config) as life:
        at_gate(life, gate)
        victim = life.child(TRAINER)
        os.kill(victim, signal.SIGSTOP)
        gate.touch()
        core = life.until(training, "a training step")
        assert core.state.trainer.step > 0
        if not hang:
            os.kill(victim, signal.SIGKILL)
        result = life.finish()
        lineage = Lineage()
        lineage.take(config)
    check_totals(config, result)
    assert result["watchdog"] == {"trainer_restarted": 1}
    (warning,) = (
        line["message"] for line in lines(config, "warning") if "restarted" in line["message"]
    )
    assert ("stuck" if hang else "SIGKILL") in warning
    lineage.check(config.run.steps)


# The controller.


def killed_while_starting(life: Life, gate: Path) -> None:
    wait_for(lambda: life.children(TRAINER), "the trainer", life)


def killed_with_a_model(life: Life, gate: Path) -> None:
    wait_for(life.run.model.exists, "the model", life)


def killed_at_first_checkpoint(life: Life, gate: Path) -> None:
    wait_for((life.run.checkpoints / "step-000000").exists, "the first checkpoint", life)


def killed_in_mid_episode(life: Life, gate: Path) -> None:
    at_gate(life, gate)


def killed_in_mid_turn(life: Life, gate: Path) -> None:
    at_gate(life, gate)
    os.kill(life.child(ENGINE), signal.SIGSTOP)
    gate.touch()
    life.until(turn_in_flight, "a turn on the engine")


def killed_in_mid_step(life: Life, gate: Path) -> None:
    at_gate(life, gate)
    os.kill(life.child(TRAINER), signal.SIGSTOP)
    gate.touch()
    life.until(training, "a training step")


def killed_after_a_step(life: Life, gate: Path) -> None:
    gate.touch()
    life.until(lambda core: core.state.trainer.step >= 2, "two steps")


KILLS = [
    killed_while_starting,
    killed_with_a_model,
    killed_at_first_checkpoint,
    killed_in_mid_episode,
    killed_in_mid_turn,
    killed_in_mid_step,
    killed_after_a_step,
]


@pytest.mark.parametrize("moment", KILLS, ids=lambda moment: moment.__name__)
def test_a_controller_is_killed(tmp_path: Path, moment: Any) -> None:
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path, {"gate": str(gate), "at": 50}, run={"steps": 5, "checkpoint_every": 2}
    )
    lineage = Lineage()
    with living(config) as life:
        moment(life, gate)
        life.kill()
    if (run_dir(config) / "journal.bin").exists():
        lineage.take(config)
    gate.touch()
    check_totals(config, run_to_end(config, resume=True), losses=1)
    lineage.take(config)
    lineage.check(config.run.steps)


def test_a_controller_is_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 4})
    lineage = Lineage()
    with living(config, program="tests.support.real_runs") as life:
        pattern = "step-000002.partial-*/model.safetensors"
        wait_for(lambda: list(life.run.checkpoints.glob(pattern)), "half a checkpoint", life)
        life.kill()
    lineage.take(config)
    assert list(life.run.checkpoints.glob("step-000002.partial-*"))
    check_totals(config, run_to_end(config, resume=True))
    assert not list(life.run.checkpoints.glob("*.partial-*"))
    lineage.take(config)
    lineage.check(config.run.steps)


def test_a_controller_is_killed_in_the_final_evaluation(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = hazardous(tmp_path, {"gate": str(gate), "held_out": True}, eval={"every": 0})
    lineage = Lineage()
    with living(config) as life:
        wait_for(Path(f"{gate}.reached").exists, "the gate", life)
        life.kill()
    lineage.take(config)
    gate.touch()
    check_totals(config, run_to_end(config, resume=True))
    lineage.take(config)
    lineage.check(config.run.steps)


def test_a_killed_controller_leaves_no_environment_behind(tmp_path: Path) -> None:
    config = lake(
        tmp_path,
        task={"isolation": "process"},
        run={"steps": 6},
        rollout={"max_running": 4},
        eval={"every": 0},
    )
    with living(config) as life:
        life.until(lambda core: core.state.trainer.step >= 1, "a step")
        assert len(life.children(ENVIRONMENT)) >= 4
        life.kill()
    check_totals(config, run_to_end(config, resume=True))


def test_a_controller_is_killed_again_and_again(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 8, "checkpoint_every": 2}, eval={"every": 0})
    lineage = Lineage()
    for resumptions, target_step in enumerate((1, 3, 4, 6)):
        with living(config, resume=resumptions > 0) as life:
            if resumptions:
                wait_for(
                    lambda resumptions=resumptions: len(lines(config, "resumed")) == resumptions,
                    "the next life",
                    life,
                )
            life.until(
                lambda core, target_step=target_step: core.state.trainer.step >= target_step,
                f"step {target_step}",
            )
            life.kill()
        lineage.take(config)
    check_totals(config, run_to_end(config, resume=True), losses=4)
    lineage.take(config)
    lineage.check(config.run.steps)


# Losses that are not finite.


def test_a_nonfinite_loss_names_its_batch(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 3}, eval={"every": 0})
    run_to_end(config)
    mad = longer(config, 5, algorithm=config.algorithm.model_copy(update={"entropy": 3e38}))
    with living(mad, resume=True) as life:
        assert life.end() == 1
        (error,) = life.errors
    assert "step 3: loss " in error
    assert "batch of groups g" in error
    assert "last good checkpoint: step 3" in error  # it may still be written
    assert (summary(mad)["steps"], summary(mad)["watchdog"]) == (3, {})
    sane = longer(config, 5)
    check_totals(sane, run_to_end(sane, resume=True))


# Environments.


def test_environments_and_rewards_fail_in_every_way(tmp_path: Path) -> None:
    config = lake(
        tmp_path,
        task={
            "env": "tests.support.faulty:FaultyLake",
            "options": {
                "faults": {
                    "draws": str(tmp_path / "draws"),
                    "raises": 0.03,
                    "hangs": 0.02,
                    "garbage": 0.03,
                    "no_reward": 0.1,
                }
            },
            "isolation": "process",
            "step_s": 10.0,
        },
        run={"steps": 6},
        rollout={"max_running": 6},
        eval={"every": 0},
    )
    result = run_to_end(config)
    assert (result["error"], result["steps"]) == ("", 6)
    stops = result["stop_reasons"]
    assert all(stops.get(reason) for reason in ("env_error", "env_hang", "reward_error")), stops


# Everything.


def test_random_kills(tmp_path: Path) -> None:
    """Kill any process at any moment, several times."""
    config = lake(
        tmp_path, run={"steps": 20, "checkpoint_every": 3}, engines={"count": 2}, eval={"every": 0}
    )
    rng = random.Random(7)
    with living(config) as life:
        for target_step in (2, 6, 11, 15):
            life.until(
                lambda core, target_step=target_step: core.state.trainer.step >= target_step,
                f"step {target_step}",
            )
            victim = rng.choice(life.children(rng.choice([ENGINE, TRAINER])))
            os.kill(victim, signal.SIGKILL)
        check_totals(config, life.finish(), losses=4)
    lineage = Lineage()
    lineage.take(config)
    lineage.check(config.run.steps)
