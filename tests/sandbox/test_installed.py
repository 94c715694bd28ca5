"""The parts of rollweave that a sandbox sees if it is installed in a virtual
environment, not as a checkout.
"""

import json
import os
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

import msgspec
import numpy
import pytest

import rollweave
from tests.support.sandboxes import ISOLATING, needs

SCRIPT = """
import asyncio, json, sys
from rollweave.sandbox.base import SandboxSpec
from rollweave.sandbox.registry import backend
import rollweave

FIND = '''
import importlib.util, json, os, sys
found = [os.path.join(at, name) for top in sys.argv[1:] for at, _, names in os.walk(top) for name in names if "rollweave" in at]
try:
    import rollweave.envs.handlers.code_solutions as solutions
except ImportError:
    solutions = None
import msgspec
print(json.dumps([found, repr(solutions), msgspec.__name__]))
'''

async def main():
    boxes = backend(sys.argv[1])
    try:
        box = await boxes.start(SandboxSpec())
        found = await box.exec([sys.executable, "-c", FIND, sys.prefix])
        print(json.dumps([rollweave.__file__.startswith(sys.prefix), found.stdout.decode(), found.stderr.decode()]))
    finally:
        await boxes.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ISOLATING)
def test_the_package_with_the_right_answers_is_hidden(name: str) -> None:
    needs(name)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, symlinks=True)
        packages = next(Path(folder, "lib").glob("python3.*")) / "site-packages"
        shutil.copytree(Path(rollweave.__file__).parent, packages / "rollweave")
        shutil.copytree(Path(msgspec.__file__).parent, packages / "msgspec")
        (packages / "others.pth").write_text(str(Path(numpy.__file__).parent.parent))
        command = [f"{folder}/bin/python", "-c", SCRIPT, name]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        installed, output_of, errors = json.loads(done.stdout)
        assert installed
        assert output_of, errors
        assert json.loads(output_of) == [[], "None", "msgspec"]  # other packages are there
