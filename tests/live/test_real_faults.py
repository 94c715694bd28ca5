"""Every fault for real: processes killed and stopped in the middle of their work, and what they wrote damaged afterwards.

Real engines and the real trainer, started by the command line. Each test waits for what the run itself says.
"""

import functools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.core import Core
from rollweave.core.state import TrainerStatus
from rollweave.live import launch
from rollweave.live.journal import Replay
from rollweave.live.world import World
from rollweave.schema.base import EngineId
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.events import WorldLost
from tests.live.real import (
    GROUPS,
    MEMBERS,
    ROOT,
    Life,
    Lineage,
    at_gate,
    check_totals,
    copied,
    hazardous,
    lake,
    lines,
    living,
    longer,
    replayed,
    run_dir,
    run_to_end,
    summary,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE, TRAINER = "rollweave.live.engine_process", "rollweave.live.trainer_process"
ENVIRONMENT = "rollweave.envs.worker"


def turn_in_flight(core: Core) -> bool:
    return any(engine.active for engine in core.state.engines.values())


def training(core: Core) -> bool:
    return core.state.trainer.status is TrainerStatus.TRAINING


# Engines.


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_killed_in_mid_turn(tmp_path: Path, count: int) -> None:
    gate = tmp_path / "gate"
    config = hazardous(tmp_path, {"gate": str(gate), "at": 20}, run={"steps": 4}, engines={"count": count})
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
        found = life.finish()
    check_totals(config, found)
    assert found["watchdog"]["engine_restarted"] == count
    assert found["watchdog"]["turn_failed"] >= 1
    told = [line for line in lines(config, "warning") if "restarted" in line["message"]]
    assert {line["component"] for line in told} == {f"e{number}" for number in range(count)}
    assert all("SIGKILL" in line["message"] for line in told)


def test_an_engine_that_hangs_is_named_and_replaced(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    watchdog = {"turn_s": 3.0}
    config = hazardous(tmp_path, {"gate": str(gate), "at": 20}, run={"steps": 4}, engines={"count": 2}, watchdog=watchdog)
    with living(config) as life:
        at_gate(life, gate)
        os.kill(life.children(ENGINE)[0], signal.SIGSTOP)
        gate.touch()
        found = life.finish()
    check_totals(config, found)
    assert found["watchdog"]["engine_restarted"] >= 1
    told = [line["message"] for line in lines(config, "warning") if "restarted" in line["message"]]
    assert any("without an answer" in message or "stuck" in message for message in told), told


# The trainer.


@pytest.mark.parametrize("hang", [False, True], ids=["killed", "hung"])
def test_a_trainer_lost_in_mid_step_goes_back_to_its_checkpoint(tmp_path: Path, hang: bool) -> None:
    gate = tmp_path / "gate"
    config = hazardous(
        tmp_path,
        {"gate": str(gate), "at": 60},
        run={"steps": 7, "checkpoint_every": 3},
        eval={"every": 0},
        watchdog={"train_s": 20.0},
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
        found = life.finish()
        lineage = Lineage()
        lineage.take(config)
    check_totals(config, found)
    assert found["watchdog"] == {"trainer_restarted": 1}
    (told,) = (line["message"] for line in lines(config, "warning") if "restarted" in line["message"])
    assert ("stuck" if hang else "SIGKILL") in told
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
def test_a_controller_killed(tmp_path: Path, moment: Any) -> None:
    gate = tmp_path / "gate"
    config = hazardous(tmp_path, {"gate": str(gate), "at": 50}, run={"steps": 5, "checkpoint_every": 2})
    lineage = Lineage()
    with living(config) as life:
        moment(life, gate)
        life.kill()
    if (run_dir(config) / "journal.bin").exists():
        lineage.take(config)
    gate.touch()
    check_totals(config, run_to_end(config, resume=True))
    lineage.take(config)
    lineage.check(config.run.steps)


def test_a_controller_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 4})
    lineage = Lineage()
    with living(config, halting=True) as life:
        pattern = "step-000002.partial-*/model.safetensors"
        wait_for(lambda: list(life.run.checkpoints.glob(pattern)), "half a checkpoint", life)
        life.kill()
    lineage.take(config)
    assert list(life.run.checkpoints.glob("step-000002.partial-*"))
    check_totals(config, run_to_end(config, resume=True))
    assert not list(life.run.checkpoints.glob("*.partial-*"))
    lineage.take(config)
    lineage.check(config.run.steps)


def test_a_controller_killed_in_the_final_evaluation(tmp_path: Path) -> None:
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


def test_a_controller_killed_leaves_no_environment_behind(tmp_path: Path) -> None:
    config = lake(tmp_path, task={"isolation": "process"}, run={"steps": 6}, rollout={"max_running": 4}, eval={"every": 0})
    with living(config) as life:
        life.until(lambda core: core.state.trainer.step >= 1, "a step")
        assert len(life.children(ENVIRONMENT)) >= 4
        life.kill()
    check_totals(config, run_to_end(config, resume=True))


def test_a_controller_killed_again_and_again(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 8, "checkpoint_every": 2}, eval={"every": 0})
    lineage = Lineage()
    for lives, wanted in enumerate((1, 3, 4, 6)):
        with living(config, resume=lives > 0) as life:
            if lives:
                wait_for(lambda lives=lives: len(lines(config, "resumed")) == lives, "the next life", life)
            life.until(lambda core, wanted=wanted: core.state.trainer.step >= wanted, f"step {wanted}")
            life.kill()
        lineage.take(config)
    check_totals(config, run_to_end(config, resume=True))
    lineage.take(config)
    lineage.check(config.run.steps)


