"""The example of an agent with a shell learns, from random weights, in real
sandboxes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sandboxes import needs

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_agent_learns_which_command_to_type(tmp_path: Path) -> None:
    needs("zygote")
    for name in ("drawers.py", "drawers.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    command = [
        sys.executable,
        "-c",
        "from rollweave.cli.entry import main; main()",
        "train",
        "drawers.toml",
    ]
    subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        check=True,
    )
    summary = json.loads((tmp_path / "runs" / "drawers" / "summary.json").read_text())
    assert summary["success_rate"]["drawers:Drawers"] > 0.5  # before: one in sixteen
