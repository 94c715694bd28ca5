"""Each problem that is detectable before a run fails one check, which names field, rule
and value.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from packages.servers.tests.sglang_package import sglang_python
from rollweave.cli.main import app
from rollweave.core.core import Core
from rollweave.envs.base import Split, split_of
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.runtime.launch import train
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import Status, failures
from rollweave.runtime.preflight.environments import examine_domain
from rollweave.runtime.preflight.examiner import RULE
from rollweave.runtime.preflight.site import Site
from rollweave.runtime.supervisors.relays import check_transport
from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.training import ScratchModel
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import RunStarted, TimerFired
from rollweave.schema.hosts import Resources
from rollweave.train.scratch import build_checkpoint
from tests.cli import envs
from tests.support.architectures import build
from tests.support.chats import TEMPLATES

CONFIG = """
[run]
name = "dry"
steps = 3
[model.scratch]
hidden = 32
layers = 1
[[tasks]]
env = "tests.cli.envs:Fine"
tag = "fine"
step_s = 0.3
[warmup]
steps = 2
[engines]
kv_tokens = 2048
"""


SECOND = """
[[tasks]]
env = "nim"
"""


def config(tmp_path: Path, *overrides: str, text: str = CONFIG) -> RunConfig:
    return loads(text, [f'run.dir="{tmp_path}"', *overrides])


def test_tokens_that_other_hosts_lack_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWEAVE_REWARD_A_B_TOKEN", "secret")
    monkeypatch.setenv("ROLLWEAVE_TEACHER_TOKEN", "secret")
    hosts = "cluster={address='127.0.0.1:0', hosts=1, env=['OTHER']}"
    reward = "rewards=[{name='a-b', url='http://127.0.0.1:9'}]"
    teacher = ("algorithm.advantage=distill", "teacher.url='http://127.0.0.1:9'")
    run = config(tmp_path, hosts, reward, "workers.count=2", *teacher)
    checks = list(dryrun._tokens(run, Site()))
    assert {(check.name, check.status) for check in checks} == {("cluster.env", Status.FAIL)}
    for check, name in zip(checks, ("REWARD_A_B", "TEACHER"), strict=True):
        assert f"must name ROLLWEAVE_{name}_TOKEN, which rollout workers" in check.detail


def test_a_bad_token_of_a_reward_names_the_variable_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWEAVE_REWARD_A_TOKEN", "schlüssel")
    run = config(tmp_path, "rewards=[{name='a', url='http://127.0.0.1:9'}]")
    (check,) = dryrun._rewards(run, Site())
    assert (check.name, check.status) == ("rewards.0.url", Status.FAIL)
    assert check.detail.startswith("ROLLWEAVE_REWARD_A_TOKEN must be set in the environment")


def test_a_valid_run_passes_all_checks(tmp_path: Path) -> None:
    checks = dryrun.examine(config(tmp_path))
    assert failures(checks) == []
    details = {check.name: check.detail for check in checks}
    assert details["tasks.0.env"] == "fine: tests.cli.envs.Fine"
    assert details["tasks.0 task"] == "begins with 'hello'"
    assert details["tasks.0 warm-up"] == "Answers yes or no at random."
    assert details["tasks.0 prompt"] == "9 of 1024 tokens"
    assert "about" in details["memory"]
    assert "checkpoints" in details["disk"]


@pytest.mark.parametrize(
    ("override", "name", "words"),
    [
        ("tasks.0.env=lake", "tasks.0", "must be one of"),
        ("tasks.0.env=no.such.module:Env", "tasks.0", "cannot import no.such.module"),
        ("tasks.0.env=tests.cli.envs:Fina", "tasks.0", "did you mean Fine?"),
        ("tasks.0.env=tests.cli.envs:Voiceless", "tasks.0", "has no step"),
        (
            "tasks.0.env=tests.cli.envs:Untaught",
            "tasks.0",
            "must have transcript() if warmup.steps is set",
        ),
        ("tasks.0.env=tests.cli.envs:Raises", "tasks.0", "ValueError: out of cheese"),
        (
            "tasks.0.env=tests.cli.envs:Hangs",
            "tasks.0",
            "must answer within step_s, got nothing in 0.3 s",
        ),
        (
            "tasks.0.env=tests.cli.envs:Undrawable",
            "tasks.0",
            "make_task raised LookupError: no tasks today",
        ),
        (
            "tasks.0.env=tests.cli.envs:Garbage",
            "tasks.0",
            "reset must return Observation, got 'hello'",
        ),
        (
            "tasks.0.env=tests.cli.envs:Silent",
            "tasks.0",
            "reset must return at least one message, got none",
        ),
        (
            "tasks.0.max_tokens=9",
            "tasks.0.max_tokens",
            "must be more than the first prompt (9 tokens), got 9",
        ),
        (
            "tasks.0.env=tests.cli.envs:BadWords",
            "tasks.0",
            "words of environment 'tests.cli.envs:BadWords' must return a list of non-empty strings, "
            "got ''",
        ),
        (
            "tasks.0.env=tests.cli.envs:OneWord",
            "tasks.0",
            "words of environment 'tests.cli.envs:OneWord' must return a list of non-empty strings, "
            "got 'hello'",
        ),
        (
            "tasks.0.env=tests.cli.envs:Foreign",
            "model",
            "allowed_words must be among words, which are one token each, got 'adieu'",
        ),
        ("tasks.0.options.sings=1", "tasks.0", "unexpected keyword argument 'sings'"),
        ("engines.kv_tokens=1000000000000", "engines.kv_tokens", "for KV cache of engines"),
        ("model.scratch.hidden=400000000", "disk", "must hold the checkpoints"),
    ],
)
def test_a_failed_check_names_field_rule_and_value(
    tmp_path: Path, override: str, name: str, words: str
) -> None:
    wrong = failures(dryrun.examine(config(tmp_path, override)))
    assert name in [check.name for check in wrong]
    assert any(words in check.detail for check in wrong), wrong


def test_a_server_that_cannot_restrict_turns_takes_no_grammar(tmp_path: Path) -> None:
    kind = ("engines.kind=sglang", f"engines.python='{sglang_python(tmp_path)}'")
    lake = ("tasks.0.env=frozenlake", "tasks.0.options.grammar=true")
    (wrong,) = failures(dryrun.examine(config(tmp_path, *kind, *lake), deep=False))
    assert wrong.name == "tasks.0"
    assert wrong.detail.startswith(
        "must have no allowed_words with SGLang, which cannot restrict a turn to certain tokens, "
        "got <left>"
    )


def test_the_interpreter_of_a_server_is_asked_for_it(tmp_path: Path) -> None:
    kind = "engines.kind=sglang"
    for python, problem in (
        (sys.executable, "must be an interpreter that has SGLang, got "),
        (sglang_python(tmp_path, without="/ready"), "must have SGLang with /ready, got version"),
    ):
        settings = (kind, f"engines.python='{python}'")
        (wrong,) = failures(dryrun.examine(config(tmp_path, *settings), deep=False))
        assert wrong.name == "engines.0.python"
        assert wrong.detail.startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tasks.0.env=tests.cli.envs:Undrawable"], "make_task raised LookupError: no tasks today"),
        (
            ["tasks.0.env=frozenlake", "tasks.0.options.maps=round"],
            "options.maps must be random or fixed, got 'round'",
        ),
        (
            ["tasks.0.env=jsonl", "tasks.0.options={path='{dir}/a', reward='math:sqrt'}"],
            "options.path must be a readable file",
        ),
        (
            ["tasks.0.env=jsonl", "tasks.0.options={path='{dir}/one', reward='math:root'}"],
            "math has no root",
        ),
        (
            ["tasks.0.env=jsonl", "tasks.0.options={path='{dir}/one', reward='math:sqrt'}"],
            "must have records for split test",
        ),
        (
            ["tasks.0.env=jsonl", "tasks.0.options={path=5, reward='math:sqrt'}"],
            "options.path of environment 'jsonl': Expected `str`, got `int`: 5",
        ),
    ],
)
def test_draws_tasks_before_every_run(tmp_path: Path, overrides: list[str], words: str) -> None:
    (tmp_path / "one").write_text('{"prompt": "a lonely record"}\n')
    sets = [override.replace("{dir}", str(tmp_path)) for override in overrides]
    (wrong,) = failures(dryrun.examine(config(tmp_path, *sets, "warmup.steps=0"), deep=False))
    assert wrong.name == "tasks.0"
    assert words in wrong.detail


@pytest.mark.parametrize(("limit", "fits"), [(6, True), (5, False)])
def test_transcripts_must_fit_a_turn(tmp_path: Path, limit: int, fits: bool) -> None:
    """`right` takes five letters and the token that ends the turn."""
    sets = ["tasks.0.env=tests.cli.envs:Wordy", f"tasks.0.max_turn_tokens={limit}"]
    wrong = failures(dryrun.examine(config(tmp_path, *sets), deep=False))
    assert [check.name for check in wrong] == ([] if fits else ["tasks.0.max_turn_tokens"])
    if not fits:
        assert wrong[0].detail == (
            "must hold every turn of transcript(): in transcript 10 turn 0, 'right', has 6 tokens "
            "with its end token, got 5"
        )


@pytest.mark.parametrize(
    ("overrides", "name", "words"),
    [
        (
            ["tasks.0.env=tests.cli.envs:Unanswered"],
            "tasks.0 warm-up",
            "and have single turns of the agent, got user",
        ),
        (
            ["tasks.0.env=tests.cli.envs:Wordy", "tasks.0.max_tokens=14"],
            "tasks.0.max_tokens",
            "must hold every transcript(): number 10 has 15 tokens, got 14",
        ),
        (["tasks.0.env=tests.cli.envs:Observed"], "", ""),
    ],
)
def test_transcripts_must_be_conversations_within_the_limits(
    tmp_path: Path, overrides: list[str], name: str, words: str
) -> None:
    wrong = failures(dryrun.examine(config(tmp_path, *overrides), deep=False))
    assert [check.name for check in wrong] == ([name] if name else [])
    assert not wrong or words in wrong[0].detail


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ("{}", "", ""),
        ("{mood='program'}", "", ""),
        (
            "{prompt='many words, and more of them'}",
            "tasks.0.max_tokens",
            "must be more than the first prompt (36 tokens), got 20",
        ),
        (
            "{tools=3}",
            "tasks.0",
            "the model's chat template must show the handler's tools (3), got one that shows none",
        ),
        (
            "{mood='mute'}",
            "tasks.0",
            "run must ask the agent at least once, and returned without asking",
        ),
        ("{mood='broken'}", "tasks.0", "KeyError: 'lost'"),
    ],
)
def test_the_first_turn_of_a_handler_must_fit(
    tmp_path: Path, options: str, name: str, words: str
) -> None:
    sets = [
        "tasks.0.env=tests.cli.envs:Handler",
        f"tasks.0.options={options}",
        "tasks.0.max_tokens=20",
        "warmup.steps=0",
    ]
    wrong = failures(dryrun.examine(config(tmp_path, *sets)))
    assert [check.name for check in wrong] == ([name] if name else [])
    assert not wrong or words in wrong[0].detail


@pytest.mark.parametrize("deep", [True, False])
def test_finds_overlong_prompts_in_the_whole_file(tmp_path: Path, deep: bool) -> None:
    """Neither the first rows nor those that are drawn first suffice."""
    words = ["short"] * 400
    words[250] = words[333] = "x" * 60
    lines = [json.dumps({"prompt": f"{number} {word}"}) for number, word in enumerate(words)]
    lines.insert(100, "")
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    sets = [
        "tasks.0.env=jsonl",
        f"tasks.0.options={{path='{path}', reward='math:sqrt'}}",
        "warmup.steps=0",
    ]
    wrong = failures(dryrun.examine(config(tmp_path, *sets, "tasks.0.max_tokens=40"), deep=deep))
    assert [(check.name, check.detail) for check in wrong] == [
        (
            "tasks.0.max_tokens",
            f"must be more than every prompt, got 40; 2 of 400 are not shorter: {path}:252 (72 "
            f"tokens), {path}:335 (72 tokens)",
        )
    ]
    assert (
        failures(dryrun.examine(config(tmp_path, *sets, "tasks.0.max_tokens=73"), deep=deep)) == []
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_leaves_overlong_prompts_out_where_asked_to(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the first one that would be drawn is too long. Each prompt is tokenized
    once. A run that is resumed with the resulting configuration leaves out the same
    ones.
    """
    path = tmp_path / "data.jsonl"
    words = ["x" * 60 if number % 4 else "short" for number in range(400)]
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{n} {word}"}) for n, word in enumerate(words))
    )
    sets = [
        "tasks.0.env=jsonl",
        f"tasks.0.options={{path='{path}', reward='math:sqrt', overlong='drop'}}",
        "tasks.0.max_tokens=40",
        "warmup.steps=0",
        f"workers.count={workers}",
    ]
    calls, start = list[int](), ChatCodec.start

    def counted(codec: ChatCodec, messages: Any, tools: Any = ()) -> Any:
        calls.append(len(messages))
        return start(codec, messages, tools)

    monkeypatch.setattr(ChatCodec, "start", counted)
    planned = dryrun.plan(config(tmp_path, *sets))
    assert 700 <= len(calls) < 710, "400 without their text, 300 with it, and the first prompt"
    assert failures(planned.checks) == []
    (check,) = [check for check in planned.checks if check.name == dryrun.LEFT_OUT]
    assert check.detail.startswith(
        f"tasks.0: 300 of 400 prompts are not shorter than max_tokens (40), and are left out: "
        f"{path}:2, {path}:3, {path}:4, {path}:6, {path}:7, …"
    )
    assert planned.config.tasks[0].options["left_out"] == [
        f"{path}:{number + 1}" for number in range(400) if number % 4
    ]
    again = dryrun.plan(planned.config)
    assert (failures(again.checks), again.config) == ([], planned.config)
    assert dryrun.LEFT_OUT not in {check.name for check in again.checks}


