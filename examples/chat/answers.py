"""Show answers to the same held-out questions before and after training.

    python examples/chat/answers.py RUN_BEFORE RUN_AFTER [NUMBER]

Both are run directories; `rollweave eval` makes the first one.
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = re.compile(r"<\|[^|]*\|>|</?s>|<end_of_turn>")
"""The tokens that end a turn in the formats of most models."""


def answers(run):
    """Return answer and reward by question, of the final evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.eval")
        program = str(Path(sys.executable).with_name("rollweave"))
        command = [program, "export", run, "--format", "inspect", "--output", file]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.startswith("samples/")]
            samples = [json.loads(archive.read(name)) for name in names]
    found = {}
    for sample in samples:
        task, scores = sample["metadata"]["task"], sample["scores"]
        if sample["metadata"]["purpose"] == "eval" and "-test-" in task["id"]:
            lines = Path(HERE, task["payload"]["file"]).read_text().splitlines()
            question = json.loads(lines[task["payload"]["row"]])["prompt"]
            answer = SPECIAL.sub("", sample["output"]["completion"])
            found[question] = " ".join(answer.split()), scores["reward"]["value"]
    return found


def main(before, after, number="5"):
    first, last = answers(before), answers(after)
    for question in [one for one in first if one in last][: int(number)]:
        (answer, reward), (trained, trained_reward) = first[question], last[question]
        print(f"\n{question}")
        print(f"  before  {reward:g}  {answer!r}")
        print(f"  after   {trained_reward:g}  {trained!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
