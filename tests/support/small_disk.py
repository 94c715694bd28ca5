"""A real run on a disk that is really full: `python -m tests.support.small_disk
DIRECTORY WHERE SPARE`, alone in a mount namespace.

It mounts a small disk at WHERE in the run's directory ("." is all of it), fills it in
the middle of the run except for SPARE bytes, and expects the run to stop with one
error, and to resume once there is space. Mounts vanish with the process.
"""

import os
import subprocess
import sys
from pathlib import Path

from rollweave.train.checkpoint import verify
from tests.support import real_runs

DISK_BYTES = 4 << 20
BALLAST = "ballast"


def fill(disk: Path, spare: int) -> None:
    """Fill the disk except for `spare` bytes."""
    with (disk / BALLAST).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 14))
        except OSError:
            pass
        file.truncate(file.tell() - spare)


def main(directory: Path, where: str, spare: int) -> None:
    gate = directory / "gate"
    config = real_runs.hazardous(directory, {"gate": str(gate), "at": 60}, run={"steps": 8})
    disk = real_runs.run_dir(config) / where
    disk.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True
    )
    lineage = real_runs.Lineage()
    with real_runs.living(config) as life:
        real_runs.at_gate(life, gate)
        fill(disk, spare)
        gate.touch()
        assert life.end() == 1, life.output
        (error,) = life.errors
    print(error)
    assert "No space left" in error
    checkpoints = [verify(path) for path in life.run.checkpoints.glob("step-??????")]
    assert max(checkpoints) < 8
    assert f"last good checkpoint: step {max(checkpoints)}" in error, checkpoints
    lineage.take(config)
    (disk / BALLAST).unlink()
    # Each step since the last good checkpoint is lost, with its trajectories.
    lost = config.run.steps - max(checkpoints)
    real_runs.check_totals(config, real_runs.run_to_end(config, resume=True), losses=lost)
    lineage.take(config)
    lineage.check(config.run.steps)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
