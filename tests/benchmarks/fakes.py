"""An interpreter for the fake vLLM of `fake_vllm/`."""

import sys
from pathlib import Path


def fake_python(directory: Path, behavior: str = "") -> str:
    """Write a program into `directory` that acts as the Python of an environment with
    vLLM.
    """
    program = directory / f"python-{behavior}"
    packages = Path(__file__).parent / "fake_vllm"
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH='{packages}' FAKE_VLLM='{behavior}' exec '{sys.executable}' "
        '"$@"\n'
    )
    program.chmod(0o755)
    return str(program)
