"""Bench `tools`: contenders alternate, ratios are those of the medians, and a missing
figure is None.
"""

import pytest

from benchmarks.tools import BLOCK, figures, take_turns
from rollweave.cli.bench import bench
from rollweave.schema.errors import ConfigError


def test_contenders_alternate_and_the_first_block_does_not_count() -> None:
    turns: list[str] = []

    def contender(name: str) -> list[float]:
        turns.append(name)
        return [float(len(turns))] * BLOCK

    times = take_turns({"a": lambda: contender("a"), "b": lambda: contender("b")}, 2 * BLOCK - 1)
    assert turns == ["a", "b"] * 3
    assert times == {"a": [3.0] * BLOCK + [5.0] * BLOCK, "b": [4.0] * BLOCK + [6.0] * BLOCK}


def test_ratios_are_of_medians_and_none_where_a_side_is_missing() -> None:
    summary = figures(
        {"bash": [1.0, 2.0, 9.0], "pty": [0.5], "tmux": [40.0], "spawn": [3.0], "ping": [0.1]}
    )
    assert (
        summary["bash_ms"],
        summary["bash_over_tmux"],
        summary["pty_over_tmux"],
        summary["bash_over_spawn"],
    ) == (
        2.0,
        20.0,
        80.0,
        1.5,
    )
    assert (summary["ipython_ms"], summary["jupyter_ms"], summary["ipython_over_jupyter"]) == (
        None,
        None,
        None,
    )


def test_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--seeds must be left out for bench tools"):
        bench("tools", as_json=False, quick=True, seeds=1)
