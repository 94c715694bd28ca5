"""The command line and the environment of an SGLang server."""

from pathlib import Path

import msgspec
import pytest

from rollweave.engine.servers.plugin import sglang_launcher as launcher
from rollweave.engine.servers.process import settings_of
from rollweave.engine.servers.sglang import TOKEN, arguments, environment
from rollweave.schema.base import EngineId
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.weights.checkpoint import read_shape
from tests.support.engines import tiny_checkpoint
from tests.support.sglang_server import parser


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    server = ServerSpec(
        kind="sglang",
        python="python3",
        args=("--mem-fraction-static", "0.7"),
        degree=2,
        start_s=1.0,
        control_s=1.0,
    )
    model = str(tiny_checkpoint(tmp_path))
    return EngineSpec(id=EngineId("e0"), model=model, kv_tokens=1024, version=7, server=server)


def options(spec: EngineSpec) -> list[str]:
    return arguments(spec, settings_of(spec), read_shape(Path(spec.model)), port=8000)


def value(spec: EngineSpec, name: str) -> str:
    given = options(spec)
    return given[given.index(name) + 1]


def test_the_users_arguments_come_last(spec: EngineSpec) -> None:
    assert options(spec)[-2:] == ["--mem-fraction-static", "0.7"]


def test_a_sequence_of_the_maximum_length_fits_in_the_context_and_the_cache(
    spec: EngineSpec,
) -> None:
    assert value(spec, "--context-length") == str(256 + 8)
    assert value(spec, "--max-total-tokens") == str(1024 + 256)
    short = msgspec.structs.replace(spec, kv_tokens=128)
    assert value(short, "--context-length") == str(128 + 8)


def test_the_label_is_the_version_from_the_start(spec: EngineSpec) -> None:
    assert value(spec, "--weight-version") == "7"
    assert value(msgspec.structs.replace(spec, version=-1), "--weight-version") == "0"


def test_nothing_is_preempted(spec: EngineSpec) -> None:
    assert "--disable-priority-preemption" in options(spec)


def test_the_batch_matters_unless_the_engine_is_deterministic(spec: EngineSpec) -> None:
    assert "--enable-deterministic-inference" not in options(spec)
    fixed = msgspec.structs.replace(spec, deterministic=True)
    assert "--enable-deterministic-inference" in options(fixed)


def test_a_tokenizer_is_loaded_if_there_is_one(spec: EngineSpec) -> None:
    assert "--skip-tokenizer-init" in options(spec)
    Path(spec.model, "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in options(spec)


def test_the_server_of_the_tests_takes_these_arguments(spec: EngineSpec) -> None:
    known = [*options(spec)[:-2], "--api-key", "secret", "--admin-api-key", "secret"]
    assert parser().parse_args(known).tp_size == 2


def test_only_the_environment_has_the_token(
    spec: EngineSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    env = environment(token="secret", folder=tmp_path)
    assert (env[TOKEN], env["TMPDIR"]) == ("secret", str(tmp_path))
    assert launcher.TOKEN == TOKEN
    assert "PYTHONPATH" not in env
    assert not any("secret" in each for each in options(spec))


def test_a_token_may_begin_with_a_hyphen(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setenv(TOKEN, "-x")
    monkeypatch.setattr(launcher, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(
        launcher.runpy, "run_module", lambda *_, **__: started.extend(launcher.sys.argv)
    )
    monkeypatch.setattr(launcher.sys, "path", ["/folder", *launcher.sys.path])
    monkeypatch.setattr(launcher.sys, "argv", ["launcher.py", "1", *options(spec)[:-2]])
    launcher.main()
    assert parser().parse_args(started[1:]).admin_api_key == "-x"


def test_a_health_check_does_not_wait_for_a_paused_server(tmp_path: Path) -> None:
    """By default it generates a token, which a paused server does not."""
    env = environment(token="secret", folder=tmp_path)
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
