"""Models of transformers, trained on packed rows, equal transformers' own forward pass
on each sequence alone; their weights are those of a checkpoint at each place.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollweave.schema.errors import TrainerError
from rollweave.schema.training import Save, Saved, TrainOn
from rollweave.train.loading import (
    examine,
    implementation_of,
    load_trained_model,
    load_transformers_model,
)
from rollweave.train.model import Reference
from rollweave.train.packing import Example, pack
from rollweave.train.trainer import Trainer
from rollweave.train.transformers_model import TransformersModel
from rollweave.weights.checkpoint import read_sizes
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint
from rollweave.weights.views import StoredTensors, View
from tests.support import tiny_models
from tests.support.architectures import CONFIGURATIONS, build, read
from tests.support.trainers import CPU, make_batch, make_config, make_examples, make_model
from tests.support.variants import mostly_slow
from tests.train.asking import published, restore_from
from tests.train.oracle import loss_of, oracle

FAST = ("qwen3_moe", "gemma3", "deepseek_v3", "qwen2_5_vl")


def each_architecture() -> list[Any]:
    """Return all architectures; those that are not in `FAST` are slow."""
    return mostly_slow(CONFIGURATIONS, FAST)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_buffers_of_old_checkpoints_change_nothing(tmp_path: Path, implementation: Any) -> None:
    model = tiny_models.build("llama", vocab_size=400)
    tiny_models.save(model, tmp_path)
    plain = load_trained_model(tmp_path, implementation, dtype="float32", device=CPU)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    older = load_trained_model(tmp_path, implementation, dtype="float32", device=CPU)
    batch = pack(make_examples(3))
    assert torch.equal(plain(batch, 1.0).logprobs, older(batch, 1.0).logprobs)


def load(path: Path, dtype: str = "float32") -> TransformersModel:
    return load_transformers_model(path, dtype=dtype, device=CPU)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.variants
@pytest.mark.parametrize("name", each_architecture())
def test_a_packed_batch_equals_its_sequences_alone(tmp_path: Path, name: str) -> None:
    path = build(name, tmp_path / name)
    examples = make_examples(7, prompts=3)
    model = load(path)
    chosen, entropy, _ = model(pack(examples), 0.7)
    loss_of(chosen, entropy).backward()  # type: ignore[no-untyped-call]
    expected, expected_entropy, expected_gradients = oracle(path, examples, 0.7)
    torch.testing.assert_close(chosen.detach(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.detach(), expected_entropy, atol=1e-5, rtol=1e-5)
    own = gradients(model)
    assert own.keys() == {key for key, value in expected_gradients.items() if value is not None}
    for key, gradient in own.items():
        scale = expected_gradients[key].abs().max().clamp(min=0.05)
        torch.testing.assert_close(
            gradient / scale, expected_gradients[key] / scale, atol=2e-5, rtol=1e-4, msg=key
        )


@pytest.mark.variants
@pytest.mark.parametrize("name", each_architecture())
def test_a_trained_model_is_the_same_checkpoint_everywhere(tmp_path: Path, name: str) -> None:
    """Published, exported and restored, it has the tensors of the checkpoint that it
    was read from, and transformers reads the export.
    """
    path = build(name, tmp_path / name)
    trainer = Trainer(make_config(), path)
    before = published(trainer, 1)
    assert set(before) == set(read_sizes(path))
    source = load_file(path / "model.safetensors")
    for key, tensor in before.items():
        assert torch.equal(tensor, source[key].float()), key
    trainer.handle(TrainOn(batch=make_batch()))
    saved = trainer.handle(Save(path=str(tmp_path / "c"), export=True))
    assert isinstance(saved, Saved), saved
    after = published(trainer, 2)
    assert any(not torch.equal(after[key], before[key]) for key in after)
    exported = load_file(tmp_path / "c" / "hf" / "model.safetensors")
    assert exported.keys() == source.keys()
    saved_weights = read_trainer_checkpoint(tmp_path / "c", step=1, dtype=torch.float32)
    for key, tensor in after.items():
        assert torch.equal(exported[key], tensor), key
        assert torch.equal(saved_weights[key], tensor), key
    trained = read(tmp_path / "c" / "hf")
    for key, parameter in trainer._model.named_parameters():
        assert torch.equal(trained.get_parameter(key), parameter), key
    trainer.handle(TrainOn(batch=make_batch(1, step=1)))
    restore_from(trainer, tmp_path / "c", step=1)
    assert all(torch.equal(tensor, after[key]) for key, tensor in published(trainer, 3).items())


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", pytest.param("gemma3_vision", marks=pytest.mark.slow)]
)
def test_training_on_text_leaves_the_vision_tower_unchanged(tmp_path: Path, name: str) -> None:
    path = build(name, tmp_path / name)
    (path / "preprocessor_config.json").write_text("{}")
    _, unused, _ = examine(path)
    assert unused
    assert all("vis" in key or "projector" in key for key in unused)
    assert not any("vis" in key for key in set(read_sizes(path)) - set(unused))
    config = make_config(trainer={"weight_decay": 0.1, "minibatches": 2})
    trainer = Trainer(config, path)
    before = published(trainer, 1)
    trainer.handle(TrainOn(batch=make_batch()))
    trainer.handle(Save(path=str(tmp_path / "c"), export=True))
    assert (tmp_path / "c" / "hf" / "preprocessor_config.json").read_text() == "{}"
    after = published(trainer, 2)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert changed == set(before) - set(unused)
    assert examine(build("qwen3", tmp_path / "text"))[1] == []


def test_logits_in_parts_and_recomputed_activations_give_the_same_results(tmp_path: Path) -> None:
    path, examples = build("gemma2", tmp_path / "m"), make_examples(5)
    plain, other = load(path), load(path)
    other.recompute_activations(True)
    other.max_logits = 500
    for model in (plain, other):
        chosen, entropy, _ = model(pack(examples), 1.0)
        loss_of(chosen, entropy).backward()  # type: ignore[no-untyped-call]
    expected = gradients(plain)
    for name, gradient in gradients(other).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_layers_are_computed_again_in_the_backward_pass(tmp_path: Path) -> None:
    model = load(build("qwen3", tmp_path / "m"))
    model.recompute_activations(True)
    calls: list[str] = []
    layers = model.get_submodule("model.layers")
    attention = layers[0].self_attn  # type: ignore[index]
    attention.q_proj.register_forward_hook(lambda *_: calls.append("forward"))
    chosen, _, _ = model(pack(make_examples(2)), 1.0)
    assert len(calls) == 1
    chosen.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_bfloat16_is_close(tmp_path: Path, name: str) -> None:
    path, examples = build(name, tmp_path / "m"), make_examples(4)
    model = load(path, "bfloat16")
    chosen = model(pack(examples), 1.0).logprobs
    chosen.sum().backward()
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model).values())
    exact = load(path)(pack(examples), 1.0).logprobs
    assert chosen.dtype == torch.float32
    assert (chosen - exact).abs().mean() < 0.1


def test_the_divergence_from_a_reference_is_that_of_its_logits(tmp_path: Path) -> None:
    """The model bounds its logits."""
    path, examples = build("gemma2", tmp_path / "m"), make_examples(3)
    model, other = load(path), load(build("gemma2", tmp_path / "other", seed=1))
    packed = pack(examples)
    with torch.no_grad():
        reference = Reference(other.hidden(packed), other.output_weights().clone())
        scores = model(packed, 0.8, reference)
        far = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32)
        near = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = []
        for example in examples:
            p, q = (
                (
                    m(input_ids=example.tokens[None]).logits[0, example.targets - 1] / 0.8
                ).log_softmax(-1)
                for m in (far, near)
            )
            expected.append((p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(scores.divergence, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_a_head_with_a_bias_has_no_forward_divergence(tmp_path: Path) -> None:
    config = make_config(kl={"forward": 0.1})
    with pytest.raises(TrainerError, match="kl must not be forward for PhiForCausalLM"):
        Trainer(config, build("phi", tmp_path / "m"))


class TestRefusals:
    """Unsupported parts are named before any weights are read."""

    def refuse(self, path: Path) -> str:
        with pytest.raises(TrainerError) as refused:
            load(path)
        text = str(refused.value)
        assert "\n" not in text
        return text

    def write(self, path: Path, config: Any, **changes: object) -> Path:
        config.save_pretrained(path)
        text = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(text))
        save_file({"w": torch.zeros(1)}, path / "model.safetensors")
        return path

    @pytest.mark.parametrize(
        ("config", "architecture", "words"),
        [
            (transformers.MambaConfig(num_hidden_layers=1), "MambaForCausalLM", "carry state"),
            (transformers.BloomConfig(), "BloomForCausalLM", "attention interface"),
            (transformers.T5Config(), "T5ForConditionalGeneration", "must name a causal"),
            (transformers.BertConfig(), "BertForMaskedLM", "must name a causal language model"),
        ],
    )
    def test_a_part_that_is_not_supported(
        self, tmp_path: Path, config: Any, architecture: str, words: str
    ) -> None:
        path = self.write(tmp_path / "m", config, architectures=[architecture])
        assert words in self.refuse(path)

    def test_quantized_weights(self, tmp_path: Path) -> None:
        path = build("llama", tmp_path / "m")
        text = json.loads((path / "config.json").read_text())
        text["quantization_config"] = {"quant_method": "fp8"}
        (path / "config.json").write_text(json.dumps(text))
        assert "its weights are quantized" in self.refuse(path)

    def test_a_model_that_transformers_does_not_know(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "x", "architectures": ["X"]}')
        assert "transformers cannot read config.json" in self.refuse(tmp_path)

    def test_weights_of_another_shape_and_missing_ones(self, tmp_path: Path) -> None:
        path = build("qwen3_moe", tmp_path / "m")
        tensors = load_file(path / "model.safetensors")
        name = "model.layers.1.mlp.experts.2.gate_proj.weight"
        save_file(tensors | {name: torch.zeros(16, 31)}, path / "model.safetensors")
        assert f"{name} must have shape (16, 32), got (16, 31)" in self.refuse(path)
        del tensors[name]
        save_file(tensors | {"extra": torch.zeros(1)}, path / "model.safetensors")
        text = self.refuse(path)
        assert f"missing ['{name}'], unknown ['extra']" in text

    def test_a_model_that_sees_more_than_attention_shows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A layer that adds its neighbor's state is found by the comparison."""
        path = build("llama", tmp_path / "m")
        from transformers.models.llama import modeling_llama

        compute = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(
            modeling_llama.LlamaMLP,
            "forward",
            lambda self, x: compute(self, x) + 0.1 * x.roll(1, 1),
        )
        assert "packing several sequences changes its log-probs" in self.refuse(path)

        def fails(*_: object) -> None:
            raise ValueError("why\nwhere")

        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", fails)
        assert self.refuse(path).endswith("LlamaForCausalLM is not supported: why")