def test_refuses_a_file_whose_prompts_are_all_too_long(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}" + "x" * 60}) for n in range(40)))
    sets = [
        "tasks.0.env=jsonl",
        f"tasks.0.options={{path='{path}', reward='math:sqrt', overlong='drop'}}",
        "tasks.0.max_tokens=40",
        "warmup.steps=0",
    ]
    wrong = failures(dryrun.examine(config(tmp_path, *sets), deep=False))
    assert [check.name for check in wrong] == ["tasks.0.max_tokens"]
    wrong = failures(dryrun.examine(config(tmp_path, *sets, "tasks.0.options.overlong=cut")))
    assert "options.overlong must be refuse or drop, got 'cut'" in wrong[0].detail


def test_names_the_measure_of_a_target(tmp_path: Path) -> None:
    checks = dryrun.examine(config(tmp_path, "eval.every=1", "eval.stop_at=0.9"), deep=False)
    assert failures(checks) == []
    (target,) = [check for check in checks if check.name == "eval.stop_at"]
    expected = (Status.WARN, "0.9 is compared with success, which ")
    assert (target.status, target.detail[:36]) == expected


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("judge", "not tried: it calls a role, and a dry run starts none"),
        ("judges", "a role of the run (judges), got role('judge') (did you mean judges?)"),
    ],
)
def test_an_environment_calls_only_roles_of_the_run(tmp_path: Path, name: str, found: str) -> None:
    judges = "tests.runtime.roles.judges"
    roles = f"roles={{{name}={{cls='{judges}:Judge'}}}}"
    text = CONFIG.replace("tests.cli.envs:Fine", f"{judges}:Lake")
    _, checks = examine_domain(config(tmp_path, roles, "warmup.steps=0", text=text), 0, deep=True)
    assert found in checks[-1].detail


