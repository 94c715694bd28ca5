"""The file that describes serving engines is checked before a simulation."""

from pathlib import Path

import pytest

from rollweave.schema.config.loading import load_serving
from rollweave.schema.errors import ConfigError

USERS = 'model = "qwen3-8b"\nengines = 2\n'


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("engines = 2\nrate = 1.0", ["model must be given unless sharing is serverless or spot"]),
        (USERS, ["rate must be given, or a trace in its place, got neither"]),
        (USERS + 'rate = 1.0\ntrace = "t"', ["rate must be given, or a trace in its place, got"]),
        (USERS + "rate = 1.0\nprefill = 2", ["prefill must be less than the 2 engines, got 2"]),
        (USERS + "rate = 0.0", ["rate must be above 0, got 0.0"]),
        (USERS + "rate = 1.0\nttft_s = 0.0", ["ttft_s must be above 0, got 0.0"]),
        (USERS + "rate = 1.0\nlease = 1.0", ["unknown key lease (did you mean lease_s?)"]),
        (
            USERS + 'rate = 1.0\nsharing = "serverless"',
            [
                "model must be left out with sharing serverless, whose engines have no users, got",
                "rate must be left out with sharing serverless, whose engines have no users, got",
            ],
        ),
        (
            'engines = 2\ntrace = "t"\nsharing = "serverless"',
            ["trace must be left out with sharing serverless, whose engines have no users, got t"],
        ),
        (
            'engines = 2\nprefill = 1\nsharing = "spot"',
            ["prefill must be left out with sharing spot, whose engines have no users, got 1"],
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "serving.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_serving(path)
    found = str(raised.value).splitlines()
    assert len(found) == len(lines)
    assert all(
        line.startswith(f"{path}: {start}") for line, start in zip(found, lines, strict=True)
    )


def test_engines_without_users_may_have_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "serving.toml"
    path.write_text('engines = 2\ntrace = "t"\nsharing = "spot"')
    assert not load_serving(path).has_users
