"""Files of real runs: on disks that are full, damaged afterwards, and over a long life.

Engines and trainer are real, and started by the command line. Each test waits for
reports of the run itself.
"""

import functools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollweave.record.journal import Replay
from rollweave.runtime import launch
from rollweave.runtime.world import World
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.events import EngineSlot, WorldLost
from tests.support import real_runs
from tests.support.mounts import can_mount

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


# Disks.


@pytest.mark.skipif(
    not can_mount(), reason="needs a user namespace in which a tmpfs may be mounted"
)
@pytest.mark.parametrize(
    ("where", "spare"), [(".", 0), (".", 1 << 16), ("trajectories", 0), ("checkpoints", 0)]
)
def test_a_full_disk_stops_the_run_until_there_is_space(
    tmp_path: Path, where: str, spare: int
) -> None:
    command = [
        "unshare",
        "-Urm",
        sys.executable,
        "-m",
        "tests.support.small_disk",
        str(tmp_path),
        where,
        str(spare),
    ]
    done = subprocess.run(command, cwd=real_runs.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "final checkpoint" in done.stdout
        if where == "checkpoints"
        else "cannot write" in done.stdout
    )


# Damage before a run is resumed.


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return a run of six steps that was killed in the middle."""
    directory = tmp_path_factory.mktemp("former")
    gate = directory / "gate"
    config = real_runs.hazardous(
        directory, {"gate": str(gate), "at": 150}, run={"steps": 6}, eval={"every": 0}
    )
    with real_runs.living(config) as life:
        real_runs.at_gate(life, gate)
        life.kill()
    gate.touch()
    core = real_runs.replayed(config)
    assert core is not None
    assert core.state.checkpoints.newest is not None
    assert 2 <= core.state.checkpoints.newest < 6
    return config


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def cut(path: Path, place: int) -> None:
    os.truncate(path, place)


def newest_checkpoint(config: RunConfig) -> Path:
    core = real_runs.replayed(config)
    assert core is not None
    return real_runs.run_dir(config) / "checkpoints" / f"step-{core.state.checkpoints.newest:06d}"


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    former: RunConfig, tmp_path: Path, damage: Any
) -> None:
    rng = random.Random(str(damage))
    config, lineage = real_runs.copied(former, tmp_path), real_runs.Lineage()
    lineage.take(config)
    checkpoint = newest_checkpoint(config)
    file = rng.choice(sorted(file for file in checkpoint.iterdir() if file.is_file()))
    damage(file, rng.randrange(file.stat().st_size))
    result = real_runs.run_to_end(config, resume=True)
    real_runs.check_totals(config, result)
    assert result["watchdog"]["checkpoint_damaged"] == 1
    (warning,) = (
        line["message"]
        for line in real_runs.lines(config, "warning")
        if line["component"] == "trainer"
    )
    assert "back at checkpoint" in warning
    assert checkpoint.name.removeprefix("step-").lstrip("0") in warning
    lineage.take(config)
    lineage.check(config.run.steps)


def test_without_a_readable_checkpoint_there_is_one_error(
    former: RunConfig, tmp_path: Path
) -> None:
    config = real_runs.copied(former, tmp_path)
    for checkpoint in (real_runs.run_dir(config) / "checkpoints").glob("step-??????"):
        cut(checkpoint / "model.safetensors", 1000)
    with real_runs.living(config, resume=True) as life:
        assert life.end() == 1
        (error,) = life.errors
    assert error.count("cannot be restored") == 2
    assert "model.safetensors does not match its digest" in error
    assert real_runs.summary(config)["watchdog"] == {}


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_journal_is_one_error_or_resumes(
    former: RunConfig, tmp_path: Path, damage: Any
) -> None:
    """Damage at every place is refused or accounts for everything; damage at a few
    places is tried with the run itself.
    """
    rng = random.Random(str(damage))
    journal = real_runs.run_dir(former) / "journal.bin"
    content = journal.read_bytes()
    path = tmp_path / "journal.bin"
    refused = 0
    for place in [0, 7, 12, 13, *rng.sample(range(len(content)), 100)]:
        path.write_bytes(content)
        damage(path, place)
        try:
            core = Replay(path, former).finish()
        except CorruptJournalError:
            refused += 1
            continue
        core.check()
        core.handle(1e6, WorldLost(engines=(EngineSlot(id=EngineId("e0")),)))
        core.check()
        assert core.account().balanced
    assert (refused > 0) == (damage is flip)
    config = real_runs.copied(former, tmp_path)
    damage(
        real_runs.run_dir(config) / "journal.bin",
        len(content) - 100 if damage is cut else len(content) // 2,
    )
    with real_runs.living(config, resume=True) as life:
        if damage is cut:
            real_runs.check_totals(config, life.finish())
        else:
            assert life.end() == 1
            (error,) = life.errors
            assert "journal.bin: record at byte" in error


# A long life.


def test_a_long_life_keeps_its_journal_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots replace the events before them, and the state of the core does not grow
    with the steps.
    """
    limit = 30_000
    monkeypatch.setattr(launch, "World", functools.partial(World, compact_bytes=limit))
    sizes = []
    for steps in (20, 40, 60):
        config = real_runs.lake(
            tmp_path, run={"steps": steps, "checkpoint_every": 2}, eval={"every": 0}
        )
        result = launch.train(config, resume=steps > 20, inproc=True)
        assert (result.error, result.steps, result.account.balanced) == ("", steps, True)
        assert result.account.trained == real_runs.GROUPS * real_runs.MEMBERS * steps
        sizes.append((real_runs.run_dir(config) / "journal.bin").stat().st_size)
        core = real_runs.replayed(config)
        assert core is not None
        assert len(core.snapshot()) < limit
    assert max(sizes) < 4 * limit, sizes
