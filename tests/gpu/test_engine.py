"""An engine on a device samples what transformers' full forward pass gives on the CPU."""

from pathlib import Path

import pytest
import torch

from rollweave.schema.serving import FinishReason
from tests.engine.models import VOCAB, build, drive, logprob_error, request, save, spec

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.3}
"""Maximum error of a log-prob; bfloat16 has three digits."""

PROMPTS = [[(7 * at + 3 * number) % VOCAB for at in range(5 + 17 * number)] for number in range(6)]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(request.param)


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_are_those_of_a_full_forward_pass(
    model: torch.nn.Module, path: str, device: str, dtype: str
) -> None:
    """More requests than slots, in less KV than all of them need, with long prompts in
    chunks.
    """
    of = spec(
        path,
        device=device,
        dtype=dtype,
        max_slots=4,
        kv_tokens=256,
        prefill_chunk_tokens=24,
    )
    requests = [
        request(f"r{number}", prompt, max_tokens=20, temperature=number % 2 * 1.0, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    results = drive(of, requests).results
    for each, prompt in zip(requests, PROMPTS, strict=True):
        result = results[each.id]
        assert (result.finish, len(result.tokens)) == (FinishReason.LENGTH, 20)
        assert logprob_error(model, prompt, result) < TOLERANCE[dtype]


def test_deterministic_results_do_not_depend_on_the_batch(path: str, device: str) -> None:
    of = spec(path, device=device, deterministic=True)
    requests = [
        request(f"r{number}", prompt, max_tokens=8, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    together = drive(of, requests).results
    for each in requests:
        alone = drive(of, [each]).results[each.id]
        assert (alone.tokens, alone.logprobs) == (
            together[each.id].tokens,
            together[each.id].logprobs,
        )


def test_a_device_that_is_not_there_is_refused(path: str) -> None:
    of = spec(path, device=f"cuda:{torch.cuda.device_count() if torch.cuda.is_available() else 0}")
    with pytest.raises(AssertionError, match=r"(?i)cuda"):
        drive(of, [request("r", PROMPTS[0], max_tokens=2)])


def test_a_missing_model_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"config\.json must be readable"):
        drive(spec(str(tmp_path), device=device), [request("r", PROMPTS[0], max_tokens=2)])
