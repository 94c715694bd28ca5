"""The engine against transformers' forward pass: tokens, log-probs, and that nothing that happens to a batch changes them."""

from pathlib import Path

import pytest
import torch

from .models import LINEAR_ROPE, LLAMA3_ROPE, build, drive, logprob_error, oracle_greedy, request, save, spec

torch.set_num_threads(1)

PROMPTS = [[5, 9, 2, 77], list(range(1, 40)), [3], [(7 * i) % 90 for i in range(23)], list(range(50, 66))]
TOLERANCE = 1e-4

KINDS = {
    "llama": ("llama", {}),
    "llama_biased_llama3_rope": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope_tied": ("llama", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_wide_heads": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True}),
}


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_and_logprobs_are_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = KINDS[name]
    model = build(kind, **changes)
    path = save(model, tmp_path)
    requests = [request(str(i), p, temperature=0.0, max_tokens=20) for i, p in enumerate(PROMPTS)]
    outcome = drive(spec(path), requests)
    for i, prompt in enumerate(PROMPTS):
        result = outcome.results[str(i)]
        assert list(result.tokens) == oracle_greedy(model, prompt, 20)
        assert logprob_error(model, prompt, result) <= TOLERANCE
