"""The example as a user runs it: an agent program in a separate process, with a real
engine.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rollweave.schema.work import TokenSequence
from tests.support.real_gateway import checkpoint, logprob_error

ROOT = Path(__file__).parents[3]
AGENT = """
from openai import OpenAI

client, history = OpenAI(), [{"role": "user", "content": "begin"}]
for turn in range(3):
    answer = client.chat.completions.create(model="any", messages=history, max_tokens=8)
    history += [answer.choices[0].message, {"role": "user", "content": f"and {turn}?"}]
alone = [{"role": "user", "content": "a sub-agent"}]
for chunk in client.chat.completions.create(model="any", messages=alone, max_tokens=8, stream=True):
    last = chunk.choices[0].finish_reason
print("done:", last)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_separate_program_is_recorded_completely(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "examples/gateway.py",
        str(directory),
        "--",
        sys.executable,
        "-c",
        AGENT,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "done:" in done.stderr
    sequences = [msgspec.json.decode(line, type=TokenSequence) for line in done.stdout.splitlines()]
    assert [len(sequence.turns) for sequence in sequences] == [3, 1]
    for sequence in sequences:
        assert logprob_error(directory, sequence) < 1e-4
