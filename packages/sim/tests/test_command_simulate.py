"""`rollweave simulate` names the settings that it ignores, honors all others, and
claims nothing about learning.
"""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollweave.cli.main import app
from rollweave.schema.config.loading import loads
from rollweave_sim.run import ALL, IGNORED, ignored

CONFIG = """
[run]
name = "small"
steps = 2
[sim]
model = "qwen3-8b"
[trainer]
ranks = 8
[[tasks]]
env = "frozenlake"
max_turns = 8
[rollout]
groups_per_step = 2
group_size = 4
[engines]
count = 1
{engines}
[eval]
every = 1
episodes = 2
final_episodes = 2
{more}
"""


def run(tmp_path: Path, *, engines: str = "", more: str = "") -> Result:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(engines=engines, more=more))
    return CliRunner().invoke(
        app, ["simulate", str(path), "--set", f'run.dir="{tmp_path}"', "--json"]
    )


def test_a_simulation_reports_no_success(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "success" not in result.stdout + result.stderr
    assert "reward " not in result.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "small.sim" / "metrics.jsonl").read_text().splitlines()
    ]
    measured = [line["success"] for line in lines if line["kind"] in ("step", "evaluation")]
    assert len(measured) > 2
    assert not any(measured)
    assert "without effect" not in result.stderr
    page = (tmp_path / "small.sim" / "report.html").read_text()
    assert "success" not in page.split("<main>")[1].split('id="configuration"')[0]


def test_the_kv_cache_has_the_configured_size(tmp_path: Path) -> None:
    by_gpu = run(tmp_path)
    assert "tokens in each engine (limited by sim.gpu)" in " ".join(by_gpu.stdout.split())
    small = run(tmp_path, engines="kv_tokens = 1024")
    assert "1,024 tokens in each engine (engines.kv_tokens)" in " ".join(small.stdout.split())
    assert "sequences at once" not in small.stdout
    slow, fast = (
        json.loads(result.stdout.splitlines()[-1])["wall_s"] for result in (small, by_gpu)
    )
    assert slow > fast, "fewer trajectories fit at once"
    vast = run(tmp_path, engines="kv_tokens = 1073741824")
    assert vast.stdout == by_gpu.stdout


def test_engines_with_a_profile_run_as_those_with_the_same_slots(tmp_path: Path) -> None:
    profiled = run(tmp_path, engines="kv_tokens = 2048\nmax_slots = 'profiled'")
    text = " ".join(profiled.stdout.split())
    match = re.search(r"(\d+) sequences at once, from the profile", text)
    assert match is not None
    assert 1 <= int(match[1]) <= 4  # 512 of the 1,024 tokens of a trajectory each
    fixed = run(tmp_path, engines=f"kv_tokens = 2048\nmax_slots = {match[1]}")
    assert fixed.stdout.splitlines()[-1] == profiled.stdout.splitlines()[-1]


def test_names_settings_without_effect(tmp_path: Path) -> None:
    result = run(
        tmp_path, more="stop_at = 0.0\n[weights]\ntransport = 'nixl'\n[algorithm]\nentropy = 0.1"
    )
    assert result.exit_code == 0, result.stderr
    assert (
        "without effect in a simulation: algorithm.entropy, weights.transport, eval.stop_at"
        in result.stderr
    )
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["without_effect"] == ["algorithm.entropy", "weights.transport", "eval.stop_at"]
    assert figures["steps"] == 2, "a success that is drawn ends nothing"


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model={path='a'}", "model"),
        ("rollout.temperature=0.5", "rollout.temperature"),
        ("tasks.0.time_s=5", "tasks.0.time_s"),
        ("tasks.0.isolation=process", "tasks.0.isolation"),
        ("engines.deterministic=true", "engines.deterministic"),
        ("ablation.changes=['no_cuda_graphs']", "ablation.changes"),
        ("warmup.steps=3", "warmup.steps"),
        ("sandbox.warm=3", "sandbox.warm"),
        ("rollout.group_size=6", ""),
        ("engines.kv_tokens=4096", ""),
        ("trainer.minibatches=2", ""),
    ],
)
def test_each_setting_is_honored_or_named(override: str, name: str) -> None:
    assert ignored(loads(CONFIG.format(engines="", more=""), [override])) == (
        [name] if name else []
    )


def test_the_list_names_existing_fields() -> None:
    config = loads(CONFIG.format(engines="", more=""))
    for section, fields in IGNORED.items():
        assert set(fields) <= set(type(getattr(config, section)).model_fields), section
        assert fields != ALL or section in ("algorithm", "critic", "warmup", "faults", "sandbox")
