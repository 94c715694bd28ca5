"""The passes of a step by a run's settings, and the measured shares of the peak."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave_sim.hardware import GPUS, gpu
from rollweave_sim.training import A100, H100, Measured, Passes, mfu, passes_of
from rollweave_sim.world import costs_of
from tests.support.simulation import config


@pytest.mark.parametrize(
    ("algorithm", "trainer", "expected"),
    [
        ({}, {}, Passes()),
        ({"kl": 0.1}, {}, Passes(forwards=1)),
        ({"kl": 0.1, "correction": "tis"}, {"minibatches": 4}, Passes(forwards=2, updates=4)),
        ({"advantage": "gae"}, {"epochs": 2}, Passes(models=2, forwards=1, epochs=2, updates=2)),
    ],
)
def test_settings_ask_for_passes(
    tmp_path: Path, algorithm: dict[str, Any], trainer: dict[str, Any], expected: Passes
) -> None:
    run = config(tmp_path, mode="sync", trainer=trainer)
    run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update=algorithm)})
    assert passes_of(run) == expected
    made = costs_of(run)[1]
    plain = costs_of(config(tmp_path, mode="sync"))[1]
    work = {"tokens": 10**6, "context": 10**9}
    assert made.forward_s(**work) == plain.forward_s(**work)
    assert (made.step_s(**work) > plain.step_s(**work)) is (expected != Passes())


def test_a_streamed_step_updates_once_for_each_part(tmp_path: Path) -> None:
    run = config(tmp_path, mode="stream", trainer={"minibatches": 4})
    assert passes_of(run).updates == 1


@pytest.mark.parametrize(("name", "rows"), [("h100", H100), ("a100", A100)])
def test_the_shares_are_the_measured_ones(name: str, rows: tuple[Measured, ...]) -> None:
    chip = GPUS[name]
    for row in rows:
        assert 0 < row.causal(chip.bf16_flops) <= row.percent / 100
        reached = mfu(chip, parameters=row.parameters, length=row.length)
        assert reached == pytest.approx(row.causal(chip.bf16_flops), rel=0.02)


@given(
    st.sampled_from(sorted(GPUS)), st.floats(1e8, 1e12), st.floats(1, 1e6), st.floats(1.0, 100.0)
)
def test_shares_are_within_those_measured(
    name: str, parameters: float, length: float, times: float
) -> None:
    chip = gpu(name)
    base = "a100" if name == "a100" else "h100"
    rows = A100 if name == "a100" else H100
    shares = [row.causal(GPUS[base].bf16_flops) for row in rows]
    scale = chip.matmul_efficiency / GPUS[base].matmul_efficiency
    for tokens in (length, times * length):
        reached = mfu(chip, parameters=parameters, length=tokens) / scale
        assert min(shares) - 1e-9 <= reached <= max(shares) + 1e-9


def test_an_h800_trains_like_an_h100() -> None:
    each = [mfu(gpu(name), parameters=8e9, length=3000) for name in ("h100", "h800", "h200")]
    assert len(set(each)) == 1
