"""verl's training worker on the CPU, with rollouts of a real service, by the program
that users start.

The test needs an interpreter that has verl and Rollweave, in the variable
ROLLWEAVE_VERL_PYTHON (docs/TRAINERS.md).
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from packages.service.tests.adapters.checkpoints import checkpoint
from packages.service.tests.rollout_service import service_config, serving
from rollweave.package import DIRECTORY
from rollweave_service.engines import backend_factory

PYTHON = os.environ.get("ROLLWEAVE_VERL_PYTHON", "")
PROGRAM = DIRECTORY.parents[1] / "examples/verl_step.py"

STEP = re.compile(
    r"step (\d): reward [01]\.\d+ over 16 rollouts, .*, gradient norm (\S+), KL between trainer "
    r"and engine (\S+)"
)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="ROLLWEAVE_VERL_PYTHON names no interpreter")
def test_verl_trains_on_the_sampled_tokens_and_the_engine_follows(tmp_path: Path) -> None:
    """The KL between the log-probs of verl and of the engine stays 0 after an
    update.
    """
    model = checkpoint(tmp_path / "model")
    task = {
        "env": "packages.service.tests.adapters.letters:Letters",
        "max_turn_tokens": 6,
        "max_tokens": 400,
    }
    config = service_config(tmp_path, task=task, rollout={"retries": 0})
    with serving(config, make_backend=backend_factory(config), registered=True) as service:
        sizes = ["--steps", "2", "--groups", "4", "--members", "4", "--lr", "1e-2"]
        command = [PYTHON, str(PROGRAM), service.address, str(model), "--handler", "game", *sizes]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    steps = STEP.findall(ran.stdout)
    assert [number for number, _, _ in steps] == ["1", "2"]
    assert all(float(norm) > 0 and abs(float(kl)) < 1e-4 for _, norm, kl in steps)
