"""Calls of the command line within the test's process."""

from typer.testing import CliRunner

from rollweave.cli.main import app

CONFIG = """
[run]
name = "small"
steps = 2
[model.scratch]
hidden = 32
layers = 1
[[tasks]]
env = "tests.cli.envs:Fine"
tag = "fine"
max_turns = 2
max_tokens = 64
max_turn_tokens = 4
[rollout]
groups_per_step = 2
group_size = 2
[engines]
kv_tokens = 1024
[warmup]
steps = 2
[eval]
final_episodes = 6
"""
"""A small run."""


def invoke(*arguments: str) -> tuple[int, str, list[str]]:
    """Return the exit code, standard output, and the lines of standard error."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr.splitlines()
