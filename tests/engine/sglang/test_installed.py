"""Interpreters without an SGLang that can serve are refused, with one line."""

import sys
from pathlib import Path

import pytest

from rollweave.engine.servers.sglang import sglang_version
from rollweave.schema.errors import ConfigError
from tests.support.sglang import sglang_python


def test_a_version_with_all_routes_is_accepted(tmp_path: Path) -> None:
    assert sglang_version(sglang_python(tmp_path)) == "0.5.23"


@pytest.mark.parametrize("word", ["/pause_generation", '"retract"', "weight_versions"])
def test_what_a_version_lacks_is_named(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        sglang_version(sglang_python(tmp_path, without=word))
    assert str(error.value).startswith(f"must have SGLang with {word}, got version 0.5.23 in ")


def test_an_interpreter_without_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"that has SGLang, got .*, which has none"):
        sglang_version(sys.executable)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo first >&2; echo the reason >&2; exit 3", "which failed: the reason"),
        ("kill -9 $$", "which failed: signal SIGKILL"),
        ("echo nothing", "Expecting value"),
    ],
)
def test_an_interpreter_that_fails_is_refused_with_its_reason(
    tmp_path: Path, script: str, reason: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="must be an interpreter that has SGLang") as error:
        sglang_version(str(program))
    assert reason in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_interpreter_that_hangs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.engine.servers.process.LIMIT_S", 0.1)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=r"which did not answer within 0\.1 s"):
        sglang_version(str(program))