def test_the_implementation_is_ours_where_it_supports_the_model(tmp_path: Path) -> None:
    ours, other = make_model(tmp_path / "ours"), build("qwen2_sliding", tmp_path / "other")
    assert (implementation_of(ours), implementation_of(other)) == ("native", "transformers")
    chosen = [
        type(load_trained_model(path, name, dtype="float32", device=CPU)).__name__
        for path, name in ((ours, None), (ours, "transformers"), (other, None))
    ]
    assert chosen == ["Model", "TransformersModel", "TransformersModel"]
    with pytest.raises(TrainerError, match="sliding-window attention is not supported"):
        load_trained_model(other, "native", dtype="float32", device=CPU)


def test_both_implementations_compute_the_same(tmp_path: Path) -> None:
    path, examples = make_model(tmp_path / "m"), make_examples(6)
    ours, theirs = (
        load_trained_model(path, name, dtype="float32", device=CPU)(pack(examples), 0.9)
        for name in ("native", "transformers")
    )
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-5)


def test_a_single_sequence_needs_no_padding(tmp_path: Path) -> None:
    path = build("mistral", tmp_path / "m")
    example = Example(tokens=torch.arange(4, 24), targets=torch.arange(1, 20))
    expected, _, _ = oracle(path, [example], 1.0)
    torch.testing.assert_close(
        load(path)(pack([example]), 1.0).logprobs, expected, atol=1e-5, rtol=1e-5
    )


