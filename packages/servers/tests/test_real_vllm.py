"""Training with two real vLLM servers, one of which is killed and the other stopped;
and the recipe `examples/qwen3_math` with a tiny model (`make test-vllm`).
"""

import json
import os
from pathlib import Path

import pytest

from benchmarks.engine.vllm_server import VARIABLE
from packages.servers.tests.lost_servers import EXACT, lose_nothing_with_lost_servers
from rollweave.schema.config.loading import load
from rollweave.schema.config.training import VLLM_HEAD_DIM, ScratchModel
from rollweave.train.scratch import build_checkpoint
from tests.support import real_runs
from tests.support.engines import needs_vllm
from tests.support.real_runs import ROOT, lines, run_to_end

pytestmark = [pytest.mark.timeout(1200), *needs_vllm, pytest.mark.slow]  # the first limit holds


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server takes half a minute to start, on a busy machine several."""
    monkeypatch.setattr(real_runs, "LIMIT_S", 500.0)


@pytest.mark.parametrize("mode", ["bounded", "partial", "decoupled"])
def test_nothing_is_lost_with_a_killed_server_and_one_that_stops_in_an_update(
    tmp_path: Path, mode: str
) -> None:
    lose_nothing_with_lost_servers(
        tmp_path, mode=mode, kind="vllm", name="vLLM", python=os.environ[VARIABLE]
    )


def test_the_recipe_trains_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights whose vocabulary has every answer as one token, so that some
    answers are right.
    """
    monkeypatch.chdir(ROOT)
    build_checkpoint(
        tmp_path / "model",
        scratch=ScratchModel(hidden=64, layers=1),
        context=256,
        words=[rf"\boxed{{{number}}}" for number in range(4)],
        seed=0,
        head_dim=VLLM_HEAD_DIM,
    )
    sums = [(a, b) for a in range(-40, 40) for b in range(40) if 0 <= a + b <= 3]
    problems = [{"problem": f"{a} + {b}?", "answer": a + b} for a, b in sums]
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    changes = {
        "run.dir": tmp_path / "runs",
        "run.steps": 4,
        "model.path": tmp_path / "model",
        "model.dtype": "float32",
        "engines.python": os.environ[VARIABLE],
        "engines.count": 2,
        "engines.max_slots": 8,
        "engines.kv_tokens": 8192,
        "trainer.ranks": 1,
        "trainer.lr": 1e-2,
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_running": 16,
        "tasks.0.max_tokens": 200,
        "tasks.0.max_turn_tokens": 32,
        "tasks.0.options.path": file,
        "eval.every": 2,
        "eval.episodes": 8,
        "eval.final_episodes": 8,
    }
    config = load(
        "examples/qwen3_math/train.toml", [f"{key}={value}" for key, value in changes.items()]
    )
    result = run_to_end(config)
    assert (result["error"], result["steps"]) == ("", 4)
    assert result["account"]["trained"] == 4 * 2 * 4
    assert result["eval_episodes"] == {"math": 8}
    steps = lines(config, "step")
    # dynamic sampling drops groups whose rewards are all equal
    assert all(0 < step["reward"]["math"] < 1 for step in steps)
    # a step whose rows are all stale has none
    gaps = [
        step["trainer"]["logprob_gap_max"] for step in steps if "logprob_gap_max" in step["trainer"]
    ]
    assert gaps
    assert max(gaps) < EXACT
