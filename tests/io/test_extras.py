"""The advice to install an optional dependency works for the installation that gives
it.
"""

import importlib
import importlib.metadata
import json
from pathlib import Path

import pytest

from rollweave.io.extras import MissingExtraError, from_extra, how_to_install, missing_from


class Installed:
    def __init__(self, record: str | None) -> None:
        self.record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.record


EDITABLE = json.dumps({"url": "file:///some/where%20else", "dir_info": {"editable": True}})


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        (None, "pip install 'rollweave[wandb]'"),
        ("no json", "pip install 'rollweave[wandb]'"),
        (
            json.dumps({"url": "file:///tmp/a.whl", "archive_info": {}}),
            "pip install 'rollweave[wandb]'",
        ),
        (EDITABLE, "pip install -e '/some/where else[wandb]'"),
    ],
)
def test_advice_names_the_path_of_a_checkout(
    record: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(record))
    assert how_to_install("wandb") == advice


def test_a_missing_package_is_named_with_the_advice() -> None:
    with from_extra("math"):
        assert missing_from("math") == [] == missing_from("transformers")
    rule = r"^no_such_package is not installed \(pip install .*\[math\]'\)$"
    with pytest.raises(MissingExtraError, match=rule), from_extra("math"):
        importlib.import_module("no_such_package")


def test_advice_in_the_checkout_is_a_dot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(record))
    monkeypatch.chdir(tmp_path)
    assert how_to_install("wandb") == "pip install -e '.[wandb]'"