def test_a_shallow_check_does_not_reset_the_environment(tmp_path: Path) -> None:
    checks = dryrun.examine(config(tmp_path, "tasks.0.env=tests.cli.envs:Raises"), deep=False)
    assert failures(checks) == []


def test_a_run_with_workers_survives_the_checks_of_code_that_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each domain is checked in another process, and those behind it, too."""
    for name, end in (
        ("crashing", "os.kill(os.getpid(), 11)"),
        ("leaving", "print('not me', flush=True); os._exit(3)"),
    ):
        text = f"import os\nif os.getpid() != {os.getpid()}: {end}\ndef late(*_): return []\n"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = "".join(f'[[tasks]]\nenv = "{name}:Game"\n' for name in ("crashing", "leaving"))
    run_config = config(
        tmp_path,
        "workers.count=2",
        "rollout.mode=decoupled",
        "buffer.sample=crashing:late",
        text=CONFIG + more + SECOND,
    )
    checks = dryrun.examine(run_config, deep=False)
    wrong = {check.name: check.detail for check in failures(checks)}
    assert wrong == {
        "buffer": f"must {RULE}, got one that ended (signal SIGSEGV)",
        "tasks.1.env": f"must {RULE}, got one that ended (signal SIGSEGV)",
        "tasks.2.env": f"must {RULE}, got one that ended (exit status 3): not me",
    }
    passed = [check.name for check in checks if check.status is Status.OK]
    assert {"tasks.0.env", "tasks.0 warm-up", "tasks.3.env"} <= {*passed}


def test_a_changed_working_directory_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_config = config(tmp_path, "tasks.0.env=tests.cli.envs:Wanders", "run.dir=here")
    assert failures(dryrun.examine(run_config, deep=False)) == []
    assert Path.cwd() == tmp_path


def test_reports_all_problems_at_once(tmp_path: Path) -> None:
    wrong = failures(dryrun.examine(config(tmp_path, "tasks.0.env=lake"), resume=True))
    assert [check.name for check in wrong][:1] == ["run.name"]
    assert "tasks.0" in [check.name for check in wrong]


@pytest.mark.parametrize("most", [2, 3])
def test_all_ranks_that_a_run_may_have_must_fit(tmp_path: Path, most: int) -> None:
    settings = (
        "model.scratch={hidden=1024, layers=8}",
        "engines={count=3, kv_tokens=2048}",
        f"trainer.ranks={{minimum=1, maximum={most}}}",
    )
    hosts = {"here": Resources(cpus=8, memory_bytes=15 << 30)}
    found = failures(dryrun.plan(config(tmp_path, *settings), hosts=hosts, deep=False).checks)
    assert [check.name for check in found] == ["trainer.micro_tokens"] * (most == 3)
    assert all(check.detail.endswith(", when there are 3 ranks") for check in found)


def test_a_dry_run_refuses_what_one_process_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    several = ("--set", "engines.count=2", "--set", "trainer.ranks={minimum=1, maximum=2}")
    result = CliRunner().invoke(app, ["train", str(file), "--dry-run", "--inproc", *several])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --inproc must be left out with a changing number of ranks, which run processes\n",
    )


def test_an_existing_run_requires_resume_or_fresh(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    (tmp_path / "dry").mkdir()
    (tmp_path / "dry" / "config.toml").touch()

    def names(*, resume: bool = False, fresh: bool = False) -> list[str]:
        return [
            check.name
            for check in failures(
                dryrun.examine(run_config, deep=False, resume=resume, fresh=fresh)
            )
        ]

    assert names() == ["run.name"]
    assert names(resume=True) == []
    assert names(fresh=True) == []


def test_a_dry_run_of_an_existing_run_prints_one_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dumps(config(tmp_path)))
    (tmp_path / "dry").mkdir()
    (tmp_path / "dry" / "config.toml").touch()
    result = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "run.name: " in result.stderr
    assert "holds a run already" in result.stderr


def test_a_run_that_is_resumed_keeps_its_model_tasks_and_seed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "dry")
    run.path.mkdir()
    run.journal.touch()
    both = CONFIG + SECOND
    run.config.write_text(dumps(config(tmp_path, text=both)))
    changes = [
        "run.seed=5",
        "model.scratch.hidden=64",
        "tasks.0.env=nim",
        "run.steps=9",
        "tasks.0.weight=2",
        "model.dtype=bfloat16",
    ]
    changed = config(tmp_path, *changes, text=both)
    wrong = failures(dryrun.examine(changed, deep=False, resume=True))
    assert [(check.name, check.detail.split(" must stay")[0]) for check in wrong] == [
        ("--resume", "run.seed"),
        ("--resume", "model.scratch"),
        ("--resume", "tasks (fine).env"),
    ]


@pytest.mark.parametrize(
    ("override", "name"),
    [
        pytest.param(
            "model.device=cuda",
            "model.device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        ("tasks.0.env=tests.cli.envs:Foreign", "model"),
        ("engines.kv_tokens=1000000000000", "engines.kv_tokens"),
        ("model.scratch.hidden=400000000", "disk"),
    ],
)
@pytest.mark.parametrize("deep", [True, False])
def test_checks_the_models_requirements_before_every_run(
    tmp_path: Path, override: str, name: str, deep: bool
) -> None:
    wrong = failures(dryrun.examine(config(tmp_path, override), deep=deep))
    assert name in [check.name for check in wrong]


def test_checks_a_scratch_model_without_importing_torch(tmp_path: Path) -> None:
    """Importing torch before each run would cost seconds."""
    (tmp_path / "small.toml").write_text(CONFIG)
    program = """
