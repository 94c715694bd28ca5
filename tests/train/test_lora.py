"""Adapters are trained as peft computes them, and are published, saved, restored and
exported without the model that they belong to.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollweave.runtime.preflight.model import _transformers
from rollweave.runtime.preflight.site import Site
from rollweave.schema.config.training import LoraConfig
from rollweave.schema.errors import ConfigError, TrainerError
from rollweave.schema.training import Restore, TrainFailed
from rollweave.train.loading import implementation_of, load_trained_model
from rollweave.train.lora import NewAdapters
from rollweave.train.packing import Example, pack
from rollweave.train.trainer import Trainer
from rollweave.weights.adapters import A, AdapterBase, B, adapter_sizes, check_adapter
from rollweave.weights.checkpoint import read_any_shape, read_shape
from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint
from tests.support.architectures import CONFIGURATIONS, build
from tests.support.trainers import CPU, make_batch, make_config, make_examples, make_model
from tests.support.variants import mostly_extended
from tests.train.asking import changed, published, refused, restore_from, save_to, trained

# peft reads it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ALL: dict[str, Any] = {"rank": 3, "alpha": 6.0}
SOME: dict[str, Any] = {"rank": 3, "targets": ["q_proj", "mlp.down_proj"]}


def train(trainer: Trainer, steps: int) -> None:
    for step in range(trainer.step, steps):
        trained(trainer, make_batch(step, step=step))


@torch.no_grad()
def logprobs(causal: Any, examples: list[Example]) -> torch.Tensor:
    """Return the log-probs of the targets by transformers, one sequence at a time."""
    rows_of_targets = []
    for example in examples:
        rows = causal(example.tokens[None]).logits[0].float().log_softmax(-1)
        rows_of_targets.append(rows[example.targets - 1, example.tokens[example.targets]])
    return torch.cat(rows_of_targets)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("qwen2", ALL), ("qwen2", SOME), ("llama", SOME), ("qwen3", ALL)),
        ("qwen3_moe", ALL),  # its experts are not linear layers
        ("phi3", {"targets": ["qkv_proj"]}),
    ],
)
def test_peft_and_transformers_compute_what_was_trained(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """The trainer, its merged export, and its adapters that peft adds to the model give
    the same log-probs.
    """
    peft = pytest.importorskip("peft", reason="needs the extra `test`")
    path, examples = build(name, tmp_path / name), make_examples(5)
    trainer = Trainer(make_config(lora=settings), path)
    with torch.no_grad():
        untrained = trainer._model(pack(examples), 1.0).logprobs
    train(trainer, 3)
    save_to(trainer, tmp_path / "c", export=True)
    with torch.no_grad():
        own = trainer._model(pack(examples), 1.0).logprobs
    assert float((own - untrained).abs().max()) > 0.05
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.testing.assert_close(untrained, logprobs(base, examples), atol=1e-5, rtol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "c" / "hf", dtype=torch.float32)
    torch.testing.assert_close(own, logprobs(merged, examples), atol=2e-5, rtol=1e-5)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "c" / "adapter")
    torch.testing.assert_close(own, logprobs(adapted, examples), atol=2e-5, rtol=1e-5)
    wanted = {name.removesuffix(A).removesuffix(B) for name in published(trainer, 3)}
    adapted_modules = {
        name for name, module in adapted.model.named_modules() if hasattr(module, "lora_A")
    }
    assert adapted_modules == wanted


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_gradients_are_those_of_peft(tmp_path: Path, implementation: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra `test`")
    path, examples = build("qwen2", tmp_path / "m"), make_examples(4)
    trainer = Trainer(make_config(lora=ALL), path)
    train(trainer, 2)
    save_to(trainer, tmp_path / "c", export=True)
    adapters = NewAdapters(make_config(lora=ALL).lora, seed=0)  # type: ignore[arg-type]
    model = load_trained_model(path, implementation, dtype="float32", device=CPU, adapters=adapters)
    with torch.no_grad():
        for name, tensor in published(trainer, 2).items():
            model.get_parameter(name).copy_(tensor)
    (-model(pack(examples), 1.0).logprobs.sum()).backward()
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    other = peft.PeftModel.from_pretrained(base, tmp_path / "c" / "adapter", is_trainable=True)
    for example in examples:
        rows = other(example.tokens[None]).logits[0].log_softmax(-1)
        (-rows[example.targets - 1, example.tokens[example.targets]].sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith((A, B))
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        expected = other.get_parameter(
            f"base_model.model.{name.removesuffix('.weight')}.default.weight"
        ).grad
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, atol=2e-4, rtol=1e-3, msg=name)


def test_only_adapters_are_published_saved_and_restored(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    config = make_config(trainer={"epochs": 2, "minibatches": 2}, kl=0.1, lora=ALL)
    trainer, whole = Trainer(config, path), Trainer(make_config(), path)
    frozen = {n: p.clone() for n, p in trainer._model.named_parameters() if not p.requires_grad}
    train(trainer, 2)
    after = published(trainer, 2)
    assert all(name.endswith((A, B)) for name in after)
    assert all(tensor.abs().max() > 0 for tensor in after.values())
    assert (
        sum(t.nbytes for t in after.values())
        < sum(t.nbytes for t in published(whole, 2).values()) / 4
    )
    save_to(trainer, tmp_path / "c")
    saved = load_file(tmp_path / "c" / "model.safetensors")
    moments = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert (
        saved.keys() == after.keys() == load_file(tmp_path / "c" / "reference.safetensors").keys()
    )
    assert {name.split(".", 1)[1] for name in moments} == set(after)
    read = read_trainer_checkpoint(tmp_path / "c", step=2, dtype=torch.float32)
    assert all(torch.equal(read[name], tensor) for name, tensor in after.items())
    train(trainer, 4)
    expected = published(trainer, 4)
    resumed = Trainer(config, path)
    restore_from(resumed, tmp_path / "c", step=2)
    train(resumed, 4)
    assert all(torch.equal(t, expected[name]) for name, t in published(resumed, 4).items())
    assert all(torch.equal(p, trainer._model.get_parameter(n)) for n, p in frozen.items())


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    other = Trainer(make_config(lora=ALL), path)
    save_to(other, tmp_path / "c")
    trainer = Trainer(make_config(lora={"rank": 2}), path)
    reply = refused(trainer, Restore(path=str(tmp_path / "c")))
    assert "lora_A.weight must have shape (2, 32), got (3, 32)" in reply.error
    reply = Trainer(make_config(), path).handle(Restore(path=str(tmp_path / "c")))
    assert isinstance(reply, TrainFailed)
    assert "weights of another model" in reply.error


def test_the_first_adapters_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    one, same = (Trainer(make_config(lora=ALL), path) for _ in range(2))
    first, second = published(one, 0), published(same, 0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not tensor.any() for name, tensor in first.items() if name.endswith(B))
    distinct = {tuple(t.flatten()[:8].tolist()) for name, t in first.items() if name.endswith(A)}
    assert len(distinct) == sum(name.endswith(A) for name in first)


def test_a_run_starts_from_an_adapter_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra `test`")
    path, examples = build("qwen3", tmp_path / "m"), make_examples(4)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made = peft.LoraConfig(
        r=3, lora_alpha=6.0, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, made)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "a")
    settings = {
        **SOME,
        "alpha": 6.0,
        "targets": ["q_proj", "down_proj"],
        "path": str(tmp_path / "a"),
    }
    config = make_config()
    lora = LoraConfig.model_validate(settings)
    check_adapter(tmp_path / "a", adapter_sizes(read_shape(path), lora), lora, base=path)
    trainer = Trainer(config.model_copy(update={"lora": lora}), path)
    with torch.no_grad():
        own = trainer._model(pack(examples), 1.0).logprobs
    torch.testing.assert_close(own, logprobs(model, examples), atol=2e-5, rtol=1e-5)


def test_an_adapter_of_another_model_or_with_other_settings_is_refused(tmp_path: Path) -> None:
    path, other = make_model(tmp_path / "m"), make_model(tmp_path / "o", seed=1)
    wider = make_model(tmp_path / "w", hidden=64)
    trainer = Trainer(make_config(lora=ALL), path)
    train(trainer, 1)
    save_to(trainer, tmp_path / "c", export=True)
    adapter = tmp_path / "c" / "adapter"

    def check(base: Path, **changes: Any) -> None:
        lora = LoraConfig.model_validate(ALL | changes)
        check_adapter(adapter, adapter_sizes(read_shape(base), lora), lora, base=base)

    check(path)
    problems = {
        "r must be 4, got 3": lambda: check(path, rank=4),
        "lora_alpha must be 5.0, got 6.0": lambda: check(path, alpha=5.0),
        f"of another base model than {other}": lambda: check(other),
        f"of another base model than {wider}: base_model.model.": lambda: check(wider),
        "or of other lora.targets": lambda: check(path, targets=["q_proj"]),
    }
    for problem, attempt in problems.items():
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value).startswith("lora.path must be an adapter's directory: ")
        assert problem in str(error.value)
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(described | {"use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora is not supported"):
        check(path)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lora\.path must be an adapter's directory"):
        check(path)
    lora = LoraConfig.model_validate(ALL | {"path": str(adapter)})
    with pytest.raises(TrainerError, match=r"lora\.path: "):
        Trainer(make_config().model_copy(update={"lora": lora}), path)


OF_TEXT = [name for name, make in CONFIGURATIONS.items() if not hasattr(make(), "vision_config")]


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3_vision"])
def test_a_model_that_also_sees_takes_no_adapters(tmp_path: Path, name: str) -> None:
    path = build(name, tmp_path / name)
    config = make_config(lora={"targets": ["q_proj"]})
    model = config.model.model_copy(update={"path": str(path), "scratch": None})
    config = config.model_copy(update={"model": model})
    (check,) = _transformers(config, read_any_shape(path), Site())
    assert check.name == "lora"
    assert "must be left out for a model whose layers have other names" in check.detail


@pytest.mark.parametrize(
    "name", mostly_extended(OF_TEXT, {"qwen3", "gpt_oss", "deepseek_v3", "granite"})
)
def test_the_checks_before_a_run_know_the_adapters(tmp_path: Path, name: str) -> None:
    path = build(name, tmp_path / name)
    trainer = Trainer(make_config(lora=ALL), path)
    sizes = {name: tuple(tensor.shape) for name, tensor in published(trainer, 0).items()}
    assert adapter_sizes(read_any_shape(path), LoraConfig.model_validate(ALL)) == sizes


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    path = build("gemma3", tmp_path / "m")
    assert implementation_of(path) == "transformers"
    with pytest.raises(TrainerError, match=r"lora.targets must name linear layers.*got 'qproj'"):
        Trainer(make_config(lora={"targets": ["qproj"]}), path)


def test_bfloat16_is_close_and_the_export_has_it(tmp_path: Path) -> None:
    path = build("qwen3", tmp_path / "m")
    config = make_config(lora=ALL)
    config = changed(config, "model", dtype="bfloat16")
    trainer = Trainer(config, path)
    train(trainer, 2)
    save_to(trainer, tmp_path / "c", export=True)
    exported = load_file(tmp_path / "c" / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert exported.keys() == load_file(path / "model.safetensors").keys()
    described = json.loads((tmp_path / "c" / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (3, 6.0)
    shape = read_shape(path)
    base = AdapterBase(load_file(path / "model.safetensors"), shape, scale=2.0)
    adapters = load_file(tmp_path / "c" / "model.safetensors")
    for name, tensor in base.with_adapters(adapters, CPU):
        assert torch.equal(tensor.bfloat16(), exported[name]), name
