"""The recipes of `examples/full_size`: each passes a dry run on its machine, without a
GPU, weights or network.
"""

import json
from pathlib import Path

import pytest

from tests.support.commands import invoke

ROOT = Path(__file__).parents[3]
RECIPES = Path("examples/full_size")
SMALL = f"model.path={RECIPES}/Qwen3-0.6B"
pytestmark = pytest.mark.extended

PROBLEMS = f'tasks.0.options={{path="{RECIPES}/sample.jsonl",reward="gsm8k"}}'


def dry_run(name: str, hosts: str, *settings: str) -> str:
    """Return the output of a dry run that passes all checks."""
    sets = [word for setting in settings for word in ("--set", setting)]
    files = [str(RECIPES / name), "--dry-run", "--hosts", str(RECIPES / hosts)]
    code, output, errors = invoke("train", *files, *sets)
    assert (code, errors) == (0, [])
    assert "ready: all checks passed" in output
    return output


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_an_engine_takes_turns_with_the_trainer_on_one_gpu() -> None:
    output = dry_run("gsm8k.toml", "one_gpu.toml", SMALL, PROBLEMS)
    assert output.count("GPU 0 in turn") == 2


def test_vllm_shares_one_gpu_with_the_trainer() -> None:
    output = dry_run("gsm8k_vllm.toml", "one_gpu.toml", SMALL, PROBLEMS)
    assert output.count("GPU 0 shared") == 2


def test_issues_fit_a_node_of_eight_gpus(tmp_path: Path) -> None:
    (tmp_path / "a__b").mkdir()
    (tmp_path / "a__b/code.py").write_text("RIGHT = False\n")
    test = "diff --git a/test_a.py b/test_a.py\nnew file mode 100644\n--- /dev/null\n"
    test += (
        "+++ b/test_a.py\n@@ -0,0 +1,3 @@\n+import code\n+def test_a():\n+    assert code.RIGHT\n"
    )
    instance = {
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": "the folder as it is",
        "problem_statement": "It is wrong.",
        "test_patch": test,
        "FAIL_TO_PASS": ["test_a.py::test_a"],
        "PASS_TO_PASS": [],
    }
    (tmp_path / "all.jsonl").write_text(json.dumps(instance) + "\n")
    output = dry_run(
        "swe.toml",
        "../qwen3_math/node.toml",
        "model.path=examples/qwen3_8b",
        f"tasks.0.options.instances={tmp_path}/all.jsonl",
        f"tasks.0.options.held_out={tmp_path}/all.jsonl",
        f"tasks.0.options.repositories={tmp_path}",
        "tasks.0.options.check_base=false",  # it would need a sandbox
    )
    assert "engines e0–e3" in output
    assert "trainer ranks 1–3" in output