import sys
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import failures
from rollweave.schema.config.loading import load
assert failures(dryrun.examine(load("small.toml"), deep=False)) == []
assert "torch" not in sys.modules
"""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        )
    }
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, check=True, timeout=60)


WEIGHTS = "model.safetensors"


class TestModelPath:
    """A checkpoint directory instead of a model from scratch."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        path = tmp_path / "model"
        shape = ScratchModel(hidden=32, layers=1)
        build_checkpoint(path, scratch=shape, context=2048, words=list(envs.Fine.words({})), seed=0)
        return path

    def examine(self, tmp_path: Path, model: Path, *overrides: str) -> list[tuple[str, str]]:
        begin, end = CONFIG.index("[model.scratch]"), CONFIG.index("[[tasks]]")
        text = f'{CONFIG[:begin]}[model]\npath = "{model}"\n{CONFIG[end:]}'
        run_config = loads(text, [f'run.dir="{tmp_path}"', *overrides])
        return [
            (check.name, check.detail)
            for check in dryrun.examine(run_config)
            if check.status is Status.FAIL
        ]

    def test_accepts_a_valid_checkpoint(self, tmp_path: Path, model: Path) -> None:
        assert self.examine(tmp_path, model) == []

    def test_checks_that_transformers_computes_the_model(
        self, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen = "model.implementation=transformers"
        assert self.examine(tmp_path, model, chosen) == []
        self.edit(model / "config.json", quantization_config={"quant_method": "fp8"})
        ((name, detail),) = self.examine(tmp_path, model, chosen)
        assert name == "model.implementation"
        assert "Qwen3ForCausalLM is not supported: its weights are quantized" in detail
        monkeypatch.setattr("rollweave.runtime.preflight.model.missing_from", lambda _: ["x"])
        ((_, detail),) = self.examine(tmp_path, model, chosen)
        assert detail.startswith("transformers is not installed (pip install")

    def test_checks_that_ranks_can_divide_the_layers(self, tmp_path: Path, model: Path) -> None:
        divided = ["model.implementation=transformers", "trainer.ranks=2"]
        divided += ["trainer.tensor_parallel=2"]
        assert self.examine(tmp_path, model, *divided) == [
            (
                "trainer.tensor_parallel",
                "must divide num_key_value_heads of Qwen3ForCausalLM (1), got 2",
            )
        ]
        built = tmp_path / "with_two"
        shape = ScratchModel(hidden=64, layers=1)
        words = list(envs.Fine.words({}))
        build_checkpoint(built, scratch=shape, context=2048, words=words, seed=0)
        assert self.examine(tmp_path, built, *divided) == []

    def test_only_vllm_serves_a_model_that_only_transformers_computes(
        self, tmp_path: Path, model: Path
    ) -> None:
        self.edit(model / "config.json", use_sliding_window=True, sliding_window=8)
        ((name, detail),) = self.examine(tmp_path, model)
        assert name == "model"
        assert detail.startswith("the embedded engine cannot compute the model: ")
        assert "sliding-window attention is not supported" in detail
        vllm = 'engines={kind="vllm", python="/nowhere/python"}'
        assert [name for name, _ in self.examine(tmp_path, model, vllm)] == ["engines.0.python"]
        refused = self.examine(tmp_path, model, vllm, "model.implementation=native")
        assert ("model", "sliding-window") in [(n, d.split()[1]) for n, d in refused]

    def test_routing_replay_is_refused_for_a_model_without_experts(
        self, tmp_path: Path, model: Path
    ) -> None:
        vllm = 'engines={kind="vllm", python="/nowhere/python"}'
        replay = "algorithm.routing_replay=true"
        expected = (
            "algorithm.routing_replay",
            "must be false for a model without experts whose choice can be replayed, got true",
        )
        for implementation in ("native", "transformers"):
            chosen = f"model.implementation={implementation}"
            assert expected in self.examine(tmp_path, model, vllm, replay, chosen)
        build("qwen3_moe", tmp_path / "experts")
        for name in ("config.json", "model.safetensors"):
            shutil.copy(tmp_path / "experts" / name, model / name)
        refused = self.examine(tmp_path, model, vllm, replay)
        assert "algorithm.routing_replay" not in [name for name, _ in refused]

    def test_checks_that_the_model_has_the_layers_of_the_adapters(
        self, tmp_path: Path, model: Path
    ) -> None:
        assert self.examine(tmp_path, model, "lora.rank=2") == []
        ((name, detail),) = self.examine(tmp_path, model, "lora.targets=['q_proj', 'wq']")
        assert name == "lora.targets"
        assert detail.startswith("must name linear layers of the model (q_proj, k_proj, v_proj")
        assert ", got 'wq'" in detail
        ((name, detail),) = self.examine(tmp_path, model, 'lora.path="/nowhere"')
        assert (name, detail.split(": ")[0]) == ("lora.path", "must be an adapter's directory")

    def test_refuses_a_missing_checkpoint(self, tmp_path: Path) -> None:
        ((name, detail),) = self.examine(tmp_path, tmp_path / "nowhere")
        assert name == "model"
        assert detail == f"model.path must be a checkpoint directory, got '{tmp_path}/nowhere'"

    def test_names_the_model_of_a_run_or_of_a_checkpoint(self, tmp_path: Path) -> None:
        run = tmp_path / "way"
        rule = "model.path must be a folder with config.json, got"
        for step in (17, 25):
            (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        first, second = sorted((run / "checkpoints").iterdir())
        for path, text in (
            (tmp_path, ""),
            (run, ", a run: none of its checkpoints has one"),
            (
                second,
                ", a checkpoint of a run, which has no model; those of the run that have one: none",
            ),
        ):
            assert self.examine(tmp_path, path) == [("model", f"{rule} {path}{text}")]
        (first / "hf").mkdir()
        (first / "hf" / "config.json").write_text("{}")
        assert self.examine(tmp_path, second) == [
            (
                "model",
                f"{rule} {second}, a checkpoint of a run, which has no model; those of the run "
                f"that have one: {first}/hf",
            )
        ]
        assert self.examine(tmp_path, run) == [
            ("model", f"{rule} {run}, a run: its model is {first}/hf")
        ]
        best = run / "best"
        best.symlink_to("checkpoints/step-000017")
        assert self.examine(tmp_path, best) == [
            ("model", f"{rule} {best}, a checkpoint of a run: its model is {best}/hf")
        ]
        assert self.examine(tmp_path, run) == [
            ("model", f"{rule} {run}, a run: its model is {best}/hf")
        ]

    @staticmethod
    def edit(path: Path, **changes: object) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def split(self, model: Path) -> None:
        (model / WEIGHTS).rename(model / "model-1.safetensors")
        (model / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}}'
        )

    def truncate(self, model: Path) -> None:
        file = model / WEIGHTS
        file.write_bytes(file.read_bytes()[:-100])

    def template(self, model: Path, text: str | None) -> None:
        (model / "chat_template.jinja").unlink(missing_ok=True)
        self.edit(model / "tokenizer_config.json", chat_template=text)

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda _, model: (model / WEIGHTS).unlink(), f"must hold {WEIGHTS}"),
            (truncate, f"{WEIGHTS} must be a complete safetensors file"),
            (split, "must name files beside it, got 'model-2.safetensors'"),
            (
                {"intermediate_size": 64},
                "mlp.gate_proj.weight must have shape (64, 32), got (96, 32)",
            ),
            ({"tie_word_embeddings": False}, "missing ['lm_head.weight']"),
            ({"hidden_size": "x"}, "config.json must have values of the right types"),
            ({"architectures": ["GPT2LMHeadModel"]}, "architectures must name one of"),
            (
                {"max_position_embeddings": 512},
                "must be at most the model's context (512), got 1024",
            ),
            (lambda test, model: test.template(model, None), "must have a chat template"),
            (
                lambda test, model: test.template(model, "{{ messages[-1]['content'] }}"),
                "cannot be extended turn by turn",
            ),
        ],
    )
    def test_refuses_a_checkpoint_that_is_damaged_or_does_not_fit(
        self,
        tmp_path: Path,
        model: Path,
        damage: dict[str, object] | Callable[["TestModelPath", Path], None],
        words: str,
    ) -> None:
        """`damage` are changes of config.json, or does the damage."""
        if isinstance(damage, dict):
            self.edit(model / "config.json", **damage)
        else:
            damage(self, model)
        ((name, detail),) = self.examine(tmp_path, model)
        assert name == ("tasks.max_tokens" if "context" in words else "model")
        assert words in detail

    def test_checks_the_arguments_of_the_chat_template(self, tmp_path: Path, model: Path) -> None:
        given = "model.template_arguments={enable_thinking=false}"
        ((_, detail),) = self.examine(tmp_path, model, given)
        assert detail == (
            "model.template_arguments must be arguments of the chat template, which reads no "
            "arguments, got 'enable_thinking'"
        )
        (model / "chat_template.jinja").write_text(TEMPLATES["switched"])
        assert self.examine(tmp_path, model, given) == []