class TestViews:
    """Stored tensors are divided like the rows of their parameters."""

    shape = (4, 6, 5)

    def parts(self, view: View, world_size: int) -> list[torch.Tensor]:
        parameter = torch.arange(120.0).view(self.shape)
        each = -(-4 // world_size)
        parts = []
        for rank in range(world_size):
            rows = slice(min(each * rank, 4), min(each * (rank + 1), 4))
            parts.append(view.part(self.shape, rows).of(view, parameter[rows].clone()))
        return parts

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
    @pytest.mark.parametrize(
        "view",
        [
            StoredTensors.identical({"p": (4, 6, 5)}).views["p"],
            View(parameter="p", offset=2 * 30, size=(3, 5), stride=(5, 1)),  # a part of row 2
            View(parameter="p", offset=30, size=(2, 6, 5), stride=(30, 5, 1)),  # rows 1 and 2
            View(parameter="p", offset=15, size=(4, 3, 5), stride=(30, 5, 1)),  # half of each
        ],
    )
    def test_parts_of_all_ranks_are_the_tensor(self, view: View, world_size: int) -> None:
        whole = view.of(torch.arange(120.0).view(self.shape))
        assert torch.equal(torch.cat(self.parts(view, world_size)), whole)

    def test_a_transposed_tensor_cannot_be_divided(self) -> None:
        view = View(parameter="p", offset=0, size=(6, 4), stride=(5, 30))
        assert torch.equal(
            self.parts(view, 1)[0], torch.arange(120.0).view(self.shape)[:, :, 0].t()
        )
        with pytest.raises(Exception, match="cannot be divided like the rows of p"):
            self.parts(view, 2)
