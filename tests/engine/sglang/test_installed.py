"""Interpreters without an SGLang that can serve are refused, with one line."""

import sys
from pathlib import Path

import pytest

from rollweave.engine.sglang.installed import sglang_version
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