def test_lists_relays_with_addresses_and_missing_transport_packages(
    tmp_path: Path,
) -> None:
    relays = config(tmp_path, "weights.relays=2", "engines.count=2")
    details = {check.name: check.detail for check in dryrun.examine(relays, deep=False)}
    assert details["relays"] == "2 processes on 127.0.0.2 to 127.0.0.3 over tcp"
    assert "relays" not in {check.name for check in dryrun.examine(config(tmp_path), deep=False)}


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="nixl is installed")
def test_refuses_a_transport_that_is_not_installed(tmp_path: Path) -> None:
    relays = config(tmp_path, "weights.relays=1", 'weights.transport="nixl"')
    check = next(
        check
        for check in failures(dryrun.examine(relays, deep=False))
        if check.name == "weights.transport"
    )
    assert "[nixl]'" in check.detail
    with pytest.raises(ConfigError, match=r"weights\.transport must be installed .*, got nixl"):
        train(relays)


def test_a_group_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = config(tmp_path, 'weights.transport="collective"')
    assert "weights" in {check.name for check in dryrun.examine(group, deep=False)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"weights\.transport must be installed \(pip install"):
        check_transport(group)


def test_a_dry_run_of_a_resumed_run_reports_its_step_and_losses(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "dry")
    run.path.mkdir()
    run.config.write_text(dumps(config(tmp_path)))
    details = {check.name: check.detail for check in dryrun.examine(config(tmp_path), resume=True)}
    assert details["run.name"] == f"begins in {run.path}"
    (run.checkpoints / "step-000004").mkdir(parents=True)
    (wrong,) = failures(dryrun.examine(config(tmp_path), resume=True))
    expected = ("--resume", f"{run.path} holds step 4 of its checkpoints")
    assert (wrong.name, wrong.detail.split(", but ")[0]) == expected
    with RunJournal(run.journal) as journal:
        core = Core(config(tmp_path))
        for now, event in ((0.0, RunStarted(engines=())), (7.0, TimerFired())):
            journal.append(now, event, core.handle(now, event))
    (wrong,) = failures(dryrun.examine(config(tmp_path), resume=True))
    assert "step 4 of" in wrong.detail
    assert "the journal has lost its end" in wrong.detail
    (run.checkpoints / "step-000004").rmdir()
    details = {}
    for check in dryrun.examine(config(tmp_path, "trainer.lr=0.5"), resume=True):
        details.setdefault(check.name, check.detail)
    assert details["run.name"] == f"resumes in {run.path} at step 0; nothing is lost"
    assert details["--resume"] == "changed since: trainer.lr: 1e-05 → 0.5"


@pytest.mark.parametrize("episodes", [1, 40])
def test_an_evaluation_that_repeats_its_records_is_named(tmp_path: Path, episodes: int) -> None:
    path = tmp_path / "records.jsonl"
    prompts = [f"{number} + 1" for number in range(40)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    overrides = [
        "tasks.0.env=jsonl",
        f"tasks.0.options={{path='{path}', reward='math:sqrt'}}",
        "warmup.steps=0",
        "eval.every=1",
        f"eval.episodes={episodes}",
        "eval.final_episodes=1",
    ]
    domain, checks = examine_domain(config(tmp_path, *overrides), 0, deep=False)
    assert domain is not None
    records = sum(split_of(json.dumps(prompt)) is Split.VALIDATION for prompt in prompts)
    rule = f"eval.episodes 40 exceeds the {records} distinct tasks of the validation split of fine"
    found = [check.detail.partition(":")[0] for check in checks if check.status is Status.WARN]
    assert found == ([rule] if episodes == 40 else [])
