"""GPUs and links have the figures of their makers, and models the shapes that Qwen
publishes.
"""

import pytest

from rollweave.schema.errors import ConfigError
from rollweave_sim.hardware import GPUS, LINKS, MODELS, ModelShape, gpu, link, model


def test_h20_and_h800_are_as_rollart_table_2_prints_them():
    h20, h800 = gpu("H20"), gpu("H800")
    assert (h20.bf16_flops, h800.bf16_flops) == (148e12, 989.5e12)
    assert (h20.hbm_bytes, h800.hbm_bytes) == (96 * 2**30, 80 * 2**30)
    assert (h20.hbm_bytes_per_s, h800.hbm_bytes_per_s) == (4e12, 3.35e12)
    assert (h20.nvlink_bytes_per_s, h800.nvlink_bytes_per_s) == (900e9, 400e9)


def test_names_are_case_insensitive():
    assert {"h20", "h800", "h100", "h200", "a100"} <= set(GPUS)
    assert {"nvlink", "rdma", "ethernet", "pcie"} <= set(LINKS)
    assert all(gpu(name.upper()).name == name for name in GPUS)
    assert all(link(name.upper()).name == name for name in LINKS)


def test_reachable_speed_is_below_the_published_one():
    assert all(0.5 < gpu_.matmul_efficiency < 1 for gpu_ in GPUS.values())


@pytest.mark.parametrize(
    ("find", "wrong", "words"),
    [
        (gpu, "h8000", ["gpu must be one of a100, h100, h20", "got 'h8000'", "did you mean h800?"]),
        (gpu, "", ["gpu must be", "got ''"]),
        (model, "Qwen3-8", ["model must be one of ", "got 'Qwen3-8' (did you mean qwen3-8b?)"]),
        (
            link,
            "rmda",
            ["link must be one of ethernet, nvlink", "got 'rmda'", "did you mean rdma?"],
        ),
    ],
)
def test_refuses_unknown_names_with_the_closest_one(find, wrong, words):
    with pytest.raises(ConfigError) as refused:
        find(wrong)
    assert all(word in str(refused.value) for word in words)


CARDS = {  # billions: all parameters, without embedding and head, active
    "qwen2.5-7b": (7.61, 6.53, 7.61),
    "qwen2.5-32b": (32.5, 31.0, 32.5),
    "qwen2.5-72b": (72.7, 70.0, 72.7),
    "qwen3-0.6b": (0.6, 0.44, 0.6),
    "qwen3-1.7b": (1.7, 1.4, 1.7),
    "qwen3-4b": (4.0, 3.6, 4.0),
    "qwen3-8b": (8.2, 6.95, 8.2),
    "qwen3-14b": (14.8, 13.2, 14.8),
    "qwen3-32b": (32.8, 31.2, 32.8),
    "qwen3-30b-a3b": (30.5, 29.9, 3.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_card_s_within_two_percent(name):
    shape = model(name)
    total, body, active = CARDS[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert (shape.dense_parameters + shape.expert_parameters) / 1e9 == pytest.approx(body, rel=0.02)
    heads = 1 if shape.tied else 2
    used = shape.layer_parameters + heads * shape.head_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.weight_bytes == 2 * shape.parameters


def test_kv_bytes():
    # 2 x 36 layers x 8 heads x 128 x 2 bytes
    assert model("qwen3-8b").kv_bytes_per_token == 144 * 1024
    assert model("qwen3-30b-a3b").kv_bytes_per_token == 96 * 1024  # as InferSim's README prints it


def test_a_dense_model_uses_all_of_its_layers_and_a_mixture_few():
    dense, mixture = model("qwen3-8b"), model("qwen3-30b-a3b")
    assert dense.layer_parameters == dense.dense_parameters
    assert dense.expert_parameters == 0
    assert (
        mixture.layer_parameters - mixture.dense_parameters == mixture.expert_parameters * 8 // 128
    )


def test_a_tied_head_is_counted_once():
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16}
    sizes["vocab"] = 100
    tied = ModelShape(name="tied", tied=True, **sizes)
    untied = ModelShape(name="untied", tied=False, **sizes)
    assert untied.parameters - tied.parameters == 800
    assert tied.parameters == 8 * 4 * (2 + 1 + 1 + 2) + 3 * 8 * 16 + 800
    assert tied.layer_parameters + tied.head_parameters == tied.parameters
