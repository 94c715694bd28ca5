"""The bench gives every figure that the contract names, on models small enough for a test."""

import pytest
import torch

from rollweave.engine.bench import COMPARED, CONCURRENCY, Subject, measure, subjects

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def figures() -> dict[str, float | None]:
    small = subjects(quick=True)[0]
    subject = Subject(name="small", config=small.config, prompt=24, output=6, repeats=1)
    return measure(subject)


def test_every_figure_is_there(figures: dict[str, float | None]) -> None:
    speeds = {f"tokens_per_s_{count}" for count in CONCURRENCY}
    assert set(figures) == speeds | {f"ratio_to_hf_{COMPARED}", "ratio_to_vllm_16", "prefix_hit_rate", "logprob_error_max"}
    assert all((figures[name] or 0) > 0 for name in speeds)
    assert figures["ratio_to_vllm_16"] is None


def test_the_conversation_is_served_from_the_cache_and_log_probs_are_exact(figures: dict[str, float | None]) -> None:
    assert (figures["prefix_hit_rate"] or 0) > 0.8
    assert 0 < (figures["logprob_error_max"] or 1) <= 1e-4
