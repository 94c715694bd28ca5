"""The command line in a process of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
"""Where this repository's tests are, and whatever is tested."""

Shell = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shell() -> Iterator[Shell]:
    """`rollweave` as a process of its own, with this repository's tests to import
    environments from.
    """
    env = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [
                sys.executable,
                "-c",
                "from rollweave.cli.entry import main; main()",
                *arguments,
            ]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
