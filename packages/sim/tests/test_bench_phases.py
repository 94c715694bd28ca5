"""The rows of bench `phases` with vLLM servers: their runs, and reasons without
them.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.engine.vllm_server import MISSING, VARIABLE
from packages.sim.benchmarks.phases import bench


@pytest.mark.parametrize("variant", [bench.SPLIT, bench.COLLOCATED])
def test_both_variants_have_two_servers_of_one_model(tmp_path: Path, variant: str) -> None:
    servers = bench.Servers(python="p", model=str(tmp_path))
    made = bench.config(variant, 240, bench.QUICK, seed=0, directory=str(tmp_path), servers=servers)
    phases = [(group.kind, group.phase, group.count) for group in made.engines]
    first, second = ("prefill", "decode") if variant == bench.SPLIT else ("both", "both")
    assert phases == [("vllm", first, 1), ("vllm", second, 1)]
    paced = bench.config(variant, 240, bench.QUICK, seed=0, directory=str(tmp_path))
    expected = [("embedded", 1), ("embedded", 2)]
    assert [(group.kind, group.count) for group in paced.engines] == expected
    assert made.tasks == paced.tasks


def test_there_is_a_reason_without_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench._why_no_vllm(quick=True) == "--quick starts no vLLM servers"
    monkeypatch.setattr(bench, "interpreter", lambda: None)
    assert bench._why_no_vllm(quick=False) == MISSING
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, sys.executable)
    why = bench._why_no_vllm(quick=False)
    assert why is not None
    assert why.startswith(f"{sys.executable} must be an interpreter that has vLLM")
