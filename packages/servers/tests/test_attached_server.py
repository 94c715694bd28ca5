"""Training with a server that a user has started: it is killed and started again in the
middle of a run, and remains when the run is over.
"""

import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from benchmarks.harness import free_port
from packages.servers.tests.lost_servers import EXACT, serving
from packages.servers.tests.sglang_package import start_sglang_server
from packages.servers.tests.vllm_server import SECRET, start_vllm_server
from rollweave.engine.server_kinds import ENGINE_TOKEN
from rollweave.runtime.preflight.dryrun import plan
from rollweave.schema.config.training import ScratchModel
from rollweave.train.scratch import build_checkpoint
from tests.support.real_runs import Lineage, check_totals, lake, lines, living

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_may_end_and_return_in_mid_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENGINE_TOKEN, SECRET)
    words = plan(lake(tmp_path), deep=False).declared.words
    model, port = tmp_path / "model", free_port()
    build_checkpoint(
        model, scratch=ScratchModel(hidden=32, layers=1), context=300, words=words, seed=0
    )
    config = lake(
        tmp_path,
        run={"steps": STEPS},
        model={"scratch": None, "path": str(model)},
        engines={"kind": kind, "address": f"http://127.0.0.1:{port}"},
        eval={"every": 0},
    )

    def start(name: str) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        if kind == "vllm":
            return start_vllm_server(model, port)
        folder = tmp_path / name
        folder.mkdir()
        return start_sglang_server(folder, model, port)

    with start("first") as first, living(config) as life:
        life.until(serving(2, engines=1), "two updates of the engine")
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        with start("second") as second:
            life.until(serving(4, engines=1), "updates of the new server")
            result = life.finish()
            assert second.poll() is None
    check_totals(config, result)
    lineage = Lineage()
    lineage.take(config)
    lineage.check(STEPS)
    assert result["watchdog"]["engine_restarted"] >= 1
    gaps = [
        line["trainer"]["logprob_gap_max"]
        for line in lines(config, "step")
        if "logprob_gap_max" in line["trainer"]
    ]
    assert max(gaps, default=0.0) < EXACT
