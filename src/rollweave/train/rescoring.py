"""Computes a checkpoint's log-probs of tokens that an engine sampled. The program is
`python -m rollweave.train.rescoring`.

It reads one JSON object, `{"path": …, "prompt": […], "tokens": […]}`, from standard
input and prints the log-probs of `tokens` at temperature 1, computed in float32 on the
CPU. It is a separate process so that torch and the weights leave memory afterwards.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from rollweave.io.process_setup import reset_signals
from rollweave.train.loading import load_trained_model
from rollweave.train.packing import Example, pack


def rescore(path: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Return log-probs of `tokens` after `prompt`.

    Raises TrainerError if the trainer does not support the checkpoint.
    """
    model = load_trained_model(path, None, dtype="float32", device=torch.device("cpu"))
    targets = torch.arange(len(prompt), len(prompt) + len(tokens))
    with torch.no_grad():
        scores = model(
            pack([Example(tokens=torch.tensor([*prompt, *tokens]), targets=targets)]), 1.0
        )
    return [float(value) for value in scores.logprobs]


if __name__ == "__main__":
    reset_signals()
    request = json.loads(sys.stdin.read())
    json.dump(rescore(Path(request["path"]), request["prompt"], request["tokens"]), sys.stdout)
