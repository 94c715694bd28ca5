"""Show answers to the same held-out questions before and after training.

    python examples/chat/answers.py RUN_BEFORE RUN_AFTER [NUMBER]

Both are run directories; `rollweave eval` makes the first one.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ASSISTANT = "<|im_start|>assistant\n"


def answers(run):
    """Return question, answer and reward of each task of the final evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.jsonl")
        program = str(Path(sys.executable).with_name("rollweave"))
        subprocess.run([program, "export", run, "--output", file], check=True, capture_output=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {}
    for row in rows:
        if row["purpose"] == "eval" and "-test-" in row["task_id"]:
            text = row["sequences"][0]["text"]
            question, _, answer = text.rpartition(ASSISTANT)
            question = question.split("user\n")[-1].split("<|im_end|>")[0]
            found[row["task_id"]] = question, answer.replace("<|im_end|>", ""), row["reward"]
    return found


def main(before, after, number="5"):
    first, last = answers(before), answers(after)
    for task in sorted(set(first) & set(last))[: int(number)]:
        question, answer, reward = first[task]
        _, trained, trained_reward = last[task]
        print(f"\n{question}")
        print(f"  before  {reward:g}  {' '.join(answer.split())!r}")
        print(f"  after   {trained_reward:g}  {' '.join(trained.split())!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
