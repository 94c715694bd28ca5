"""An engine on a device samples what transformers' full forward pass gives on the
CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rollweave.engine.paged_attention import PagedAttention
from rollweave.engine.runner import Runner
from rollweave.schema.serving import EngineSpec, FinishReason
from tests.support.tiny_models import VOCAB, build, drive, logprob_error, request, save, spec
from tests.support.variants import mostly_extended

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.3}
"""Maximum error of a log-prob; bfloat16 has three digits."""

PROMPTS = [[(7 * at + 3 * number) % VOCAB for at in range(5 + 17 * number)] for number in range(6)]


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(request.param)


@pytest.fixture(scope="module")
def path(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(model, tmp_path_factory.mktemp("model"))


@pytest.mark.variants
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
        expected = (together[each.id].tokens, together[each.id].logprobs)
        assert (alone.tokens, alone.logprobs) == expected


def test_a_device_that_is_not_there_is_refused(path: str) -> None:
    of = spec(path, device=f"cuda:{torch.cuda.device_count() if torch.cuda.is_available() else 0}")
    with pytest.raises(AssertionError, match=r"(?i)cuda"):
        drive(of, [request("r", PROMPTS[0], max_tokens=2)])


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runners of the engines that a test drives."""
    made: list[Runner] = []
    begin = Runner.__init__

    def remember(self: Runner, spec: EngineSpec, *options: Any) -> None:
        made.append(self)
        begin(self, spec, *options)

    monkeypatch.setattr(Runner, "__init__", remember)
    return made


@pytest.mark.variants
@pytest.mark.parametrize("dtype", mostly_extended(["float32", "bfloat16"], {"float32"}))
@pytest.mark.parametrize(
    "heads", [{}, {"num_key_value_heads": 4}, {"num_attention_heads": 6}], ids=["2", "1", "3"]
)
def test_kernel_and_graphs_compute_a_full_forward_pass(
    device: str, dtype: str, heads: dict[str, int], runners: list[Runner], tmp_path: Path
) -> None:
    """On a GPU, blocks of 16 tokens and heads of 16 are attended by FlexAttention, and
    decoding steps are replayed, with 2, 1 and 3 query heads for a key head. Some
    requests wait for a slot, so that few and many rows decode.
    """
    model = build("qwen3", **heads)
    requests = [
        request(f"r{number}", prompt, max_tokens=30 - 4 * number, temperature=1.0, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    of = spec(
        save(model, tmp_path), device=device, dtype=dtype, block_tokens=16, max_slots=4,
        kv_tokens=416, prefill_chunk_tokens=70,
    )  # fmt: skip
    for changes in ({}, {"cuda_graphs": False}, {"paged_attention": False}):
        results = drive(replace(of, **changes), requests).results
        for each, prompt in zip(requests, PROMPTS, strict=True):
            assert logprob_error(model, prompt, results[each.id]) < TOLERANCE[dtype]
    if device == "cuda":
        assert [isinstance(one.attention, PagedAttention) for one in runners] == [True, True, False]
        assert [one.graphs is not None for one in runners] == [True, False, False]


def test_many_rows_of_long_contexts(device: str, runners: list[Runner], tmp_path: Path) -> None:
    """Several processors of a GPU share the context of one sequence."""
    model = build("qwen3", max_position_embeddings=4096)
    length = 1500 if device == "cuda" else 150
    prompts = [[(11 * at + number) % VOCAB for at in range(length)] for number in range(5)]
    requests = [
        request(f"r{number}", prompt, max_tokens=6, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    of = spec(save(model, tmp_path), device=device, block_tokens=16, kv_tokens=16 * length)
    results = drive(of, requests).results
    for each, prompt in zip(requests, prompts, strict=True):
        assert logprob_error(model, prompt, results[each.id]) < TOLERANCE["float32"]
    assert device == "cpu" or runners[0].graphs is not None
