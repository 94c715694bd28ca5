"""The engine bench returns every figure of the contract, or the reason for a missing
one, on models small enough for a test.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.contract import Result
from benchmarks.engine.bench import CONCURRENCY, compare
from benchmarks.engine.exactness import changes
from benchmarks.engine.models import ModelCase, model_cases
from rollweave.schema.serving import FinishReason, GenerateResult

from .fakes import fake_python

torch.set_num_threads(1)

SPEEDS = [
    f"tokens_per_s_{variant}_small"
    for variant in (*CONCURRENCY, "hf_16", "process_16", "vllm_16", "bf16")
]
RATIOS = ["ratio_to_hf_16_small", "ratio_to_vllm_16_small", "bf16_over_f32_small"]
EXACTNESS = [
    "prefix_hit_rate_small",
    "logprob_error_max_small",
    "batch_mismatches_small",
    "batch_logprob_change_max_small",
]


def small() -> ModelCase:
    return ModelCase(
        name="small", config=model_cases(quick=True)[0].config, prompt=24, output=6, repeats=1
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return compare(
        [small()], turns=40, python=fake_python(tmp_path_factory.mktemp("fake")), eager=False
    )


def value(result: Result, name: str) -> float:
    figure = result.figures[name]
    assert isinstance(figure, int | float)
    return figure


@pytest.mark.extended
def test_every_figure_is_present(result: Result) -> None:
    assert set(result.figures) == {*SPEEDS, *RATIOS, *EXACTNESS}
    assert all(value(result, name) > 0 for name in (*SPEEDS, *RATIOS))
    ours, vllm = (
        value(result, "tokens_per_s_process_16_small"),
        value(result, "tokens_per_s_vllm_16_small"),
    )
    assert value(result, "ratio_to_vllm_16_small") == pytest.approx(ours / vllm)
    assert result.conditions["vllm"]["version"] == "0.0-fake"


@pytest.mark.extended
def test_the_conversation_is_served_from_the_cache_and_log_probs_are_exact(result: Result) -> None:
    assert value(result, "prefix_hit_rate_small") > 0.8
    assert 0 < value(result, "logprob_error_max_small") <= 1e-4


@pytest.mark.extended
def test_results_do_not_depend_on_the_batch(result: Result) -> None:
    assert value(result, "batch_mismatches_small") == 0
    assert 0 < value(result, "batch_logprob_change_max_small") <= 1e-4


@pytest.mark.extended
@pytest.mark.parametrize("behavior", ["crashes", pytest.param("dies", marks=pytest.mark.slow)])
def test_a_vllm_that_fails_is_null_with_the_reason(tmp_path: Path, behavior: str) -> None:
    result = compare([small()], turns=40, python=fake_python(tmp_path, behavior), eager=True)
    assert set(result.figures) == {*SPEEDS, *RATIOS, *EXACTNESS}
    assert value(result, "ratio_to_hf_16_small") > 0
    words = {"crashes": "no kernel for heads of 16", "dies": "out of memory"}
    for name in ("ratio_to_vllm_16_small", "tokens_per_s_vllm_16_small"):
        assert result.figures[name] is None
        assert words[behavior] in result.conditions[name]


def test_changes_counts_results_that_differ() -> None:
    def made(*tokens: int, logprob: float) -> GenerateResult:
        logprobs = (logprob,) * len(tokens)
        return GenerateResult(
            id="x", tokens=tokens, logprobs=logprobs, versions=(), finish=FinishReason.LENGTH
        )

    these = [made(1, 2, logprob=-1.0), made(1, 2, logprob=-1.0), made(3, logprob=-1.0)]
    those = [made(1, 2, logprob=-1.25), made(1, 3, logprob=-9.0), made(3, 4, logprob=-1.0)]
    assert changes(these, those) == (2, 0.25)
