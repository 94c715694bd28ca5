"""Ranks that divide the layers of a model train like one rank, and a model that they
cannot divide is refused.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.errors import ConfigError
from rollweave.train import distributed
from rollweave.train.loading import examine
from tests.support.architectures import build

SPLITS = [None, distributed.Split(0), distributed.Split(1), distributed.Split(1, blocks=2)]


def rank_of(number: int, *, data: int, tensor: int) -> distributed.RankGroup:
    return distributed.RankGroup(rank=number, world_size=data * tensor, tensor_size=tensor)


@given(
    each=st.integers(1, 9),
    data=st.integers(1, 4),
    tensor=st.integers(1, 4),
    split=st.sampled_from(SPLITS),
)
def test_each_row_is_published_once(
    each: int, data: int, tensor: int, split: distributed.Split | None
) -> None:
    """Each row is also saved by a rank that has it, together with the other columns of
    its group.
    """
    count = each * tensor
    published_by = [0] * count
    for number in range(data * tensor):
        ranks = rank_of(number, data=data, tensor=tensor)
        own = distributed.published_rows(count, ranks, split=split)
        saved = distributed.saved_rows(count, ranks, split=split)
        assert saved.start <= own.start <= own.stop <= saved.stop
        for row in range(count)[own]:
            published_by[row] += 1
        if split is not None and split.dim:
            group = distributed.rows_of(count, rank=ranks.data_rank, world_size=data)
            assert group.start <= saved.start <= saved.stop <= group.stop
    assert published_by == [1] * count


@given(
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    tensor=st.integers(1, 4),
    dim=st.integers(0, 2),
    blocks=st.integers(1, 2),
)
def test_parts_of_a_parameter_make_it_up(
    shape: tuple[int, int, int], tensor: int, dim: int, blocks: int
) -> None:
    size = [count * tensor * blocks if place == dim else count for place, count in enumerate(shape)]
    full, split = torch.randn(size), distributed.Split(dim, blocks)
    ranks = [rank_of(number, data=1, tensor=tensor) for number in range(tensor)]
    parts = [split.take(full, rank) for rank in ranks]
    assert torch.equal(split.join(parts), full)
    assert all(
        distributed.full_shape(part.shape, split, rank) == full.shape
        for part, rank in zip(parts, ranks, strict=True)
    )
    if blocks == 2:  # a rank has the same part of both halves
        halves = [part.chunk(2, dim) for part in parts]
        expected = [half.chunk(tensor, dim) for half in full.chunk(2, dim)]
        for number, (first, second) in enumerate(halves):
            assert torch.equal(first, expected[0][number])
            assert torch.equal(second, expected[1][number])


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        ("gpt_oss", 2, "must be 1 for GptOssForCausalLM, whose layers have no tp_plan, got 2"),
        ("llama", 4, "must divide num_key_value_heads of LlamaForCausalLM (2), got 4"),
        ("glm4", 3, "must divide num_attention_heads of Glm4ForCausalLM (4), got 3"),
        ("phi3", 3, "must divide dimension 1 of model.layers.0.self_attn.o_proj.weight (32), got"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(
    tmp_path: Path, name: str, size: int, problem: str
) -> None:
    path = build(name, tmp_path / "m")
    with pytest.raises(ConfigError) as refused:
        examine(path, tensor_parallel=size)
    assert str(refused.value).startswith(f"trainer.tensor_parallel {problem}")
    assert examine(path)[0].views
