"""An engine reads the tensors of a trainer's checkpoint from the files of all ranks, or
is told what is wrong.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollweave.io.disk import file_digest
from rollweave.schema.errors import WeightsError
from rollweave.weights import trainer_checkpoint
from rollweave.weights.views import StoredTensors, View

W = torch.arange(20.0).reshape(5, 4) + 2**-12
OTHERS = {"bias": torch.tensor([1.0, 2.0]), "scalar": torch.tensor(3.5)}
NAMES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def write(directory: Path, *, step: int = 4, form: int = 1) -> None:
    """Write a checkpoint of three ranks: shards of `W`, and what one file has."""
    shards = [(W[:3], (0, 0)), (W[3:, :1], (3, 0)), (W[3:, 1:], (3, 1))]
    for rank, (shard, offset) in enumerate(shards):
        file = directory / trainer_checkpoint.file_of("model", rank=rank, world_size=3)
        places = {trainer_checkpoint.PLACES: json.dumps({"w": ((5, 4), offset)})}
        save_file({"w": shard.contiguous()} | (OTHERS if rank == 1 else {}), file, places)
    (directory / "state.json").write_text(json.dumps({"format": form, "step": step}))
    files = [path for path in directory.iterdir() if path.name != "digests.json"]
    digests = {path.name: [path.stat().st_size, file_digest(path)] for path in files}
    (directory / "digests.json").write_text(json.dumps(digests))


def read(directory: Path) -> dict[str, torch.Tensor]:
    return trainer_checkpoint.read_trainer_checkpoint(directory, step=4, dtype=torch.bfloat16)


def test_reads_the_shards_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path)
    files, single = trainer_checkpoint.files_of, trainer_checkpoint.file_of("model")
    others = ["model-x.safetensors", "my-model.safetensors", "model_safetensors"]
    assert files("model", [single, *NAMES[::-1], *others]) == [*NAMES, "model.safetensors"]
    tensors = read(tmp_path)
    assert tensors.keys() == {"w", *OTHERS}
    for name, tensor in {"w": W, **OTHERS}.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor.bfloat16()), name
    with trainer_checkpoint.SavedTensors(tmp_path / name for name in NAMES) as saved:
        assert torch.equal(saved.read("w"), W)
        part = saved.read_part("w", saved.shards["w"][2], (1, 2), (1, 1))
        assert part.tolist() == W[4:5, 3:4].tolist()
        assert saved.read_part("scalar", saved.shards["scalar"][0], (), ()) == 3.5
    with pytest.raises(SafetensorError, match="closed"):
        saved.read("w")


def test_stored_tensors_constants_and_what_is_wrong(tmp_path: Path) -> None:
    half: dict[str, Any] = {"size": (2, 4), "stride": (4, 1), "parameter": "w"}
    views = {"low": View(offset=0, **half), "high": View(offset=12, **half)}
    views["b"] = View(parameter="bias", offset=1, size=(), stride=())
    (tmp_path / "stored.json").write_bytes(msgspec.json.encode(StoredTensors(views=views)))
    save_file({"c": torch.ones(3)}, tmp_path / "constants.safetensors")
    for change, error in (({"step": 5}, "'step': 5"), ({"form": 2}, "'format': 2"), ({}, "")):
        write(tmp_path, **change)
        if error:
            with pytest.raises(
                WeightsError, match=rf"must be of step 4 in format 1, got .*{error}"
            ):
                read(tmp_path)
    expected = {"low": W[:2], "high": W[3:], "b": torch.tensor(2.0), "c": torch.ones(3)}
    for name, tensor in read(tmp_path).items():
        assert torch.equal(tensor.float(), expected.pop(name).bfloat16().float())
    assert expected == {}
    assert read(tmp_path)["c"].dtype == torch.float32
    for name in ("state.json", "stored.json", "constants.safetensors", NAMES[1]):
        content = (tmp_path / name).read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
            (tmp_path / name).write_bytes(damaged)
            with pytest.raises(WeightsError, match=f"is damaged: {name} does not match its digest"):
                read(tmp_path)
        (tmp_path / name).write_bytes(content)
    digests = json.loads((tmp_path / "digests.json").read_text())
    digests[NAMES[0]][0] += 1
    (tmp_path / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(WeightsError, match=f"is damaged: {NAMES[0]} does not match"):
        read(tmp_path)
    for text, error in (("{}", "'state.json'"), (None, "'model.safetensors'|No such file")):
        (tmp_path / "digests.json").write_text(text) if text else (
            tmp_path / "digests.json"
        ).unlink()
        with pytest.raises(WeightsError, match=f"is incomplete or invalid: .*{error}"):
            read(tmp_path)
