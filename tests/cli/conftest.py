"""The command line in another process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forking import Forked

PATHS = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
"""PYTHONPATH with this repository's tests and the tested package."""

Shell = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def shell() -> Iterator[Shell]:
    """Start `rollweave` in another process, which can import environments from this
    repository's tests.
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
            process = Forked(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