# Disks.


def can_mount() -> bool:
    """True if this user may mount a disk of memory in a namespace of its own."""
    try:
        mount = ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs a user namespace in which a tmpfs may be mounted")
@pytest.mark.parametrize(("where", "spare"), [(".", 0), (".", 1 << 16), ("trajectories", 0), ("checkpoints", 0)])
def test_a_full_disk_stops_the_run_and_it_goes_on_once_there_is_room(tmp_path: Path, where: str, spare: int) -> None:
    command = ["unshare", "-Urm", sys.executable, "-m", "tests.live.small_disk", str(tmp_path), where, str(spare)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final checkpoint" in done.stdout if where == "checkpoints" else "cannot write" in done.stdout


# What no trainer can learn from.


def test_a_loss_that_is_not_finite_names_its_batch(tmp_path: Path) -> None:
    config = lake(tmp_path, run={"steps": 3}, eval={"every": 0})
    run_to_end(config)
    mad = longer(config, 5, algorithm=config.algorithm.model_copy(update={"entropy": 3e38}))
    with living(mad, resume=True) as life:
        assert life.end() == 1
        (error,) = life.errors
    assert "step 3: loss " in error
    assert "batch of groups g" in error
    assert error.endswith("last good checkpoint: step 3")
    assert (summary(mad)["steps"], summary(mad)["watchdog"]) == (3, {})
    sane = longer(config, 5)
    check_totals(sane, run_to_end(sane, resume=True))


# Environments.


def test_environments_and_rewards_that_fail_in_every_way(tmp_path: Path) -> None:
    config = lake(
        tmp_path,
        task={"isolation": "process", "step_s": 10.0},
        run={"steps": 6},
        rollout={"max_running": 6},
        faults={"env_error": 0.03, "env_hang": 0.02, "env_garbage": 0.03, "reward_error": 0.1},
        eval={"every": 0},
    )
    found = run_to_end(config)
    assert (found["error"], found["steps"]) == ("", 6)
    stops = found["stop_reasons"]
    assert all(stops.get(reason) for reason in ("env_error", "env_hang", "reward_error")), stops


# What is damaged before a run goes on.


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of six steps that was killed in the middle."""
    directory = tmp_path_factory.mktemp("former")
    gate = directory / "gate"
    config = hazardous(directory, {"gate": str(gate), "at": 150}, run={"steps": 6}, eval={"every": 0})
    with living(config) as life:
        at_gate(life, gate)
        life.kill()
    gate.touch()
    core = replayed(config)
    assert core is not None
    assert core.state.checkpoint is not None
    assert 2 <= core.state.checkpoint < 6
    return config


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def cut(path: Path, place: int) -> None:
    os.truncate(path, place)


def newest_checkpoint(config: RunConfig) -> Path:
    core = replayed(config)
    assert core is not None
    return run_dir(config) / "checkpoints" / f"step-{core.state.checkpoint:06d}"


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(former: RunConfig, tmp_path: Path, damage: Any) -> None:
    rng = random.Random(str(damage))
    config, lineage = copied(former, tmp_path), Lineage()
    lineage.take(config)
    checkpoint = newest_checkpoint(config)
    file = rng.choice(sorted(file for file in checkpoint.iterdir() if file.is_file()))
    damage(file, rng.randrange(file.stat().st_size))
    found = run_to_end(config, resume=True)
    check_totals(config, found)
    assert found["watchdog"]["checkpoint_damaged"] == 1
    (told,) = (line["message"] for line in lines(config, "warning") if line["component"] == "trainer")
    assert "back at checkpoint" in told
    assert checkpoint.name.removeprefix("step-").lstrip("0") in told
    lineage.take(config)
    lineage.check(config.run.steps)


def test_without_a_good_checkpoint_there_is_one_error(former: RunConfig, tmp_path: Path) -> None:
    config = copied(former, tmp_path)
    for checkpoint in (run_dir(config) / "checkpoints").glob("step-??????"):
        cut(checkpoint / "model.safetensors", 1000)
    with living(config, resume=True) as life:
        assert life.end() == 1
        (error,) = life.errors
    assert error.count("cannot be restored") == 2
    assert "model.safetensors does not match its digest" in error
    assert summary(config)["watchdog"] == {}


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_journal_is_one_error_or_goes_on(former: RunConfig, tmp_path: Path, damage: Any) -> None:
    """Every place: what can be read accounts for all of it. Few places: the run itself."""
    rng = random.Random(str(damage))
    journal = run_dir(former) / "journal.bin"
    whole = journal.read_bytes()
    path = tmp_path / "journal.bin"
    refused = 0
    for place in [0, 7, 12, 13, *rng.sample(range(len(whole)), 100)]:
        path.write_bytes(whole)
        damage(path, place)
        try:
            core = Replay(path, former).finish()
        except CorruptJournalError:
            refused += 1
            continue
        core.check()
        core.handle(1e6, WorldLost(engines=(EngineId("e0"),)))
        core.check()
        assert core.account().balanced
    assert (refused > 0) == (damage is flip)
    config = copied(former, tmp_path)
    damage(run_dir(config) / "journal.bin", len(whole) - 100 if damage is cut else len(whole) // 2)
    with living(config, resume=True) as life:
        if damage is cut:
            check_totals(config, life.finish())
        else:
            assert life.end() == 1
            (error,) = life.errors
            assert "journal.bin: record at byte" in error


# A long life.


def test_a_long_life_keeps_its_journal_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots take the place of what came before them; what the core remembers does not grow with the steps."""
    limit = 30_000
    monkeypatch.setattr(launch, "World", functools.partial(World, compact_bytes=limit))
    sizes = []
    for steps in (20, 40, 60):
        config = lake(tmp_path, run={"steps": steps, "checkpoint_every": 2}, eval={"every": 0})
        found = launch.train(config, resume=steps > 20, inproc=True)
        assert (found.error, found.steps, found.account.balanced) == ("", steps, True)
        assert found.account.trained == GROUPS * MEMBERS * steps
        sizes.append((run_dir(config) / "journal.bin").stat().st_size)
        core = replayed(config)
        assert core is not None
        assert len(core.snapshot()) < limit
    assert max(sizes) < 4 * limit, sizes


def test_random_kills(tmp_path: Path) -> None:
    """Whatever the moment: kill any process, several times."""
    config = lake(tmp_path, run={"steps": 20, "checkpoint_every": 3}, engines={"count": 2}, eval={"every": 0})
    rng = random.Random(7)
    with living(config) as life:
        for wanted in (2, 6, 11, 15):
            life.until(lambda core, wanted=wanted: core.state.trainer.step >= wanted, f"step {wanted}")
            victim = rng.choice(life.children(rng.choice([ENGINE, TRAINER])))
            os.kill(victim, signal.SIGKILL)
        check_totals(config, life.finish())
    lineage = Lineage()
    lineage.take(config)
    lineage.check(config.run.steps)
