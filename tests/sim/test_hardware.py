"""Published figures, and names that do not exist."""

import pytest

from rollweave.schema.errors import ConfigError
from rollweave.sim.hardware import GPUS, LINKS, gpu, link


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
