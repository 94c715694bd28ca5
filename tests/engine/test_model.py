"""The output head in oneDNN's layout gives the logits of the head as it is."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.engine.model import Decoder
from rollweave.io.machine import has_bfloat16
from rollweave.weights import needs
from rollweave.weights.checkpoint import read_shape
from tests.support.engines import tiny_checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_large_output_head_gives_the_same_logits_for_any_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tied: bool
) -> None:
    if dtype is torch.bfloat16 and not has_bfloat16():
        pytest.skip("this CPU computes such models in float32")
    monkeypatch.setattr(needs, "PACKED_WEIGHTS", 128 * 16)
    tiny_checkpoint(tmp_path, tie_word_embeddings=tied)
    decoder = Decoder(read_shape(tmp_path), device=torch.device("cpu"), dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    for turn in range(3):  # loaded, loaded again, and copied from another version
        tensors = {name: tensor * (turn + 1) for name, tensor in tensors.items()}
        staged = decoder.weights if turn < 2 else decoder.allocate()
        staged.load(tensors.items())
        decoder.update(staged, in_place=turn == 2)
        assert decoder.weights.packed_head is not None
        for rows in (0, 1, 3, 4, 5, 33):
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)).to(dtype)
            expected = (x @ decoder.weights.head).float()
            torch.testing.assert_close(decoder.logits(x), expected, atol=1e-2, rtol=1e-2)


def test_a_small_head_and_a_deterministic_engine_have_one_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = read_shape(tiny_checkpoint(tmp_path))
    for tiles, least in ((False, 128 * 16 + 1), (True, 1)):
        monkeypatch.setattr(needs, "PACKED_WEIGHTS", least)
        decoder = Decoder(shape, device=torch.device("cpu"), dtype=torch.float32, tiles=tiles)
        decoder.weights.load(load_file(tmp_path / "model.safetensors").items())
        assert decoder.weights.packed_head is None
