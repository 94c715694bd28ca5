"""The reward for a sum: 1 if the last number of the answer is right."""

import re

from rollweave import Score


def reward(record, answer):
    """`record` is a line of `sums.jsonl` as a dict, `answer` the model's text."""
    numbers = re.findall(r"\d+", answer)
    right = numbers[-1:] == [record["answer"]]
    return Score(reward=float(right), success=right)
