"""The oracle is transformers' forward pass: log-probs, entropies and gradients of
packed sequences equal those of each alone.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rollweave.schema.errors import TrainerError
from rollweave.train.model import Attention, Model, Reference, load_model
from rollweave.train.packing import Example, pack
from tests.support.trainers import CPU, make_examples, make_model
from tests.train.oracle import loss_of, oracle

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


def llama_scaling() -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama", "llama3-bias"])
def checkpoint_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path: Path = tmp_path_factory.mktemp("oracle") / request.param
    torch.manual_seed(0)
    match request.param:
        case "qwen3":
            return make_model(path, layers=3)
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False))
        case _:
            extra = {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": llama_scaling(),
                "head_dim": 16,
            }
            model = LlamaForCausalLM(LlamaConfig(**SMALL, **extra, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        # otherwise ones and zeros, which hide mistakes
        if name.endswith(("bias", "norm.weight", "layernorm.weight")):
            torch.nn.init.normal_(parameter, 0.9, 0.3)
    model.save_pretrained(path)
    return path


def compare(model: Model, path: Path, examples: list[Example], temperature: float = 1.0) -> None:
    chosen, entropy, _ = model(pack(examples), temperature)
    loss_of(chosen, entropy).backward()  # type: ignore[no-untyped-call]
    expected, expected_entropy, gradients = oracle(path, examples, temperature)
    torch.testing.assert_close(chosen.detach(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.detach(), expected_entropy, atol=1e-5, rtol=1e-5)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp(min=0.05)
        torch.testing.assert_close(
            parameters[name].grad / scale, gradient / scale, atol=2e-5, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize(("temperature", "prompts"), [(1.0, 0), (0.7, 2)])
def test_a_packed_batch_equals_its_sequences_alone(
    checkpoint_dir: Path, temperature: float, prompts: int
) -> None:
    compare(
        load_model(checkpoint_dir, dtype="float32", device=CPU),
        checkpoint_dir,
        make_examples(7, prompts=prompts),
        temperature,
    )


def test_equal_lengths_need_no_padding(checkpoint_dir: Path) -> None:
    tokens = torch.randint(4, 100, (3, 9), generator=torch.Generator().manual_seed(0))
    examples = [Example(tokens=row, targets=torch.arange(1, 9)) for row in tokens]
    assert pack(examples).keys.dense
    assert pack(examples).queries.dense
    compare(load_model(checkpoint_dir, dtype="float32", device=CPU), checkpoint_dir, examples)


def test_one_token_sequences(checkpoint_dir: Path) -> None:
    examples = [
        Example(tokens=torch.tensor(pair), targets=torch.tensor([1]))
        for pair in ([5, 6], [7, 9], [8, 5])
    ]
    compare(load_model(checkpoint_dir, dtype="float32", device=CPU), checkpoint_dir, examples)


def test_large_attention_and_vocabularies_give_the_same_results(checkpoint_dir: Path) -> None:
    model = load_model(checkpoint_dir, dtype="float32", device=CPU)
    model.max_logits = 500
    for module in model.modules():
        if isinstance(module, Attention):
            module.max_scores = 0
    compare(model, checkpoint_dir, make_examples(5, seed=1, prompts=1))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "attention"):
        module = importlib.import_module(f"rollweave.train.{name}")
        monkeypatch.setattr(module, "keeps_scores", lambda x: False)


def test_with_torch_kernels_alone_the_results_are_the_same(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    compare(
        load_model(checkpoint_dir, dtype="float32", device=CPU),
        checkpoint_dir,
        make_examples(6, prompts=2),
    )


def test_bfloat16_is_close(checkpoint_dir: Path) -> None:
    examples = make_examples(4)
    chosen = load_model(checkpoint_dir, dtype="bfloat16", device=CPU)(pack(examples), 1.0).logprobs
    exact = load_model(checkpoint_dir, dtype="float32", device=CPU)(pack(examples), 1.0).logprobs
    assert chosen.dtype == torch.float32
    assert (chosen - exact).abs().mean() < 0.1


def test_no_layer_attends_with_a_mask_in_bfloat16(
    checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a mask, torch's kernels would hold all scores of a sequence.
    as_on_a_gpu(monkeypatch)
    masks = []
    own = functional.scaled_dot_product_attention

    def kernel(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        masks.append(options["attn_mask"])
        return own(*tensors, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", kernel)
    model = load_model(checkpoint_dir, dtype="bfloat16", device=CPU)
    model(pack(make_examples(4)), 1.0)
    assert masks == [None] * model.shape.layers


def test_refuses_other_architectures(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(TrainerError, match="architectures must name one of"):
        load_model(tmp_path / "gpt2", dtype="float32", device=CPU)
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    config.save_pretrained(tmp_path / "sliding")
    with pytest.raises(TrainerError, match="sliding"):
        load_model(tmp_path / "sliding", dtype="float32", device=CPU)


@pytest.mark.parametrize("parts", [False, True])
def test_the_divergence_from_a_reference_is_exact(checkpoint_dir: Path, parts: bool) -> None:
    """KL(reference, policy) over the vocabulary and its gradient, in one piece and in
    parts of two rows.
    """
    examples = make_examples(3)
    model, other = (load_model(checkpoint_dir, dtype="float32", device=CPU) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
        packed = pack(examples)
        reference = Reference(other.hidden(packed), other.lm_head.weight.clone())
        expected = (reference.hidden @ reference.head.T / 0.8).log_softmax(-1)
    own = (model.hidden(packed) @ model.lm_head.weight.T / 0.8).log_softmax(-1)
    slow = (expected.exp() * (expected - own)).sum(-1)
    slow.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    if parts:
        model.max_logits = 2 * model.lm_head.out_features
    divergence = model(packed, 0.8, reference).divergence
    divergence.sum().backward()
    torch.testing.assert_close(divergence, slow, atol=1e-6, rtol=1e-5)
    assert float(divergence.detach().min()) > 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)
    assert float(model(packed, 0.8).divergence.abs().max()) == 0
