"""The estimate is exact for weights and KV, and close for what a backward pass
needs.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rollweave.engine.needs import engine_needs
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import LoraConfig, ScratchModel
from rollweave.schema.hosts import Need
from rollweave.train.lora import NewAdapters
from rollweave.train.model import Model
from rollweave.train.needs import (
    MASTER_BYTES,
    gathered_layers,
    layer_bytes,
    logit_bytes,
    rank_needs,
)
from rollweave.train.packing import Example, pack
from rollweave.train.scratch import build_checkpoint, scratch_shape
from rollweave.weights.checkpoint import ModelShape, read_shape
from rollweave.weights.needs import PUBLICATIONS, relay_needs, trained_parameters

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
    assert shape.parameters() == numbers_in(built)
    assert scratch_shape(SCRATCH, shape.vocab, context=CONTEXT).parameters() == numbers_in(built)


def config(*overrides: str) -> RunConfig:
    return loads('[run]\nname = "m"\n[model.scratch]\n[[tasks]]\nenv = "nim"\n', overrides)


SMALL = scratch_shape(SCRATCH, 200, context=CONTEXT)


def sizes(needs: list[Need]) -> dict[str, int]:
    return {need.what: need.nbytes for need in needs}


def rank(*overrides: str, number: int = 0) -> dict[str, int]:
    return sizes(rank_needs(config(*overrides), SMALL, rank=number))


def engine(*overrides: str) -> dict[str, int]:
    run = config(*overrides)
    return sizes(engine_needs(run, SMALL, run.engines[0]))


def test_adamw_keeps_two_moments_beside_weights_and_gradients() -> None:
    parts = rank()
    assert parts["weights"] == parts["gradients"] == 4 * SMALL.parameters()
    assert parts["optimizer"] == 2 * parts["weights"]


def test_ranks_share_the_copy_for_a_checkpoint() -> None:
    one, two = (rank("model.device=cuda", f"trainer.ranks={ranks}") for ranks in (1, 2))
    assert one["copy for a checkpoint"] == 3 * one["weights"] == 2 * two["copy for a checkpoint"]


def test_on_a_cpu_nothing_is_copied_for_a_checkpoint() -> None:
    assert "copy for a checkpoint" not in rank("algorithm.kl=0.1")


def test_logits_are_those_of_the_tokens_that_may_be_sampled() -> None:
    """A turn of 10 tokens in a trajectory of 100."""
    limits = ("tasks.0.max_tokens=100", "trainer.micro_tokens=1000", "tasks.0.max_turns=1")
    few, all_ = (rank(*limits, f"tasks.0.max_turn_tokens={count}") for count in (10, 100))
    logits = logit_bytes(1000, SMALL.vocab) - logit_bytes(100, SMALL.vocab)
    assert all_["activations"] - few["activations"] == logits == 900 * SMALL.vocab * 4 * 2


def test_what_saves_the_trainers_memory() -> None:
    saving = "trainer.save_memory=['activations', 'optimizer']"
    assert rank(saving)["activations"] < rank()["activations"]
    on_device = {need.what for need in rank_needs(config(saving), SMALL, rank=0) if need.on_device}
    assert on_device & {"weights", "optimizer"} == {"weights"}
    assert "activations" not in rank("run.steps=0")  # an evaluation


def test_a_reference_and_a_copy_to_undo_a_batch_need_memory_only_if_used() -> None:
    assert not {"reference", "copy of the state"} & set(rank())
    assert rank("algorithm.kl=0.1")["reference"] == 2 * rank()["weights"]
    for setting in ("epochs", "minibatches"):
        assert rank(f"trainer.{setting}=2")["copy of the state"] == 3 * rank()["weights"]


def test_adapters_have_gradients_and_moments_and_the_model_has_none() -> None:
    whole, few, many = rank(), rank("lora.rank=2"), rank("lora.rank=4")
    of_adapters = few["gradients"]
    with torch.device("meta"):
        model = Model(SMALL, torch.float32)
    NewAdapters(LoraConfig(rank=2), seed=0).attach(model, head=model.lm_head)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert of_adapters == MASTER_BYTES * sum(each.numel() for each in trained)
    assert few["weights"] == whole["weights"] + of_adapters
    assert few["optimizer"] == 2 * of_adapters
    assert few["published weights"] == of_adapters
    assert many["gradients"] == 2 * of_adapters
    assert rank("lora.targets=q_proj")["gradients"] < of_adapters
    assert rank("lora.rank=2", "algorithm.kl=0.1")["reference"] == 2 * of_adapters
    assert few["activations"] < many["activations"]
    assert engine("lora.rank=2") == engine()


def test_each_engine_needs_weights_and_kv() -> None:
    parts = engine("engines.kv_tokens=4096")
    # tokens, keys and values, layers, heads, dim, float32
    assert parts["KV cache"] == parts["copy of the KV cache"] == 4096 * 2 * 3 * 2 * 16 * 4
    assert parts["weights"] == 4 * SMALL.parameters()
    assert "copy of the KV cache" not in engine("model.dtype=bfloat16")
    assert "copy of the KV cache" not in engine("engines.deterministic=true")
    assert {"one step", "CUDA"} <= set(engine("model.device=cuda"))


def test_a_vllm_server_needs_more_than_a_process_of_ours() -> None:
    vllm = engine("engines.kind='vllm'")
    assert (vllm["weights"], vllm["KV cache"]) == (engine()["weights"], engine()["KV cache"])
    assert vllm["vLLM"] > engine()["process"]
    assert "copy of the KV cache" not in vllm


def test_a_version_for_sglang_is_copied_beside_its_weights() -> None:
    sglang = engine("engines.kind='sglang'")
    assert sglang["new weights"] == sglang["weights"]
    assert sglang["SGLang"] > engine()["process"]
    assert "new weights" not in engine("engines.kind='vllm'")


def test_bfloat16_halves_the_engines_memory_but_not_the_trainers() -> None:
    half = "model.dtype=bfloat16"
    assert 2 * engine(half)["weights"] == engine()["weights"]
    assert rank(half)["weights"] == rank()["weights"]
    # two versions of half the size; of the float32 ones the weights are a mapping
    assert rank(half)["published weights"] == rank()["published weights"]
    assert 2 * SMALL.kv_bytes(2) == SMALL.kv_bytes(4)


def test_only_the_first_rank_and_the_relays_of_other_hosts_keep_published_weights() -> None:
    assert rank()["published weights"] == 4 * SMALL.parameters()
    for setting in ("algorithm.kl=0.1", "trainer.minibatches=2", "trainer.ranks=2"):
        assert rank(setting)["published weights"] == 2 * 4 * SMALL.parameters()
    assert "published weights" not in rank("trainer.ranks=2", number=1)
    beside = sizes(relay_needs(config(), SMALL, stores=False))
    other = sizes(relay_needs(config(), SMALL, stores=True))
    assert other["published weights"] == PUBLICATIONS * 4 * SMALL.parameters()
    assert "published weights" not in beside


def test_activations_are_bounded_by_the_packed_pass_and_by_the_batch() -> None:
    assert rank("trainer.micro_tokens=1200")["activations"] < rank()["activations"]
    small = ("rollout.groups_per_step=1", "rollout.group_size=2")
    assert rank(*small) == rank(*small, "trainer.micro_tokens=1000000")


# Against a slow and obvious reference.

shapes = st.builds(
    lambda layers, heads, group, dim, hidden, ffn, vocab, tied, norm, bias: ModelShape(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads * group,
        kv_heads=heads,
        head_dim=2 * dim,
        ffn=ffn,
        context=CONTEXT,
        tied=tied,
        qkv_bias=bias,
        mlp_bias=bias,
        qk_norm=norm,
        inv_freq=tuple(1.0 for _ in range(dim)),
    ),
    layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    group=st.integers(1, 4),
    dim=st.integers(1, 32),
    hidden=st.integers(1, 300),
    ffn=st.integers(1, 400),
    vocab=st.integers(2, 500),
    tied=st.booleans(),
    norm=st.booleans(),
    bias=st.booleans(),
)


def numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@given(shape=shapes, ranks=st.integers(1, 16))
def test_shards_hold_the_whole_model_and_little_more(shape: ModelShape, ranks: int) -> None:
    with torch.device("meta"):
        model = Model(shape, torch.float32)
    total = numel(model) * MASTER_BYTES
    run = config(f"trainer.ranks={ranks}")
    shards = [sizes(rank_needs(run, shape, rank=number)) for number in range(ranks)]
    for what, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        held = sum(shard[what] for shard in shards)
        assert copies * total <= held < copies * (total + ranks * MASTER_BYTES)
    layers = [numel(layer) for layer in model.model.layers]
    rest = numel(model) - sum(layers)
    assert gathered_layers(shape, config("trainer.ranks=2")) == MASTER_BYTES * (
        3 * layers[0] + 2 * rest
    )
    assert all(("gathered layers" in shard) == (ranks > 1) for shard in shards)


@given(shape=shapes, groups=st.integers(1, 4), size=st.integers(2, 4))
def test_a_tensor_group_divides_the_matrices_of_the_layers(
    shape: ModelShape, groups: int, size: int
) -> None:
    with torch.device("meta"):
        model = Model(shape, torch.float32)
    matrices = sum(
        parameter.numel() for parameter in model.model.layers.parameters() if parameter.dim() > 1
    )
    run = config(
        f"trainer.ranks={groups * size}",
        f"trainer.tensor_parallel={size}",
        "model.implementation=transformers",
    )
    of_rank, whole = sizes(rank_needs(run, shape, rank=0)), rank_needs(config(), shape, rank=0)
    expected = matrices / size + numel(model) - matrices
    for what, copies in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        parameters = of_rank[what] / (copies * MASTER_BYTES)
        assert 0 <= parameters - expected / groups < 2
    assert of_rank["activations"] <= sizes(whole)["activations"]
    with_lora = run.model_copy(update={"lora": LoraConfig()})
    adapted = sizes(rank_needs(with_lora, shape, rank=0))
    assert adapted["weights"] == of_rank["weights"] + adapted["gradients"]
    trained = trained_parameters(with_lora, shape)
    assert 0 <= adapted["gradients"] / MASTER_BYTES - trained / groups < 1


def kept_for_backward(shape: ModelShape, dtype: torch.dtype, lengths: list[int]) -> int:
    """Return the bytes of all memory that autograd keeps, except for parameters."""
    torch.manual_seed(0)
    model = Model(shape, dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    examples = [
        Example(
            tokens=torch.randint(0, shape.vocab, (length + 1,)), targets=torch.arange(1, length + 1)
        )
        for length in lengths
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        model(pack(examples), 1.0)
    return sum(storage.nbytes() for storage in kept.values())


def decoder(**sizes: int) -> ModelShape:
    values = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "dim": 16, "ffn": 192, **sizes}
    dim = values.pop("dim")
    return ModelShape(
        vocab=128,
        head_dim=dim,
        context=4096,
        qk_norm=dim == 16,
        inv_freq=tuple(1.0 for _ in range(dim // 2)),
        **values,
    )


@pytest.mark.variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[256], [768], [256] * 4])
@pytest.mark.parametrize(
    "shape",
    [
        decoder(),
        decoder(heads=8, hidden=128, ffn=320, layers=4),
        decoder(heads=4, kv_heads=4, dim=32, hidden=200, ffn=700, layers=6),
    ],
    ids=["small", "narrow heads", "no groups"],
)
def test_activations_are_what_autograd_keeps(
    shape: ModelShape, lengths: list[int], dtype: torch.dtype
) -> None:
    measured = kept_for_backward(shape, dtype, lengths)
    tokens = sum(lengths)
    estimate = logit_bytes(tokens, shape.vocab) + layer_bytes(
        shape, tokens, longest=max(lengths), width=dtype.itemsize, on_cpu=True
    )
    assert measured <= estimate <= 1.15 * measured
