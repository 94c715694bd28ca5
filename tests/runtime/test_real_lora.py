"""Runs that train adapters with the real engine and the real trainer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollweave.runtime.launch import train
from rollweave.schema.config.root import RunConfig
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.staging import on_device
from tests.support.real_runs import lake, lines, longer, run_dir

pytestmark = pytest.mark.slow

EXACT = 1e-4


def adapted(directory: Path, **sections: Any) -> RunConfig:
    # without an entropy bonus, groups of equal rewards would train nothing
    usual = {"lora": {"rank": 4}, "trainer": {"lr": {"peak": 3e-2, "warmup": 0}}}
    sections = usual | {"algorithm": {"entropy": 0.1}} | sections
    return lake(directory, **sections)


def gaps(config: RunConfig) -> list[float]:
    gaps = [line["trainer"].get("logprob_gap_max") for line in lines(config, "step")]
    assert any(gaps)
    return [gap for gap in gaps if gap is not None]


def test_a_run_in_processes_that_is_resumed(tmp_path: Path) -> None:
    """The base is what the warm-up made of the random weights, and stays as it is."""
    config = adapted(tmp_path)
    assert train(config).error == ""
    base = load_file(run_dir(config) / "model" / "model.safetensors")
    assert not list(run_dir(config).glob("random*"))
    assert not list(run_dir(config).glob("warm*"))
    assert max(gaps(config)) < EXACT
    again = longer(config, 4)
    summary = train(again, resume=True)
    assert (summary.error, summary.steps) == ("", 4)
    assert max(gaps(again)) < EXACT
    after = load_file(run_dir(config) / "model" / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
    newest = max((run_dir(config) / "checkpoints").iterdir())
    exported = load_file(newest / "hf" / "model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, exported[name])}
    assert changed == {name for name in base if "_proj." in name}
    described = json.loads((newest / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(run_dir(config) / "model")
    assert not [line for line in lines(again, "warning") if "log-probs" in line["message"]]


def test_engines_of_a_colocated_run_take_adapters_into_new_memory(tmp_path: Path) -> None:
    config = adapted(
        tmp_path,
        rollout={"mode": "sync"},
        trainer={"lr": {"peak": 3e-2, "warmup": 0}, "colocated": True},
    )
    assert train(config, inproc=True).error == ""
    assert max(gaps(config)) < EXACT


def test_an_engine_that_drops_the_adapters_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropped(
        self: AdapterBase, adapters: Mapping[str, torch.Tensor], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(on_device(self._tensors, device))

    monkeypatch.setattr(AdapterBase, "with_adapters", dropped)
    config = adapted(tmp_path, run={"name": "lake", "dir": str(tmp_path), "steps": 4})
    train(config, inproc=True)
    (line,) = [line for line in lines(config, "warning") if "log-probs" in line["message"]]
    assert line["component"] == "e0"
    assert "it may compute with other weights than it was given" in line["message"]
