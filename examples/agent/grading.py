"""The reward of `agent.toml`: it runs outside the sandbox, after the program's end."""

import re

from rollweave import Score


def grade(outcome) -> Score:
    """Give a tenth for a number, and all for the right one."""
    numbers = re.findall(r"\d+", outcome.stdout)
    right = outcome.rc == 0 and numbers[-1:] == [outcome.task["answer"]]
    return Score(reward=1.0 if right else 0.1 * bool(numbers), success=right)
