"""The estimate is exact for weights and KV."""

from pathlib import Path

import pytest
from safetensors import safe_open

from rollweave.runtime.preflight.memory import kv_bytes, memory, parameters, scratch_shape
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ScratchModel
from rollweave.train.scratch import build_checkpoint
from rollweave.weights.checkpoint import read_shape

SCRATCH = ScratchModel(hidden=64, layers=3)
CONTEXT = 64


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    build_checkpoint(path, scratch=SCRATCH, context=CONTEXT, words=["one", "two"], seed=0)
    return path


def numbers_in(path: Path) -> int:
    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (a handle is no mapping)


def test_parameters_are_those_of_the_checkpoint(built: Path) -> None:
    shape = read_shape(built)
    assert parameters(shape) == numbers_in(built)
    assert parameters(scratch_shape(SCRATCH, shape.vocab, context=CONTEXT)) == numbers_in(built)


def config(*overrides: str) -> RunConfig:
    return loads('[run]\nname = "m"\n[model.scratch]\n[[tasks]]\nenv = "nim"\n', overrides)


def needs(*overrides: str) -> dict[str, int]:
    return {
        need.what: need.total
        for need in memory(config(*overrides), scratch_shape(SCRATCH, 200, context=CONTEXT))
    }


def test_adamw_keeps_two_moments_beside_weights_and_gradients() -> None:
    sizes = needs()
    assert (
        sizes["trainer: weights"]
        == sizes["trainer: gradients"]
        == 4 * parameters(scratch_shape(SCRATCH, 200, context=CONTEXT))
    )
    assert sizes["trainer: optimizer (AdamW)"] == 2 * sizes["trainer: weights"]
    assert sizes["trainer: copy for a checkpoint"] == 3 * sizes["trainer: weights"]


def test_a_reference_needs_memory_only_with_kl() -> None:
    assert "trainer: reference" not in needs()
    assert needs("algorithm.kl=0.1")["trainer: reference"] == needs()["trainer: weights"]


def test_each_engine_needs_weights_and_kv() -> None:
    one, three = needs("engines.kv_tokens=4096"), needs("engines.kv_tokens=4096", "engines.count=3")
    assert three["engines: KV cache"] == 3 * one["engines: KV cache"]
    # tokens, keys and values, layers, heads, dim, float32
    assert one["engines: KV cache"] == 4096 * 2 * 3 * 2 * 16 * 4
    assert three["engines: weights"] == 3 * one["engines: weights"]


def test_bfloat16_halves_the_engines_memory_but_not_the_trainers() -> None:
    full, half = needs(), needs("model.dtype=bfloat16")
    assert 2 * half["engines: weights"] == full["engines: weights"]
    assert half["trainer: weights"] == full["trainer: weights"]
    shape = scratch_shape(SCRATCH, 200, context=CONTEXT)
    assert 2 * kv_bytes(shape, 2) == kv_bytes(shape, 4)


def test_activations_are_bounded_by_the_packed_pass_and_by_the_batch() -> None:
    assert (
        needs("trainer.micro_tokens=512")["trainer: activations"] < needs()["trainer: activations"]
    )
    small = ("rollout.groups_per_step=1", "rollout.group_size=2")
    assert needs(*small) == needs(*small, "trainer.micro_tokens=1000000")
