"""Trials show the pace that a run keeps, not that of its beginning."""

import pytest

from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.sim.trial import Length, ahead, try_out
from tests.support.variants import mostly_slow

CONFIG = """
[run]
name = "trial"
[sim]
model = "qwen3-8b"
[[tasks]]
env = "gem-game"
max_turns = 1
max_tokens = 32768
max_turn_tokens = 16384
[rollout]
groups_per_step = 2
group_size = 2
max_running = 64
mode = "{mode}"
[engines]
count = 2
[watchdog]
turn_s = 3600.0
"""


def config(mode: str) -> RunConfig:
    return loads(CONFIG.format(mode=mode))


@pytest.mark.variants
@pytest.mark.parametrize(
    "mode", mostly_slow(["sync", "one_step", "bounded", "decoupled"], {"bounded", "decoupled"})
)
def test_a_short_trial_has_the_pace_of_a_long_one(mode: str) -> None:
    short, _ = try_out(config(mode), Length(warm=0, steps=2))
    long, _ = try_out(config(mode), Length(warm=20, steps=60))
    assert short.step_s == pytest.approx(long.step_s, rel=0.5)


def test_a_wave_is_what_runs_at_once() -> None:
    waves = {mode: ahead(config(mode)) for mode in ("sync", "one_step", "bounded", "decoupled")}
    assert waves == {"sync": 0, "one_step": 1, "bounded": 1, "decoupled": 1 + 64 // 4}
    limited = loads(CONFIG.format(mode="decoupled") + "[buffer]\ngroups = 5\n")
    assert ahead(limited) == 3
